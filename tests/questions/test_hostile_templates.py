"""A chat template of a stranger's tokenizer can neither hang the program nor fill a prompt without end."""

import resource
import time

import pytest
from processes import python
from question_sources import tokenizer

from exgrpo_cli.base.bounds import Expired, time_limit
from exgrpo_cli.base.errors import InputError
from exgrpo_cli.questions import prompts

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HOARD = "{% set text = 'ab' * 2 ** 30 %}{{ text | length }}"
FLOOD = "{% for a in range(99999) %}{{ 'a long line of text' }}{% endfor %}"


def test_a_template_that_loops_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "TEMPLATE_SECONDS", 0.3)
    started = time.monotonic()
    with pytest.raises(InputError, match=r"chat template is not done with a prompt after 0.3 s: use another template"):
        prompts.choose_template("chat", tokenizer(LOOP))
    # The loop would take minutes; a loaded machine does not.
    assert time.monotonic() - started < 60


def test_a_template_that_hoards_memory_or_floods_is_refused() -> None:
    """2 GiB that would never be seen in the prompt; the limit is gone afterwards."""
    for template, message in (
        (HOARD, "needs more than 1 GiB for a prompt"),
        (FLOOD, "a prompt of 1,899,981 characters"),
    ):
        with pytest.raises(InputError, match=message):
            prompts.choose_template("chat", tokenizer(template))
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("template", "error"),
    [
        ("{% for a in range(10 ** 6) %}{% endfor %}", "Range too big"),
        ("{{ 1 // 0 }}", "division"),
        ("{{ 1 + 'a' }}", "unsupported operand"),
        ("{{ 10 ** 5000 }}", "integer string conversion"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
    ],
)
def test_a_template_that_fails_in_its_own_code_is_refused(template: str, error: str) -> None:
    with pytest.raises(InputError, match=rf"chat template refuses a prompt with the roles \['user'\] \(.*{error}"):
        prompts.choose_template("chat", tokenizer(template))


def test_a_template_that_never_comes_back_ends_the_process() -> None:
    """The power of a power, one call into C code: no exception reaches it."""
    program = "from exgrpo_cli.base import bounds\nbounds.HANG_SECONDS = 1.0\n"
    program += "with bounds.time_limit(0.1):\n    number = 9 ** 9; 9 ** number"
    ended = python("-c", program, timeout=200)
    assert ended.returncode == 1 and "Timeout (0:00:01.1" in ended.stderr and "line 4 in <module>" in ended.stderr


def test_a_limit_that_is_not_reached_is_not_felt() -> None:
    for _ in range(50):
        with time_limit(0.05):
            pass
    time.sleep(0.1)
    with pytest.raises(Expired), time_limit(0.05):
        while True:
            pass
