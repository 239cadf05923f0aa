"""What a run of a study says in its log: of damage the study's terminal hears too."""

import warnings
from pathlib import Path

import pytest

from exgrpo_cli.base.errors import DamageWarning, ToolkitWarning
from exgrpo_cli.config.layers import build_config
from exgrpo_cli.studies.schedule import pass_on_damage
from exgrpo_cli.studies.study import Arm, StudyRun
from exgrpo_cli.studies.worker import warn_in_log


def test_damage_is_told_once_with_the_name_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warn_in_log()
        warnings.warn("an earlier process said this", DamageWarning, stacklevel=1)
        earlier = capsys.readouterr().err
        warnings.warn("a checkpoint is passed over:\nweights.safetensors", DamageWarning, stacklevel=1)
        warnings.warn("only a hint", ToolkitWarning, stacklevel=1)
        now = capsys.readouterr().err
    (tmp_path / "seed-0.log").write_text(earlier)
    run = StudyRun(arm=Arm(name="exgrpo"), seed=0, folder=tmp_path / "seed-0", config=build_config())
    with run.log.open("a") as file:
        file.write(f"step 1\n{now}")
    with pytest.warns(DamageWarning) as told:
        pass_on_damage(run, len(earlier))
    assert [str(warning.message) for warning in told] == [
        "exgrpo, seed 0: a checkpoint is passed over: weights.safetensors"
    ]
