"""`exgrpo ablate` from the command line: which runs a study has, where they go, what is refused."""

import json
import os
import re
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest
from made_results import write_claim_results

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.commands import run
from exgrpo_cli.config.layers import build_config
from exgrpo_cli.questions.made.countdown import make_countdown
from exgrpo_cli.studies.study import read_plan

pytestmark = pytest.mark.usefixtures("workdir")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NOT_RUN = ("real_model_trade",)


def planned(capsys, *arguments):
    assert run(["ablate", *arguments, "--dry-run", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def dry_talk(capsys, *arguments):
    capsys.readouterr()
    assert run(["ablate", *arguments, "--dry-run"]) == 0
    return capsys.readouterr().err


def test_one_metric_is_twelve_runs(capsys, tmp_path):
    """ent:min, ent:max, random and on-policy with 3 seeds: 4 x 3 = 12."""
    plan = planned(capsys, "--metric", "ent")
    arms = ("ent:min", "ent:max", "random", "on-policy")
    assert [(each["arm"], each["seed"]) for each in plan["runs"]] == [(arm, seed) for seed in range(3) for arm in arms]
    assert plan["runs"][0]["folder"] == "studies/metric-ent/ent-min/seed-0"
    assert {each["state"] for each in plan["runs"]} == {"new"} and plan == planned(capsys)
    assert list(tmp_path.iterdir()) == []


def test_axes_regimes_seeds_steps_and_place(capsys):
    axes = ("--sampler", "uniform", "--vary", "replay.ratio=0.25,0.75")
    runs = planned(capsys, *axes, "--seeds", "1,4", "--steps", "9", "--output", "out/mine")["runs"]
    arms = ["uniform replay.ratio=0.25", "uniform replay.ratio=0.75", "on-policy"]
    assert [(each["arm"], each["seed"], each["steps"]) for each in runs[:3]] == [(arm, 1, 9) for arm in arms]
    assert {each["seed"] for each in runs} == {1, 4}
    assert runs[0]["folder"] == "out/mine/uniform-replay.ratio=0.25/seed-1"
    plan = planned(capsys, "--regimes", "strong,sparse", "--methods", "exgrpo,grpo", "--seeds", "2")
    assert len(plan["runs"]) == 8 and plan["equal"] == "generated"
    assert plan["baseline"] == "strong: grpo, sparse: grpo"


def test_a_study_hears_which_of_its_held_out_questions_published_ones_had(capsys):
    """Counted here by text, over the draws of countdown that entries of the lab notebook name."""

    def asked(regime, seed=0, num_train=2):
        drawn = [f"countdown.seed={seed}", f"countdown.num_train={num_train}"]
        settings = build_config(regime=regime, assignments=drawn).countdown
        return {each.prompt[-1].content for each in make_countdown(settings).heldout}

    own = asked("search", 6, 1600)
    again = len(own & asked("sparse").union(*(asked("search", seed) for seed in range(6))))
    assert 200 < again < 400
    said = dry_talk(capsys, "--regimes", "search,search-20,strong", "--set", "countdown.seed=6")
    assert f"published studies held out {again} of its 400 countdown questions (" in said
    assert "published studies held out 0 of its 400 countdown questions\n" in said
    assert "published studies held out 600 of its 600 arithmetic questions (600 in strong; " in said


def test_a_claim_on_another_backbone_has_a_folder_of_its_own(capsys):
    for backbone in ("qwen-math-1.5b", "qwen-math-7b"):
        [first, *_] = planned(capsys, "--claim", "real-model", "--backbone", backbone)["runs"]
        assert first["folder"] == f"studies/claims-{backbone}/grpo/seed-500"


def test_every_claim_with_results_has_its_draw_among_the_published_ones(capsys):
    """Its held-out questions are all known, or a study that draws them again would not hear of it."""
    others = [str(path) for path in BENCHMARKS.glob("*.toml") if path.stem not in NOT_RUN]
    for claims in ("all", "real-model", ",".join(others)):
        said = re.findall(r"held out (\d+) of its (\d+) ", dry_talk(capsys, "--claim", claims))
        assert said and all(again == asked for again, asked in said)


def test_a_plan_for_people(capsys):
    assert run(["ablate", "--methods", "exgrpo", "--seeds", "1", "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[1] == "on-policy\tseed 0\t150 steps\tnew\tstudies/methods-exgrpo/on-policy/seed-0"
    assert "study methods-exgrpo" in err
    assert "2 of 2 runs to go" in err and "how long shows once one has made a step" in err


def test_a_claim_whose_results_are_all_there_is_judged_without_a_run(capsys, tmp_path):
    """Sixteen results of another machine: 6 of 8 questions right against 2 of 8, each once more or less."""
    carried = write_claim_results(tmp_path / "carried", "replay-beats-on-policy", method="exgrpo")
    arguments = ["ablate", "--claim", "replay-beats-on-policy", "--results", str(carried), "--output", "out/claims"]
    assert "16 of 16 runs to go, 2 at a time: about" in dry_talk(capsys, *arguments[1:3], "--jobs", "2")
    assert run([*arguments, "--json"]) == 0
    out, err = capsys.readouterr()
    claim = json.loads(out)["claims"]["replay-beats-on-policy"]
    assert claim["verdict"] == "supported" and claim["seeds"] == 8 and claim["tokens"] == 16_000
    assert claim["contrasts"][0]["effect"]["mean"] == pytest.approx(0.5, abs=0.1)
    assert "nothing to go: 16 of 16 runs are finished" in err and "about 0 s" not in err
    assert (tmp_path / "out" / "claims" / "claims.png").is_file()
    report = (tmp_path / "out" / "claims" / "report.md").read_text()
    assert "| Replay beats on-policy training at equal generated tokens | strong |" in report
    page = (tmp_path / "out" / "claims" / "report.html").read_text()
    assert "supported" in page and page.count("finished elsewhere") == 16
    assert "2 arms, 8 seeds, against strong: grpo: 16 of 16 runs finished, 16 of them elsewhere." in page
    assert "strong: exgrpo: method exgrpo, regime strong, run.budget=generated" in page and "/seed-N" not in page
    plan = tmp_path / "out" / "claims" / "study.json"
    now = read_plan(plan.parent)
    kept = json.loads(plan.read_text())
    plan.write_text(json.dumps({**kept, "equal": "trained"}))
    with pytest.raises(InputError, match=r"study.json is damaged \(.*other values than were written.*\): restore it"):
        read_plan(plan.parent)
    for content in (b"[" * 100_000, b"", b"[]", json.dumps(kept).encode("utf-16"), None):
        plan.unlink()
        plan.write_bytes(content) if content is not None else plan.mkdir()
        assert run(["report", str(plan.parent)]) == 2
        err = capsys.readouterr().err
        assert (
            f"exgrpo: {plan} is " in err
            and "Without a copy remove it" in err
            and err.count("\n") == 1
            and len(err) < 400
        )
    plan.rmdir()
    plan.write_text(json.dumps(kept))
    assert read_plan(plan.parent) == now and now.claims
    (plan.parent / "results" / "strong-grpo-207.result.json").unlink()
    assert run(["report", str(plan.parent)]) == 0
    page = (plan.parent / "report.html").read_text()
    assert "15 of 16 runs finished, 15 of them elsewhere" in page and page.count("not begun") == 1
    assert (
        "Runs not shown: settings and buffers of 15 of 16 runs, of which the results alone" in capsys.readouterr().err
    )
    (carried / "strong-grpo-207.result.json").unlink()
    assert "1 of 16 runs to go, 1 at a time: about 60 s" in dry_talk(capsys, *arguments[1:5])


def test_an_interrupted_study_remembers_the_results_of_other_machines(capsys, tmp_path):
    """Of sixteen runs fifteen were made elsewhere; the sixteenth has just begun when the study is stopped."""
    carried = write_claim_results(tmp_path / "carried", "replay-beats-on-policy", method="exgrpo")
    (carried / "strong-exgrpo-207.result.json").unlink()
    study = tmp_path / "claims"
    arguments = ["ablate", "--claim", "replay-beats-on-policy", "--output", str(study)]

    def stop_when_under_way():
        while not (study / "strong-exgrpo" / "seed-207.log").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=stop_when_under_way, daemon=True).start()
    assert run([*arguments, "--results", str(carried)]) == 130
    assert not (study / "results.json").exists(), "the study has not come to its end"
    left = [run for server in psutil.Process().children() for run in server.children()]
    assert left == [], "nor has a run been left behind that was about to begin"
    capsys.readouterr()
    assert run(["report", str(study), "--json"]) == 0
    capsys.readouterr()
    page = (study / "report.html").read_text()
    assert "15 of 16 runs finished, 15 of them elsewhere" in page and page.count("finished elsewhere") == 15
    assert [each["seed"] for each in planned(capsys, *arguments[1:])["runs"] if each["state"] == "new"] == [207]
