"""Documents: examples are run as they are printed, and the page on architecture says what is checked."""

import re
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pytest
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
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder that holds the run the documents speak of."""
    monkeypatch.chdir(tmp_path)
    play(tmp_path / "runs/exgrpo-tiny/replay", Replace(), num_steps=12).close()
    return tmp_path / "runs/exgrpo-tiny"


def test_reading_the_ledger(run: Path) -> None:
    seen: dict[str, object] = {}
    code = "\n".join(blocks("ledger.md", "python")).replace("STEP = 40", "STEP = 9")
    exec(code, seen)
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
    assert len(named) > 30
    assert sorted(name for name in named if not (DOCS.parent / name).exists()) == []


def test_the_table_of_layers_is_the_one_that_is_checked():
    from test_layers import LAYERS

    rows = re.findall(r"^\| (\d+) \| (.*) \|$", (DOCS / "architecture.md").read_text(), flags=re.MULTILINE)
    told = {name: int(layer) for layer, text in rows for name in re.findall(r"`([a-z_.]+)/?`", text)}
    assert told == LAYERS
