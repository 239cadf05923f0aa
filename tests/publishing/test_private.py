"""Secrets, paths and hosts in texts: taken out, refused, however written; mathematics is left as it is."""

import base64
import html
import json
import random
from pathlib import Path

import pytest

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.publishing.private import Private

HOST = "buildhost77.corp.internal"
ENVIRONMENT = {
    "HOSTNAME": HOST, "DB_PASS": "correct-horse-battery", "WEB_SESSION": 'Zq9"x+7\\k&é<t',
    "DATABASE_URL": "postgres://alice:pw-of-alice-9@db/runs", "KEYBOARD": "an ordinary value", "TOKEN_LIMIT": "16",
}  # fmt: skip
SIGNS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
LOOKS = (
    ("hf_", SIGNS, 34), ("ghp_", SIGNS, 36), ("github_pat_", SIGNS + "_", 82), ("glpat-", SIGNS + "-_", 20),
    ("sk-proj-", SIGNS, 48), ("sk-ant-api03-", SIGNS + "-_", 93), ("sk_live_", SIGNS, 24), ("AKIA", SIGNS[:26], 16),
    ("AIza", SIGNS + "-_", 35), ("xoxb-", SIGNS + "-", 40), ("npm_", SIGNS, 36), ("pypi-", SIGNS + "-_", 100),
    ("gsk_", SIGNS, 48), ("dckr_pat_", SIGNS, 27), ("eyJhbGciOi.eyJzdWIiOi.", SIGNS + "-_", 43),
    ("-----BEGIN OPENSSH PRIVATE KEY-----\n", SIGNS, 70), ("-----BEGIN PRIVATE KEY-----\n", SIGNS, 64),
    ("Authorization: Bearer ", SIGNS, 40), ("https://alice:", SIGNS, 12), ("http://h/v1?api_key=", SIGNS, 24),
)  # fmt: skip
"""Beginning, alphabet and length of tokens."""
# Homes of people and of root, mounts and shares, as they look on systems of all kinds.
PATHS = (
    "file:///home/alice/plan/x", "~/plan/x", "//home/alice/x", "</home/alice/x>", "dir/home/alice/x", "../alice/plan",
    "./../home/alice", r"C:\Users\alice\x", r"\\srv\share", "/home/alice/My Secret/plan", "/Users/alice/plan",
    "/mnt/disk/alice/x", "D:/models/alice/x", "alice@gpu17:/home/alice/x", "/root/plan/x",
)  # fmt: skip
HOSTS = (
    "run-on-buildhost77", "BUILDHOST77", "buildhost77_9", HOST, "node5.corp.internal", f"alice@{HOST}", "10.11.12.13",
    "192.168.0.7:8000", "2001:db8::8a2e:370:7334", "fe80::1", "http://gpu17.lan:8000/v1",
)  # fmt: skip
PARTS = ("alice", "gpu17", "buildhost77", "BUILDHOST77", "corp.internal", "10.11", "2001:", "srv", "Secret")
"""Parts of them that must not stay."""
WRITINGS = {
    "as it is": str,
    "in JSON": lambda text: json.dumps(text)[1:-1],
    "all escaped": lambda text: "".join(f"\\u{ord(sign):04x}" for sign in text),
    "one escaped": lambda text: f"\\u{ord(text[0]):04x}{text[1:]}",
    "one as %": lambda text: text[:2] + "".join(f"%{byte:02X}" for byte in text[2].encode()) + text[3:],
    "all as %": lambda text: "".join(f"%{byte:02x}" for byte in text.encode()),
    "on a page": html.escape,
    "as entities": lambda text: "".join(f"&#{ord(sign)};" for sign in text),
    "in base64": lambda text: base64.b64encode(text.encode()).decode(),
    "inside of base64": lambda text: base64.b64encode(f"ab {text} c".encode()).decode(),
    "in base64 of addresses": lambda text: "x" + base64.urlsafe_b64encode(text.encode()).decode().rstrip("="),
    "in base64 twice": lambda text: base64.b64encode(base64.b64encode(text.encode())).decode(),
}
MATHEMATICS = (
    r"\frac{1}{2}/3/4", "3/4/5", "a/b/c", "/3", "x /y", "60 km/h", "60~km/h and 5~/~3", "m/s/s", "he/she/they",
    r"f:\mathbb{R}\to\mathbb{R}", r"F:\Omega\to\R", r"\\frac\pi2", r"x \\ \alpha\beta \\\hline y \\[2pt] z \\c\cdot d",
    "$x/y/z$ (1/2)/3/4", "1:2::3:6", "sections 1.2.3.4 and 2.10", "2024:10:05 12:30:45", "P(A/B)/P(C)/P(D)",
    "https://huggingface.co/datasets/a/home/b/c", "https://example.org/home/alice/x", "a1/a2/../an", "50%2F 20%",
    "A:\nB:\n", "</think>\n\\boxed{22}", "g: \\mathbb{Z}/n\\mathbb{Z}", "a@b, x@y", "1/2/2024", "school/home/work",
    "supercalifragilisticexpialidocious", "</s>", "replay/bucket/3", "torch 2.13.0+cpu", "{a/b}/c/d", "127.0.0.1:8000",
)  # fmt: skip


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> Private:
    return Private.of(tmp_path_factory.mktemp("root") / "run", ENVIRONMENT)


