"""Hub data sets against a hub on this machine: real requests, a real cache, every refusal as one line."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from local_hub import TOKEN, LocalHub, Repository, local_hub, talk_to
from question_sources import text_of

from exgrpo_cli.base.errors import ExgrpoError, InputError, RunError
from exgrpo_cli.config.requests import PrepareRequest
from exgrpo_cli.questions.prepare import PrepareReport, read_source

CARD = Path(__file__).with_name("card.md").read_text()

PARTS = ["main/train-00000-of-00002.jsonl", "main/train-00001-of-00002.jsonl"]


def rows(*answers: str) -> bytes:
    return text_of(".jsonl", *({"question": f"{each} - 0 = ?", "answer": each} for each in answers)).encode()


FILES = {
    "README.md": CARD.encode(),
    **dict(zip(PARTS, (rows("1", "2"), rows("3")), strict=True)),
    "main/test-00000-of-00001.jsonl": rows("4", "5"),
    "socratic.jsonl": rows("6"),
    "load.py": b"raise SystemExit('run from the hub')",
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    """A hub that has some/questions, which this process's client asks without a token."""
    with local_hub() as hub:
        hub.repositories["dataset", "some/questions"] = Repository(files=FILES)
        talk_to(hub.endpoint, tmp_path, monkeypatch)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 2)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield hub


def read(source: str, steps: list[tuple[int, int, str]] | None = None) -> PrepareReport:
    return read_source(source, PrepareRequest(), lambda *step: steps.append(step) if steps is not None else None)


def answers(source: str) -> list[str]:
    return [question.answer for question in read(source).questions]


def test_a_data_set_is_read_cached_and_read_again_offline(hub, monkeypatch):
    steps: list[tuple[int, int, str]] = []
    reading = read("some/questions:main", steps)
    commit = hub.repositories["dataset", "some/questions"].sha
    assert [question.answer for question in reading.questions] == ["1", "2", "3"]
    assert reading.source.to_json() == {"source": "some/questions", "revision": commit, "split": "main/train"}
    # Three rows of the two parts; the progress ends with all of their bytes.
    size = sum(len(FILES[part]) for part in PARTS)
    fetched = [step[:2] for step in steps if step[2] == "fetching files"]
    assert fetched[-1] == (size, size) and len(fetched) >= 3
    # Only the card and the chosen files were fetched, and nothing of the repository was run.
    assert sorted(hub.downloaded) == ["README.md", *PARTS]
    hub.downloaded.clear()
    assert answers(f"some/questions@{commit}:main:test") == ["4", "5"]
    assert answers("some/questions:main:train") == ["1", "2", "3"]
    assert hub.downloaded == ["main/test-00000-of-00001.jsonl"]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert answers("some/questions:main") == ["1", "2", "3"]
    with pytest.raises(InputError, match="some/questions@old is not in the cache"):
        read("some/questions@old:main")


def test_offline_a_part_of_a_data_set_is_not_taken_for_the_whole(hub, tmp_path, monkeypatch):
    # The names do not tell how many files there are.
    hub.repositories["dataset", "some/questions"] = Repository(files={"a.jsonl": rows("1"), "b.jsonl": rows("2")})
    hub.refusals["b.jsonl"] = (403, "Forbidden")
    with pytest.raises(ExgrpoError, match="403"):
        read("some/questions")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    missing = r"b.jsonl of some/questions@main is not in the cache .* and HF_HUB_OFFLINE is set"
    with pytest.raises(InputError, match=missing):
        read("some/questions")
    # What another program fetched is all there.
    for listing in tmp_path.glob("*/.listings/*"):
        listing.unlink()
    assert answers("some/questions") == ["1"]


def test_a_private_data_set_needs_a_token(hub, monkeypatch):
    hub.repositories["dataset", "some/questions"].private = True
    with pytest.raises(InputError, match="no data set 'some/questions', or it is private: check the id, and HF_TOKEN"):
        read("some/questions:main")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert answers("some/questions:socratic") == ["6"]


@pytest.mark.parametrize(
    ("source", "refusal", "message"),
    [
        ("some/questions", None, "the configurations main, socratic: say which, for example some/questions:main"),
        ("some/questions:main:tset", None, "has no split 'tset'. Did you mean 'test'?"),
        ("some/questions@nowhere:main", None, "some/questions has no revision 'nowhere'"),
        ("other/questions", None, "no data set 'other/questions'"),
        ("some/questions:main", (PARTS[1], 404, "EntryNotFound"), "refused some/questions@main with status 404"),
        ("some/questions:main", ("/api", 403, "GatedRepo"), "is gated: accept its terms"),
        ("some/questions:main", ("/api", 401, "Unauthorized"), "HF_TOKEN"),
        ("some/questions:main", ("/api", 200, ""), "does not answer as a hub does"),
    ],
)
def test_a_refusal_says_what_to_do(hub, source, refusal, message):
    if refusal is not None:
        hub.refusals[refusal[0]] = refusal[1:]
    with pytest.raises(InputError) as raised:
        read(source)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_a_broken_download_leaves_nothing_half_and_the_next_one_fetches_what_is_not_whole(hub, tmp_path):
    hub.cut_after = 10
    with pytest.raises(RunError, match=r"broke off .* run the command again"):
        read("some/questions:main")
    snapshots = tmp_path / "datasets--some--questions" / "snapshots"
    assert [path.name for path in snapshots.rglob("*") if path.is_file()] == ["README.md"]
    hub.cut_after = None
    hub.downloaded.clear()
    assert answers("some/questions:main") == ["1", "2", "3"]
    # The card was whole.
    assert hub.downloaded == PARTS


def test_a_hub_that_does_not_answer(tmp_path, monkeypatch):
    talk_to("http://127.0.0.1:9", tmp_path, monkeypatch)
    with pytest.raises(RunError, match="HF_HUB_OFFLINE=1 uses the cache"):
        read("some/questions:main")


def test_a_data_set_with_a_loading_script_alone_is_not_run(hub):
    hub.repositories["dataset", "some/questions"] = Repository(files={"load.py": b"raise SystemExit"})
    with pytest.raises(InputError, match=r"loading script load.py is not run; try some/questions@refs/convert/parquet"):
        read("some/questions")
    assert hub.downloaded == []
