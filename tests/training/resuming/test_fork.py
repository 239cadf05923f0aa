"""`exgrpo fork`: the factual branch is the run itself, effects are those of plain sums, a kill changes nothing."""

import json
import math
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file

from exgrpo_cli.algo.batching import MiniBatch
from exgrpo_cli.base import statistics
from exgrpo_cli.base.reporter import SilentReporter
from exgrpo_cli.base.types import AnswerFormat
from exgrpo_cli.commands import run as exgrpo
from exgrpo_cli.config.settings import Config
from exgrpo_cli.engines.policy.policy import Policy, UpdateReport
from exgrpo_cli.grading.verifiers import valid_trace
from exgrpo_cli.ledger.reader import LedgerReader
from exgrpo_cli.questions.made import make_split
from exgrpo_cli.runs.folder import complete_steps
from exgrpo_cli.runs.result import read_result
from exgrpo_cli.studies import endpoints
from exgrpo_cli.training import fork
from exgrpo_cli.training.run import train
from exgrpo_cli.training.start import resumed_config

FOUR_STEPS = ("run.steps=4", "run.save_every=1", "run.keep_checkpoints=0", "replay.start_threshold=0")
FROM_THE_THIRD_ON = ("replay.warmup_steps=2", "replay.collect_before_start=true")
METHODS = {
    "exgrpo": (),
    # One group a step, in a mini-batch of its own.
    "headroom-drift": ("rollout.questions_per_step=4", "replay.max_drift=9", "replay.ratio=0.25"),
}
REFUSED = {
    "has no checkpoint of step 9 and 1 steps after it, but of [1, 2, 3]": ("--step", "9"),
    "step 2 of": ("--step", "1"),
    "was made on several ranks": ("config.toml", "nproc = 1", "nproc = 2"),
    "was made without replay": ("config.toml", "\nenabled = true", "\nenabled = false"),
    "was made on another kind of machine (torch 0.0.0, here": (
        "environment.json",
        '"torch": "',
        '"torch": "0.0.0", "": "',
    ),
}


