"""A server that knows every answer scores 100 %, one that knows none 0 %, on every layout, through the command line.

The server is real HTTP on this machine. It knows the questions by their text and the answers as a person would read
them off the row: of multiple choice the text of the right option, never its letter. Each question of the made files
holds a mark of its own (`q3;`), so the server needs nothing of what was asked but the text that it was sent.
"""

import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from benchmark_layouts import LAYOUTS, OPTIONS_KNOWN, Known, math, verl, write

from exgrpo_cli.commands import run
from exgrpo_cli.evaluation.scoring import open_pool


class Server:
    """Answers each question with what `Known` says, right or wrong, and remembers what it was sent."""

    def __init__(self, known: Sequence[Known], *, right: bool) -> None:
        self.asked: list[str] = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.reply({"data": [{"id": "oracle"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                text = body["messages"][-1]["content"]
                outer.asked.append(text)
                item = known[int(re.search(r"q(\d+);", text).group(1))]  # type: ignore[union-attr]
                content = answer_to(text, item.right if right else item.wrong)
                choice = {"message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
                self.reply({"choices": [choice], "usage": {"completion_tokens": 5}})

            def reply(self, value: Any) -> None:
                data = json.dumps(value).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: object) -> None: ...

        outer = self
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def answer_to(asked: str, answer: str) -> str:
    """The letter in front of the option with this text, in the form the question asks for; else the answer in a box."""
    letters = re.findall(
        rf"(?:^|\s)\(?([A-Za-z1-9])[.):]\s*{re.escape(answer)};?\s*(?:$|\n|(?=\(?[A-Z1-9][.):]))", asked, re.M
    )
    if not letters:
        return f"It has to be \\boxed{{{answer}}}."
    assert len(letters) == 1, f"{answer!r} is not the text of one option in {asked!r}"
    return (
        f"Thinking about {answer}.\nANSWER: {letters[0]}" if "ANSWER:" in asked else f"It is \\boxed{{{letters[0]}}}."
    )


@pytest.fixture
def oracle() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(known: Sequence[Known], *, right: bool) -> Server:
        servers.append(Server(known, right=right))
        return servers[-1]

    yield start
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


@pytest.mark.parametrize("right", [True, False], ids=["perfect", "wrong"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_perfect_server_scores_one_and_a_wrong_one_zero(tmp_path, monkeypatch, capsys, pools, oracle, name, right):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("exgrpo_cli.evaluation.service.open_pool", pools)
    monkeypatch.setattr("exgrpo_cli.plots.style.save", lambda *values, **options: [])
    layout = LAYOUTS[name]
    server = oracle(layout.known, right=right)
    names = [layout.benchmark] if layout.benchmark else []
    line = ["evaluate", *names, "--data", str(write(tmp_path, layout)), "--model", "oracle", "--samples", "2"]
    assert run([*line, "--endpoint", server.url, "--json", "--quiet"]) == 0
    result = json.loads(capsys.readouterr().out)["benchmark"]
    assert result["questions"] == len(layout.known)
    verdicts = {verdict: count for verdict, count in result["verdicts"].items() if count}
    assert verdicts == {"correct" if right else "wrong": 2 * len(layout.known)}
    assert (result["avg_at_k"], result["pass_at_k"]["2"]["value"]) == (float(right), float(right))
    # Mathematics is graded by Oat's grader as well, unasked, and here the two agree.
    seconds = {name: second["avg_at_k"] for name, second in result.get("second_graders", {}).items()}
    assert seconds == ({"oat": float(right)} if result["protocol"]["grader"]["name"] == "math" else {})
    for text, found in zip(sorted(set(server.asked)), layout.known, strict=True):
        # Of multiple choice the server answered with a letter that it found: the options reached it.
        assert layout.known is not OPTIONS_KNOWN or found.right in text


def test_questions_that_are_not_shuffled_are_told(tmp_path, monkeypatch, capsys, pools, oracle):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("exgrpo_cli.evaluation.service.open_pool", pools)
    monkeypatch.setattr("exgrpo_cli.plots.style.save", lambda *values, **options: [])
    layout = LAYOUTS["gpqa as the released code writes it"]
    plain = verl("gpqa")("q3; which letter is the third?", "C")
    pq.write_table(pa.Table.from_pylist([*layout.rows, plain]), tmp_path / "set.parquet")
    server = oracle([*layout.known, Known(right="C", wrong="D")], right=True)
    line = [
        "evaluate",
        "gpqa-diamond",
        "--data",
        "set.parquet",
        "--model",
        "oracle",
        "--endpoint",
        server.url,
        "--json",
    ]
    assert run(line) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["benchmark"]["avg_at_k"] == 1.0
    assert "gpqa-diamond: 1 of 4 questions have no options that can be told from their text" in err


@pytest.mark.engines
def test_nine_benchmarks_from_one_file_with_thirty_two_samples(tmp_path, monkeypatch, capsys, pools, oracle):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("exgrpo_cli.evaluation.service.open_pool", pools)
    drawn: list[tuple[Path, str]] = []
    monkeypatch.setattr("exgrpo_cli.plots.style.save", lambda figure, *place, **options: drawn.append(place))
    names = ["aime24", "aime25", "amc", "math", "minerva", "olympiadbench", "arc-c", "gpqa", "mmlu-pro"]
    sums = [verl(name)(f"q{n}; {name}?", str(n)) for n, name in enumerate(names[:6])]
    options = "\n".join(f"{letter}. option {letter}" for letter in "ABCD")
    choices = [verl(name)(f"q{n}; {name}?\n\n{options}", "B") for n, name in enumerate(names[6:], start=6)]
    known = [*(math(str(n), "99") for n in range(6)), *[Known(right="option B", wrong="option C")] * 3]
    pq.write_table(pa.Table.from_pylist([*sums, *choices]), tmp_path / "all.parquet")
    server = oracle(known, right=True)
    line = [
        "evaluate",
        "paper",
        "--data",
        "all.parquet",
        "--samples",
        "32",
        "--model",
        "oracle",
        "--endpoint",
        server.url,
    ]
    assert run([*line, "--json", "--quiet"]) == 0
    results = json.loads(capsys.readouterr().out)
    averages = results.pop("averages")
    assert {name: found["value"] for name, found in averages.items()} == {
        "in-distribution": 1.0,
        "out-of-distribution": 1.0,
    }
    assert len(results) == 9 and all(found["k"] == 32 for found in results.values())
    assert all(set(found["pass_at_k"]) == {"1", "2", "4", "8", "16", "32"} for found in results.values())
    assert drawn == [(Path("results/paper-oracle"), name) for name in ("accuracy", "pass-at-k")]
    assert len(server.asked) == 9 * 32
