"""The endpoint path against a small local server: recorded answers, failures that pass, failures that do not."""

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from openai_server import Reply, Server, completion
from random_model import questions_file, run
from run_leaves import kill_once

from exgrpo_cli.base.errors import InputError, RunError
from exgrpo_cli.base.types import SamplingParams, StopReason
from exgrpo_cli.config.requests import EvaluationRequest
from exgrpo_cli.evaluation import sampling, service
from exgrpo_cli.evaluation.benchmarks import benchmark_questions, own_benchmark
from exgrpo_cli.evaluation.server import Endpoint, endpoint_prompt, throttled
from exgrpo_cli.questions.prompts import TEMPLATES

PARAMS = SamplingParams(temperature=0.6, top_p=1.0, max_new_tokens=64)


def patient(server: Server, **values: Any) -> Endpoint:
    return Endpoint(url=server.url, model="recorded", backoff_seconds=0.01, **values)


def request_to(server: Server, data: Path, output: Path, **protocol: Any) -> EvaluationRequest:
    asked = {"data": data, "model": "recorded", "endpoint": server.url, "output": output, "protocol": protocol}
    return EvaluationRequest(benchmarks=(), **asked)


def right_for_even_seeds(path: str, body: dict[str, Any], before: int) -> Reply:
    number = int(body["messages"][-1]["content"].split("+")[0])
    return completion(f"It is \\boxed{{{number + 1 + body['seed'] % 2}}}.")


def test_known_share_of_correct_answers(tmp_path, serve):
    server = serve(right_for_even_seeds)
    data = questions_file(tmp_path, 20)
    report = run(request_to(server, data, tmp_path / "results", samples=4))
    questions = benchmark_questions(own_benchmark("sums"), data).questions
    even = sum(seed % 2 == 0 for question in questions for seed in sampling.sample_seeds(0, question.id, 4))
    assert 0 < even < 80
    result = report.results["sums"]
    assert (result["avg_at_k"], result["verdicts"]["correct"]) == (pytest.approx(even / 80), even)
    assert report.to_json()["benchmark"]["name"] == "sums"
    assert result["protocol"]["engine"] == {"name": "endpoint", "version": "unknown to the client"}
    assert {(body["temperature"], body["max_tokens"]) for body in server.bodies} == {(0.6, 8192)}


def test_failures_that_pass_are_tried_again(serve):
    replies: list[Reply] = [(429, b"slow down"), (503, b"busy"), (200, b"<html>"), (200, {"choices": []})]
    server = serve(lambda path, body, before: [*replies, completion("4", reason="length")][before])
    response = patient(server).respond("2+2=", 5, PARAMS)
    assert (response.text, response.num_tokens, response.stop_reason) == ("4", 7, StopReason.LENGTH)
    assert len(server.bodies) == 5


def test_a_refusal_ends_it_at_once(serve):
    server = serve(lambda path, body, before: (400, {"error": "max_tokens is too large"}))
    with pytest.raises(RunError, match=r"refused the request with status 400 .*max_tokens is too large"):
        patient(server).respond("2+2=", 5, PARAMS)
    assert len(server.bodies) == 1


def test_a_slow_server_runs_into_the_time_out(serve):
    def slow(path: str, body: dict[str, Any], before: int) -> Reply:
        time.sleep(0.5)
        return completion("4")

    with pytest.raises(RunError, match="failed 2 times, last with: timed out"):
        patient(serve(slow), attempts=2, timeout_seconds=0.05).respond("2+2=", 5, PARAMS)


