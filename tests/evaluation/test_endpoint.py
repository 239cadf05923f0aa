"""The endpoint path against a small local server: recorded answers, failures that pass, failures that do not."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from exgrpo_cli.base.errors import InputError, RunError
from exgrpo_cli.base.types import SamplingParams, StopReason
from exgrpo_cli.evaluation.asking.askers import EndpointAsker, endpoint_prompt
from exgrpo_cli.evaluation.asking.endpoint import Endpoint, SparingNote
from exgrpo_cli.evaluation.benchmarks.presets import Benchmark, Protocol, own_benchmark
from exgrpo_cli.evaluation.benchmarks.questions import benchmark_questions
from exgrpo_cli.evaluation.progress import EvaluationProgress
from exgrpo_cli.evaluation.results.folder import ResultsFolder
from exgrpo_cli.evaluation.runner import sample_seeds
from exgrpo_cli.evaluation.scoring import open_pool, score_folder
from exgrpo_cli.evaluation.service import EvaluationRequest, evaluate, plan_evaluation
from exgrpo_cli.evaluation.session import BenchmarkSession

PARAMS = SamplingParams(temperature=0.6, top_p=1.0, max_new_tokens=64)
Reply = tuple[int, Any]


class Server:
    """An OpenAI-compatible server on a free port; `answer(path, body, times seen before)` makes each reply."""

    def __init__(self, answer: Callable[[str, dict[str, Any], int], Reply]) -> None:
        self.seen: Counter[str] = Counter()
        self.bodies: list[dict[str, Any]] = []
        lock = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.reply(200, {"data": [{"id": "recorded"}], "version": "9.9"})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    key = json.dumps(body, sort_keys=True)
                    before = outer.seen[key]
                    outer.seen[key] += 1
                    outer.bodies.append(body)
                self.reply(*answer(self.path, body, before))

            def reply(self, status: int, value: Any) -> None:
                data = value if isinstance(value, bytes) else json.dumps(value).encode()
                try:
                    self.send_response(status)
                    if status == 429:
                        self.send_header("Retry-After", "0.4")
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)
                except OSError:
                    pass  # The client's patience ended first.

            def log_message(self, *args: object) -> None: ...

        outer = self
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


Serve = Callable[[Callable[[str, dict[str, Any], int], Reply]], Server]


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers: list[Server] = []

    def start(answer: Callable[[str, dict[str, Any], int], Reply]) -> Server:
        servers.append(Server(answer))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def completion(text: str, *, tokens: int = 7, reason: str = "stop") -> Reply:
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": reason}
    return 200, {"choices": [choice], "usage": {"completion_tokens": tokens}}


def patient(server: Server, **values: Any) -> Endpoint:
    return Endpoint(url=server.url, model="recorded", backoff_seconds=0.01, **values)


def questions_file(folder: Path, count: int) -> Path:
    path = folder / "sums.jsonl"
    path.write_text("".join(json.dumps({"question": f"{n}+1=?", "answer": n + 1}) + "\n" for n in range(count)))
    return path


def right_for_even_seeds(path: str, body: dict[str, Any], before: int) -> Reply:
    number = int(body["messages"][-1]["content"].split("+")[0])
    return completion(f"It is \\boxed{{{number + 1 + body['seed'] % 2}}}.")


def session_of(benchmark: Benchmark, data: Path, endpoint: Endpoint) -> tuple[EndpointAsker, BenchmarkSession]:
    asker = EndpointAsker(endpoint)
    questions = benchmark_questions(benchmark, data)
    prepared = asker.prepare(benchmark, questions.questions, fits_window=True)
    return asker, BenchmarkSession(
        benchmark=benchmark, questions=questions, prepared=prepared, seed=0, batch_questions=None
    )


def run_session(asker: EndpointAsker, session: BenchmarkSession, path: Path) -> dict[str, Any]:
    total = len(session.questions.questions)
    with ResultsFolder.create(path, session.stamp(asker), session.asked) as folder, open_pool("math") as pool:
        session.run(folder, pool, EvaluationProgress("sums", total, quiet=True))
        return score_folder(folder, pool)


def test_known_share_of_correct_answers(tmp_path, serve):
    server = serve(right_for_even_seeds)
    request = EvaluationRequest(
        benchmarks=(),
        data=questions_file(tmp_path, 20),
        model="recorded",
        endpoint=server.url,
        output=tmp_path / "results",
        protocol={"samples": 4},
    )
    report = evaluate(plan_evaluation(request), lambda text: None, quiet=True)
    questions = benchmark_questions(own_benchmark("sums"), request.data).questions
    even = [sum(seed % 2 == 0 for seed in sample_seeds(0, question.id, 4)) for question in questions]
    assert 0 < sum(even) < 80
    assert report.results["sums"]["avg_at_k"] == pytest.approx(sum(even) / 80)
    assert report.results["sums"]["verdicts"]["correct"] == sum(even)
    assert report.to_json()["benchmark"]["name"] == "sums"
    stamp = report.results["sums"]["protocol"]
    assert stamp["engine"] == {"name": "endpoint", "version": "9.9", "deterministic": False}
    assert {body["temperature"] for body in server.bodies} == {0.6}
    assert {body["max_tokens"] for body in server.bodies} == {8192}


def test_failures_that_pass_are_tried_again(serve):
    replies: list[Reply] = [(503, b"busy"), (200, b"<html>"), (200, {"choices": []}), completion("4", reason="length")]
    server = serve(lambda path, body, before: replies[before])
    response = patient(server).respond("2+2=", 5, PARAMS)
    assert (response.text, response.num_tokens, response.stop_reason) == ("4", 7, StopReason.LENGTH)
    assert sum(server.seen.values()) == 4


def test_a_pause_that_the_server_asks_for_is_kept(serve):
    server = serve(lambda path, body, before: completion("4") if before else (429, b"slow down"))
    began = time.monotonic()
    assert patient(server).respond("2+2=", 5, PARAMS).text == "4"
    # Its own pause would have been 0.01 s.
    assert time.monotonic() - began >= 0.4


def test_nonsense_ends_after_the_last_attempt(serve):
    server = serve(lambda path, body, before: (200, {"choices": [{"text": 3}]}))
    with pytest.raises(RunError, match=r"failed 3 times, last with: an answer that is no completion.* are kept"):
        patient(server, attempts=3).respond("2+2=", 5, PARAMS)
    assert sum(server.seen.values()) == 3


def test_a_refusal_is_not_tried_again(serve):
    server = serve(lambda path, body, before: (400, {"error": "max_tokens is too large"}))
    with pytest.raises(RunError, match=r"refused the request with status 400: .*max_tokens is too large"):
        patient(server).respond("2+2=", 5, PARAMS)
    assert sum(server.seen.values()) == 1


def test_a_slow_server_runs_into_the_time_out(serve):
    def slow(path: str, body: dict[str, Any], before: int) -> Reply:
        time.sleep(0.5)
        return completion("4")

    with pytest.raises(RunError, match="failed 2 times, last with: timed out"):
        patient(serve(slow), attempts=2, timeout_seconds=0.05).respond("2+2=", 5, PARAMS)


def test_nobody_there_is_found_before_work_starts():
    notes: list[str] = []
    endpoint = Endpoint(url="http://127.0.0.1:9", model="m", backoff_seconds=0.01, note=notes.append)
    with pytest.raises(
        InputError, match=r"^http://127.0.0.1:9/v1 failed 3 times, last with: Connection refused. Is the server up"
    ):
        endpoint.check()
    assert [note.split("; ")[1] for note in notes] == ["attempt 2 of 3 in 0 s", "attempt 3 of 3 in 0 s"]
    assert notes[0].startswith("http://127.0.0.1:9/v1: Connection refused; ")
    with pytest.raises(InputError, match="'localhost:8000' is no address: it begins with http"):
        Endpoint(url="localhost:8000", model="m").check()


def test_a_host_that_does_not_exist_is_asked_once():
    with pytest.raises(
        InputError, match=r"failed once with: the host is not known \(.*\)\. Is the server up, and --end"
    ):
        Endpoint(url="http://no-such-host.invalid", model="m").check()


def test_a_server_that_goes_away_under_way_gets_all_attempts(serve):
    notes: list[str] = []
    server = serve(right_for_even_seeds)
    endpoint = patient(server, attempts=5, note=SparingNote(notes.append))
    endpoint.check()
    server.close()
    with pytest.raises(
        RunError, match=r"failed 5 times, last with: Connection refused. Finished questions are kept: run"
    ):
        endpoint.respond("2+2=", 5, PARAMS)
    # One line, not one for each of the attempts and threads.
    assert len(notes) == 1 and "Connection refused; attempt 2 of 5" in notes[0]


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b'{"choices": [{"message": {"content": "4"}, "finish_re',
        b"null",
        b"[1, 2]",
        {"choices": [{"message": None, "finish_reason": "stop"}], "usage": {"completion_tokens": 1}},
        {"choices": [{"message": {"content": "4"}, "finish_reason": None}], "usage": {"completion_tokens": 1}},
        {"choices": [{"message": {"content": "4"}, "finish_reason": ["stop"]}], "usage": {"completion_tokens": 1}},
        {"choices": [{"message": {"content": "4"}, "finish_reason": "stop"}], "usage": None},
        {"choices": [{"message": {"content": "4"}, "finish_reason": "stop"}], "usage": {"completion_tokens": True}},
        {"choices": {"0": 1}},
    ],
    ids=str,
)
def test_an_answer_that_is_no_completion(serve, reply):
    server = serve(lambda path, body, before: (200, reply))
    with pytest.raises(RunError, match=r"failed 2 times, last with: an answer that is no"):
        patient(server, attempts=2).respond("2+2=", 5, PARAMS)


def test_a_missing_field_is_named(serve):
    choice = {"message": {"content": "4"}, "finish_reason": "stop"}
    with pytest.raises(RunError, match=r"no completion, 'usage' is missing or unknown \({'choices'"):
        patient(serve(lambda path, body, before: (200, {"choices": [choice]})), attempts=1).respond("2+2=", 5, PARAMS)


@pytest.mark.parametrize("reason", ["content_filter", "tool_calls"])
def test_a_response_that_the_server_ended_counts_as_ended(serve, reason):
    server = serve(lambda path, body, before: completion("I cannot", reason=reason))
    assert patient(server).respond("2+2=", 5, PARAMS).stop_reason is StopReason.EOS


def test_half_a_surrogate_pair_does_not_stop_the_evaluation(tmp_path, serve):
    server = serve(lambda path, body, before: completion("\\boxed{1} \ud800"))
    asker, session = session_of(own_benchmark("sums"), questions_file(tmp_path, 2), patient(server))
    result = run_session(asker, session, tmp_path / "results")
    assert result["verdicts"]["correct"] == 1
    assert "boxed{1} ?" in (tmp_path / "results" / "records.jsonl").read_text()


def test_a_model_that_is_not_served(serve):
    server = serve(right_for_even_seeds)
    with pytest.raises(InputError, match="/v1 serves recorded, not 'other'"):
        Endpoint(url=server.url + "/v1/", model="other").check()


def test_one_bad_question_keeps_the_finished_ones_and_the_rest_go_on(tmp_path, serve):
    broken = threading.Event()
    broken.set()

    def answer(path: str, body: dict[str, Any], before: int) -> Reply:
        if broken.is_set() and body["messages"][-1]["content"] == "7+1=?":
            return 500, b"out of memory"
        return right_for_even_seeds(path, body, before)

    server = serve(answer)
    data, benchmark = questions_file(tmp_path, 12), own_benchmark("sums")
    asker, session = session_of(benchmark, data, patient(server, attempts=2, parallel=1))
    with pytest.raises(RunError, match="status 500 out of memory"):
        run_session(asker, session, tmp_path / "results")
    first = (tmp_path / "results" / "records.jsonl").read_text()
    assert len(first.splitlines()) == 7

    broken.clear()
    run_session(asker, session, tmp_path / "results")
    assert (tmp_path / "results" / "records.jsonl").read_text().startswith(first)
    # 7 questions once, the broken one twice and then once more, 4 questions once: nothing finished was asked again.
    asked = Counter(body["messages"][-1]["content"] for body in server.bodies)
    assert asked == Counter({**{f"{n}+1=?": 1 for n in range(12)}, "7+1=?": 3})


def test_a_killed_evaluation_goes_on(tmp_path, serve):
    killed_one = threading.Event()

    def until_killed(path: str, body: dict[str, Any], before: int) -> Reply:
        if len(server.bodies) > 60:
            killed_one.wait(120)
        return right_for_even_seeds(path, body, before)

    server = serve(until_killed)
    data, output = questions_file(tmp_path, 150), tmp_path / "results"
    arguments = ["--data", str(data), "--endpoint", server.url, "--model", "recorded", "--output", str(output)]
    command = "import sys; from exgrpo_cli.commands.evaluate import evaluate; import typer; typer.run(evaluate)"
    process = subprocess.Popen([sys.executable, "-c", command, *arguments], stderr=subprocess.DEVNULL)
    records = output / "records.jsonl"
    deadline = time.monotonic() + 120
    while not (records.exists() and records.stat().st_size > 2000):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    killed_one.set()
    # The worst moment to die is in the middle of a line.
    killed = records.read_bytes()
    torn = killed[: len(killed) - 20] if killed.endswith(b"\n") else killed
    records.write_bytes(torn)
    whole = torn[: torn.rfind(b"\n") + 1]
    assert 0 < whole.count(b"\n") < 150

    request = EvaluationRequest(benchmarks=(), data=data, model="recorded", endpoint=server.url, output=output)
    report = evaluate(plan_evaluation(request), lambda text: None, quiet=True)
    assert records.read_bytes().startswith(whole)
    assert report.results["sums"]["questions"] == 150
    lines = [json.loads(line) for line in records.read_bytes().splitlines()]
    assert len({line["question_id"] for line in lines}) == 150
    for line in lines:
        assert [sample["seed"] for sample in line["samples"]] == list(sample_seeds(0, line["question_id"], 1))


def test_prompts_for_a_server(tmp_path, serve):
    server = serve(lambda path, body, before: completion(path))
    (question,) = benchmark_questions(own_benchmark("sums"), questions_file(tmp_path, 1)).questions
    assert endpoint_prompt("step-by-step", question) == "User: 0+1=?\nAnswer: Let's think step by step.\n"
    system, user = endpoint_prompt("thought-solution", question)
    assert (system.role, user.role, user.content) == ("system", "user", "0+1=?")
    assert system.content.startswith("Your task is to follow a systematic")
    assert patient(server).respond(endpoint_prompt("chat", question), 1, PARAMS).text == "/v1/chat/completions"
    text_server = serve(
        lambda path, body, before: (
            200,
            {"choices": [{"text": path, "finish_reason": "stop"}], "usage": {"completion_tokens": 1}},
        )
    )
    assert patient(text_server).respond("0+1=", 1, PARAMS).text == "/v1/completions"


@pytest.mark.parametrize(("text", "correct"), [("<think>1</think> \\boxed{1}", 1), ("<think>1</think> It is 1.", 0)])
def test_the_papers_template_asks_a_server_for_a_box(tmp_path, serve, text, correct):
    server = serve(lambda path, body, before: completion(text))
    benchmark = replace(own_benchmark("sums"), protocol=Protocol(template="thought-solution"))
    asker, session = session_of(benchmark, questions_file(tmp_path, 1), patient(server))
    result = run_session(asker, session, tmp_path / "results")
    assert [message["role"] for message in server.bodies[0]["messages"]] == ["system", "user"]
    assert result["verdicts"]["correct"] == correct
    assert result["protocol"]["prompt"]["template"] == "thought-solution"


def test_an_api_key_is_sent_and_not_shown(serve):
    endpoint = Endpoint(url="http://host", model="m", api_key="secret")
    assert "secret" not in repr(endpoint)
    assert endpoint._headers()["Authorization"] == "Bearer secret"


def test_protocol_for_an_endpoint_is_checked(tmp_path):
    data = questions_file(tmp_path, 1)
    with pytest.raises(InputError, match="--endpoint needs --model"):
        plan_evaluation(EvaluationRequest(benchmarks=(), data=data, endpoint="http://host"))
    with pytest.raises(InputError, match="--deterministic needs a model loaded here"):
        plan_evaluation(
            EvaluationRequest(benchmarks=(), data=data, endpoint="http://host", model="m", deterministic=True)
        )
