"""Documents: examples are run as they are printed, and the page on architecture names files that are there."""

import re
import sys
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pytest
from readability import measures
from small_ledger import IDENTITY, K
from store_calls import candidates_of, chosen_of, draw, record, replay, row_of, visit_of

from exgrpo_cli.ledger.reader import LedgerReader
from exgrpo_cli.ledger.schemas import SCHEMAS, Event
from exgrpo_cli.replay.replace import Replace
from exgrpo_cli.replay.store import Store

DOCS = Path(__file__).parents[1] / "docs"
QUESTIONS = [f"q{number}" for number in range(9)]


def blocks(document: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / document).read_text(), flags=re.DOTALL)


def play(folder: Path, rules: Replace, num_steps: int) -> Store:
    """Steps of three visits, with k going round, and two replays."""
    rng = np.random.default_rng(0)
    buffer = Store(folder, identity=IDENTITY, rules=rules, question_ids=QUESTIONS)
    for step in range(1, num_steps + 1):
        for question_id in draw(buffer, 2, step, rng):
            candidates = candidates_of(buffer, question_id)
            [chosen] = chosen_of(buffer, candidates, rng)
            replay(buffer, step, candidates, chosen)
        for position in range(3):
            rows = [
                row_of(*range(step, step + 2 + member), entropy=0.1 * member + 0.01 * step)
                for member in range((step + position) % K)
            ]
            record(buffer, visit_of(QUESTIONS[(3 * step + position) % len(QUESTIONS)], step, rows))
        buffer.flush(step)
        if step == 9:
            buffer.seal()
    return buffer


@pytest.fixture
def run(workdir: Path) -> Path:
    """A working folder that holds the run the documents speak of."""
    play(workdir / "runs/exgrpo-tiny/replay", Replace(), num_steps=12).close()
    return workdir / "runs/exgrpo-tiny"


def test_reading_the_ledger(run: Path) -> None:
    seen: dict[str, object] = {}
    exec("\n".join(blocks("ledger.md", "python")).replace("STEP = 40", "STEP = 9"), seen)
    reader = LedgerReader(run / "replay")
    assert seen["trajectories"].equals(reader.trajectories().to_pandas())
    assert seen["bodies"].column("trajectory_id").to_pylist() == list(range(len(reader.trajectories())))
    assert seen["bodies"].column("token_ids")[0].as_py() == seen["token_ids"].tolist()
    assert seen["scores"].num_rows == 2 * 11 == len(reader.events().filter(pc.field("event") == "selected"))
    assert seen["most_replayed"]["times"].tolist() == sorted(seen["most_replayed"]["times"], reverse=True)
    # The query about an earlier step against a resume at that step.
    with Store(run / "replay", identity=reader.identity, rules=Replace(), question_ids=QUESTIONS, at_step=9) as buffer:
        assert dict(seen["buckets"].itertuples(index=False)) == buffer.counts.buckets


def test_the_document_lists_every_column_and_event() -> None:
    text = (DOCS / "ledger.md").read_text()
    for table, schema in SCHEMAS.items():
        section = text.split(f"**{table}**")[1].split("\n**")[0]
        for name in schema.names:
            assert f"`{name}`" in section, (table, name)
    for event in Event:
        assert f"| `{event.value}` |" in text


@pytest.fixture
def my_replay(run: Path) -> Path:
    """The worked example, saved where the document says."""
    [code] = blocks("custom-replay.md", "python")
    path = run.parents[1] / "my_replay.py"
    path.write_text(code)
    return path


@pytest.mark.parametrize("sampler", ["hard_ones", "largest_bucket"])
def test_the_worked_example_draws_and_chooses(my_replay: Path, tmp_path: Path, sampler: str) -> None:
    rules = Replace(metric="python:my_replay:sure_and_short", sampler=f"python:my_replay:{sampler}")
    play(tmp_path / "mine", rules, num_steps=12).close()
    reader = LedgerReader(tmp_path / "mine")
    rows = reader.draws().to_pylist()
    for step in {row["step"] for row in rows}:
        offered = [row for row in rows if row["step"] == step]
        if sampler == "hard_ones":
            weights = [1 - row["bucket"] / K if row["bucket"] else 0.0 for row in offered]
            total = sum(weights)
            expected = [weight / total if total else 0.0 for weight in weights]
        else:
            sizes = [row["num_questions"] for row in offered]
            expected = [float(position == sizes.index(max(sizes))) for position in range(len(sizes))]
        assert [row["probability"] for row in offered] == pytest.approx(expected)
    scores = reader.scores().to_pandas()
    assert scores["chosen"].sum() > 10
    for _, group in scores.groupby(["step", "question_id"]):
        mine = group["entropy"] + 0.1 * group["num_tokens"] / 1000
        assert mine[group["chosen"]].item() == mine.min()


