"""Graders of the user's own: what they return, raise and print; verifiers that questions bring."""

import threading
from pathlib import Path

import pytest
from grading_pools import boxed, descendants, plain, pool_of

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.base.types import AnswerFormat, Grade, Verdict
from exgrpo_cli.grading.pool import GradingPool
from exgrpo_cli.grading.routes import GradingItem, Route, route_item
from exgrpo_cli.grading.verifiers import load_own


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("fine", Verdict.CORRECT), ("verdict", Verdict.NO_ANSWER), ("die", Verdict.CRASHED),
        ("raise", Verdict.CRASHED), ("hoard", Verdict.CRASHED), ("hang", Verdict.TIMEOUT),
    ],
)  # fmt: skip
def test_users_grader_is_charged_for_what_it_does_and_writes_nothing_to_stdout(
    user_graders: str, text: str, verdict: Verdict, capfd: pytest.CaptureFixture[str]
) -> None:
    with pool_of(user_graders, deadline_seconds=1, memory_mb=256) as pool:
        assert pool.grade([plain("ok 1"), plain(text), plain("ok 2")]) == [Verdict.CORRECT, verdict, Verdict.CORRECT]
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(
    ("grader", "message"),
    [
        ("python:graders_of_mine", "write python:module:function"),
        ("python:no_such_module:grade", "cannot import no_such_module"),
        ("python:graders_of_mine:no_such", "graders_of_mine has no function no_such"),
    ],
)
def test_unusable_grader_is_refused_before_work_starts(user_graders: str, grader: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        pool_of(grader, deadline_seconds=1, memory_mb=256)
    assert descendants() == []


def test_the_working_directory_hides_no_module(workdir: Path) -> None:
    for name in ("json", "random", "sympy"):
        workdir.joinpath(f"{name}.py").write_text("raise SystemExit('a script of the user')")
    with pool_of() as pool:
        assert pool.grade([boxed("x", "x")]) == [Verdict.CORRECT]


def test_many_threads_share_a_pool(user_graders: str) -> None:
    verdicts: dict[int, list[Verdict]] = {}

    def grade(thread: int) -> None:
        verdicts[thread] = pool.grade([plain(f"fine {number}") for number in range(20)])

    with pool_of(user_graders, workers=2, memory_mb=256) as pool:
        threads = [threading.Thread(target=grade, args=(thread,)) for thread in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert verdicts == {thread: [Verdict.CORRECT] * 20 for thread in range(4)}


COUNTDOWN = '{"verifier": "countdown", "numbers": [2, 3, 4, 8], "target": 26}'


def item(response, metadata=COUNTDOWN):
    answer_format = AnswerFormat(opens_think=True, requires_box=True, require_eos=True)
    return GradingItem(gold="8*3+4-2", response=response, finished=True, answer_format=answer_format, metadata=metadata)


def test_math_grades_and_audits_by_the_questions_own_verifier():
    route = Route(grader="math", max_answer_chars=100)
    assert route_item(route, item("so\n</think>\n\\boxed{4+8*3-2}")) is Verdict.CORRECT
    # 26 is what the gold comes to, and no way to get there.
    assert route_item(route, item("</think>\n\\boxed{26}")) is Verdict.WRONG
    assert route_item(route, item("8*3+4-2")) is Verdict.NO_ANSWER
    assert route.audit("8*3+4-2", COUNTDOWN) is Verdict.CORRECT
    assert route.audit("8*3+4", COUNTDOWN) is Verdict.WRONG


def test_a_grader_that_was_chosen_is_used_as_chosen():
    exact, own = (Route(grader=grader, max_answer_chars=100) for grader in ("exact", "python:m:f"))
    assert route_item(exact, item("</think>\n\\boxed{4+8*3-2}")) is Verdict.WRONG
    assert route_item(own, item("</think>\n\\boxed{1}")).metadata == COUNTDOWN


def test_an_unknown_verifier_is_named():
    with pytest.raises(InputError, match="the verifier 'judge', which is not known: use 'countdown' or 'gym:TASK'"):
        route_item(Route(grader="math", max_answer_chars=100), item("</think>\n\\boxed{1}", '{"verifier": "judge"}'))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ('{"verifier": "countdown", "target": 6}', "needs whole numbers in metadata.numbers, not None"),
        (
            '{"verifier": "countdown", "numbers": "2 3", "target": 6}',
            "needs whole numbers in metadata.numbers, not '2 3'",
        ),
        ('{"verifier": "countdown", "numbers": [2, [3]], "target": 6}', "needs whole numbers in metadata.numbers"),
        ('{"verifier": "countdown", "numbers": [2, 3]}', "needs a number in metadata.target, not None"),
        ('{"verifier": "countdown", "numbers": [2], "target": ' + "9" * 5000 + "}", "metadata .* cannot be read"),
        ('{"verifier": ' + "[" * 100_000, "metadata .* cannot be read"),
        ("[2, 3]", "is no JSON table"),
        ('{"verifier": "gym:lcm"}', "needs the task's own table in metadata.entry"),
    ],
)
def test_metadata_that_a_verifier_cannot_read_are_refused_in_one_line(metadata: str, message: str) -> None:
    if "gym" in metadata:
        pytest.importorskip("reasoning_gym")
    with pytest.raises(InputError, match=message) as refusal:
        route_item(Route(grader="math", max_answer_chars=100), item("</think>\n\\boxed{1}", metadata))
    assert len(str(refusal.value)) < 300 and "\n" not in str(refusal.value)


