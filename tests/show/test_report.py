"""`report.html`: self-contained, complete, honest about what is missing, and safe with hostile text."""

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from made_results import result_of
from synthetic_run import SyntheticRun, write_config, write_run

from exgrpo_cli.base.errors import InputError, ToolkitWarning
from exgrpo_cli.commands import run as exgrpo
from exgrpo_cli.runs.folder import note_checksums
from exgrpo_cli.runs.result import write_result
from exgrpo_cli.show import headline, page, record, report
from exgrpo_cli.studies.study import Arm, Study

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


def test_a_page_has_every_section_and_figure_and_loads_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = report.write_report(run, tmp_path / "page.html").read_text()
    assert headings(text) == SECTIONS.split("|")
    ids, loaded = re.findall(r'\bid="([^"]*)"', text), re.findall(r'\b(?:src|href|data|action)="([^"]*)"', text)
    assert len(ids) == len(set(ids))
    assert "<script" not in text and HOSTILE not in text and "&lt;script&gt;" in text
    assert all(address.startswith(("#", "data:")) for address in loaded), "a page elsewhere leads to no file"
    assert {address[1:] for address in loaded if address.startswith("#")} <= set(ids)
    assert "default-src 'none'" in text
    assert not re.search(r"url\((?!#)|@import|http-equiv=.refresh", text)
    assert "step 30\nfresh questions: " in text and text.count('<rect class="value"') > 300, "values under the pointer"
    assert not re.search(r"https?://(?!www\.w3\.org/)", text.replace("http://example.org", ""))
    said = re.search(r'class="headline">([^<]*)<', text)
    assert said and said[1].startswith("exgrpo with backbone tiny on arithmetic questions: held-out pass@1 ")
    assert "prefers-color-scheme: dark" in text and "stroke: var(--blue)" in text and '#0072b2;"' not in text
    for name in ("learning", "diagnostics", "replay-buckets", "replay-flow", "replay-entropy-by-bucket"):
        assert f'id="figure-{name}"' in text
    assert "exgrpo train --config run/config.toml --output runs/run-again" in text, "other places are private"
    with monkeypatch.context() as patch:
        patch.chdir(run.parents[1])
        [block] = (block for block in report._repeat(run) if isinstance(block, page.Paragraph) and block.kind == "code")
        assert Path(shlex.split(block.text)[3]).is_file(), "a path from where the reader stands"
    changed = {name: (here, there) for name, here, there in report.differing_settings(record.read_config(run))}
    assert changed["rollout.questions_per_step"] == ("8", "32")
    assert not {"run.method", "optim.horizon", "rollout.logprobs"} & changed.keys()


