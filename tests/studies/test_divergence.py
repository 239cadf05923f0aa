"""Where an arm's fresh questions leave those of its baseline."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from small_ledger import create
from store_calls import candidates_of, record, replay

from exgrpo_cli.base.errors import DamageWarning
from exgrpo_cli.config.layers import build_config
from exgrpo_cli.replay.store import FreshRow, Visit
from exgrpo_cli.studies.report import divergence_by_arm
from exgrpo_cli.studies.study import Arm, Study, StudyRun

BASELINE = Arm(name="grpo", method="grpo", baseline="grpo")
ROW = FreshRow(
    token_ids=np.array([1], dtype=np.int32), behaviour_logprobs=np.array([-1], dtype=np.float32), entropy=1.0, nll=1.0
)


def run_of(root: Path, arm: Arm, steps: Sequence[str], selected: int = 0) -> StudyRun:
    """A finished run that rolled out these questions, one digit each; in step `selected` a row of its first one."""
    folder = root / arm.name
    with create(folder / "replay") as buffer:
        for step, questions in enumerate(steps, start=1):
            if step == selected:
                replay(buffer, step, candidates_of(buffer, f"q{steps[0][0]}"), 0)
            for question in questions:
                record(
                    buffer,
                    Visit(
                        question_id=f"q{question}", step=step, weight_version=step, success_count=1,
                        num_fresh_successes=1, num_replayed=0, verifier_failed=False,
                        rows=[replace(ROW, token_ids=np.array([step], dtype=np.int32))],
                    )
                )  # fmt: skip
            buffer.flush(step)
    (folder / "summary.json").write_text('{"steps": 150, "finished": "steps reached"}')
    return StudyRun(arm=arm, seed=0, folder=folder, config=build_config(method=arm.method))


def test_the_first_step_with_another_fresh_question(tmp_path: Path) -> None:
    """A replayed question stands in for a fresh one: the next fresh one is the baseline's all the same."""
    runs = [
        run_of(tmp_path, BASELINE, ["12", "34", "56"]),
        run_of(tmp_path, Arm(name="replays", method="exgrpo", baseline="grpo"), ["12", "13", "45"], selected=2),
        run_of(tmp_path, Arm(name="rounds", method="dapo", baseline="grpo"), ["12", "354", "6"]),
    ]
    study = Study(name="s", folder=tmp_path, arms=tuple(run.arm for run in runs), runs=tuple(runs))
    assert divergence_by_arm(study) == {"replays": {0: None}, "rounds": {0: 2}}
    (tmp_path / "rounds" / "replay" / "ledger.json").unlink()
    with pytest.warns(DamageWarning, match=r"not said of rounds, seed 0, where its questions part: .*ledger\.json"):
        assert divergence_by_arm(study) == {"replays": {0: None}}
