"""Hub data sets against a local HTTP server speaking the hub's endpoints: real requests, real cache, own processes."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import pytest

from exgrpo_cli.questions.hub import parse_hub_id

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OLD_COMMIT = "f" * 40
CARD = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: socratic
  data_files: socratic.jsonl
---
# A card
"""


def rows(*answers):
    return "".join(
        json.dumps({"question": f"{answer} - 0 = ?", "answer": answer}) + "\n" for answer in answers
    ).encode()


class Hub:
    """What the server serves, and how it misbehaves."""

    def __init__(self):
        self.files = {
            "README.md": CARD.encode(),
            "main/train-00000-of-00002.jsonl": rows("1", "2"),
            "main/train-00001-of-00002.jsonl": rows("3"),
            "main/test-00000-of-00001.jsonl": rows("4", "5"),
            "socratic.jsonl": rows("6"),
            "load.py": b"raise SystemExit('run from the hub')",
        }
        self.revisions = {"main": COMMIT, COMMIT: COMMIT, "old": OLD_COMMIT}
        self.token = None
        self.error = None
        self.cut_after = None
        self.missing = ()
        self.failing = ()
        self.listing = None
        self.served = []


def make_handler(hub):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def do_HEAD(self):
            self.answer(body=False)

        def do_GET(self):
            self.answer(body=True)

        def answer(self, body):
            path = unquote(urlsplit(self.path).path)
            if hub.error is not None:
                return self.refuse(*hub.error)
            if hub.token is not None and self.headers.get("Authorization") != f"Bearer {hub.token}":
                return self.refuse(401, "RepoNotFound")
            if path.startswith("/api/datasets/some/questions"):
                return self.list_files(path.rpartition("/revision/")[2] if "/revision/" in path else "main")
            prefix = "/datasets/some/questions/resolve/"
            if path.startswith(prefix):
                revision, _, name = path.removeprefix(prefix).partition("/")
                return self.send_file(revision, name, body)
            return self.refuse(404, "RepoNotFound")

        def list_files(self, revision):
            if revision not in hub.revisions:
                return self.refuse(404, "RevisionNotFound")
            if hub.listing is not None:
                return self.send(200, hub.listing, {"Content-Type": "text/html"})
            siblings = [{"rfilename": name, "size": len(content)} for name, content in hub.files.items()]
            info = {"_id": "1", "id": "some/questions", "sha": hub.revisions[revision], "siblings": siblings}
            self.send(200, json.dumps(info).encode(), {"Content-Type": "application/json"})

        def send_file(self, revision, name, body):
            if revision not in hub.revisions:
                return self.refuse(404, "RevisionNotFound")
            if name in hub.failing:
                return self.refuse(403, "Forbidden")
            if name not in hub.files or name in hub.missing:
                return self.refuse(404, "EntryNotFound")
            content = hub.files[name]
            headers = {
                "ETag": f'"{hashlib.sha1(content).hexdigest()}"',
                "X-Repo-Commit": hub.revisions[revision],
                "Accept-Ranges": "bytes",
            }
            if not body:
                return self.send(200, content, headers, body=False)
            hub.served.append(name)
            if hub.cut_after is not None and name != "README.md":
                self.send_response(200)
                for key, value in headers.items():
                    self.send_header(key, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content[: hub.cut_after])
                self.wfile.flush()
                self.close_connection = True
                return None
            return self.send(200, content, headers)

        def refuse(self, status, code):
            self.send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

        def send(self, status, content, headers, body=True):
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if body and self.command != "HEAD":
                self.wfile.write(content)

    return Handler


@contextmanager
def serving(hub):
    server = ThreadingHTTPServer(("127.0.0.1", 0), make_handler(hub))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


DRIVER = """
import sys, json
from exgrpo_cli.questions.audit import Tally
from exgrpo_cli.questions.layouts import NamedFields
from exgrpo_cli.questions.prepare import read_source
from exgrpo_cli.base.errors import ExgrpoError
steps = []
try:
    reading = read_source(sys.argv[1], NamedFields(), Tally(), lambda *step: steps.append(step))
except ExgrpoError as error:
    print(json.dumps({"error": str(error), "exit_code": error.exit_code}))
else:
    print(json.dumps({
        "answers": [question.answer for question in reading.questions], "revision": reading.revision,
        "split": reading.split, "source": reading.source,
        "fetched": [step[:2] for step in steps if step[2] == "fetching files"],
    }))
"""