def test_nobody_there_or_another_model_is_found_before_work_starts(serve):
    with pytest.raises(InputError, match="/v1 serves recorded, not 'other'"):
        Endpoint(url=serve(right_for_even_seeds).url + "/v1/", model="other").check()
    notes: list[str] = []
    endpoint = Endpoint(url="http://127.0.0.1:9", model="m", backoff_seconds=0.01, note=notes.append)
    refused = r"^http://127.0.0.1:9/v1 failed 3 times, last with: Connection refused. Is the server up"
    with pytest.raises(InputError, match=refused):
        endpoint.check()
    assert [note.split("; ")[1] for note in notes] == ["attempt 2 of 3 in 0 s", "attempt 3 of 3 in 0 s"]
    assert notes[0].startswith("http://127.0.0.1:9/v1: Connection refused; ")
    with pytest.raises(InputError, match="'localhost:8000' is no address: it begins with http"):
        Endpoint(url="localhost:8000", model="m").check()
    with pytest.raises(InputError, match=r"failed 3 times, last with: .* Is the server up, and --endpoint its addr"):
        Endpoint(url="http://no-such-host.invalid", model="m", backoff_seconds=0.01).check()


def test_a_server_that_goes_away_under_way_gets_all_attempts(serve):
    notes: list[str] = []
    server = serve(right_for_even_seeds)
    endpoint = patient(server, attempts=5, note=throttled(notes.append))
    endpoint.check()
    server.close()
    said = r"failed 5 times, last with: Connection refused. Is .* Finished questions are kept: r"
    with pytest.raises(RunError, match=said):
        endpoint.respond("2+2=", 5, PARAMS)
    # One line, not one for each of the attempts and threads.
    assert len(notes) == 1 and "Connection refused; attempt 2 of 5" in notes[0]


def choice(**values: Any) -> dict[str, Any]:
    whole = {"message": {"content": "4"}, "finish_reason": "stop", **values}
    return {"choices": [whole], "usage": {"completion_tokens": 1}}


