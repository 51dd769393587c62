"""A small Hugging Face Hub on 127.0.0.1: search, repository info, tree, and files with ETag, ranges and redirects.

It takes uploads too: accounts, new repositories, LFS objects whole and in parts, commits.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

TIME = "2026-11-29T09:00:00.000Z"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_right"
# Files of at least this size are LFS files: their ETag is the SHA-256, and they come from another host
LARGE = 4096
CHUNK = 1 << 14  # bytes of a body that are read at a time
# What the Hub puts into a repository that it creates
NEW_FILES = {".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"}


def _hardware(name: str, title: str, cents_per_hour: int, *gpu: str) -> dict[str, Any]:
    accelerator = dict(zip(("quantity", "model", "vram"), gpu, strict=False)) | {
        "type": "gpu",
        "manufacturer": "Nvidia",
    }
    micro = round(cents_per_hour * 1e4 / 60)
    about = {"name": name, "prettyName": title, "cpu": "4 vCPU", "ram": "15 GB", "unitLabel": "minute"}
    return about | {"accelerator": accelerator if gpu else None, "unitCostMicroUSD": micro, "unitCostUSD": micro / 1e6}


# As /api/jobs/hardware has it, in its order
HARDWARE = [
    _hardware("cpu-basic", "CPU Basic", 1),
    _hardware("a10g-small", "Nvidia A10G - small", 100, "1", "A10G", "24 GB"),
    _hardware("t4-small", "Nvidia T4 - small", 40, "1", "T4", "16 GB"),
    _hardware("h200x2", "2x Nvidia H200", 1000, "2", "H200", "282 GB"),
]


@dataclass
class Repo:
    """One repository: its files, and its entry in a search."""

    files: dict[str, bytes]
    about: dict[str, Any] = field(default_factory=dict)
    gated: bool = False
    private: bool = False
    head: str = COMMIT
    revisions: dict[str, Repo] = field(default_factory=dict)  # branch or tag → the repository at it, besides main

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


@dataclass
class Commit:
    """One commit that arrived: its title, and what it changed."""

    title: str
    added: list[str]
    deleted: list[str]


@dataclass
class Job:
    """A job of the Hub, whose `work` runs in a thread."""

    id: str
    spec: dict[str, Any]
    stage: str = "RUNNING"
    message: str | None = None
    lines: list[str] = field(default_factory=list[str])

    def is_over(self) -> bool:
        return self.stage not in ("SCHEDULING", "RUNNING")


@dataclass
class Fault:
    """An answer in place of the right one, to requests whose "METHOD path" matches `where`, so many times."""

    where: str
    status: int
    times: int = 1
    message: str = ""


class HubHandler(BaseHTTPRequestHandler):
    """Answers one connection; `stand_in` is set by a subclass of each stand-in."""

    stand_in: HubStandIn
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else a body waits 40 ms for the acknowledgement of its headers

    def log_message(self, *_: Any) -> None: ...

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self.stand_in.moment()
        if not self._is_at_fault():
            self._answer()
            self.stand_in.moment()

    def do_POST(self) -> None:
        self._take()

    def do_PUT(self) -> None:
        self._take()

    def _answer(self) -> None:
        split = urlsplit(self.path)
        path = unquote(split.path)
        self.stand_in.asked.append(f"{self.command} {path}")
        if self.stand_in.down:
            self.close_connection = True
            self.connection.close()
            return
        token = self._token()
        if path == "/api/whoami-v2":
            self._whoami()
        elif path == "/api/jobs/hardware":
            self._json(HARDWARE)
        elif path.startswith(("/api/jobs/", "/api/buckets/", "/buckets/")) and token != TOKEN:
            self._error(401, message="Invalid credentials in Authorization header")
        elif match := re.fullmatch(r"/api/jobs/[^/]+/([^/]+)(/logs|/metrics)?", path):
            self._job(match[1], match[2])
        elif match := re.fullmatch(r"/api/buckets/([^/]+/[^/]+)(?:/tree/(.*))?", path):
            self._bucket(match[1], match[2])
        elif match := re.fullmatch(r"/api/buckets/[^/]+/[^/]+/xet-(?:write|read-(\d+))-token", path):
            # hf_xet reads and writes such a storage itself, in one process at a time
            place = self.stand_in.storage(match[1])
            self._json({"casUrl": f"local://{place}", "accessToken": "of the storage", "exp": 4_000_000_000})
        elif match := re.fullmatch(r"/buckets/([^/]+/[^/]+)/resolve/(.+)", path):
            self._bucket_file(match[1], match[2])
        elif token not in ("", TOKEN):
            self._error(401, message="Invalid credentials in Authorization header")
        elif match := re.fullmatch(r"/api/(models|datasets)", path):
            self._search(match[1], parse_qs(split.query))
        elif match := re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)/tree/([^/]+)(?:/(.+))?", path):
            is_deep = parse_qs(split.query).get("recursive", [""])[0].lower() == "true"
            self._tree(match[1], match[2], token, match[3], f"{match[4]}/" if match[4] else "", is_deep)
        elif match := re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/revision/([^/]+))?", path):
            self._about(match[1], match[2], token, match[3] or "main")
        elif match := re.fullmatch(r"(/cdn)?/(?:(datasets)/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._file(match[2] or "models", match[3], match[5], token, match[4], from_cdn=bool(match[1]))
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

    def _at(self, repo: Repo | None, revision: str) -> Repo | None:
        """The repository at a revision."""
        if repo is None or not repo.revisions or revision in ("main", repo.head):
            return repo
        found = (each for name, each in repo.revisions.items() if revision in (name, each.head))
        if (there := next(found, None)) is None:
            self._error(404, "RevisionNotFound", "Invalid rev id")
        return there

    def _about(self, kind: str, id_: str, token: str, revision: str) -> None:
        repo = self._at(self._repo(kind, id_, token), revision)
        if repo is None:
            return
        about = {"id": id_, "sha": repo.head, "gated": repo.gated, "private": repo.private, "tags": []}
        self._json({**about, "siblings": [self._entry(repo, name) for name in repo.files], **repo.about})

    def _tree(self, kind: str, id_: str, token: str, revision: str, folder: str, is_deep: bool) -> None:
        repo = self._at(self._repo(kind, id_, token), revision)
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
    def _entry(repo: Repo, name: str) -> dict[str, Any]:
        """A file as a tree has it, and as a sibling."""
        size, sha = len(repo.files[name]), repo.etag(name)
        lfs = {"lfs": {"oid": sha, "sha256": sha, "size": size, "pointerSize": 130}} if repo.is_lfs(name) else {}
        names = {"type": "file", "path": name, "rfilename": name}
        return names | {"size": size, "oid": sha[:40], "blobId": sha[:40]} | lfs

    def _file(self, kind: str, id_: str, name: str, token: str, revision: str, *, from_cdn: bool) -> None:
        repo = self._repo(kind, id_, token) if not from_cdn else self.stand_in.repos[kind][id_]
        repo = self._at(repo, revision)
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
        self.send_header("Location", f"{self.stand_in.url.replace('127.0.0.1', 'localhost')}/cdn{self.path}")
        self.send_header("X-Repo-Commit", repo.head)
        self.send_header("X-Linked-Etag", f'"{repo.etag(name)}"')
        self.send_header("X-Linked-Size", str(len(repo.files[name])))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send(self, repo: Repo, name: str) -> None:
        data = repo.files[name]
        if self.stand_in.damage and len(data) >= LARGE:
            data = bytes([data[0] ^ 1]) + data[1:]
        ranged = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        begin = int(ranged[1]) if ranged else 0
        self.send_response(206 if ranged else 200)
        if ranged:
            self.send_header("Content-Range", f"bytes {begin}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - begin))
        self.send_header("X-Repo-Commit", repo.head)
        self.send_header("ETag", f'"{repo.etag(name)}"')
        self.end_headers()
        if self.command == "GET":
            self._pour(name, data, begin)

    def _pour(self, name: str, data: bytes, begin: int) -> None:
        hub = self.stand_in
        for at in range(begin, len(data), CHUNK):
            if len(data) >= LARGE and hub.down_after and at >= hub.down_after:
                hub.down = self.close_connection = True
                self.connection.close()
                return
            piece = data[at : at + CHUNK]
            try:
                self.wfile.write(piece)
            except OSError:
                return
            hub.sent[name] += len(piece)

    def _take(self) -> None:
        hub = self.stand_in
        path = unquote(urlsplit(self.path).path)
        hub.asked.append(f"{self.command} {path}")
        hub.moment()
        body = self._body()
        if body is None or self._is_at_fault():
            return
        if self.command == "POST" and not path.startswith("/lfs/") and self._token() != TOKEN:
            return self._error(401, message="Invalid credentials in Authorization header")
        if path.startswith(("/lfs/", "/part/")) and self.headers.get("Authorization"):
            hub.token_leaks += 1
        for pattern, answer in (
            (r"/api/repos/create", self._create),
            (r"/api/validate-yaml", self._validate_card),
            (r"/api/models/([^/]+/[^/]+)/preupload/main", self._preupload),
            (r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", self._batch),
            (r"/lfs/([0-9a-f]{64})", self._whole),
            (r"/part/([0-9a-f]{64})/(\d+)", self._part),
            (r"/lfs/complete/([0-9a-f]{64})", self._complete),
            (r"/api/models/([^/]+/[^/]+)/commit/main", self._commit),
            (r"/api/buckets/([^/]+/[^/]+)", self._create_bucket),
            (r"/api/buckets/([^/]+/[^/]+)/batch", self._change_bucket),
            (r"/api/jobs/([^/]+)", self._submit),
            (r"/api/jobs/[^/]+/([^/]+)/cancel", self._cancel),
        ):
            if match := re.fullmatch(pattern, path):
                hub.moment()
                answer(body, *match.groups())
                hub.moment()
                return
        self._error(404, "EntryNotFound")

    def _token(self) -> str:
        return (self.headers.get("Authorization") or "").removeprefix("Bearer ")

    def _body(self) -> bytes | None:
        hub = self.stand_in
        left, pieces = int(self.headers.get("Content-Length") or 0), list[bytes]()
        while left:
            piece = self.rfile.read(min(CHUNK, left))
            if not piece:
                return None
            left -= len(piece)
            pieces.append(piece)
            hub.received += len(piece)
            hub.moment()
        return b"".join(pieces)

    def _is_at_fault(self) -> bool:
        hub = self.stand_in
        asked = f"{self.command} {unquote(urlsplit(self.path).path)}"
        for fault in hub.faults:
            if fault.times and re.search(fault.where, asked):
                fault.times -= 1
                if fault.status == 0:  # says nothing
                    time.sleep(hub.silence_s)
                    self.close_connection = True
                else:
                    self._error(fault.status, message=fault.message)
                return True
        return False

    def _whoami(self) -> None:
        if self._token() != TOKEN:
            return self._error(401, message=f"Invalid credentials: {self._token()}")
        token = {"displayName": "t", "role": "write"}
        auth = {"type": "access_token", "accessToken": token}
        self._json({"name": "someone", "type": "user", "orgs": [{"name": "a-lab"}], "auth": auth})

    def _create(self, body: bytes) -> None:
        asked = json.loads(body)
        id_ = f"{asked.get('organization') or 'someone'}/{asked['name']}"
        hub = self.stand_in
        if asked.get("organization") not in (None, "someone", "a-lab"):
            return self._error(403, message="You don't have the rights to create a model under this namespace")
        if id_ in hub.repos["models"]:
            return self._json({"error": "You already created this model repo", "url": f"{hub.url}/{id_}"}, 409)
        private = asked.get("visibility") == "private" or bool(asked.get("private"))
        hub.repos["models"][id_] = Repo(dict(NEW_FILES), private=private, head=git_hash(id_.encode()))
        self._json({"url": f"{hub.url}/{id_}", "name": id_, "id": "0"})

    def _validate_card(self, body: bytes) -> None:
        content = json.loads(body)["content"]
        if re.match(r"---\n.*?\n---\n", content, re.DOTALL):
            return self._json({"errors": [], "warnings": []})
        self._json({"errors": [{"message": "no metadata"}], "warnings": []}, 400)

    def _preupload(self, body: bytes, id_: str) -> None:
        repo = self._repo("models", id_, self._token())
        if repo is None:
            return
        files = []
        for file in json.loads(body)["files"]:
            path, mode = file["path"], "lfs" if is_lfs(file["path"], file["size"]) else "regular"
            oid = repo.etag(path) if path in repo.files else None
            files.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self._json({"files": files})

    def _batch(self, body: bytes, id_: str) -> None:
        asked = json.loads(body)
        self._json({"transfer": "multipart", "objects": [self._action(thing) for thing in asked["objects"]]})

    def _action(self, thing: dict[str, Any]) -> dict[str, Any]:
        hub = self.stand_in
        oid, size = thing["oid"], thing["size"]
        if oid in hub.objects:
            return {"oid": oid, "size": size}
        if size <= hub.part_size:
            return {"oid": oid, "size": size, "actions": {"upload": {"href": f"{hub.url}/lfs/{oid}"}}}
        hub.parts[oid] = {}  # a new multipart upload: parts of an earlier one are gone, as in S3
        numbers = range(1, -(-size // hub.part_size) + 1)
        header = {str(number): f"{hub.url}/part/{oid}/{number}" for number in numbers}
        header["chunk_size"] = str(hub.part_size)
        upload = {"href": f"{hub.url}/lfs/complete/{oid}", "header": header}
        return {"oid": oid, "size": size, "actions": {"upload": upload}}

    def _whole(self, body: bytes, oid: str) -> None:
        if self.command == "PUT":
            self._store(oid, body)

    def _part(self, body: bytes, oid: str, number: str) -> None:
        self.stand_in.parts[oid][int(number)] = body
        self.send_response(200)
        self.send_header("ETag", f'"{hashlib.md5(body).hexdigest()}"')
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _complete(self, body: bytes, oid: str) -> None:
        parts = self.stand_in.parts[oid]
        listed = [part["partNumber"] for part in json.loads(body)["parts"]]
        self._store(oid, b"".join(parts[number] for number in listed))

    def _store(self, oid: str, data: bytes) -> None:
        hub = self.stand_in
        if hashlib.sha256(data).hexdigest() != oid:
            return self._error(400, message="The checksum is another")
        hub.stored[oid] += 1
        hub.objects[oid] = data
        self._json({})

    def _commit(self, body: bytes, id_: str) -> None:
        hub = self.stand_in
        repo = self._repo("models", id_, self._token())
        if repo is None:
            return
        header, *changes = [json.loads(line) for line in body.splitlines()]
        if header["value"].get("parentCommit") not in (None, repo.head):
            return self._error(412, message="A commit has happened since")
        files, commit = dict(repo.files), Commit(header["value"]["summary"], [], [])
        for change in changes:
            key, value = change["key"], change["value"]
            if key == "deletedFile":
                del files[value["path"]]
                commit.deleted.append(value["path"])
                continue
            data = base64.b64decode(value["content"]) if key == "file" else hub.objects.get(value["oid"])
            if data is None:
                return self._error(400, message=f"LFS object {value['oid']} is not here")
            files[value["path"]] = data
            commit.added.append(value["path"])
        repo.files, repo.head = files, git_hash(f"{repo.head}{commit.title}{len(hub.commits.get(id_, []))}".encode())
        hub.commits.setdefault(id_, []).append(commit)
        self._json({"commitUrl": f"{hub.url}/{id_}/commit/{repo.head}", "commitOid": repo.head, "pullRequestUrl": None})

    # Jobs and their buckets

    def _create_bucket(self, body: bytes, id_: str) -> None:
        there = id_ in self.stand_in.buckets
        self.stand_in.buckets.setdefault(id_, {})
        self._json({"url": f"{self.stand_in.url}/buckets/{id_}"}, 409 if there else 200)

    def _bucket(self, id_: str, prefix: str | None) -> None:
        files = self.stand_in.buckets[id_]
        if prefix is None:
            private = id_ not in self.stand_in.public_buckets
            return self._json({"id": id_, "private": private, "createdAt": TIME, "size": 0, "totalFiles": len(files)})
        listed = [(path, hash_, len(data)) for path, (hash_, _, data) in files.items() if path.startswith(prefix)]
        self._json([{"type": "file", "path": p, "xetHash": hash_, "size": size} for p, hash_, size in listed])

    def _change_bucket(self, body: bytes, id_: str) -> None:
        changes = [json.loads(line) for line in body.splitlines()]
        found = self.stand_in.uploaded([change["xetHash"] for change in changes])
        self.stand_in.buckets[id_] |= {change["path"]: found[change["xetHash"]] for change in changes}
        self._json({})

    def _bucket_file(self, id_: str, path: str) -> None:
        hash_, number, data = self.stand_in.buckets[id_][path]
        self.send_response(200)
        self.send_header("X-Xet-Hash", hash_)
        self.send_header("X-Xet-Refresh-Route", f"{self.stand_in.url}/api/buckets/{id_}/xet-read-{number}-token")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()

    def _submit(self, body: bytes, owner: str) -> None:
        hub = self.stand_in
        job = Job(f"job{len(hub.jobs)}", json.loads(body) | {"owner": owner})
        hub.jobs[job.id] = job
        threading.Thread(target=hub.work, args=(job,), daemon=True).start()
        self._tell_job(job)

    def _job(self, id_: str, stream: str | None) -> None:
        if (job := self.stand_in.jobs.get(id_)) is None:
            return self._error(404, message="Job not found")
        if stream is None:
            return self._tell_job(job)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection, sent = True, 0
        while not (job.is_over() and sent == len(job.lines)) and not self.stand_in.down:
            for line in job.lines[sent : (sent := len(job.lines))]:
                event = json.dumps({"data": line, "timestamp": TIME})
                with contextlib.suppress(OSError):
                    self.wfile.write(f"data: {event}\n\n".encode())
            time.sleep(0.01)

    def _tell_job(self, job: Job) -> None:
        owner = {"id": "1", "name": job.spec["owner"], "type": "user"}
        status = {"stage": job.stage, "message": job.message}
        self._json({"id": job.id, "createdAt": TIME, "owner": owner, "status": status, "flavor": job.spec["flavor"]})

    def _cancel(self, body: bytes, id_: str) -> None:
        self.stand_in.jobs[id_].stage = "CANCELED"
        self._json({})

    def _json(self, value: Any, status: int = 200) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
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

    def __init__(self, models: dict[str, Repo] | None = None, datasets: dict[str, Repo] | None = None) -> None:
        self.repos = {"models": models or {}, "datasets": datasets or {}}
        self.down_after, self.damage = 0, False
        self.sent, self.asked, self.down = Counter[str](), list[str](), False
        self.objects: dict[str, bytes] = {}
        self.stored = Counter[str]()  # how often each object was uploaded completely
        self.parts: dict[str, dict[int, bytes]] = {}
        self.commits: dict[str, list[Commit]] = {}
        self.received = 0  # bytes of all bodies
        self.token_leaks = 0  # requests to the storage that carried a token
        self.part_size = 1 << 30
        self.silence_s = 2.0
        self.faults: list[Fault] = []
        self.moments = 0
        self.buckets: dict[str, dict[str, tuple[str, int, bytes]]] = {}  # id → path → (xet's hash, storage, bytes)
        self.public_buckets = set[str]()
        self.jobs: dict[str, Job] = {}
        self.work: Callable[[Job], None] = lambda job: None  # what a job does
        self._storage = tempfile.TemporaryDirectory()
        self._uploads = self._copies = 0
        self.on_moment: Callable[[int], None] = lambda number: None
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (HubHandler,), {"stand_in": self}))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._storage.cleanup()

    def storage(self, number: str | int | None) -> Path:
        """The folder of a new upload, or a copy of that of an earlier one."""
        if number is None:
            self._uploads += 1
            return Path(self._storage.name, f"upload-{self._uploads}")
        self._copies += 1
        copy = Path(self._storage.name, f"copy-{self._copies}")
        return Path(shutil.copytree(Path(self._storage.name, f"upload-{number}"), copy))

    def uploaded(self, hashes: list[str]) -> dict[str, tuple[str, int, bytes]]:
        """Hash → (hash, storage, content) of files that the newest upload has brought."""
        from hf_xet import XetFileInfo, XetSession  # pyright: ignore[reportAttributeAccessIssue]

        number, folder = self._uploads, Path(self._storage.name, f"files-{self._uploads}")
        token = {"token_refresh_url": f"{self.url}/api/buckets/a/b/xet-read-{number}-token"}
        headers = {"token_refresh_headers": {"Authorization": f"Bearer {TOKEN}"}}
        with XetSession().new_file_download_group(**token, **headers) as group:
            for hash_ in set(hashes):
                group.start_download_file(XetFileInfo(hash_), str(folder / hash_))
        return {hash_: (hash_, number, (folder / hash_).read_bytes()) for hash_ in hashes}

    def folder_of(self, job: Job, to: Path) -> Path:
        """Write what is mounted into a job to `to`."""
        volume = job.spec["volumes"][0]
        prefix = f"{volume['path']}/"
        for path, (_, _, data) in self.buckets[volume["source"]].items():
            if path.startswith(prefix):
                file = to / path.removeprefix(prefix)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(data)
        return to

    def put(self, job: Job, folder: Path, name: str) -> None:
        """Let a job write the files of a folder to `name` in its own."""
        volume = job.spec["volumes"][0]
        from huggingface_hub import HfApi

        files = [file for file in folder.rglob("*") if file.is_file()]
        add = [(file, f"{volume['path']}/{name}/{file.relative_to(folder)}") for file in files]
        HfApi(self.url, token=TOKEN).batch_bucket_files(volume["source"], add=[*add])

    def moment(self) -> None:
        self.moments += 1
        self.on_moment(self.moments)

    def check_sound(self, id_: str) -> None:
        """Fail where a file of the repository is not what its checksum says."""
        repo = self.repos["models"][id_]
        assert all(repo.etag(name) in self.objects for name in repo.files if repo.is_lfs(name))