def read(source, endpoint, home, **variables):
    """Read a source in a process of its own, because the hub's client reads its variables when it is imported."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    environment |= {"HF_HUB_DISABLE_TELEMETRY": "1", **variables}
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, source], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a/b", ("a/b", "main", ())),
        ("openai/gsm8k:main", ("openai/gsm8k", "main", ("main",))),
        ("a/b.c-d@v1.0:test", ("a/b.c-d", "v1.0", ("test",))),
        ("a/b@refs/convert/parquet:main:test", ("a/b", "refs/convert/parquet", ("main", "test"))),
    ],
)
def test_hub_ids(text, parts):
    hub = parse_hub_id(text)
    assert (hub.repo, hub.revision, hub.selectors) == parts


@pytest.mark.parametrize("text", ["gsm8k", "a/b/c", "a b/c", "/a/b"])
def test_what_is_no_hub_id(text):
    assert parse_hub_id(text) is None


def test_a_data_set_is_read_cached_and_read_again_offline(tmp_path):
    hub = Hub()
    with serving(hub) as endpoint:
        found = read("some/questions:main", endpoint, tmp_path)
        assert found["answers"] == ["1", "2", "3"]
        assert (found["source"], found["revision"], found["split"]) == ("some/questions", COMMIT, "main/train")
        # Three rows of the two parts; the progress ends with all of their bytes.
        size = len(hub.files["main/train-00000-of-00002.jsonl"]) + len(hub.files["main/train-00001-of-00002.jsonl"])
        assert found["fetched"][-1] == [size, size] and len(found["fetched"]) >= 3
        # Only the card and the chosen files were fetched, and nothing of the repository was run.
        assert sorted(hub.served) == [
            "README.md",
            "main/train-00000-of-00002.jsonl",
            "main/train-00001-of-00002.jsonl",
        ]
        hub.served.clear()
        assert read("some/questions:main:train", endpoint, tmp_path)["answers"] == ["1", "2", "3"]
        assert hub.served == []
    offline = read("some/questions:main", "http://127.0.0.1:9", tmp_path, HF_HUB_OFFLINE="1")
    assert (offline["answers"], offline["revision"]) == (["1", "2", "3"], COMMIT)
    missing = read("some/questions@old:main", "http://127.0.0.1:9", tmp_path, HF_HUB_OFFLINE="1")
    assert missing["exit_code"] == 2 and "some/questions@old is not in the cache" in missing["error"]


def test_offline_a_part_of_a_data_set_is_not_taken_for_the_whole(tmp_path):
    nowhere, offline = "http://127.0.0.1:9", {"HF_HUB_OFFLINE": "1"}
    hub = Hub()
    with serving(hub) as endpoint:
        assert read("some/questions:main:test", endpoint, tmp_path)["answers"] == ["4", "5"]
        # The only split in the cache is not the one that is asked for.
        train = read("some/questions:main", nowhere, tmp_path, **offline)
        assert train["exit_code"] == 2
        assert "without main/train-00000-of-00002.jsonl (2 of 2 files) and HF_HUB_OFFLINE is set" in train["error"]
        assert read("some/questions:main:test", nowhere, tmp_path, **offline)["answers"] == ["4", "5"]
    # The names do not tell how many files there are.
    hub.files, hub.failing = {"train_a.jsonl": rows("1"), "train_b.jsonl": rows("2")}, ("train_b.jsonl",)
    with serving(hub) as endpoint:
        broken = read("some/questions", endpoint, tmp_path / "other")
        assert broken["exit_code"] == 1 and "broke off (403 Forbidden" in broken["error"]
        half = read("some/questions", nowhere, tmp_path / "other", **offline)
        assert half["exit_code"] == 2 and "without train_b.jsonl (1 of 2 files)" in half["error"]
    # What another program fetched is all there.
    for listing in tmp_path.glob("other/hub/*/.listings/*"):
        listing.unlink()
    assert read("some/questions", nowhere, tmp_path / "other", **offline)["answers"] == ["1"]


def test_a_server_that_is_no_hub(tmp_path):
    hub = Hub()
    hub.listing = b"<html>Please log in</html>"
    with serving(hub) as endpoint:
        refused = read("some/questions", endpoint, tmp_path)
    assert refused["exit_code"] == 2 and "does not answer as a hub does" in refused["error"]


def test_split_configuration_revision_and_token(tmp_path):
    hub = Hub()
    hub.token = "hf_secret"
    with serving(hub) as endpoint:
        chosen = read("some/questions@old:main:test", endpoint, tmp_path, HF_TOKEN="hf_secret")
        assert (chosen["answers"], chosen["revision"], chosen["split"]) == (["4", "5"], OLD_COMMIT, "main/test")
        refused = read("some/questions:main", endpoint, tmp_path)
        assert refused["exit_code"] == 2
        assert "no data set 'some/questions', or it is private: check the id, and HF_TOKEN" in refused["error"]


def test_open_choices_and_unknown_names_are_listed(tmp_path):
    with serving(Hub()) as endpoint:
        open_choice = read("some/questions", endpoint, tmp_path)
        assert (
            "has the configurations main, socratic: say which, for example some/questions:main" in open_choice["error"]
        )
        unknown = read("some/questions:main:tset", endpoint, tmp_path)
        assert "has no split 'tset'. Did you mean 'test'?" in unknown["error"]
        assert open_choice["exit_code"] == unknown["exit_code"] == 2


def test_wrong_revision_unknown_data_set_and_missing_file(tmp_path):
    hub = Hub()
    with serving(hub) as endpoint:
        wrong = read("some/questions@nowhere:main", endpoint, tmp_path)
        assert wrong["exit_code"] == 2 and "some/questions has no revision 'nowhere'" in wrong["error"]
        unknown = read("other/questions", endpoint, tmp_path)
        assert unknown["exit_code"] == 2 and "no data set 'other/questions'" in unknown["error"]
        hub.missing = ("main/train-00001-of-00002.jsonl",)
        gone = read("some/questions:main", endpoint, tmp_path)
        assert gone["exit_code"] == 2 and "lists a file that is not there" in gone["error"]


def test_a_broken_download_leaves_nothing_half_and_the_next_one_fetches_what_is_not_whole(tmp_path):
    hub = Hub()
    hub.cut_after = 10
    with serving(hub) as endpoint:
        broken = read("some/questions:main", endpoint, tmp_path, HF_HUB_DOWNLOAD_TIMEOUT="2")
        assert (
            broken["exit_code"] == 1 and "broke off" in broken["error"] and "run the command again" in broken["error"]
        )
        snapshot = tmp_path / "hub" / "datasets--some--questions" / "snapshots" / COMMIT
        assert sorted(path.name for path in snapshot.rglob("*") if path.is_file()) == ["README.md"]
        hub.cut_after = None
        hub.served.clear()
        assert read("some/questions:main", endpoint, tmp_path)["answers"] == ["1", "2", "3"]
        # The card was whole.
        assert hub.served == ["main/train-00000-of-00002.jsonl", "main/train-00001-of-00002.jsonl"]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ((403, "GatedRepo"), "is gated: accept its terms"),
        ((401, "Unauthorized"), "HF_TOKEN"),
    ],
)
def test_refusals_say_what_to_do(tmp_path, error, message):
    hub = Hub()
    hub.error = error
    with serving(hub) as endpoint:
        refused = read("some/questions:main", endpoint, tmp_path)
        assert refused["exit_code"] == 2 and message in refused["error"]


def test_a_hub_that_does_not_answer(tmp_path):
    refused = read("some/questions:main", "http://127.0.0.1:9", tmp_path)
    assert refused["exit_code"] == 1 and "HF_HUB_OFFLINE=1 uses the cache" in refused["error"]


def test_a_data_set_with_a_loading_script_alone_is_not_run(tmp_path):
    hub = Hub()
    hub.files = {"load.py": hub.files["load.py"]}
    with serving(hub) as endpoint:
        refused = read("some/questions", endpoint, tmp_path)
        assert "loading script load.py is not run; try some/questions@refs/convert/parquet" in refused["error"]
        assert hub.served == []
