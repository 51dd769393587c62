"""Folders of somebody else whose files go to another place, an export or another machine: no link in them brings a file
of the user's along."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from backend.config.config import parse
from backend.distributed.hosts_file import Host, HostsFile
from backend.distributed.machine_check import copy_model
from backend.export.trl_folder import export_trl
from backend.export.writer import kept_files
from backend.runs.saved_weights import find_adapter
from backend.trainer.preflight import preflight
from backend.utils.errors import UserError
from backend.utils.hub_cache import hub_cache, own_file, own_files
from tests.support import small_run

SECRET = "KEY = 'a secret of the user'\n"
REWARD = """
import helper, parts
from backend.rewards import register_reward_function

@register_reward_function("class")
def scored(prompts, completions, answer, types=None):
    return [0.5] * len(completions)
"""


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    file = tmp_path / "home" / ".env"
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


def test_no_link_of_a_model_is_followed_into_an_export(
    linked_model: Path, models: Path, exported: Callable[..., Path]
) -> None:
    with pytest.raises(UserError, match=r"vocab\.txt is a link that leads out of its folder"):
        kept_files(linked_model)
    with pytest.raises(UserError, match=r"vocab\.txt is a link"):
        exported(model=str(linked_model))
    raw = small_run.settings_for(models, model=str(linked_model), data=str(models / "rows.jsonl"))
    for own, is_refused in (({"fuse": True}, True), ({"train_type": "full"}, True), ({"fuse": False}, False)):
        try:
            preflight(raw | own).scorer.close()
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
