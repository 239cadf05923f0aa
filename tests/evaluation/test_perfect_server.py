"""A server that knows every answer scores 100 %, one that knows none 0 %, on every layout, through the command line.

The server is real HTTP on this machine. It knows the questions by their text and the answers as a person would read
them off the row: of multiple choice the text of the right option, never its letter. Each question of the made files
holds a mark of its own (`q3;`), so the server needs nothing of what was asked but the text that it was sent.
"""

import csv
import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from exgrpo_cli.commands import run
from exgrpo_cli.evaluation.scoring import open_pool

SYSTEM = {"role": "system", "content": "Think first, then put the answer in \\boxed{}."}


@dataclass(frozen=True, kw_only=True)
class Known:
    """What is right and what is wrong at one question; option texts where it has options."""

    right: str
    wrong: str


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A small question set in one layout."""

    file: str
    rows: Sequence[Any]
    known: Sequence[Known]
    benchmark: str = ""
    """Asked for by this name; without one as a file of the user's own."""


def math(right: str, wrong: str) -> Known:
    return Known(right=right, wrong=wrong)


def rows_of(make: Callable[[str, str], Any], answers: Sequence[str]) -> list[Any]:
    return [make(f"q{n}; what is it?", answer) for n, answer in enumerate(answers)]


NUMBERS = ("4", "7", "1/2", "-3")
NUMBERS_KNOWN = (math("4", "5"), math("7.0", "8"), math("\\frac{1}{2}", "\\frac{1}{3}"), math("-3", "3"))
COUNTS_KNOWN = (math("4", "5"), math("1272", "1273"))
# The right option of each question by its place, and options that are long enough to be told apart.
OPTIONS = (("oak", "birch", "elm", "ash"), ("iron", "lead", "zinc", "gold"), ("red", "blue", "green", "white"))
PLACES = (0, 2, 3)
OPTIONS_KNOWN = tuple(
    Known(right=options[place], wrong=options[place - 1]) for options, place in zip(OPTIONS, PLACES, strict=True)
)


def choice_rows(make: Callable[[str, Sequence[str], int], Any]) -> list[Any]:
    pairs = enumerate(zip(OPTIONS, PLACES, strict=True))
    return [make(f"q{n}; which one?", options, place) for n, (options, place) in pairs]


def verl(source: str, system: bool = False) -> Callable[[str, str], dict[str, Any]]:
    def make(question: str, answer: str) -> dict[str, Any]:
        return {
            "data_source": source,
            "prompt": [*([SYSTEM] if system else []), {"role": "user", "content": question}],
            "ability": "math",
            "reward_model": {"ground_truth": answer, "style": "rule"},
            "extra_info": {"index": 0, "split": "default"},
        }

    return make


def asked_in_text(source: str, label: str, request: str, *, labels: str = "ABCD", joint: str = "\n") -> Any:
    """Options in the prompt itself, as the verl-layout files of multiple-choice benchmarks have them."""
    make = verl(source)

    def convert(question: str, options: Sequence[str], place: int) -> dict[str, Any]:
        lines = joint.join(label.format(name, text) for name, text in zip(labels, options, strict=True))
        return make(f"{question}\n\n{lines}{request}", labels[place])

    return convert


IN_A_LINE = (
    "\n\nThink it over. The last line of your response has to be of the form ANSWER: C, with one of the letters."
)


def arc(question: str, options: Sequence[str], place: int, *, labels: str) -> dict[str, Any]:
    choices = {"text": options, "label": list(labels)}
    return {"id": question, "question": question, "choices": choices, "answerKey": labels[place]}


def boxed_solution(question: str, answer: str) -> dict[str, Any]:
    solution = f"At first one would say \\boxed{{99}}. That is far too much. It is \\boxed{{{answer}}}."
    return {"problem": question, "level": "Level 5", "type": "Algebra", "solution": solution}