def test_a_grader_of_ones_own_gets_the_metadata_it_asks_for(workdir, monkeypatch):
    (workdir / "graders_with_metadata.py").write_text(
        "def near(gold, text, metadata):\n    return int(text) == metadata.get('target')\n"
        "def plain(gold, text):\n    return gold == text\n"
        "def thought(gold, text, response):\n    return '</think>' in response and '</think>' not in text\n"
    )
    monkeypatch.syspath_prepend(str(workdir))
    near, plain = (load_own(f"python:graders_with_metadata:{name}") for name in ("near", "plain"))
    thought = load_own("python:graders_with_metadata:thought")
    assert (
        near("x", "26", COUNTDOWN, "").verdict is Verdict.CORRECT and near("x", "26", None, "").verdict is Verdict.WRONG
    )
    assert plain("x", "x", COUNTDOWN, "").verdict is Verdict.CORRECT
    assert thought("x", "7", None, "so</think>7").reward == 1 and thought("x", "7", None, "7").reward == 0


SCORES = """
import numpy as np
from exgrpo_cli.base.types import Score, Verdict

RETURNED = {
    "half": 0.5, "one": 1, "narrow": np.float32(0.25), "true": np.True_, "none": Verdict.NO_ANSWER,
    "said": Score(0.5, True, {"length": 3, "tone": np.float64(-0.5)}), "full": Score(1.0, False), "plain": Score(0.75),
    "above": 2, "nan": float("nan"), "word": "yes", "nothing": None, "high": Score(1.5),
    "part": Score(0.5, parts={"a": "b"}),
    "odd": Score(0.5, "yes"), "endless": Score(0.5, parts={"a": float("inf")}), "unnamed": Score(0.5, parts={1: 0.5}),
}

def grade(gold, text):
    return RETURNED[text]

def form(gold, text, response):
    return Score(0.25 * len(response), parts={"letters": len(text)})

def fails(gold, text):
    return 1 / 0
"""


def judged(pool: GradingPool, items: list[GradingItem]) -> list[Grade]:
    return [grade() for grade in [pool.judge(item) for item in items]]


@pytest.fixture
def scores_of_mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "scores_of_mine.py").write_text(SCORES)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "python:scores_of_mine:"


def test_a_grader_gives_part_of_a_point_says_what_is_correct_and_names_parts(scores_of_mine: str) -> None:
    right, wrong = Verdict.CORRECT, Verdict.WRONG
    expected = {
        "half": Grade(wrong, 0.5), "one": Grade(right, 1.0), "narrow": Grade(wrong, 0.25), "true": Grade(right, 1.0),
        "none": Grade(Verdict.NO_ANSWER, 0.0), "said": Grade(right, 0.5, {"length": 3.0, "tone": -0.5}),
        "full": Grade(wrong, 1.0), "plain": Grade(wrong, 0.75),
    }  # fmt: skip
    items = [plain(text) for text in expected]
    with pool_of(f"{scores_of_mine}grade") as pool:
        assert dict(zip(expected, judged(pool, items), strict=True)) == expected
    # From 0.5 on it is a success, unless the grader says otherwise.
    with pool_of(f"{scores_of_mine}grade", success_at=0.5) as pool:
        found = dict(zip(expected, judged(pool, items), strict=True))
    assert [text for text in expected if found[text] != expected[text]] == ["half", "plain"]
    assert (found["half"], found["plain"]) == (Grade(right, 0.5), Grade(right, 0.75))


@pytest.mark.parametrize("text", ["above", "nan", "word", "nothing", "high", "part", "odd", "endless", "unnamed"])
def test_what_is_no_reward_ends_grading_with_one_line(scores_of_mine: str, text: str) -> None:
    with pool_of(f"{scores_of_mine}grade") as pool:
        with pytest.raises(InputError, match=f"grade' returned .* for the answer '{text}': return True or") as refusal:
            judged(pool, [plain("one"), plain(text)])
        assert "\n" not in str(refusal.value)
        # Its worker lives on.
        assert pool.grade([plain("one")]) == [Verdict.CORRECT]


def test_a_reward_is_the_weighted_sum_of_its_graders_and_the_verdict_that_of_the_first(scores_of_mine: str) -> None:
    form, fails = f"{scores_of_mine}form", f"{scores_of_mine}fails"
    weights = {form: 0.2, fails: -1.0, "exact": 0.5}
    with pool_of("exact", rewards=weights) as pool:
        right, wrong = judged(pool, [plain("7"), plain("8 8")])
        assert pool.grade([plain("7")]) == [Verdict.CORRECT]
    assert right.verdict is Verdict.CORRECT and right.reward == pytest.approx(0.5 * 1 + 0.2 * 0.25)
    assert right.parts == {"exact": 1.0, "form": 0.25, "form.letters": 1.0, "fails": 0.0, "fails.failed": 1.0}
    assert wrong.verdict is Verdict.WRONG and wrong.reward == pytest.approx(0.2 * 0.75)
    with pool_of("exact", rewards={form: 0.2}) as pool:
        assert judged(pool, [plain("7")])[0].reward == pytest.approx(1 + 0.2 * 0.25)
    # The weight of the only grader counts too.
    with pool_of("exact", rewards={"exact": 0.5}) as pool:
        assert judged(pool, [plain("7")]) == [Grade(Verdict.CORRECT, 0.5, {"exact": 1.0})]
    assert descendants() == []
