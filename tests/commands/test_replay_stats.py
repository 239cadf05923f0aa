"""`exgrpo replay-stats`: tables, JSON, refusals, and no heavy package."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.compute as pc
import pytest
from synthetic_run import SyntheticRun, write_config, write_run
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from exgrpo_cli.commands import run as exgrpo
from exgrpo_cli.ledger.reader import LedgerReader
from exgrpo_cli.show.statistics import plot_folders, report_runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two runs of one name, as the seeds of two arms have it."""
    base = tmp_path_factory.mktemp("studies")
    spec = SyntheticRun(steps=8, num_questions=80, questions_per_step=8, mixed_from=2)
    for arm in ("ent", "random"):
        (base / arm).mkdir()
        write_run(base / arm / "seed-0", spec)
    return base / "ent" / "seed-0", base / "random" / "seed-0"


def test_json_is_one_object_with_the_promised_keys(runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert exgrpo(["replay-stats", str(runs[0]), "--json"]) == 0
    out, err = capsys.readouterr()
    told = json.loads(out)
    last = json.loads((runs[0] / "metrics.jsonl").read_text().splitlines()[-1])
    assert told["buckets"] == {str(k): last[f"replay/bucket/{k}"] for k in range(8) if last.get(f"replay/bucket/{k}")}
    for name in ("retired", "questions", "trajectories"):
        assert told[name] == last[f"replay/{name}"]
    assert 0 < told["entropy"]["selected"] < told["entropy"]["available"]
    assert {"mean", "median", "p90", "max"} <= set(told["age"]) & set(told["reuse"])
    assert len(told["over_time"]["questions"]) == 9
    assert err.splitlines()[-1] == f"plots: {runs[0] / 'plots'}"
    assert (runs[0] / "plots" / "replay-buckets.svg").is_file()


def test_tables_name_every_part_of_the_report(runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert exgrpo(["replay-stats", str(runs[0]), "--no-plots"]) == 0
    out, err = capsys.readouterr()
    for title in (
        "Replay buffer",
        "Questions by successes of 8",
        "Over time",
        "Drawn against promised (normal",
        "Entropy of trajectories at birth",
        "Most replayed questions",
    ):
        assert title in out
    assert err == ""
    assert max(map(len, out.splitlines())) <= 120


def test_what_was_asked_for_is_all_that_is_shown(runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert exgrpo(["replay-stats", str(runs[0]), "--no-plots", "--what-if", "sampler=linear,metric=ppl"]) == 0
    out = capsys.readouterr().out
    assert "seed-0: questions drawn, had the sampler been linear" in out
    assert "seed-0: trajectories replayed, had the metric been ppl:min" in out
    assert "Replay buffer" not in out
    assert exgrpo(["replay-stats", str(runs[0]), "--no-plots", "--what-if", "mu=0.9"]) == 0
    assert re.search(r"run: normal\(0\.5, [\d.]+\) +normal\(0\.9, [\d.]+\)", capsys.readouterr().out)


def write_tokenizer(path: Path) -> None:
    """Token 3 is "w3", and so on: a text tells which ids it was made of."""
    path.parent.mkdir(parents=True)
    Tokenizer(WordLevel({f"w{number}": number for number in range(512)}, unk_token="w0")).save(str(path))


def test_a_step_shows_what_it_drew_with_its_candidates_and_their_words(
    runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs[0], run, ignore=shutil.ignore_patterns("plots"))
    write_tokenizer(run / "checkpoints" / "step-000005" / "model" / "tokenizer.json")  # while a run goes on
    assert exgrpo(["replay-stats", str(run), "--step", "6", "--json"]) == 0
    out, err = capsys.readouterr()
    told = json.loads(out)["step"]
    assert err == "" and not (run / "plots").exists()
    ledger = LedgerReader(run / "replay")
    scores = ledger.scores().filter(pc.field("step") == 6).to_pylist()
    offers = ledger.draws().filter(pc.field("step") == 6).to_pylist()
    assert sum(offer["drawn"] for offer in told["buckets"]) == len(told["questions"]) > 1
    shown = {one["trajectory_id"]: one for drawn in told["questions"] for one in drawn["candidates"]}
    assert {row["trajectory_id"]: (row["chosen"], row["entropy"]) for row in scores} == {
        trajectory_id: (one["chosen"], one["entropy"]) for trajectory_id, one in shown.items()
    }
    born = dict(zip(*ledger.trajectories(["trajectory_id", "step_born"]).to_pydict().values(), strict=True))
    for trajectory_id, one in shown.items():
        [(token_ids, _)] = ledger.bodies([trajectory_id])
        assert one["text"].split() == [f"w{token}" for token in token_ids]
        assert one["age"] == 6 - born[trajectory_id]
    for drawn in told["questions"]:
        [offer] = [row for row in offers if row["bucket"] == drawn["bucket"]]
        assert drawn["probability"] == pytest.approx(offer["probability"] / offer["num_questions"])
        assert sum(one["chosen"] for one in drawn["candidates"]) == 1
        assert drawn["question"]["text"].startswith("What is")
    question_id = told["questions"][0]["question_id"]
    assert exgrpo(["replay-stats", str(run), "--question", question_id, "--json"]) == 0
    history = json.loads(capsys.readouterr().out)["question"]
    drawn = next(row for row in history["events"] if (row["step"], row["event"]) == (6, "selected"))
    assert drawn["probability"] == told["questions"][0]["probability"]
    assert history["responses"][str(drawn["trajectory_id"])] == shown[drawn["trajectory_id"]]["text"]
    (run / "checkpoints" / "step-000005" / "model" / "tokenizer.json").write_text('{"model": {"type": "none"}}')
    assert exgrpo(["replay-stats", str(run), "--step", "6", "--json"]) == 2
    assert "tokenizer.json is no tokenizer" in capsys.readouterr().err


def test_the_tables_of_a_step_stand_alone(runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert exgrpo(["replay-stats", str(runs[0]), "--step", "6"]) == 0
    out = capsys.readouterr().out
    assert "buckets at step 6" in out and "drawn at step 6" in out and "Replay buffer" not in out
    # A few of its questions, and how the others are seen.
    [shown, drawn] = re.findall(r"The first (\d+) of (\d+); all of them, with whole texts: --json", out)[0]
    assert 1 <= int(shown) < int(drawn) and len(out.split("drawn at step 6")[1].splitlines()) < 40
    assert exgrpo(["replay-stats", str(runs[0]), "--step", "1"]) == 0
    assert "on-policy phase: replay begins with step 2" in capsys.readouterr().out


def test_several_runs_are_set_side_by_side(runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert exgrpo(["replay-stats", *map(str, runs), "--no-plots", "--quiet"]) == 0
    out, err = capsys.readouterr()
    assert "ent/seed-0" in out and "random/seed-0" in out
    assert err == ""
    assert exgrpo(["replay-stats", *map(str, runs), "--no-plots", "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)["runs"]) == ["ent/seed-0", "random/seed-0"]


def test_each_of_several_runs_has_its_own_folder_of_plots(runs: tuple[Path, Path], tmp_path: Path) -> None:
    reports = report_runs(runs)
    assert plot_folders(reports, None) == [run / "plots" for run in runs]
    assert plot_folders(reports, tmp_path) == [tmp_path / "ent" / "seed-0", tmp_path / "random" / "seed-0"]
    assert plot_folders({"one": reports["ent/seed-0"]}, tmp_path / "one") == [tmp_path / "one"]


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert exgrpo(["replay-stats", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1 and "Traceback" not in err
    return err


def test_what_cannot_be_shown_is_one_line_and_exit_code_2(
    runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = str(runs[0])
    assert "is not a run folder" in refusal(capsys, str(tmp_path / "nowhere"))
    assert not (tmp_path / "nowhere").exists()
    (tmp_path / "grpo").mkdir()
    write_config(tmp_path / "grpo", SyntheticRun(), method="grpo", replay=False)
    assert "replay was off (method 'grpo'" in refusal(capsys, str(tmp_path / "grpo"))
    assert "named twice" in refusal(capsys, first, first)
    assert "Did you mean 'sampler'?" in refusal(capsys, first, "--what-if", "samplers=linear")
    assert "is not in" in refusal(capsys, first, "--question", "nobody")
    assert "--step 9 is not in" in (told := refusal(capsys, first, "--step", "9")) and "from 1 to 8" in told
    assert "--step 0 is not in" in refusal(capsys, first, "--step", "0")
    assert "replay-buckets.png cannot be written" in refusal(capsys, first, "--output", "/dev/null/plots")


BLOCKED = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "vllm", "deepspeed"):
            raise ImportError(f"{name} is not installed")
sys.meta_path.insert(0, Blocker())
from exgrpo_cli.commands import run
sys.exit(run(sys.argv[1:]))
"""


def test_it_works_without_torch_transformers_vllm_and_deepspeed_and_without_a_home(
    runs: tuple[Path, Path], tmp_path: Path
) -> None:
    command = [sys.executable, "-c", BLOCKED, "replay-stats", str(runs[0]), "--json", "--quiet"]
    asked = ["--output", str(tmp_path), "--what-if", "sampler=sqrt,metric=length"]
    # A home that is no folder refuses even the superuser.
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "MPL"))}
    result = subprocess.run(
        [*command, *asked], capture_output=True, text=True, check=False, env=kept | {"HOME": "/dev/null"}
    )
    # Which slow package comes first is not the same everywhere.
    assert result.returncode == 0 and re.fullmatch(r"(exgrpo: loading \w+\n)?", result.stderr)
    assert json.loads(result.stdout)["what_if"]["sampler"]["sampler"] == "sqrt"
    assert (tmp_path / "replay-what-if.png").is_file()
