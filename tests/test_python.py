"""The face in Python: light to import, typed, and every example of its page runs."""

import re
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
from conftest import SMALL_RUN
from processes import python

import exgrpo_cli
from exgrpo_cli.base.errors import InputError

PAGE = Path(__file__).parents[1] / "docs" / "python.md"


def test_importing_is_light_and_offers_what_the_page_shows() -> None:
    code = (
        "import sys, exgrpo_cli; print(sorted(m for m in sys.modules if '.' not in m and m in "
        "{'torch', 'numpy', 'pyarrow', 'transformers', 'matplotlib', 'typer'})); print(exgrpo_cli.Run.__name__)"
    )
    done = python("-c", code, check=True)
    assert done.stdout.split("\n")[:2] == ["[]", "Run"]
    shown = set(re.findall(r"exgrpo_cli\.(\w+)\(|A `(Run)` has", PAGE.read_text()))
    assert {either or other for either, other in shown} == set(exgrpo_cli.__all__) - {"__version__"}
    assert (Path(exgrpo_cli.__file__).parent / "py.typed").is_file()
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = exgrpo_cli.nothing


@pytest.fixture(scope="module")
def played(small_backbone: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the page's examples leave behind, with a backbone and settings of seconds."""
    small = dict(setting.split("=", 1) for setting in SMALL_RUN if not setting.startswith("run.steps"))
    values = {name: eval(value, {"false": False, "exact": "exact"}) for name, value in small.items()}
    values |= {"backbone.source": str(small_backbone), "backbone.name": "small", "rollout.max_response_tokens": 100}
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL))
    for old, new in (
        ('"run.steps": 60,', '"run.steps": 4, **SMALL,'),
        ('"data/questions.parquet")', '"data/questions.parquet", settings=SIZES)'),
        ("> 0.95", "> -1 and line['step'] == 2"),
        ('"samples": 2}', '"samples": 1}, data="data/questions-heldout.parquet"'),
    ):
        assert old in code
        code = code.replace(old, new)
    sizes = {name: value for name, value in values.items() if name.startswith("arithmetic.")}
    seen: dict[str, Any] = {"SMALL": values, "SIZES": sizes}
    folder = tmp_path_factory.mktemp("page")
    with chdir(folder):
        exec(code, seen)
    return seen | {"folder": folder}


@pytest.mark.slow
def test_the_examples_of_the_page_run(played: dict[str, Any]) -> None:
    run, folder = played["run"], played["folder"]
    assert played["report"]["counts"]["kept"] == 60
    assert run.finished and run.summary["steps"] == 4
    assert run.metrics().column("step").to_pylist() == [1, 2, 3, 4]
    assert 0 <= played["results"]["arithmetic"]["avg_at_k"] <= 1
    assert set(played["trajectories"]["trajectory_id"]) == set(run.ledger().column("trajectory_id").to_pylist())
    assert (folder / "learning.pdf").is_file() and (folder / "replay-buckets.pdf").is_file()
    assert (folder / "runs/mine/report.html").is_file()


@pytest.mark.slow
def test_bodies_come_in_the_order_of_the_ids(played: dict[str, Any]) -> None:
    run = exgrpo_cli.open_run(played["folder"] / "runs/mine")
    both = run.bodies([1, 0])
    assert both.column("trajectory_id").to_pylist() == [1, 0]
    assert both.column("token_ids")[1] == run.bodies([0]).column("token_ids")[0]
    lengths = [len(row) for row in both.column("token_ids").to_pylist()]
    assert lengths == [run.ledger().column("num_tokens").to_pylist()[number] for number in (1, 0)]


@pytest.mark.slow
def test_what_is_wrong_is_an_input_error(tmp_path: Path, played: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="is not a run folder"):
        exgrpo_cli.open_run(tmp_path)
    with pytest.raises(InputError, match="'steps' is not of the form"):
        exgrpo_cli.train(tmp_path / "run", settings={"steps": 3})
    with pytest.raises(InputError, match="Did you mean 'scores'"):
        exgrpo_cli.open_run(played["folder"] / "runs/mine").ledger("score")
