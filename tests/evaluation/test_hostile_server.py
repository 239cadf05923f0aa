"""Servers that mean harm or are broken: where a key goes, what is shown of it, and how much of a reply is read."""

import base64
import json
import random
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import pytest
from openai_server import Reply, Server, about, completion
from random_model import questions_file

from exgrpo_cli.base import errors, types
from exgrpo_cli.commands import run
from exgrpo_cli.evaluation.exchange import without_key
from exgrpo_cli.evaluation.server import Endpoint

PARAMS = types.SamplingParams(temperature=0.6, top_p=1.0, max_new_tokens=64)
KEY = "sk-Proj-9f8e7d6c5b4a+/x"


def endpoint(server: Server, **values: Any) -> Endpoint:
    return Endpoint(url=server.url, model="recorded", api_key=KEY, backoff_seconds=0.01, attempts=2, **values)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize(
    "target", ["http://127.0.0.1:{port}", "http://localhost:{own}", "https://127.0.0.1:{own}", "ftp://127.0.0.1:{own}"]
)
def test_a_redirect_to_another_server_is_refused_and_gets_nothing(serve, status, target):
    elsewhere = serve(lambda path, body, before: completion("4"))

    def moved(path: str, body: dict[str, Any], before: int) -> Reply:
        own = int(server.url.rpartition(":")[2])
        place = target.format(port=elsewhere.url.rpartition(":")[2], own=own)
        return status, b"", {"Location": f"{place}{path}?key={KEY}"}

    server = serve(moved, moved)
    with pytest.raises(errors.InputError, match=r"sends requests on to .*, and they go to --endpoint alone") as refused:
        endpoint(server).check()
    assert KEY not in str(refused.value)
    with pytest.raises(errors.RunError, match="sends requests on to"):
        endpoint(server).respond((), 5, PARAMS)
    assert (elsewhere.keys, elsewhere.bodies, len(server.keys), len(server.bodies)) == ([], [], 1, 1)


def test_a_redirect_within_the_server_is_followed_with_the_key(serve):
    def moved(path: str, body: dict[str, Any], before: int) -> Reply:
        return about(path, body, before) if before else (307, b"", {"Location": f"{path}/"})

    server = serve(lambda path, body, before: (307, b"", {"Location": path}), moved)
    endpoint(server).check()
    assert server.keys == [f"Bearer {KEY}"] * 2
    with pytest.raises(errors.RunError, match="sends requests on to"):
        endpoint(server).respond((), 5, PARAMS)


def echoes() -> list[tuple[str, str]]:
    """A key as a server may send it back, within other text drawn at random."""
    rng = random.Random(7)
    pad = lambda: "".join(rng.choice("abc {}\"'\\é:\n") for _ in range(rng.randrange(300)))  # noqa: E731
    forms = [KEY, KEY.upper(), quote(KEY, safe=""), KEY.encode().hex(), base64.b64encode(KEY.encode()).decode()]
    forms += [base64.b64encode(f"{'x' * size}{KEY}".encode()).decode() for size in (1, 2, 7)]
    return [(form, pad() + form + pad()) for form in forms for _ in range(4)]


def test_no_piece_of_a_key_is_left_in_a_servers_text():
    for form, text in echoes():
        left = without_key(text, KEY)
        # Of base64 its ends depend on what stands beside it.
        pieces = [form[at : at + 8] for at in range(8, len(form) - 16)] or [form]
        assert not [piece for piece in pieces if piece in left], (form, left)
    assert without_key("no such model: \x1b[2J'a'\r\n", None) == "no such model: \\u001b[2J'a'"
    assert without_key("max_tokens is too large", KEY) == "max_tokens is too large"


@pytest.mark.parametrize(
    "reply",
    [
        lambda: (401, f"bad key: Bearer {KEY}".encode()),
        lambda: (500, {"error": {"message": KEY}}),
        lambda: (200, f"not JSON {KEY}".encode()),
        lambda: (200, {"choices": KEY}),
        lambda: (200, lambda write: write(f"{KEY} 200 OK\r\n\r\n".encode())),
        lambda: completion("4", reason=KEY),
        # Half a key, where the text that is shown ends.
        lambda: (400, b"a" * 190 + KEY.encode()),
        lambda: completion(f"Your key is {KEY}"),
    ],
)
def test_a_key_that_a_server_sends_back_is_neither_shown_nor_stored(serve, tmp_path, monkeypatch, capsys, reply):
    monkeypatch.setattr("exgrpo_cli.evaluation.server.time.sleep", lambda seconds: None)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    server = serve(lambda path, body, before: reply(), lambda *asked: (200, {"data": [{"id": "m"}], "version": KEY}))
    data, output = questions_file(tmp_path, 1), tmp_path / "out"
    arguments = ["evaluate", "--data", str(data), "--endpoint", server.url, "--output", str(output), "--model"]
    run([*arguments, "m", "--debug"])
    # Another model is not there, and those that are there are told.
    server = serve(lambda path, body, before: reply(), lambda *asked: (200, {"data": [{"id": f"x{KEY}"}]}))
    assert run([*arguments[:4], server.url, *arguments[5:], "m"]) == 2
    shown = capsys.readouterr()
    written = [path.read_bytes() for path in output.rglob("*") if path.is_file()]
    assert all(KEY[:10] not in text for text in (shown.out, shown.err))
    assert not [text for text in written if KEY[:10].encode() in text]