def secrets(rng: random.Random) -> list[str]:
    drawn = [begin + "".join(rng.choices(signs, k=length)) for begin, signs, length in LOOKS]
    # The address of an account ends with the machine's name.
    drawn = [f"{each}@host/x" if each.startswith("https://alice:") else each for each in drawn]
    return [*drawn, ENVIRONMENT["DB_PASS"], ENVIRONMENT["WEB_SESSION"], "pw-of-alice-9"]


@pytest.mark.parametrize("writing", WRITINGS)
@pytest.mark.parametrize("seed", range(3))
def test_a_secret_is_refused_however_it_is_written_and_is_not_repeated(private, writing, seed):
    rng = random.Random(seed)
    for secret in secrets(rng):
        before, behind = rng.choice(["", "see ", '{"key": "', "\n", "x="]), rng.choice(["", " here", '"}', "\n"])
        text = before + WRITINGS[writing](secret) + behind
        for look in (private.check, private.redact):
            with pytest.raises(InputError, match="a text holds a secret") as refused:
                look(text, "a text")
            assert secret not in str(refused.value), text
    with pytest.raises(InputError, match="holds a secret, the value of DB_PASS: nothing was published"):
        private.check("correct-horse-battery", "a text")


@pytest.mark.parametrize("found", [*PATHS, *HOSTS])
def test_a_path_or_host_is_taken_out_of_settings_and_pages_and_refused_in_rows(private, found):
    for before, behind in (("", ""), ("lost ", ""), ("see ", " here"), ("it is in <", ">"), ("'", "'"), ("a\n", "\nb")):
        text = before + found + behind
        values = {"key": text, text: "value", "list": [text, 1.5]}
        toml = f"key = {json.dumps(text)}\n" + ("" if "\n" in text else f"# {text}\n")
        for name, written in (
            ("json", json.dumps(values)),
            ("toml", toml),
            ("page", text),
            ("html", html.escape(text)),
        ):
            public = private.redact(written, "a text", quoted=name in ("json", "toml"))
            public = html.unescape(public) if name == "html" else public
            for gone in PARTS:
                assert gone not in public, (written, public)
            assert before.strip() in public and behind.strip() in public
            if name == "json":
                assert list(json.loads(public)) == ["key", list(json.loads(public))[1], "list"]
        with pytest.raises(InputError, match=r"a row has .* in it, which would be published"):
            private.check(text, "a row")


@pytest.mark.parametrize("writing", WRITINGS)
def test_a_path_or_host_in_another_writing_does_not_pass(private, writing):
    for found in (*PATHS, *HOSTS):
        text = f"see {WRITINGS[writing](found)} here"
        if "base64" in writing and len(found) < 12:
            # A run of base64 is read from 16 signs on.
            continue
        with pytest.raises(InputError, match="a row has"):
            private.check(text, "a row")
            pytest.fail(text)
        try:
            public = private.redact(text, "a text")
        except InputError:
            continue
        private.check(public, "a text")
        assert WRITINGS[writing](found) not in public


def test_mathematics_addresses_on_the_web_and_words_stay_as_they_are(private):
    for text in (*MATHEMATICS, "\n".join(MATHEMATICS)):
        private.check_rows([text, json.dumps({"answer": text})], "the rows")
        assert private.redact(text, "a page") == text
        for written in (json.dumps({"answer": text}), f"answer = {json.dumps(text)}"):
            assert private.redact(written, "a text", quoted=True) == written


def test_a_quoted_path_keeps_its_last_part_alone(private):
    for path, last in {
        "/one-part": "one-part",
        "/home/alice/My Secret Plan": "My Secret Plan",
        "/home/alice": "~",
        r"C:\Users\alice": "~",
        "file:///srv/x/plan.toml": "plan.toml",
        "../../plan": "plan",
        "/data/x y/questions.jsonl": "questions.jsonl",
    }.items():
        assert json.loads(private.redact(json.dumps({"key": path}), "settings", quoted=True)) == {"key": last}


def test_a_machine_with_the_name_of_a_setting_does_not_break_the_settings(tmp_path: Path):
    private = Private.of(tmp_path, {"HOSTNAME": "replay.lan"})
    assert private.redact("[replay]\nx = 'replay.lan'\n", "settings", quoted=True) == "[replay]\nx = 'host'\n"
