"""A small Hub on 127.0.0.1 for the real client: revisions, LFS redirects to another host, tokens, faults on demand."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

LFS_BYTES = 4096  # from which on a file lies in the other store
TOKEN = "hf_of_the_test"


@dataclass
class Repository:
    """Commits of one repository; `main` is the last one. `gated`: nobody may read it; `private`: only `TOKEN` may."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    private: bool = False

    def commit(self, files: Mapping[str, bytes] | Path, tag: str = "") -> str:
        """Add a commit, and a tag of it; return its hash."""
        if isinstance(files, Path):
            paths = (path for path in files.rglob("*") if path.is_file())
            files = {str(path.relative_to(files)): path.read_bytes() for path in paths}
        commit = hashlib.sha1(repr((len(self.commits), sorted(files))).encode()).hexdigest()
        self.commits[commit] = dict(files)
        self.refs |= {"main": commit, **({tag: commit} if tag else {})}
        return commit


class LocalHub:
    """Repositories by name, and what clients did: `sent` counts GETs of whole files and of rests of them.

    `cuts`: file → how many times its connection breaks in the middle. `down`: every answer is 503.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.sent: Counter[str] = Counter()
        self.asked: list[str] = []
        self.tokens_at_store: list[str] = []
        self.cuts: Counter[str] = Counter()
        self.down = False
        self.port = 0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def repository(
        self, name: str, files: Mapping[str, bytes] | Path | None = None, **options: Any
    ) -> Repository:
        made = self.repositories.setdefault(name, Repository(**options))
        if files:
            made.commit(files)
        return made

    @property
    def downloaded(self) -> set[str]:
        return {file for file, count in self.sent.items() if count}


@contextmanager
def local_hub() -> Iterator[LocalHub]:
    """Run a Hub until the end of the block."""
    hub = LocalHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    server.daemon_threads = True
    hub.port = server.server_address[1]
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def environment(hub: LocalHub, folder: Path) -> dict[str, str]:
    """Return the variables by which a process of its own uses this Hub and a cache in `folder`."""
    return {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(folder), "HF_HUB_OFFLINE": "0", "HF_TOKEN": ""}


def use(hub: LocalHub, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Let huggingface_hub, and processes that are started from here, use this Hub and a cache in `folder`."""
    import huggingface_hub
    from huggingface_hub import constants

    for name, value in environment(hub, folder).items():
        patch.setenv(name, value)
    patch.setattr(constants, "ENDPOINT", hub.endpoint)
    template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    patch.setattr(constants, "HF_URL_HOSTS", frozenset({"127.0.0.1"}))
    patch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
    patch.setattr(constants, "HF_TOKEN_PATH", str(folder / "token"))
    patch.setattr(constants, "HF_HUB_OFFLINE", False)
    huggingface_hub.close_session()


