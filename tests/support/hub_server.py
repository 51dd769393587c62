"""A small Hugging Face Hub on 127.0.0.1: search, repository info, tree, and files with ETag, ranges and redirects."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_right"
# Files of at least this size are LFS files: their ETag is the SHA-256, and they are served from another path, as by a
# CDN
LARGE = 4096


@dataclass
class Repo:
    """One repository: its files, and its entry in a search."""

    files: dict[str, bytes]
    about: dict[str, Any] = field(default_factory=dict)
    gated: bool = False
    private: bool = False
    head: str = COMMIT

    def is_lfs(self, name: str) -> bool:
        return is_lfs(name, len(self.files[name]))

    def etag(self, name: str) -> str:
        data = self.files[name]
        return hashlib.sha256(data).hexdigest() if self.is_lfs(name) else git_hash(data)


def is_lfs(name: str, size: int) -> bool:
    """Text is kept in git, however long."""
    return size >= LARGE and not name.endswith((".md", ".json", ".yaml"))


def git_hash(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class HubHandler(BaseHTTPRequestHandler):
    """Answers one connection; `stand_in` is set by a subclass of each stand-in."""

    stand_in: Any
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else a body waits 40 ms for the acknowledgement of its headers

    def log_message(self, *_: Any) -> None: ...

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        split = urlsplit(self.path)
        path = unquote(split.path)
        self.stand_in.asked.append(f"{self.command} {path}")
        if self.stand_in.down:
            self.close_connection = True
            self.connection.close()
            return
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token not in ("", TOKEN):
            self._error(401, message="Invalid credentials in Authorization header")
        elif match := re.fullmatch(r"/api/(models|datasets)", path):
            self._search(match[1], parse_qs(split.query))
        elif match := re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)/tree/[^/]+(?:/(.+))?", path):
            is_deep = parse_qs(split.query).get("recursive", [""])[0].lower() == "true"
            self._tree(match[1], match[2], token, f"{match[3]}/" if match[3] else "", is_deep)
        elif match := re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/revision/[^/]+)?", path):
            self._about(match[1], match[2], token)
        elif match := re.fullmatch(r"(/cdn)?/(?:(datasets)/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._file(match[2] or "models", match[3], match[5], token, from_cdn=bool(match[1]))
        else:
            self._error(404, "EntryNotFound")

    def _search(self, kind: str, query: dict[str, list[str]]) -> None:
        words = query.get("search", [""])[0].lower()
        tags = set(query.get("filter", []))
        matches = [
            {"id": id_, "modelId": id_, "gated": repo.gated, **repo.about}
            for id_, repo in self.stand_in.repos[kind].items()
            if words in id_.lower() and not repo.private and tags <= set(repo.about.get("tags", []))
        ]
        self._json(matches[: int(query.get("limit", ["1000"])[0])])

    def _repo(self, kind: str, id_: str, token: str) -> Repo | None:
        repo = self.stand_in.repos[kind].get(id_)
        if repo is None or (repo.private and token != TOKEN):
            self._error(404 if token else 401, "RepoNotFound", "Repository not found")
            return None
        return repo

    def _about(self, kind: str, id_: str, token: str) -> None:
        repo = self._repo(kind, id_, token)
        if repo is None:
            return
        about = {"id": id_, "sha": repo.head, "gated": repo.gated, "private": repo.private, "tags": []}
        self._json({**about, "siblings": [self._sibling(repo, name) for name in repo.files], **repo.about})

    def _tree(self, kind: str, id_: str, token: str, folder: str, is_deep: bool) -> None:
        repo = self._repo(kind, id_, token)
        if repo is None:
            return
        inside = [name for name in repo.files if name.startswith(folder)]
        if folder and not inside:
            self._error(404, "EntryNotFound", "Entry not found")
            return
        folders = dict.fromkeys(
            name[: at + len(folder)] for name in inside if (at := name[len(folder) :].find("/")) >= 0
        )
        listed = [name for name in inside if is_deep or "/" not in name[len(folder) :]]
        self._json(
            [{"type": "directory", "path": path, "size": 0, "oid": git_hash(path.encode())} for path in folders]
            + [self._entry(repo, name) for name in listed]
        )

    @staticmethod
    def _sibling(repo: Repo, name: str) -> dict[str, Any]:
        size, sha = len(repo.files[name]), repo.etag(name)
        lfs = {"lfs": {"sha256": sha, "size": size, "pointerSize": 130}} if repo.is_lfs(name) else {}
        return {"rfilename": name, "size": size, "blobId": sha[:40], **lfs}

    @staticmethod
    def _entry(repo: Repo, name: str) -> dict[str, Any]:
        size = len(repo.files[name])
        lfs = {"lfs": {"oid": repo.etag(name), "size": size, "pointerSize": 130}} if repo.is_lfs(name) else {}
        return {"type": "file", "path": name, "size": size, "oid": repo.etag(name)[:40], **lfs}

    def _file(self, kind: str, id_: str, name: str, token: str, *, from_cdn: bool) -> None:
        repo = self._repo(kind, id_, token) if not from_cdn else self.stand_in.repos[kind][id_]
        if repo is None:
            return
        if repo.gated and not token and not from_cdn:
            self._error(403, "GatedRepo", "Access to this repository is restricted")
        elif name not in repo.files:
            self._error(404, "EntryNotFound", "Entry not found")
        elif repo.is_lfs(name) and not from_cdn:
            self._redirect(repo, name)
        else:
            self._send(repo, name)

    def _redirect(self, repo: Repo, name: str) -> None:
        self.send_response(302)
        # Another host name makes it another origin, as a CDN is: a token must not travel there.
        self.send_header("Location", f"http://localhost:{self.server.server_port}/cdn{self.path}")  # type: ignore[attr-defined]
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("X-Linked-Etag", f'"{repo.etag(name)}"')
        self.send_header("X-Linked-Size", str(len(repo.files[name])))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send(self, repo: Repo, name: str) -> None:
        data, begin = repo.files[name], 0
        if self.stand_in.damage and len(data) >= LARGE:
            data = bytes([data[0] ^ 1]) + data[1:]
        ranged = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        if ranged and self.stand_in.knows_ranges:
            begin = int(ranged[1])
        self.send_response(206 if ranged and self.stand_in.knows_ranges else 200)
        if ranged and self.stand_in.knows_ranges:
            self.send_header("Content-Range", f"bytes {begin}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - begin))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{repo.etag(name)}"')
        self.end_headers()
        if self.command == "GET":
            self._pour(name, data, begin)

    def _pour(self, name: str, data: bytes, begin: int) -> None:
        hub = self.stand_in
        for at in range(begin, len(data), hub.chunk):
            if len(data) >= LARGE and self._breaks(at):
                self.close_connection = True
                self.connection.close()
                return
            hub.pace.wait()
            piece = data[at : at + hub.chunk]
            try:
                self.wfile.write(piece)
            except OSError:
                return
            hub.sent[name] += len(piece)

    def _breaks(self, at: int) -> bool:
        hub = self.stand_in
        if hub.down_after and at >= hub.down_after:
            hub.down = True
            return True
        if hub.break_after and at >= hub.break_after:
            hub.break_after = 0
            return True
        return False

    def _json(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def _error(self, status: int, code: str = "", message: str = "") -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        if message:
            self.send_header("X-Error-Message", message)
        self.send_header("Content-Length", "0")
        self.end_headers()


class HubStandIn:
    """Serve with `with HubStandIn({...}) as hub:`; `hub.url` is what HF_ENDPOINT should be."""

    handler = HubHandler

    def __init__(self, models: dict[str, Repo] | None = None, datasets: dict[str, Repo] | None = None) -> None:
        self.repos = {"models": models or {}, "datasets": datasets or {}}
        self.break_after = self.down_after = 0
        self.damage, self.knows_ranges = False, True
        self.chunk, self.pace = 1 << 14, threading.Event()
        self.pace.set()
        self.sent, self.asked, self.down = Counter[str](), list[str](), False
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (self.handler,), {"stand_in": self}))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.pace.set()
        self._server.shutdown()
        self._server.server_close()