@pytest.mark.parametrize(
    "url", ["{url}/v1?api_key={key}", "{url}#{key}", "http://me:{key}@127.0.0.1:9", "http://{key}@[::1"]
)
def test_a_key_in_an_address_is_refused_unshown(tmp_path, capsys, url):
    url = url.format(url="http://127.0.0.1:9", key=KEY)
    arguments = ["evaluate", "arithmetic", "--endpoint", url, "--model", "m", "--output", str(tmp_path / "out")]
    for more in ([], ["--dry-run"], ["--dry-run", "--json"]):
        assert run([*arguments, *more]) == 2
        shown = capsys.readouterr()
        assert "put a key into OPENAI_API_KEY" in shown.err and KEY[:10] not in shown.err + shown.out
    assert not (tmp_path / "out").exists()


def test_a_key_in_the_path_of_an_address_is_neither_stored_nor_shown(serve, tmp_path, capsys):
    server, secret = serve(lambda path, body, before: completion("4")), "f3a9" * 8
    output = tmp_path / "out"
    arguments = ["--data", str(questions_file(tmp_path, 1)), "--model", "recorded", "--output", str(output)]
    assert run(["evaluate", "--endpoint", f"{server.url}/{secret}/v1", *arguments, "--json"]) == 0
    shown = capsys.readouterr()
    assert f"{server.url}/***/v1" in shown.out and secret not in shown.out + shown.err
    assert not [path for path in output.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]


def test_a_key_that_no_header_can_hold_is_refused_unshown(monkeypatch, capsys):
    monkeypatch.setenv("OPENAI_API_KEY", f"{KEY}\x07more")
    assert run(["evaluate", "arithmetic", "--endpoint", "http://127.0.0.1:9", "--model", "m", "--debug"]) == 2
    shown = capsys.readouterr().err
    assert "OPENAI_API_KEY holds a character" in shown and KEY not in shown
    # A line's end behind it, as `cat` of a file gives it, does not matter.
    assert Endpoint(url="http://a", model="m", api_key=f"{KEY}\n").api_key == KEY


def endless(begin: bytes, more: bytes, pause: float = 0.0) -> Reply:
    def write(send: Callable[[bytes], object]) -> None:
        send(begin)
        until = time.monotonic() + 60
        while time.monotonic() < until:
            send(more)
            time.sleep(pause)

    return 200, write


HEAD = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (endless(HEAD + b"\r\n", b"a" * 65536), "more than 4.2 MB as one answer"),
        (
            endless(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"ffff\r\n" + b"a" * 65535 + b"\r\n"),
            "more than 4.2 MB",
        ),
        (endless(HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"a: b\r\n" * 9999), "more than 4.2 MB"),
        (endless(b"", b"HTTP/1.1 100 Continue\r\na: b\r\n\r\n" * 999), "more than 4.2 MB"),
        (endless(b"HTTP/1.1 500 Bad\r\n\r\n", b"a" * 65536), "more than 4.2 MB"),
        (endless(HEAD, b"a: b\r\n" * 999), "more than 100 headers"),
        (endless(HEAD + b"a: ", b"b" * 65536), "more than 65536 bytes"),
        (endless(HEAD + b"\r\n", b" ", 0.02), r"timed out: no whole answer in 0.2 s \(see --timeout\)"),
        (endless(HEAD, b"a", 0.02), r"timed out: no whole answer in 0.2 s \(see --timeout\)"),
        (endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n", 0.02), "timed out"),
        (endless(b"HTTP/1.1 429 Slow\r\n\r\n", b"a", 0.02), "timed out"),
        (endless(b"HTTP/1.1 307 Moved\r\nLocation: /\r\n\r\n", b"a", 0.02), "timed out"),
        (endless(HEAD + b"Content-Length: 99999999999999\r\n\r\n", b"a", 0.02), "timed out"),
    ],
)
def test_an_endless_or_dripping_reply_ends_at_a_bound(serve, reply, message):
    server = serve(lambda path, body, before: reply, lambda path, body, before: reply)
    seconds = 0.2 if "timed out" in message else 60.0
    with pytest.raises(errors.InputError, match=message):
        endpoint(server, timeout_seconds=seconds).check()
    with pytest.raises(errors.RunError, match=f"{message}|sends requests on to"):
        endpoint(server, timeout_seconds=seconds).respond((), 5, PARAMS)


def test_a_long_answer_may_have_what_was_asked_for(serve):
    # A million tokens of six bytes each: more than an answer of a few tokens may have.
    text = "\\u4e2d" * 1_000_000
    reply = json.dumps(completion("@")[1]).replace("@", text).encode()
    server = serve(lambda path, body, before: (200, reply))
    params = types.SamplingParams(temperature=0.6, top_p=1.0, max_new_tokens=1_000_000)
    assert len(endpoint(server).respond((), 5, params).text) == 1_000_000
    with pytest.raises(errors.RunError, match=r"more than 4.2 MB as one answer, more than --max-tokens can be"):
        endpoint(server).respond((), 5, PARAMS)