def test_a_pause_that_the_server_asks_for_is_kept(serve):
    slow_down = (429, b"slow down", {"Retry-After": "0.4"})
    server = serve(lambda path, body, before: completion("4") if before else slow_down)
    began = time.monotonic()
    assert patient(server).respond("2+2=", 5, PARAMS).text == "4"
    # Its own pause would have been 0.01 s.
    assert time.monotonic() - began >= 0.4


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (b'{"choices": [{"message": {"content": "4"}, "finish_re', "an answer that is not JSON"),
        (b"null", "an unusable answer"),
        (choice(message=None), "an unusable answer"),
        (choice(finish_reason=None), r"an unusable answer \(Expected `str`, got `null` - at `\$.choices"),
        (choice(finish_reason="eos"), r"an unusable answer \(Invalid enum value 'eos'"),
        (choice() | {"usage": {"completion_tokens": 1 << 31}}, r"an unusable answer \(Expected `int` <= 2147483647"),
        (choice() | {"usage": {"completion_tokens": 10**30}}, r"an unusable answer \(Expected `int` <= 2147483647"),
        (b"[" * 200_000, "an answer that is not JSON"),
        (b"1" * 5000, "an answer that is not JSON"),
        (b'"\xff"', "an answer that is not JSON"),
        (choice() | {"usage": {"completion_tokens": True}}, "an unusable answer"),
        ({"choices": choice()["choices"]}, r"an unusable answer \(.*`usage`\): {.choices"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_an_answer_that_is_no_completion(serve, reply, message):
    server = serve(lambda path, body, before: (200, reply))
    with pytest.raises(RunError, match=rf"failed 2 times, last with: {message}"):
        patient(server, attempts=2).respond("2+2=", 5, PARAMS)


def test_half_a_surrogate_pair_and_a_response_that_the_server_ended_stop_nothing(tmp_path, serve):
    server = serve(lambda path, body, before: completion("\\boxed{1} \ud800", reason="content_filter"))
    result = run(request_to(server, questions_file(tmp_path, 2), tmp_path / "results")).results["sums"]
    assert (result["verdicts"]["correct"], result["share_clipped"]) == (1, 0)
    assert "boxed{1} ?" in (tmp_path / "results" / "records.jsonl").read_text()


def test_one_bad_question_keeps_the_finished_ones_and_the_rest_go_on(tmp_path, serve, monkeypatch):
    broken = threading.Event()
    broken.set()

    def answer(path: str, body: dict[str, Any], before: int) -> Reply:
        if broken.is_set() and body["messages"][-1]["content"] == "7+1=?":
            return 500, b"out of memory"
        return right_for_even_seeds(path, body, before)

    monkeypatch.setattr(service, "Endpoint", partial(Endpoint, attempts=2, parallel=1, backoff_seconds=0.01))
    server, records = serve(answer), tmp_path / "results" / "records.jsonl"
    request = request_to(server, questions_file(tmp_path, 12), records.parent)
    with pytest.raises(RunError, match="status 500 out of memory"):
        run(request)
    first = records.read_text()
    assert len(first.splitlines()) == 7
    broken.clear()
    run(request)
    assert records.read_text().startswith(first)
    # 7 questions once, the broken one twice and then once more, 4 questions once: nothing finished was asked again.
    asked = Counter(body["messages"][-1]["content"] for body in server.bodies)
    assert asked == Counter({**{f"{n}+1=?": 1 for n in range(12)}, "7+1=?": 3})


@pytest.mark.engines
def test_a_killed_evaluation_goes_on(tmp_path, serve):
    killed_one = threading.Event()

    def until_killed(path: str, body: dict[str, Any], before: int) -> Reply:
        if len(server.bodies) > 60:
            killed_one.wait(120)
        return right_for_even_seeds(path, body, before)

    server = serve(until_killed)
    data, output = questions_file(tmp_path, 150), tmp_path / "results"
    arguments = ["--data", str(data), "--endpoint", server.url, "--model", "recorded", "--output", str(output)]
    process = subprocess.Popen([sys.executable, "-m", "exgrpo_cli", "eval", *arguments], stderr=subprocess.DEVNULL)
    records = output / "records.jsonl"
    kill_once(lambda: records.exists() and records.stat().st_size > 2000, process, pause=0.005)
    killed_one.set()
    # The worst moment to die is in the middle of a line.
    torn = records.read_bytes()[:-20]
    records.write_bytes(torn)
    whole = torn[: torn.rfind(b"\n") + 1]
    assert 0 < whole.count(b"\n") < 150

    assert run(request_to(server, data, output)).results["sums"]["questions"] == 150
    assert records.read_bytes().startswith(whole)
    lines = [json.loads(line) for line in records.read_bytes().splitlines()]
    assert len({line["question_id"] for line in lines}) == 150
    for line in lines:
        assert [sample["seed"] for sample in line["samples"]] == list(sampling.sample_seeds(0, line["question_id"], 1))


def test_prompts_for_a_server(tmp_path, serve):
    server = serve(lambda path, body, before: completion(path))
    (question,) = benchmark_questions(own_benchmark("sums"), questions_file(tmp_path, 1)).questions
    assert endpoint_prompt(TEMPLATES["step-by-step"], question) == "User: 0+1=?\nAnswer: Let's think step by step.\n"
    system, user = endpoint_prompt(TEMPLATES["thought-solution"], question)
    assert (system.role, user.role, user.content) == ("system", "user", "0+1=?")
    assert system.content.startswith("Your task is to follow a systematic")
    assert (
        patient(server).respond(endpoint_prompt(TEMPLATES["chat"], question), 1, PARAMS).text == "/v1/chat/completions"
    )
    whole = {"usage": {"completion_tokens": 1}}
    plain = serve(lambda path, body, before: (200, {"choices": [{"text": path, "finish_reason": "stop"}], **whole}))
    assert patient(plain).respond("0+1=", 1, PARAMS).text == "/v1/completions"


@pytest.mark.parametrize(("text", "correct"), [("<think>1</think> \\boxed{1}", 1), ("<think>1</think> It is 1.", 0)])
def test_the_papers_template_asks_a_server_for_a_box(tmp_path, serve, text, correct):
    server = serve(lambda path, body, before: completion(text))
    request = request_to(server, questions_file(tmp_path, 1), tmp_path / "results", template="thought-solution")
    result = run(request).results["sums"]
    assert [message["role"] for message in server.bodies[0]["messages"]] == ["system", "user"]
    assert (result["verdicts"]["correct"], result["protocol"]["prompt"]["template"]) == (correct, "thought-solution")