def test_warnings_see_what_happens_between_two_validations_and_files_are_linked(run: Path, tmp_path: Path) -> None:
    sick = tmp_path / "sick"
    shutil.copytree(run, sick)
    lines = [json.loads(line) for line in (sick / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line["batch/pass_at_1"], line["batch/questions"] = (0.2 if 12 <= line["step"] < 18 else 0.6), 64
    lines[11]["policy/ratio_fresh_max"] = 126.6
    (sick / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = report.write_report(sick).read_text()
    assert "Step 12: a burst of importance ratios: this step made a fresh token 127 times as likely" in text
    assert "Step 14: success on fresh questions is less than half of what it was" in text
    assert re.search(r'class="alarm">Warnings \(\d\)<', text)
    for name in ("metrics.jsonl", "samples/", "summary.json"):
        assert f'<a href="./{name}">{name}</a>' in text


@pytest.mark.parametrize(
    ("mean", "low", "high", "seeds", "p_holm", "said"),
    [
        (0.05, 0.02, 0.08, 8, 0.01, r"mine is ahead of grpo by 0.050 .*\[\+0.020, \+0.080\], 8 seeds.*leaves out 0"),
        (-0.05, -0.08, -0.02, 8, 0.01, r"grpo is ahead of mine by 0.050 .*\[\+0.020, \+0.080\].*leaves out 0"),
        (0.05, 0.02, 0.08, 8, 0.2, "The difference may be chance"),
        (0.05, -0.02, 0.12, 8, 0.2, "The difference may be chance"),
        (0.05, 0.02, 0.08, 2, None, "No verdict: that takes a claim made beforehand, and 8 seeds"),
    ],
)
def test_a_study_begins_with_its_answer(
    mean: float, low: float, high: float, seeds: int, p_holm: float | None, said: str
) -> None:
    effect = {"mean": mean, "low": low, "high": high, "seeds": seeds}
    arms = {
        "grpo": {"difference": None, "baseline": "grpo", "p_holm": None},
        "mine": {"difference": effect, "baseline": "grpo", "p_holm": p_holm},
    }
    assert re.search(said, headline.study_headline({"arms": arms}, seeds_needed=8))
    claims = {name: {"title": f"Replay {name}", "verdict": "supported"} for name in ("helps", "lasts", "pays")}
    assert headline.study_headline({"claims": claims}, seeds_needed=8) == "Of 3 claims: 3 supported."
    claims.popitem(), claims.popitem()
    assert headline.study_headline({"claims": claims}, seeds_needed=8) == "Replay helps: supported."


LOOK = """
const frame = document.querySelector("iframe");
frame.onload = () => setTimeout(() => {
  const page = frame.contentDocument, root = page.documentElement, found = [];
  if (root.scrollWidth > root.clientWidth) found.push("the page scrolls sideways");
  for (const svg of page.querySelectorAll("svg")) {
    const boxes = [...svg.querySelectorAll("text")].filter(text => !text.querySelector("tspan"))
      .map(text => [text.textContent.trim(), text.getBoundingClientRect()]);
    for (const [words, a] of boxes) for (const [others, b] of boxes)
      if (a !== b && Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
          && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 2) found.push(words + " over " + others);
  }
  document.body.innerHTML = "<pre></pre>";
  document.body.firstChild.textContent = "seen:" + (found.join("; ") || "nothing wrong") + ":seen";
}, 500);
"""
"""A page beside its own: the page is looked at in a frame as wide as a screen."""


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 768, 1280, 1920])
def test_a_browser_shows_the_page_without_overlaps_or_scrolling_sideways(
    run: Path, study: Path, tmp_path: Path, width: int
) -> None:
    chromium = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
    assert chromium, "this test needs Chromium: apt-get install chromium"
    with pytest.warns(ToolkitWarning):
        pages = [report.write_report(run, tmp_path / "run.html"), report.write_report(study, tmp_path / "study.html")]
    for shown in pages:
        frame = f'<iframe src="{shown.name}" style="width: {width}px; height: 900px"></iframe>'
        (tmp_path / "look.html").write_text(f"<!doctype html><body>{frame}<script>{LOOK}</script>")
        options = ["--headless", "--no-sandbox", "--allow-file-access-from-files", "--enable-logging=stderr", "--v=0"]
        options += [f"--user-data-dir={tmp_path / 'browser'}", "--virtual-time-budget=5000", "--dump-dom"]
        command = [chromium, *options, f"file://{tmp_path / 'look.html'}"]
        seen = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        assert "seen:nothing wrong:seen" in seen.stdout, (shown.name, re.findall("seen:.*:seen", seen.stdout)[-1:])
        assert "CONSOLE" not in seen.stderr


def test_a_mistake_of_ours_is_no_damage_to_a_file() -> None:
    def blocks(error: Exception) -> Iterator[page.Paragraph]:
        yield page.Paragraph("before")
        raise error

    with pytest.raises(TypeError, match="a bug"):
        page.gather({"Result": (blocks(TypeError("a bug")),)})
    damaged = blocks(InputError("run/summary.json is damaged"))
    shown = page.gather({"Result": (damaged, iter([page.Paragraph("after")])), "Replay": (iter(()),)})
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
            text = report.write_report(broken).read_text()
        assert any(Path(name).name in str(warning.message) for warning in told), name
        assert {"Result", "How to repeat it"} <= set(headings(text)) and "Not shown:" in text, name
    young = tmp_path / "young"
    young.mkdir()
    write_config(young, SyntheticRun())
    with pytest.warns(ToolkitWarning) as told:
        report.write_report(young)
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
                write_config(folder, SyntheticRun(steps=6, seed=seed), method="grpo", replay=False)
                shutil.rmtree(folder / "replay")
            with (folder / "config.toml").open("a") as file:
                file.write(f"\n[tiny]\nseed = {seed}\n")
    changed = study / "on-policy" / "seed-1"
    (changed / "environment.json").write_text('{"node": "a"}')
    note_checksums(changed)
    (changed / "environment.json").write_text('{"node": "b"}')
    (study / "on-policy" / "seed-2").mkdir()
    (study / "on-policy" / "seed-2" / "config.toml").write_text("[run\n")
    # Copies of seed 0, which are no third seed and no third arm.
    shutil.copytree(study / "ent-min" / "seed-0", study / "ent-min" / "seed-3")
    return study


def test_a_study_is_compared_on_its_page(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exgrpo(["report", str(study), "--json"]) == 0
    said = capsys.readouterr()
    text = Path(json.loads(said.out)["report"]).read_text()
    assert "seed-1/environment.json is damaged" in said.err and "Runs not shown: on-policy/seed-2: " in said.err
    assert headings(text) == ["Result", "Runs", "Arms"]
    assert "4 of 6 runs finished" in text and "on-policy/seed-2: " in text
    assert re.search(r"ent-min/seed-3: \S+ holds a run with seed 0: it is left out", text)
    assert re.search(r"<td[^>]*>tiny.seed</td>\s*<td[^>]*>by seed</td>", text) and "+0.100" in text
    for name in ("ablation", "differences", "curves", "curves-tokens"):
        assert f'id="figure-{name}"' in text
    (study / "results").mkdir()
    assert exgrpo(["report", str(study)]) == 0
    assert f"{study}/study.json is missing: arms are called after their folders" in capsys.readouterr().err
    # A plan that does not know of one of the folders.
    arms = (Arm(name="on-policy", baseline="on-policy", method="grpo"),)
    Study(name="s", folder=study, arms=arms, runs=(), equal="steps").write_beginning()
    assert exgrpo(["report", str(study)]) == 0
    assert "Runs not shown: ent-min/seed-0: ent-min is no arm of study.json: it is left out" in capsys.readouterr().err
    (study / "study.json").unlink()


def test_a_page_that_cannot_be_written_is_one_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exgrpo(["report", str(run), "--output", "/dev/null/page.html"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "cannot be written" in err
