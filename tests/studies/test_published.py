"""The published results: docs/claims.md has the verdicts that they give, and effects on some questions can be had."""

import json
import re
import runpy
import shutil
from collections import Counter
from pathlib import Path

import pytest

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.runs.result import read_result
from exgrpo_cli.studies.claims import chosen_claims, claim_outcomes
from exgrpo_cli.studies.planning import StudyRequest, plan_claims

DOCS = Path(__file__).parents[2] / "docs"


def test_the_verdicts_are_those_of_the_results(tmp_path: Path) -> None:
    study = plan_claims(chosen_claims("all"), tmp_path / "claims", StudyRequest(results=[DOCS / "results"]))
    judged = [each for each in claim_outcomes(study).values() if each["verdict"] != "not run"]
    found = Counter((each["regime"], each["verdict"]) for each in judged)
    said = re.findall(
        r"^\| .* \| `([a-z-]+)` \| (?:\*\*)?(supported|contradicted|undecided)(?:\*\*)? \|",
        (DOCS / "claims.md").read_text(),
        flags=re.MULTILINE,
    )
    assert Counter(said) == found


PUBLISHED = sorted((DOCS / "results").rglob("*.json"))


def test_every_result_would_be_missed_if_a_figure_of_it_changed(tmp_path: Path) -> None:
    """Results of earlier versions, which have no checksum, are read without one: here none may be."""
    assert len(PUBLISHED) > 400
    assert [path.name for path in PUBLISHED if "checksum" not in json.loads(path.read_text())] == []
    for path in PUBLISHED:
        assert read_result(path).samples > 0
    changed = Path(shutil.copy(DOCS / "results" / "strong-grpo-200.result.json", tmp_path))
    text = changed.read_text()
    assert '"generated": 508462' in text
    changed.write_text(text.replace('"generated": 508462', '"generated": 408462'))
    with pytest.raises(InputError, match=r"strong-grpo-200\.result\.json has changed since its run wrote it"):
        read_result(changed)


def printed(capsys: pytest.CaptureFixture[str], script: str) -> list[str]:
    runpy.run_path(str(DOCS / "results" / script), run_name="__main__")
    return capsys.readouterr().out.splitlines()


@pytest.mark.slow
def test_effects_on_some_of_the_questions_are_those_of_the_notebook(capsys: pytest.CaptureFixture[str]) -> None:
    notebook = (DOCS / "lab-notebook.md").read_text()
    lines = printed(capsys, "by_question.py")
    assert len(lines) == 5 * 7 * 3
    assert {int(line.split(", ")[3]) for line in lines} >= {400, 254, 146, 200, 73, 181}
    lines = printed(capsys, "sampler/compare.py")
    effects = [re.search(r"[+-]\d.*", line) for line in lines]
    assert len(lines) == 6 and all(effect and effect[0] in notebook for effect in effects)
    lines = printed(capsys, "by_level.py")
    assert len(lines) == 3 * 2 * 6
    [other_seeds] = [line for line in lines if line.startswith("8 seeds from 440, pass@1, levels 5 to 7:")]
    effect = re.search(r"[+-]\d\S+ \[.*?\]", other_seeds)
    assert effect and effect[0] in notebook


def test_the_map_is_drawn_from_the_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["map.py", str(tmp_path)])
    assert "pass@1: exgrpo, search, 16 seeds from 360: +0.081 [0.061, 0.102]" in printed(capsys, "map.py")
    assert (tmp_path / "map.png").is_file()