def _handler(hub: LocalHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None: ...

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.asked.append(f"{self.command} {path}")
            if hub.down:
                self._fail(503, "")
            elif found := re.fullmatch(r"/store/([0-9a-f]{64})/(.+)", path):
                hub.tokens_at_store.append(self.headers.get("Authorization", ""))
                self._send(found[2], self._stored(found[1]), found[1])
            elif found := re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)(?:/(revision|tree)/(.+))?", path):
                self._api(found[1], found[2], found[3] or "main")
            elif found := re.fullmatch(r"/([\w.-]+/[\w.-]+)/resolve/([^/]+)/(.+)", path):
                self._resolve(*found.groups())
            else:
                self._fail(404, "RepoNotFound")

        def do_POST(self) -> None:
            """Take what `HfApi.upload_folder` sends, every file in the commit itself."""
            path = unquote(urlsplit(self.path).path)
            lines = self.rfile.read(int(self.headers["Content-Length"])).splitlines()
            sent = [json.loads(line) for line in lines]
            hub.asked.append(f"POST {path}")
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                self._fail(401, "")
            elif path == "/api/repos/create":
                name = f"{sent[0]['organization']}/{sent[0]['name']}"
                hub.repository(name, {".gitattributes": b""}, private=sent[0].get("private") is True)
                self._json({"url": f"{hub.endpoint}/{name}"})
            elif found := re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)/preupload/main", path):
                files = [{"path": file["path"], "uploadMode": "regular"} for file in sent[0]["files"]]
                self._json({"files": [{**file, "shouldIgnore": False} for file in files]})
            elif found := re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)/commit/main", path):
                added = (line["value"] for line in sent if line["key"] == "file")
                commit = hub.repositories[found[1]].commit(
                    {file["path"]: base64.b64decode(file["content"]) for file in added}
                )
                self._json({"commitUrl": f"{hub.endpoint}/{found[1]}/commit/{commit}", "commitOid": commit})
            else:
                self._fail(404, "")

        def _files(self, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
            repository = hub.repositories.get(name)
            signed = self.headers.get("Authorization") == f"Bearer {TOKEN}"
            if repository is None or (repository.private and not signed):
                self._fail(401, "RepoNotFound")
            elif repository.gated:
                self._fail(403, "GatedRepo")
            elif (commit := repository.refs.get(revision, revision)) not in repository.commits:
                self._fail(404, "RevisionNotFound")
            else:
                return commit, repository.commits[commit]
            return None

        def _api(self, name: str, what: str | None, revision: str) -> None:
            if (held := self._files(name, revision)) is None:
                return
            commit, files = held
            if what == "tree":
                self._json([_entry(path, data) for path, data in files.items()])
            else:
                self._json({"id": name, "modelId": name, "sha": commit, "siblings": []})

        def _resolve(self, name: str, revision: str, file: str) -> None:
            if (held := self._files(name, revision)) is None:
                return
            commit, files = held
            if file not in files:
                self._fail(404, "EntryNotFound", {"X-Repo-Commit": commit})
                return
            data, head = files[file], {"X-Repo-Commit": commit}
            if len(data) < LFS_BYTES:
                self._send(file, data, _blob_id(data), head)
                return
            sha = hashlib.sha256(data).hexdigest()
            place = f"http://localhost:{hub.port}/store/{sha}/{file}"
            linked = {"X-Linked-Etag": f'"{sha}"', "X-Linked-Size": str(len(data)), "Location": place}
            self._head(302, {**head, **linked, "ETag": f'"{sha}"', "Content-Length": "0"})

        def _stored(self, sha: str) -> bytes:
            every = (
                data
                for one in hub.repositories.values()
                for files in one.commits.values()
                for data in files.values()
            )
            return next(data for data in every if hashlib.sha256(data).hexdigest() == sha)

        def _send(self, file: str, data: bytes, tag: str, head: Mapping[str, str] = {}) -> None:
            head = {**head, "ETag": f'"{tag}"', "Accept-Ranges": "bytes"}
            first = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
            body, status = data, 200
            if first:
                body, status = data[int(first[1]) :], 206
                head["Content-Range"] = f"bytes {first[1]}-{len(data) - 1}/{len(data)}"
            self._head(status, {**head, "Content-Length": str(len(body))})
            if self.command == "HEAD":
                return
            hub.sent[f"{file} from {first[1]}" if first else file] += 1
            if hub.cuts[file]:
                hub.cuts[file] -= 1
                self.wfile.write(body[: len(body) // 2])
                self.wfile.flush()
                self.close_connection = True
                self.connection.shutdown(2)
                return
            self.wfile.write(body)

        def _json(self, value: Any) -> None:
            data = json.dumps(value).encode()
            self._head(200, {"Content-Type": "application/json", "Content-Length": str(len(data))})
            self.wfile.write(data)

        def _fail(self, status: int, code: str, head: Mapping[str, str] = {}) -> None:
            named = {"X-Error-Code": code} if code else {}
            self._head(status, {**head, **named, "Content-Length": "0"})

        def _head(self, status: int, head: Mapping[str, str]) -> None:
            self.send_response(status)
            for name, value in head.items():
                self.send_header(name, value)
            self.end_headers()

    return Handler


def _blob_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _entry(path: str, data: bytes) -> dict[str, Any]:
    entry = {"type": "file", "path": path, "size": len(data), "oid": _blob_id(data)}
    if len(data) >= LFS_BYTES:
        lfs = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
        entry["lfs"] = lfs
    return entry
