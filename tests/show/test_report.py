"""`report.html`: self-contained, complete, honest about what is missing, and safe with hostile text."""

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from made_results import result_of

from exgrpo_cli.base.errors import InputError, ToolkitWarning
from exgrpo_cli.commands import run as exgrpo
from exgrpo_cli.runs.folder import note_checksums
from exgrpo_cli.runs.result import write_result
from exgrpo_cli.show.page import Paragraph, gather
from exgrpo_cli.show.record import read_config
from exgrpo_cli.show.report import differing_settings, write_report

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from synthetic_run import SyntheticRun, write_config, write_run

HOSTILE = "<script>alert(1)</script><img src='http://example.org/x.png'>"
SECTIONS = "Result|Warnings|Training|Replay|Verdicts and responses|How to repeat it|Files|Versions"


def headings(text: str) -> list[str]:
    return re.findall(r"<h2[^>]*>([^<]*)</h2>", text)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty steps with samples, the last of them hostile."""
    folder = tmp_path_factory.mktemp("reports") / "run"
    write_run(folder, SyntheticRun(steps=30, num_questions=100, questions_per_step=8, mixed_from=4))
    (folder / "samples").mkdir()
    row = {"prompt": HOSTILE, "answer": "7", "text": HOSTILE, "num_tokens": 9, "experiential": False}
    rows = [row | {"reward": 0.0, "verdict": "wrong"}, row | {"reward": 1.0, "verdict": "correct"}]
    (folder / "samples" / "step-000030.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_page_has_every_section_and_figure_and_loads_nothing(run: Path, tmp_path: Path) -> None:
    text = write_report(run, tmp_path / "page.html").read_text()
    assert headings(text) == SECTIONS.split("|")
    ids, loaded = re.findall(r'\bid="([^"]*)"', text), re.findall(r'\b(?:src|href|data|action)="([^"]*)"', text)
    assert len(ids) == len(set(ids))
    assert "<script" not in text and HOSTILE not in text and "&lt;script&gt;" in text
    assert all(address.startswith(("#", "data:")) for address in loaded), "a page elsewhere leads to no file"
    assert {address[1:] for address in loaded if address.startswith("#")} <= set(ids)
    assert "default-src 'none'" in text
    assert not re.search(r"url\((?!#)|@import|http-equiv=.refresh", text)
    for name in ("learning", "diagnostics", "replay-buckets", "replay-flow", "replay-entropy-by-bucket"):
        assert f'id="figure-{name}"' in text
    changed = {name: (here, there) for name, here, there in differing_settings(read_config(run))}
    assert changed["rollout.questions_per_step"] == ("8", "32")
    assert not {"run.method", "optim.horizon", "rollout.logprobs"} & changed.keys()


def test_a_mistake_of_ours_is_no_damage_to_a_file() -> None:
    def blocks(error: Exception) -> Iterator[Paragraph]:
        yield Paragraph("before")
        raise error

    with pytest.raises(TypeError, match="a bug"):
        gather({"Result": (blocks(TypeError("a bug")),)})
    damaged = blocks(InputError("run/summary.json is damaged"))
    shown = gather({"Result": (damaged, iter([Paragraph("after")])), "Replay": (iter(()),)})
    assert [block.text for block in shown.pop("Result")] == [
        "before",
        "Not shown: run/summary.json is damaged",
        "after",
    ]
    assert not shown, "a section without blocks is left out"


@pytest.mark.engines
def test_a_broken_or_young_run_gets_the_page_that_its_files_allow(run: Path, tmp_path: Path) -> None:
    damages = {
        "config.toml": "[run\n",
        "metrics.jsonl": "{}\n{}\n",
        "summary.json": '{"steps": 30, "heldout": {"after": {"pass_at_1": "x"}}}',
        "environment.json": "[]",
        "replay/ledger.json": "{",
        "data/train.parquet": "PAR1",
        "samples/step-000030.jsonl": '{"prompt": 1}\n',
    }
    for name, damaged in damages.items():
        broken = tmp_path / name.replace("/", "-")
        shutil.copytree(run, broken)
        (broken / name).write_text(damaged)
        with pytest.warns(ToolkitWarning) as told:
            text = write_report(broken).read_text()
        assert any(Path(name).name in str(warning.message) for warning in told), name
        assert {"Result", "How to repeat it"} <= set(headings(text)) and "Not shown:" in text, name
    young = tmp_path / "young"
    young.mkdir()
    write_config(young, SyntheticRun())
    with pytest.warns(ToolkitWarning) as told:
        write_report(young)
    assert any("has no metrics.jsonl" in str(warning.message) for warning in told)
    assert "Not shown: " in (young / "report.html").read_text()


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two arms of two seeds, one run with a changed file, and a run whose settings cannot be read."""
    study = tmp_path_factory.mktemp("reports") / "study"
    for arm, replay in (("ent-min", True), ("on-policy", False)):
        for seed in (0, 1):
            folder = study / arm / f"seed-{seed}"
            folder.parent.mkdir(parents=True, exist_ok=True)
            write_run(folder, SyntheticRun(steps=6, num_questions=60, questions_per_step=8, mixed_from=2, seed=seed))
            write_result(folder / "result.json", result_of([50 + 10 * replay + seed], samples=100))
            if not replay:
                write_config(folder, SyntheticRun(steps=6), method="grpo", replay=False)
                shutil.rmtree(folder / "replay")
            with (folder / "config.toml").open("a") as file:
                file.write(f"\n[tiny]\nseed = {seed}\n")
    changed = study / "on-policy" / "seed-1"
    (changed / "environment.json").write_text('{"node": "a"}')
    note_checksums(changed)
    (changed / "environment.json").write_text('{"node": "b"}')
    (study / "on-policy" / "seed-2").mkdir()
    (study / "on-policy" / "seed-2" / "config.toml").write_text("[run\n")
    return study


def test_a_study_is_compared_on_its_page(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exgrpo(["report", str(study), "--json"]) == 0
    said = capsys.readouterr()
    text = Path(json.loads(said.out)["report"]).read_text()
    assert "seed-1/environment.json is damaged" in said.err and "Runs not shown: on-policy/seed-2 cannot" in said.err
    assert headings(text) == ["Result", "Runs", "Arms"]
    assert "4 of 5 runs finished" in text and "on-policy/seed-2 cannot be read" in text
    assert re.search(r"<td[^>]*>tiny.seed</td>\s*<td[^>]*>by seed</td>", text)
    assert "+0.100" in text
    for name in ("ablation", "differences", "curves", "curves-tokens"):
        assert f'id="figure-{name}"' in text
    (study / "results").mkdir()
    assert exgrpo(["report", str(study)]) == 0
    assert f"{study}/study.json is missing: arms are called after their folders" in capsys.readouterr().err


def test_what_is_neither_a_run_nor_a_study_is_one_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exgrpo(["report", str(tmp_path)]) == 2
    assert "is neither a run (no config.toml) nor a study" in capsys.readouterr().err
    assert exgrpo(["report", str(tmp_path / "nowhere")]) == 2
    assert "is neither a run" in capsys.readouterr().err
    assert exgrpo(["report", str(run), "--output", "/dev/null/page.html"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "cannot be written" in err