LAYOUTS = {
    "canonical": Layout(
        file="set.parquet",
        rows=rows_of(
            lambda q, a: {"id": q, "prompt": [{"role": "user", "content": q}], "answer": a, "source": "s"}, NUMBERS
        ),
        known=NUMBERS_KNOWN,
    ),
    "prompt and answer": Layout(
        file="set.jsonl", rows=rows_of(lambda q, a: {"prompt": q, "answer": a}, NUMBERS), known=NUMBERS_KNOWN
    ),
    "gsm8k": Layout(
        file="train.jsonl",
        rows=rows_of(lambda q, a: {"question": q, "answer": f"2+2=<<2+2=4>>4\n#### {a}"}, ("4", "1,272")),
        known=COUNTS_KNOWN,
    ),
    "math": Layout(file="set.json", rows=rows_of(boxed_solution, NUMBERS), known=NUMBERS_KNOWN),
    "openr1": Layout(
        file="set.parquet",
        rows=rows_of(lambda q, a: {"problem": q, "answer": a, "generations": ["t"], "source": "x"}, NUMBERS),
        known=NUMBERS_KNOWN,
    ),
    "openr1 as the paper's training set has it": Layout(
        file="set.parquet", rows=rows_of(verl("openr1", system=True), NUMBERS), known=NUMBERS_KNOWN
    ),
    "question and answer": Layout(
        file="set.csv", rows=rows_of(lambda q, a: {"question": q, "answer": a}, NUMBERS), known=NUMBERS_KNOWN
    ),
    "expected_answer, packed": Layout(
        file="set.jsonl.gz",
        rows=rows_of(lambda q, a: {"problem": q, "expected_answer": a}, NUMBERS),
        known=NUMBERS_KNOWN,
    ),
    "orz": Layout(
        file="set.json",
        rows=rows_of(
            lambda q, a: [{"from": "human", "value": q}, {"from": "assistant", "ground_truth": {"value": a}}], NUMBERS
        ),
        known=NUMBERS_KNOWN,
    ),
    "aime24 in verl, rows repeated": Layout(
        file="set.parquet",
        rows=rows_of(verl("aime"), ("204", "033", "7")) * 4,
        known=(math("204", "205"), math("33", "34"), math("7", "70")),
        benchmark="aime24",
    ),
    "math500 in verl": Layout(
        file="set.parquet",
        rows=rows_of(verl("math"), ("\\left( 3, \\frac{\\pi}{2} \\right)", "\\frac{14}{3}", "p - q", "10\\%")),
        known=(
            math("(3, \\frac{\\pi}{2})", "(3, \\pi)"),
            math("\\frac{14}{3}", "\\frac{3}{14}"),
            math("-q + p", "q - p"),
            math("10\\%", "11\\%"),
        ),
        benchmark="math500",
    ),
    "amc with floats": Layout(
        file="set.parquet",
        rows=rows_of(lambda q, a: {"id": 0, "problem": q, "answer": float(a), "url": "u"}, ("142.0", "9.0")),
        known=(math("142", "141"), math("9", "-9")),
    ),
    "amc in verl with floats as text": Layout(
        file="set.parquet",
        rows=rows_of(verl("amc"), ("142.0", "9.0")),
        known=(math("142", "141"), math("9", "-9")),
        benchmark="amc",
    ),
    "arc with letters": Layout(
        file="set.jsonl",
        rows=choice_rows(
            lambda q, o, p: {
                "id": q,
                "question": q,
                "choices": {"text": o, "label": list("ABCD")},
                "answerKey": "ABCD"[p],
            }
        ),
        known=OPTIONS_KNOWN,
    ),
    "arc with digits": Layout(
        file="set.parquet",
        rows=choice_rows(
            lambda q, o, p: {
                "id": q,
                "question": q,
                "choices": {"text": o, "label": list("1234")},
                "answerKey": "1234"[p],
            }
        ),
        known=OPTIONS_KNOWN,
    ),
    "gpqa as the released code writes it": Layout(
        file="set.parquet",
        rows=choice_rows(asked_in_text("gpqa", "{}) {}", IN_A_LINE)),
        known=OPTIONS_KNOWN,
        benchmark="gpqa-diamond",
    ),
    "the same without the benchmark's name": Layout(
        file="set.parquet", rows=choice_rows(asked_in_text("gpqa", "{}) {}", IN_A_LINE)), known=OPTIONS_KNOWN
    ),
    "options in brackets": Layout(
        file="set.parquet", rows=choice_rows(asked_in_text("quiz", "({}) {}", "")), known=OPTIONS_KNOWN
    ),
    "arc in verl with digits": Layout(
        file="set.parquet",
        rows=choice_rows(asked_in_text("arc-c", "{}. {}", "", labels="1234")),
        known=OPTIONS_KNOWN,
        benchmark="arc-c",
    ),
    "options in a row": Layout(
        file="set.jsonl",
        rows=choice_rows(asked_in_text("gpqa", "{}: {}", "\nAnswer:", joint="; ")),
        known=OPTIONS_KNOWN,
        benchmark="gpqa-diamond",
    ),
    "small letters, a list and a request behind it": Layout(
        file="set.jsonl",
        rows=choice_rows(asked_in_text("quiz", "- ({}) {}", "\nThe last line is 'ANSWER: X'.", labels="abcd")),
        known=OPTIONS_KNOWN,
    ),
    "options by letter": Layout(
        file="set.tsv",
        rows=choice_rows(lambda q, o, p: {"question": q, **dict(zip("ABCD", o, strict=True)), "answer": "abcd"[p]}),
        known=OPTIONS_KNOWN,
    ),
    "options in a table by letter": Layout(
        file="set.jsonl.zst",
        rows=choice_rows(
            lambda q, o, p: {"question": q, "options": dict(zip("ABCD", o, strict=True)), "answer": "ABCD"[p]}
        ),
        known=OPTIONS_KNOWN,
    ),
    "orz as columns": Layout(
        file="set.parquet",
        rows=rows_of(
            lambda q, a: {"0": {"from": "human", "value": q}, "1": {"from": "a", "ground_truth": {"value": a}}}, NUMBERS
        ),
        known=NUMBERS_KNOWN,
    ),
    "mmlu-pro": Layout(
        file="set.parquet",
        rows=choice_rows(
            lambda q, o, p: {"question": q, "options": o, "answer": "ABCD"[p], "answer_index": p, "category": "law"}
        ),
        known=OPTIONS_KNOWN,
    ),
    "mmlu": Layout(
        file="set.jsonl",
        rows=choice_rows(lambda q, o, p: {"question": q, "choices": o, "answer": p}),
        known=OPTIONS_KNOWN,
    ),
    "gpqa as published": Layout(
        file="gpqa_diamond.csv",
        rows=choice_rows(
            lambda q, o, p: {
                "Question": q,
                "Correct Answer": o[p],
                **{f"Incorrect Answer {n}": text for n, text in enumerate([*o[:p], *o[p + 1 :]], start=1)},
            }
        ),
        known=OPTIONS_KNOWN,
    ),
}


def write(folder: Path, layout: Layout) -> Path:
    path = folder / layout.file
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(layout.rows), path)
    elif path.suffix in (".csv", ".tsv"):
        with path.open("w", newline="") as text:
            writer = csv.DictWriter(text, list(layout.rows[0]), delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(layout.rows)
    elif path.suffix == ".json":
        path.write_text(json.dumps(layout.rows))
    else:
        lines = "".join(json.dumps(row) + "\n" for row in layout.rows).encode()
        packing = {".gz": "gzip", ".zst": "zstd"}.get(path.suffix)
        path.write_bytes(pa.compress(lines, packing, asbytes=True) if packing else lines)
    return path


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
