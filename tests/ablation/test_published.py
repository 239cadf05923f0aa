"""The published results: docs/claims.md has the verdicts that they give, and effects on some questions can be had."""

import re
import runpy
from collections import Counter
from pathlib import Path

import pytest

from exgrpo_cli.ablation.claims.claim import chosen_claims
from exgrpo_cli.ablation.claims.outcome import claim_outcomes
from exgrpo_cli.ablation.claims.plan import plan_claims
from exgrpo_cli.ablation.results.inference import Verdict

DOCS = Path(__file__).parents[2] / "docs"


def test_the_verdicts_are_those_of_the_results(tmp_path: Path) -> None:
    study = plan_claims(chosen_claims("all"), name="claims", root=tmp_path, results=[DOCS / "results"])
    found = Counter(
        (each.claim.regime, each.verdict.value) for each in claim_outcomes(study) if each.verdict is not Verdict.NOT_RUN
    )
    said = re.findall(
        r"^\| .* \| `([a-z-]+)` \| (?:\*\*)?(supported|contradicted|undecided)(?:\*\*)? \|",
        (DOCS / "claims.md").read_text(),
        flags=re.MULTILINE,
    )
    assert Counter(said) == found


def test_effects_on_some_of_the_questions_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(DOCS / "results" / "by_question.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 * 7 * 3
    assert {int(line.split(", ")[3]) for line in lines} >= {400, 254, 146, 200, 73, 181}


def test_the_sampler_is_compared_with_the_trainer(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(DOCS / "results" / "sampler" / "compare.py"), run_name="__main__")
    printed = capsys.readouterr().out.splitlines()
    notebook = (DOCS / "lab-notebook.md").read_text()
    effects = [re.search(r"[+-]\d.*", line) for line in printed]
    assert len(printed) == 6 and all(effect and effect[0] in notebook for effect in effects)
