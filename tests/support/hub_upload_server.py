"""The Hub on 127.0.0.1 that also takes uploads: accounts, new repositories, LFS objects whole and in parts, commits."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.support.hub_server import TOKEN, HubHandler, HubStandIn, Repo, git_hash, is_lfs

CHUNK = 1 << 14  # bytes of a body that are read at a time
# What the Hub puts into a repository that it creates
NEW_FILES = {".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"}


@dataclass
class Commit:
    """One commit that arrived: its title, and what it changed."""

    title: str
    added: list[str]
    deleted: list[str]


@dataclass
class Fault:
    """An answer in place of the right one, to requests whose "METHOD path" matches `where`, so many times."""

    where: str
    status: int
    times: int = 1
    message: str = ""


class UploadHandler(HubHandler):
    """What an upload asks for, beside what `HubHandler` answers."""

    stand_in: Any

    def do_POST(self) -> None:
        self._take()

    def do_PUT(self) -> None:
        self._take()

    def do_GET(self) -> None:
        hub: UploadHub = self.stand_in
        hub.moment()
        if self._is_at_fault():
            return
        if urlsplit(self.path).path == "/api/whoami-v2":
            hub.asked.append("GET /api/whoami-v2")
            self._whoami()
        else:
            self._answer()
        hub.moment()

    def _take(self) -> None:
        hub: UploadHub = self.stand_in
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
        hub: UploadHub = self.stand_in
        left, pieces = int(self.headers.get("Content-Length") or 0), list[bytes]()
        while left:
            piece = self.rfile.read(min(CHUNK, left))
            if not piece:
                return None
            left -= len(piece)
            pieces.append(piece)
            hub.received += len(piece)
            hub.moment()
            if hub.cut_at and hub.received >= hub.cut_at:
                hub.cut_at = 0
                self.close_connection = True
                self.connection.close()
                return None
        return b"".join(pieces)

    def _is_at_fault(self) -> bool:
        hub: UploadHub = self.stand_in
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
        role = self.stand_in.role
        self._json({"name": "someone", "type": "user", "orgs": [{"name": "a-lab"}],
                    "auth": {"type": "access_token", "accessToken": {"displayName": "t", "role": role}}})  # fmt: skip

    def _create(self, body: bytes) -> None:
        asked = json.loads(body)
        id_ = f"{asked.get('organization') or 'someone'}/{asked['name']}"
        hub: UploadHub = self.stand_in
        if asked.get("organization") not in (None, "someone", "a-lab"):
            return self._error(403, message="You don't have the rights to create a model under this namespace")
        if id_ in hub.repos["models"]:
            return self._json({"error": "You already created this model repo", "url": f"{hub.url}/{id_}"}, 409)
        private = asked.get("visibility") == "private" or bool(asked.get("private"))
        hub.repos["models"][id_] = Repo(dict(NEW_FILES), private=private, head=_oid(id_))
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
        self._json({"files": [
            {"path": file["path"], "uploadMode": "lfs" if is_lfs(file["path"], file["size"]) else "regular",
             "shouldIgnore": False, "oid": repo.etag(file["path"]) if file["path"] in repo.files else None}
            for file in json.loads(body)["files"]
        ]})  # fmt: skip

    def _batch(self, body: bytes, id_: str) -> None:
        asked = json.loads(body)
        self._json({"transfer": "multipart", "objects": [self._action(thing) for thing in asked["objects"]]})

    def _action(self, thing: dict[str, Any]) -> dict[str, Any]:
        hub: UploadHub = self.stand_in
        oid, size = thing["oid"], thing["size"]
        if oid in hub.objects:
            return {"oid": oid, "size": size}
        if hub.quota and size > hub.quota:
            return {"oid": oid, "size": size, "error": {"code": 413, "message": "Storage quota exceeded"}}
        if size <= hub.part_size:
            return {"oid": oid, "size": size, "actions": {"upload": {"href": f"{hub.url}/lfs/{oid}"}}}
        hub.parts[oid] = {}  # a new multipart upload: parts of an earlier one are gone, as in S3
        numbers = range(1, -(-size // hub.part_size) + 1)
        header = {str(number): f"{hub.url}/part/{oid}/{number}" for number in numbers}
        header["chunk_size"] = str(hub.part_size)
        return {
            "oid": oid,
            "size": size,
            "actions": {"upload": {"href": f"{hub.url}/lfs/complete/{oid}", "header": header}},
        }

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
        hub: UploadHub = self.stand_in
        if hashlib.sha256(data).hexdigest() != oid:
            return self._error(400, message="The checksum is another")
        hub.stored[oid] += 1
        hub.objects[oid] = data
        self._json({})

    def _commit(self, body: bytes, id_: str) -> None:
        hub: UploadHub = self.stand_in
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
        repo.files, repo.head = files, _oid(repo.head + commit.title + str(len(hub.commits.get(id_, []))))
        hub.commits.setdefault(id_, []).append(commit)
        if hub.lose_commit_answer:
            hub.lose_commit_answer = False
            self.close_connection = True
            self.connection.close()
            return
        self._json({"commitUrl": f"{hub.url}/{id_}/commit/{repo.head}", "commitOid": repo.head, "pullRequestUrl": None})

    def _json(self, value: Any, status: int = 200) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@dataclass
class _Uploads:
    objects: dict[str, bytes] = field(default_factory=dict)
    stored: Counter[str] = field(default_factory=Counter)  # how often each object was uploaded completely
    parts: dict[str, dict[int, bytes]] = field(default_factory=dict)
    commits: dict[str, list[Commit]] = field(default_factory=dict)
    received: int = 0  # bytes of all bodies
    token_leaks: int = 0  # requests to the storage that carried a token
    part_size: int = 1 << 30
    quota: int = 0
    cut_at: int = 0
    lose_commit_answer: bool = False
    role: str = "write"
    silence_s: float = 2.0
    faults: list[Fault] = field(default_factory=list)


class UploadHub(_Uploads, HubStandIn):
    """Serve with `with UploadHub() as hub:`."""

    handler = UploadHandler

    def __init__(self, models: dict[str, Repo] | None = None, **how: Any) -> None:
        _Uploads.__init__(self, **how)
        HubStandIn.__init__(self, models)
        self.moments = 0
        self.on_moment: Callable[[int], None] = lambda number: None

    def moment(self) -> None:
        self.moments += 1
        self.on_moment(self.moments)

    def check_sound(self, id_: str) -> None:
        """Fail where a file of the repository is not what its checksum says."""
        repo = self.repos["models"][id_]
        assert all(repo.etag(name) in self.objects for name in repo.files if repo.is_lfs(name))


def _oid(seed: str) -> str:
    return git_hash(seed.encode())