def test_the_page_on_architecture_names_files_that_are_there():
    text = (DOCS / "architecture.md").read_text()
    named = set(re.findall(r"`((?:exgrpo_cli|commands|presets|tests|docs|benchmarks|\.ci)/[\w/.-]*)`", text))
    assert len(named) > 30 and sorted(name for name in named if not (DOCS.parent / name).exists()) == []


HOW_TO = (
    "custom-replay.md", "cluster.md", "publishing.md", *(f"guide/{page.name}" for page in DOCS.glob("guide/*.md")),
)  # fmt: skip
READ_FIRST = {f"docs/{page}": {"long_sentence": 25, "early_decimals": 3} for page in ("tutorial.md", *HOW_TO)}
READ_FIRST["README.md"] = {"lines": 120, "early_numbers": 3, "early_decimals": 3, "long_sentence": 25}
"""Most that a page may have which is read in order, from its first line: see `Measures`."""


@pytest.mark.parametrize("page", READ_FIRST)
def test_what_is_read_first_reads_easily(page: str):
    found = measures((DOCS.parent / page).read_text())
    assert {name: getattr(found, name) for name, most in READ_FIRST[page].items() if getattr(found, name) > most} == {}


def test_how_a_page_reads_is_measured():
    """Worked by hand: of eleven sentences the second longest has three words, one of them code."""
    early = "# A head of many words that is none\n\nAbout 3.5 and [4](x.md) of Python 3.11.\n\n"
    other = "| a | 1.5 |\n|---|---|\n\n```sh\nexgrpo train --steps 7.5\n```\n\n"
    found = measures(f"{early}{other}{'One two. ' * 8}\n\n- Three `more words`.\n- One.\n")
    assert (found.lines, found.early_numbers, found.early_decimals, found.long_sentence) == (15, 2, 1, 2)


def settings_page():
    """The script that writes the page of settings, as a module."""
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("settings_page", DOCS / "settings.py")
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_of_settings_is_the_code_s():
    script = settings_page()
    text = script.page()
    assert text == (DOCS / "settings.md").read_text(), "write it anew: python docs/settings.py"
    assert [row.name for kinds in script.SECTIONS.values() for row in script.rows(kinds).values() if not row.text] == []
    from exgrpo_cli.config.layers import build_config
    from exgrpo_cli.config.settings import flat

    for name in flat(build_config()):
        section, key = name.split(".")
        assert f"- `{key} = " in text.split(f"## `[{section}]`")[1].split("\n## ")[0], name


def test_the_glossary_is_short_and_names_keys_that_exist():
    from exgrpo_cli.config.layers import build_config

    entries = (DOCS / "glossary.md").read_text().split("\n### ")[1:]
    assert 20 <= len(entries) <= 25
    files = [path for name in ("exgrpo_cli", "commands") for path in (DOCS.parent / name).rglob("*.py")]
    code = "\n".join(path.read_text() for path in files)
    journal, config = (DOCS / "run-folder.md").read_text(), build_config()
    for entry in entries:
        [line] = re.findall(r"^(?:Keys|Settings): .*$", entry, flags=re.MULTILINE)
        keys, _, settings = line.partition("ettings: ") if line.startswith("Keys") else ("", "", line)
        for key in re.findall("`(.*?)`", keys):
            assert f"`{key}`" in journal or f'"{key}"' in code or f"{key}:" in code, key
        for name in re.findall("`(.*?)`", settings):
            section, key = name.split(".")
            assert hasattr(getattr(config, section), key), name


def test_scores_are_fractions():
    """An interval behind a number in per cent is a score on another scale."""
    pages = [*DOCS.rglob("*.md"), DOCS.parent / "README.md"]
    assert [page.name for page in pages if re.search(r"\d ?% [\[(]\d", page.read_text())] == []


@pytest.mark.parametrize("page", sorted(DOCS.glob("**/*.md")), ids=lambda page: page.name)
def test_a_page_links_to_the_glossary(page: Path):
    lists = ("glossary.md", "security.md", "python.md", "lab-notebook.md")
    assert page.name in lists or "results" in page.parts or "glossary.md" in page.read_text()
