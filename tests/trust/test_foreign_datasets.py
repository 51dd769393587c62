"""A dataset of somebody else on the Hub: what its README and its rows name is opened in its own repository alone, on
the Hub as in the cache."""

from __future__ import annotations

import io
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from fsspec.registry import get_filesystem_class, known_implementations

from backend.config.config import parse
from backend.data.rows import read_splits
from backend.utils.errors import UserError
from backend.utils.hub_cache import repo_cache
from tests.models.test_hub import point_at
from tests.support.hub_server import COMMIT, HubStandIn, Repo

ROWS = b'{"prompt": "hi", "answer": "1"}\n'
IMAGE = {"_type": "Image"}
PICTURE = {"info": {"features": {"prompt": IMAGE, "more": {"_type": "List", "feature": IMAGE}}}}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStandIn]:
    with HubStandIn() as stand_in:
        point_at(stand_in.url, tmp_path / "cache", monkeypatch)
        monkeypatch.setattr("datasets.config.HF_ENDPOINT", stand_in.url)
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "prepared")
        yield stand_in


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    file = tmp_path / "home" / "secret.jsonl"
    file.parent.mkdir()
    file.write_text('{"prompt": "a secret of the user", "answer": "1"}\n')
    return file


@pytest.fixture
def stranger() -> Iterator[socket.socket]:
    """A machine that listens, and that nobody is to contact."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        yield server
        with pytest.raises(BlockingIOError):
            server.accept()


def card(files: str) -> bytes:
    return f"---\nconfigs:\n- config_name: default\n  data_files: {json.dumps(files)}\n---\n".encode()


def settings(**more: Any) -> Any:
    return parse({"model": "m", "data": "owner/rows", **more})


@pytest.mark.parametrize("address", ["ftp://{}/x.jsonl", "simplecache::webhdfs://{}/x.jsonl", "http://{}/x.jsonl"])
def test_a_readme_contacts_no_machine(address: str, hub: HubStandIn, stranger: socket.socket) -> None:
    place = address.format(f"127.0.0.1:{stranger.getsockname()[1]}")
    hub.repos["datasets"]["owner/rows"] = Repo({"README.md": card(place), "train.jsonl": ROWS})
    loaded, known = get_filesystem_class("memory"), dict(known_implementations)
    with pytest.raises(UserError, match="names a file outside its own repository"):
        read_splits(settings())
    assert get_filesystem_class("memory") is loaded and known_implementations == known, "other code's files open again"


def test_rows_that_name_pictures_open_nothing(hub: HubStandIn, secret: Path, stranger: socket.socket) -> None:
    """To decode a picture, `datasets` opens the path that its row names: a file, an address, another repository with
    the user's token."""
    paths = [str(secret), f"ftp://127.0.0.1:{stranger.getsockname()[1]}/x.png", "hf://datasets/owner/private/x.png"]
    stored = [{"bytes": None, "path": path} for path in paths]
    picture = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    more = pyarrow.array([[each] for each in stored], pyarrow.list_(picture))
    table = pyarrow.table({"prompt": pyarrow.array(stored, picture), "more": more})
    file = io.BytesIO()
    about = {"huggingface": json.dumps(PICTURE)}
    pyarrow.parquet.write_table(table.replace_schema_metadata(about), file)
    hub.repos["datasets"]["owner/rows"] = Repo({"README.md": b"", "train.parquet": file.getvalue()})
    for streaming in (False, True):
        rows = list(read_splits(settings(streaming=streaming)).train)
        assert rows == [{"prompt": each, "more": [each]} for each in stored]
    assert not [asked for asked in hub.asked if "private" in asked]


@pytest.mark.parametrize("name", ["{}", "../../../../{}", "file://{}"])
def test_a_readme_in_the_cache_names_no_file_of_the_user(name: str, hub: HubStandIn, secret: Path) -> None:
    """Of a dataset on the Hub, `datasets` refuses this itself; of a folder it does not, and the cache is one."""
    hub.down = True
    snapshot = repo_cache("owner/rows", "dataset") / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text(COMMIT)
    (snapshot / "train.jsonl").write_bytes(ROWS)
    path = "../" * 20 + str(secret)[1:] if name.startswith("..") else name.format(secret)
    (snapshot / "README.md").write_bytes(card(path))
    with pytest.raises(UserError, match="as a file of its own, and it is none") as refused:
        read_splits(settings())
    assert len(refused.value.faults[0].sentence) <= 200
    (snapshot / "README.md").write_bytes(card("train.jsonl"))
    assert list(read_splits(settings()).train) == [json.loads(ROWS)]
