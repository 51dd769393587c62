"""Files of somebody else bring none of the user's along: no link of a folder that goes to an export or another machine,
and nothing that a dataset's README or rows name, which is opened in its own repository alone."""

import io
import json
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from fsspec.registry import get_filesystem_class, known_implementations

from backend.config.config import parse
from backend.data.rows import read_splits
from backend.distributed.hosts_file import Host, HostsFile
from backend.distributed.machine_check import copy_model
from backend.export.trl_folder import export_trl
from backend.export.writer import kept_files
from backend.runs.saved_weights import find_adapter
from backend.trainer.preflight import preflight
from backend.utils.errors import UserError
from backend.utils.hub_cache import hub_cache, own_file, own_files, repo_cache
from tests.models.test_hub import point_at
from tests.support import small_run
from tests.support.hub_server import COMMIT, HubStandIn, Repo

SECRET = '{"prompt": "a secret of the user", "answer": "1"}\n'
REWARD = """
import helper, parts
from backend.rewards import register_reward_function
@register_reward_function("class")
def scored(prompts, completions, answer, types=None):
    return [0.5] * len(completions)
"""


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    file = tmp_path / "home" / "secret.jsonl"
    file.parent.mkdir()
    file.write_text(SECRET)
    return file


@pytest.fixture
def exported(models: Path, tmp_path: Path) -> Callable[..., Path]:
    """Exports settings for TRL with a reward file that imports helper.py and the package parts from beside it."""
    theirs = tmp_path / "theirs"
    (theirs / "parts").mkdir(parents=True)
    (theirs / "parts" / "__init__.py").write_text("")
    (theirs / "helper.py").write_text("")
    (theirs / "theirs.py").write_text(REWARD)

    def export(**settings: object) -> Path:
        own = {"reward_functions_file": str(theirs / "theirs.py"), "reward_functions": ["class"], "reward_weights": [1]}
        raw = small_run.settings_for(models, data=str(models / "rows.jsonl"), **own, **settings)
        return export_trl(parse(raw), "for-trl", tmp_path, overwrite=True).path

    return export


@pytest.fixture
def linked_model(models: Path, tmp_path: Path, secret: Path) -> Path:
    """A model whose vocabulary is a link to a file of the user's."""
    folder = shutil.copytree(str(small_run.settings_for(models)["model"]), tmp_path / "model")
    (folder / "vocab.txt").symlink_to(secret)
    return folder


def test_no_link_of_a_model_is_followed_into_an_export(linked_model: Path, models: Path, exported: Callable[..., Path]):
    with pytest.raises(UserError, match=r"vocab\.txt is a link that leads out of its folder"):
        kept_files(linked_model)
    with pytest.raises(UserError, match=r"vocab\.txt is a link"):
        exported(model=str(linked_model))
    raw = small_run.settings_for(models, model=str(linked_model), data=str(models / "rows.jsonl"))
    for own, is_refused in (({"fuse": True}, True), ({"train_type": "full"}, True), ({"fuse": False}, False)):
        try:
            preflight(parse(raw | own)).scorer.close()
        except UserError as mistake:
            assert is_refused and "vocab.txt is a link" in str(mistake), str(mistake)
        else:
            assert not is_refused, "a run would end without the model that it was to write"


def test_no_link_of_a_model_is_followed_to_another_machine(linked_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")  # no ssh: nothing could be sent
    with pytest.raises(UserError, match=r"vocab\.txt is a link"):
        copy_model(str(linked_model), HostsFile((Host("127.0.0.1"), Host("mac-b"))), 1)


def test_links_of_the_hubs_cache_are_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot's files lead to the blobs beside it, and other programs' folders of models into the cache."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert hub_cache() == tmp_path / "hub"
    for repo in (tmp_path / "elsewhere" / "models--a--b", tmp_path / "hub" / "models--a--b"):
        snapshot = repo / "snapshots" / "0123"
        (repo / "blobs").mkdir(parents=True)
        (repo / "blobs" / "beef").write_text("{}")
        (snapshot / "inside").mkdir(parents=True)
        (snapshot / "inside" / "tokenizer.json").symlink_to("../../../blobs/beef")
        (snapshot / "tokenizer.json").symlink_to("../../blobs/beef")
        assert own_files(snapshot, "model") == [snapshot / "tokenizer.json", snapshot / "inside" / "tokenizer.json"]
    (tmp_path / "studio").mkdir()
    (tmp_path / "studio" / "tokenizer.json").symlink_to(tmp_path / "hub" / "models--a--b" / "blobs" / "beef")
    own_file(tmp_path / "studio" / "tokenizer.json", tmp_path / "studio", "model")
    # What only looks like a cache has no blobs but its own.
    false = tmp_path / "false" / "snapshots" / "0123"
    false.mkdir(parents=True)
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "id").write_text(SECRET)
    (tmp_path / "false" / "blobs").symlink_to(tmp_path / "keys")
    (false / "vocab.txt").symlink_to("../../blobs/id")
    with pytest.raises(UserError, match="is a link"):
        own_file(false / "vocab.txt", false, "model")


@pytest.mark.parametrize("name", ["https://some.example/x", "smb://some.example/x", "//some.example/x", "owner/name"])
def test_an_adapter_is_never_fetched(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.socket", lambda *_, **__: pytest.fail("a connection"))
    with pytest.raises(UserError, match="There is no adapter"):
        find_adapter(name, tmp_path)


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


@pytest.mark.parametrize(
    "address",
    [
        "ftp://{}/x.jsonl",
        "simplecache::webhdfs://{}/x.jsonl",
        "http://{}/x.jsonl",
        "gzip://x.jsonl::http://{}/x.jsonl.gz",
    ],
)
def test_a_readme_contacts_no_machine(address: str, hub: HubStandIn, stranger: socket.socket) -> None:
    place = address.format(f"127.0.0.1:{stranger.getsockname()[1]}")
    hub.repos["datasets"]["owner/rows"] = Repo({"README.md": card(place), "train.jsonl": ROWS})
    loaded, known = get_filesystem_class("memory"), dict(known_implementations)
    with pytest.raises(UserError, match="names a file outside its own repository"):
        read_splits(settings())
    assert get_filesystem_class("memory") is loaded and known_implementations == known, "other code's files open again"


def test_rows_that_name_pictures_open_nothing(hub: HubStandIn, secret: Path, stranger: socket.socket) -> None:
    """`datasets` decodes a picture at its row's path: a file, an address, another repository with the user's token."""
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
