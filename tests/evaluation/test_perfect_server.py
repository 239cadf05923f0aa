"""A server that knows every answer scores 100 % and one that knows none 0 %, whatever the layout, as typed.

The server is real HTTP on this machine. It knows the questions by their text and the answers as a person would read
them off the row: of multiple choice the text of the right option, never its letter. Each question of the made files
holds a mark of its own (`q3;`), so the server needs nothing of what was asked but the text that it was sent.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from benchmark_layouts import LAYOUTS, Known, verl
from openai_server import Reply, Server, completion
from question_sources import write

from exgrpo_cli.commands import run
from exgrpo_cli.evaluation.sampling import open_pool


def answer_to(asked: str, answer: str) -> str:
    """The letter in front of the option with this text, in the form the question asks for; else the answer in a box."""
    letters = re.findall(
        rf"(?:^|\s)\(?([A-Za-z1-9])[.):]\s*{re.escape(answer)};?\s*(?:$|\n|(?=\(?[A-Z1-9][.):]))", asked, re.M
    )
    if not letters:
        return f"It has to be \\boxed{{{answer}}}."
    assert len(letters) == 1, f"{answer!r} is not the text of one option in {asked!r}"
    thought = f"Thinking about {answer}.\nANSWER: {letters[0]}"
    return thought if "ANSWER:" in asked else f"It is \\boxed{{{letters[0]}}}."


Ask = Callable[..., dict[str, Any]]


@pytest.fixture
def ask(workdir, monkeypatch, capsys, pools) -> Iterator[Ask]:
    """`exgrpo evaluate ARGUMENTS --json` of a server that answers each question with what `Known` says."""
    servers: list[Server] = []
    monkeypatch.setattr("exgrpo_cli.evaluation.sampling.open_pool", pools)

    def evaluate(arguments: Sequence[str], known: Sequence[Known], *, right: bool = True) -> dict[str, Any]:
        def answer(path: str, body: dict[str, Any], before: int) -> Reply:
            text = body["messages"][-1]["content"]
            item = known[int(re.search(r"q(\d+);", text).group(1))]  # type: ignore[union-attr]
            return completion(answer_to(text, item.right if right else item.wrong))

        servers.append(Server(answer))
        assert run(["evaluate", *arguments, "--model", "recorded", "--endpoint", servers[-1].url, "--json"]) == 0
        out, err = capsys.readouterr()
        asked = [body["messages"][-1]["content"] for body in servers[-1].bodies]
        return {"results": json.loads(out), "asked": asked, "told": err}

    yield evaluate
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def pools() -> Iterator[Callable[[str], Any]]:
    """One pool of each grader for the whole file: starting one takes longer than all that is graded here."""
    opened: dict[str, Any] = {}

    def shared(grader: str) -> Any:
        if grader not in opened:
            opened[grader] = open_pool(grader)
        return nullcontext(opened[grader])

    yield shared
    for pool in opened.values():
        pool.close()


@pytest.fixture
def drawn(monkeypatch) -> list[tuple[Path, str]]:
    """Figures that would be drawn: drawing them takes longer than everything else here."""
    places: list[tuple[Path, str]] = []
    monkeypatch.setattr("exgrpo_cli.show.figures.written.save", lambda figure, *place, **options: places.append(place))
    return places


@pytest.mark.parametrize("right", [True, False], ids=["perfect", "wrong"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_perfect_server_scores_one_and_a_wrong_one_zero(tmp_path, ask, drawn, name, right):
    layout = LAYOUTS[name]
    names = [layout.benchmark] if layout.benchmark else []
    data = write(tmp_path / layout.file, *layout.rows)
    answered = ask([*names, "--data", str(data), "--samples", "2"], layout.known, right=right)
    result = answered["results"]["benchmark"]
    assert result["questions"] == len(layout.known)
    verdicts = {verdict: count for verdict, count in result["verdicts"].items() if count}
    assert verdicts == {"correct" if right else "wrong": 2 * len(layout.known)}
    assert (result["avg_at_k"], result["pass_at_k"]["2"]["value"]) == (float(right), float(right))
    # Mathematics is graded by Oat's grader as well, unasked, and here the two agree.
    seconds = {name: second["avg_at_k"] for name, second in result.get("second_graders", {}).items()}
    assert seconds == ({"oat": float(right)} if result["protocol"]["grader"]["name"] == "math" else {})
    for text, found in zip(sorted(set(answered["asked"])), layout.known, strict=True):
        # Of multiple choice the server answered with a letter that it found: the options reached it.
        assert result["protocol"]["grader"]["name"] != "choice" or found.right in text


def test_questions_that_are_not_shuffled_are_told(tmp_path, ask, drawn):
    layout = LAYOUTS["gpqa as the released code writes it"]
    write(tmp_path / "set.parquet", *layout.rows, verl("gpqa")("q3; which letter is the third?", "C"))
    answered = ask(["gpqa-diamond", "--data", "set.parquet"], [*layout.known, Known(right="C", wrong="D")])
    assert answered["results"]["benchmark"]["avg_at_k"] == 1.0
    assert "gpqa-diamond: 1 of 4 questions have no options that can be told from their text" in answered["told"]
