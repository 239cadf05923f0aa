"""A small Hugging Face hub on this machine: repositories, uploads (preupload, large files, commits) and downloads."""

import base64
import hashlib
import itertools
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

TOKEN = "hf_writerwriterwriterwriter"
READER = "hf_readerreaderreaderreader"
LARGE = (".parquet", ".safetensors", ".png")
"""Ends of the names of files that go up as large ones."""


def git_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@dataclass
class Repository:
    """One repository with the files of its newest commit."""

    private: bool = False
    files: dict[str, bytes] = field(default_factory=dict)
    large: set[str] = field(default_factory=set)
    commits: int = 0

    @property
    def sha(self) -> str:
        return f"{self.commits:040x}"

    def entry(self, name: str) -> dict:
        """A file as listings have it."""
        content = self.files[name]
        entry = {"type": "file", "path": name, "size": len(content), "oid": git_oid(content)}
        if name in self.large:
            entry["lfs"] = {"oid": sha256(content), "size": len(content), "pointerSize": 130}
        return entry


@dataclass
class LocalHub:
    """What the server keeps, what it was asked, and how it misbehaves."""

    endpoint: str = ""
    repositories: dict[tuple[str, str], Repository] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    uploaded: list[str] = field(default_factory=list)
    """Object ids in the order in which they arrived."""
    begun: Iterator[int] = field(default_factory=itertools.count)
    """Number of each upload as it begins: the client sends several at once, before any has arrived."""
    downloaded: list[str] = field(default_factory=list)
    """Names of the files whose contents were asked for."""
    refuse_after: int | None = None
    """Large files that are taken before all others are refused."""
    refusals: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Part of a path to the status and error code with which it is refused; status 200 is a page of somebody else."""
    cut_after: int | None = None
    """Bytes of a file, other than a card, after which its download breaks off."""
    hang_after: int | None = None
    """Large files that are taken before one is left hanging."""
    hanging: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: LocalHub

    def log_message(self, *_: object) -> None: ...

    def do_POST(self) -> None:
        content = self._body()
        path = urlsplit(self.path).path
        if path == "/api/validate-yaml":
            return self._json(200, {"warnings": [], "errors": []})
        if path.endswith("/info/lfs/objects/batch"):
            return self._batch(json.loads(content))
        if "/paths-info/" in path:
            return self._paths_info(path, content)
        if self._user() != "writer":
            return self._refuse(401 if self._user() is None else 403, "")
        if path == "/api/repos/create":
            return self._create(json.loads(content))
        repository = self._repository(path)
        if repository is None:
            return self._refuse(404, "RepoNotFound")
        if "/preupload/" in path:
            return self._preupload(repository, json.loads(content))
        name = path.removeprefix("/api/").removeprefix("models/").partition("/commit/")[0]
        return self._commit(name, repository, [json.loads(line) for line in content.splitlines()])

    def do_PUT(self) -> None:
        hub, oid = self.hub, self.path.rpartition("/")[2]
        number = next(hub.begun)
        if hub.hang_after is not None and number >= hub.hang_after:
            hub.hanging.set()
            hub.released.wait(30)
        content = self._body()
        if hub.refuse_after is not None and number >= hub.refuse_after:
            return self._refuse(400, "")
        assert sha256(content) == oid
        hub.objects[oid] = content
        hub.uploaded.append(oid)
        self._json(200, {})

    def _create(self, asked: dict) -> None:
        kind, name = asked.get("type", "model"), f"{asked['organization']}/{asked['name']}"
        if (kind, name) in self.hub.repositories:
            return self._json(409, {"error": "exists", "url": f"{self.hub.endpoint}/{name}"})
        private = asked.get("private", False) or asked.get("visibility") == "private"
        self.hub.repositories[kind, name] = Repository(private=private)
        self._json(200, {"url": f"{self.hub.endpoint}/{name}", "name": name, "id": name})

    def _preupload(self, repository: Repository, asked: dict) -> None:
        files = []
        for file in asked["files"]:
            name = file["path"]
            mode = "lfs" if name.endswith(LARGE) else "regular"
            there = repository.files.get(name)
            oid = None if there is None else sha256(there) if mode == "lfs" else git_oid(there)
            files.append({"path": name, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self._json(200, {"files": files})

    def _batch(self, asked: dict) -> None:
        objects = [{"oid": each["oid"], "size": each["size"]} for each in asked["objects"]]
        for each in objects:
            if each["oid"] not in self.hub.objects:
                each["actions"] = {"upload": {"href": f"{self.hub.endpoint}/lfs/{each['oid']}"}}
        self._json(200, {"transfer": "basic", "objects": objects})

    def _commit(self, name: str, repository: Repository, lines: list[dict]) -> None:
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                repository.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                repository.files[value["path"]] = self.hub.objects[value["oid"]]
                repository.large.add(value["path"])
            elif line["key"] == "deletedFile":
                del repository.files[value["path"]]
        repository.commits += 1
        address = f"{self.hub.endpoint}/{name}/commit/{repository.sha}"
        self._json(200, {"commitUrl": address, "commitOid": repository.sha})

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        for part, (status, code) in self.hub.refusals.items():
            if part in path:
                return self._send(status, b"<html>refused", {"X-Error-Code": code})
        if path == "/api/whoami-v2":
            return self._json(200, {"name": "me"}) if self._user() else self._refuse(401, "")
        repository = self._repository(path)
        if repository is None or (repository.private and self._user() is None):
            return self._refuse(401 if self._user() is None else 404, "RepoNotFound")
        revision = re.search(r"/(?:resolve|revision)/([^/]+)", path)
        if revision is not None and revision[1] not in ("main", repository.sha):
            return self._refuse(404, "RevisionNotFound")
        if "/resolve/" in path:
            return self._file(repository, path)
        if "/tree/" in path:
            return self._json(200, self._entries(repository, path.split("/tree/")[1].partition("/")[2]))
        siblings = [{"rfilename": name, "size": len(content)} for name, content in repository.files.items()]
        name = "/".join(path.split("/")[3:5])
        self._json(200, {"_id": "1", "id": name, "sha": repository.sha, "siblings": siblings, "tags": []})

    do_HEAD = do_GET

    def _file(self, repository: Repository, path: str) -> None:
        name = path.split("/resolve/")[1].partition("/")[2]
        if name not in repository.files:
            return self._refuse(404, "EntryNotFound")
        content = repository.files[name]
        headers = {"ETag": f'"{sha256(content)}"', "X-Repo-Commit": repository.sha}
        if self.command == "HEAD":
            return self._send(200, content, headers)
        self.hub.downloaded.append(name)
        if self.hub.cut_after is not None and not name.endswith(".md"):
            self.close_connection = True
            headers["Content-Length"] = str(len(content))
            return self._send(200, content[: self.hub.cut_after], headers)
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, end = int(asked[1]), min(int(asked[2] or len(content)) + 1, len(content))
            headers["Content-Range"] = f"bytes {first}-{end - 1}/{len(content)}"
            return self._send(206, content[first:end], headers)
        self._send(200, content, headers)

    def _paths_info(self, path: str, content: bytes) -> None:
        repository = self._repository(path)
        if repository is None:
            return self._refuse(404, "RepoNotFound")
        fields = content.decode()
        wanted = json.loads(fields)["paths"] if fields.startswith("{") else parse_qs(fields)["paths"]
        self._json(200, [repository.entry(name) for name in repository.files if name in wanted])

    def _entries(self, repository: Repository, folder: str) -> list[dict]:
        deep = "recursive=true" in self.path.lower()
        prefix = f"{folder}/" if folder else ""
        entries: dict[str, dict] = {}
        for name in repository.files:
            if not name.startswith(prefix):
                continue
            *parents, _ = name.removeprefix(prefix).split("/")
            for depth in range(1, len(parents) + 1 if deep else min(len(parents), 1) + 1):
                path = prefix + "/".join(parents[:depth])
                entries[path] = {"type": "directory", "path": path, "size": 0, "oid": "0" * 40}
            if deep or not parents:
                entries[name] = repository.entry(name)
        return list(entries.values())

    def _repository(self, path: str) -> Repository | None:
        named = re.match(r"/(?:api/)?(?:(datasets|models)/)?([^/]+/[^/]+)", path)
        return self.hub.repositories.get(((named[1] or "models").removesuffix("s"), named[2]))

    def _user(self) -> str | None:
        users = {f"Bearer {TOKEN}": "writer", f"Bearer {READER}": "reader"}
        return users.get(self.headers.get("Authorization", ""))

    def _body(self) -> bytes:
        length = self.headers.get("Content-Length")
        if length is not None:
            return self.rfile.read(int(length))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b'{"error": "refused"}', {"X-Error-Code": code} if code else {})

    def _json(self, status: int, value: object) -> None:
        self._send(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@contextmanager
def local_hub() -> Iterator[LocalHub]:
    """A hub that serves while the body lasts."""
    hub = LocalHub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield hub
    finally:
        hub.released.set()
        server.shutdown()
        server.server_close()


def talk_to(endpoint: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process's client ask the hub at `endpoint` and keep what it fetches under `cache`."""
    from huggingface_hub import constants

    settings = {"ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": True, "HF_HUB_OFFLINE": False, "HF_HUB_CACHE": str(cache)}
    settings["HUGGINGFACE_CO_URL_TEMPLATE"] = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    for name, value in settings.items():
        monkeypatch.setattr(constants, name, value)