@pytest.fixture(scope="module", params=["exgrpo", pytest.param("headroom-drift", marks=pytest.mark.engines)])
def run(request: pytest.FixtureRequest, small_config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / request.param
    settings = (*FOUR_STEPS, *FROM_THE_THIRD_ON, *METHODS[request.param])
    train(small_config(*settings, method=request.param), folder, reporter=SilentReporter())
    return folder


def test_the_factual_branch_is_the_run_itself_and_one_without_a_unit_is_not(run, monkeypatch) -> None:
    """Bit by bit after two steps, also from a second branch; what is left out trains in the first of them alone."""
    config, weights, answered = resumed_config(run), [], fork.validation.answered

    def noted(parts: Any, questions: Any) -> Any:
        weights.append({name: each.numpy().copy() for name, each in parts.policy.named_weights()})
        return answered(parts, questions)

    monkeypatch.setattr(fork.validation, "answered", noted)
    [unit, *_] = fork.replayed_units(LedgerReader(run / "replay"), 2, groups=config.replay.draws_groups)
    with fork.branching(run, config, 2, 2) as branch:
        factual, without, again = branch({}), branch(dict.fromkeys(unit["ids"])), branch({})
    saved = load_file(run / "checkpoints/step-000004/model/model.safetensors")
    same = [all(np.array_equal(made[name], saved[name]) for name in saved) for made in weights]
    assert same == [True, False, True]
    nothing, did = fork.effect(factual, again), fork.effect(factual, without)
    assert (
        (nothing["effect_logprob"], nothing["effect_pass_at_1"], nothing["drift"]) == (0, 0, 0) < (0, 0, did["drift"])
    )
    one, other = factual[0][0], without[0][0]
    assert one["tokens/generated"] == other["tokens/generated"]
    assert one["tokens/trained"] > other["tokens/trained"]


def test_another_row_trains_in_the_place_of_one(run, tmp_path, capsys, monkeypatch) -> None:
    """One that its question held and did not choose; the row itself in its own place is the run to the bit."""
    if run.name != "exgrpo":
        assert exgrpo(["fork", str(run), "--step", "2", "--instead", "--output", str(tmp_path)]) == 2
        assert "had one row to choose from for each question: none is another" in capsys.readouterr().err
        return
    ledger, bases, updated = LedgerReader(run / "replay"), [2, 3], []
    scores = ledger.scores().to_pandas()
    update = Policy.update

    def noted(policy: Policy, batch: MiniBatch) -> UpdateReport:
        updated.extend([row.sequence.response_ids.tolist() for row in batch.rows if row.replayed])
        return update(policy, batch)

    monkeypatch.setattr(Policy, "update", noted)
    for base in bases:
        units = fork.replayed_units(ledger, base, groups=False)
        for unit in fork.with_others(ledger, base, units, np.random.default_rng(0)):
            [row] = scores[(scores.step == base + 1) & (scores.trajectory_id == unit["instead"])].to_dict("records")
            assert (row["question_id"], row["chosen"]) == (unit["question_id"], False)
            with fork.branching(run, resumed_config(run), base, 1) as branch:
                factual, [own] = branch({}), unit["ids"]
                trained, updated[:] = updated[:], []
                other, changed = branch({own: unit["instead"]}), updated[:]
                assert fork.effect(factual, branch({own: own}))["drift"] == 0 < fork.effect(factual, other)["drift"]
            here, there = (ledger.bodies([each])[0][0].tolist() for each in (own, unit["instead"]))
            assert sorted([*changed, here]) == sorted([*trained, there])
            return
    pytest.fail("no question held two rows")


@pytest.mark.engines
def test_killed_and_gone_on_with_it_ends_in_the_same_table(run, tmp_path, capsys) -> None:
    command = ["fork", str(run), "--step", "3", "--step", "2", "--rows", "3", "--json"]
    assert exgrpo([*command, "--output", str(tmp_path / "whole")]) == 0
    report = json.loads(capsys.readouterr().out)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    killed = [sys.executable, "-m", "exgrpo_cli", *command, "--output", str(tmp_path / "killed"), "--jobs", "2"]
    log = tmp_path / "killed" / "forks.jsonl"
    with subprocess.Popen(killed, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while not (log.is_file() and log.read_bytes()):
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    log.write_bytes(log.read_bytes() + b'{"torn')
    assert exgrpo([*command, "--output", str(tmp_path / "killed")]) == 0
    assert json.loads(capsys.readouterr().out) == report | {"table": str(tmp_path / "killed" / "forks.parquet")}
    one, other = (pq.read_table(tmp_path / name / "forks.parquet") for name in ("whole", "killed"))
    assert one.equals(other) and one.num_rows == report["units"] == (6 if run.name == "exgrpo" else 2)
    assert before == {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    assert (
        exgrpo(["fork", str(run), "--step", "2", "--steps", "2", "--rows", "1", "--output", str(tmp_path / "whole")])
        == 0
    )
    assert "effect_pass_at_1" in capsys.readouterr().out


@pytest.mark.engines
def test_a_run_forks_itself_when_it_has_ended(small_config, tmp_path, capsys) -> None:
    """The endpoint `memory` is what `exgrpo fork` finds; its checkpoints stay, and without replay there is none."""
    own = ("run.steps=4", "run.save_every=9", "run.keep_checkpoints=1", "replay.start_threshold=0")
    forks, found = "validation.forks=[1,2,9]", {}
    for method in ("grpo", "headroom-drift"):
        run = tmp_path / method
        settings = (*own, forks, *METHODS["headroom-drift"]) if method != "grpo" else (*own[:3], forks)
        train(small_config(*settings, method=method), run, reporter=SilentReporter())
        assert complete_steps(run / "checkpoints") == [1, 2, 4]
        found[method] = endpoints.values_of(endpoints.endpoint_named("memory"), {0: read_result(run / "result.json")})
    assert exgrpo(["fork", str(run), "--step", "1", "--step", "2", "--output", str(tmp_path / "forks"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert found == {"grpo": {}, "headroom-drift": {0: report["effect_logprob"]["mean"]}} and report["units"] == 2
    assert exgrpo(["verify", str(run), "--steps", "4"]) == 0


@pytest.mark.parametrize(("refused", "how"), REFUSED.items())
def test_what_cannot_be_forked_is_refused_in_one_line(
    run, tmp_path, capsys, refused: str, how: tuple[str, ...]
) -> None:
    shutil.copytree(run, copy := tmp_path / "run")
    options = how if how[0] == "--step" else ("--step", "2")
    if how[0] != "--step":
        text = (copy / how[0]).read_text()
        assert how[1] in text
        (copy / how[0]).write_text(text.replace(*how[1:]))
    assert exgrpo(["fork", str(copy), *options, "--output", str(tmp_path / "forks")]) == 2
    err = capsys.readouterr().err
    assert refused in err and err.count("\n") == 1 + err.count("loading libraries")


def test_an_effect_is_the_difference_of_sums_of_log_probs_and_of_rates() -> None:
    golds = [np.array([-1.0, -2.0], np.float32), np.array([-0.5], np.float32), np.array([-3.0], np.float32)]
    others = [np.array([-1.5, -2.0], np.float32), np.array([-0.25], np.float32), np.array([-4.0], np.float32)]
    found = fork.effect(([], golds, np.array([1.0, 0.5, 0])), ([], others, np.array([0.5, 0.5, 0])))
    # Of the questions 0.5, -0.25 and 1; their standard deviation is sqrt(19 / 48), t(2) = 4.302653.
    half = 4.302653 * math.sqrt(19 / 48 / 3)
    expected = {"": 5 / 12, "_low": 5 / 12 - half, "_high": 5 / 12 + half}
    assert {end: found[f"effect_logprob{end}"] for end in expected} == pytest.approx(expected, rel=1e-6)
    assert found["effect_pass_at_1"] == pytest.approx(1 / 6) and found["drift"] == pytest.approx(1.75 / 4)


def test_a_rank_correlation_is_that_of_ranks_with_fishers_interval() -> None:
    pairs = [(1.0, 10.0), (2.0, 30.0), (2.0, 20.0), (4.0, 40.0), (9.0, 90.0)]
    # Ranks 1, 2.5, 2.5, 4, 5 and 1, 3, 2, 4, 5: sums of squares 9.5 and 10, of products 9.5.
    r = 9.5 / math.sqrt(9.5 * 10)
    half = 1.959964 / math.sqrt(2)
    found = statistics.rank_correlation(pairs)
    expected = (r, math.tanh(math.atanh(r) - half), math.tanh(math.atanh(r) + half))
    assert (found.mean, found.low, found.high) == pytest.approx(expected, rel=1e-6)
    assert statistics.rank_correlation(pairs[:3]) is statistics.rank_correlation([(1.0, 2.0)] * 5) is None


@pytest.mark.parametrize("source", ["arithmetic", "modular", "countdown"])
def test_a_gold_response_is_worked_out_where_the_question_can_be(source: str) -> None:
    form = AnswerFormat(opens_think=True, requires_box=True, require_eos=True)
    for question in make_split(source, Config()).heldout:
        thinking, _, box = (text := fork.gold_response(question, form)).partition("\n</think>\n")
        assert box == f"\\boxed{{{question.answer}}}"
        lines = [line.split("=") for line in thinking.splitlines()]
        assert lines and (source == "modular" or all(eval(left) == int(right) for left, right in lines))
        assert valid_trace(question, text) or source == "countdown"
        if source == "countdown":
            assert int(lines[-1][1]) == json.loads(question.metadata)["target"]
