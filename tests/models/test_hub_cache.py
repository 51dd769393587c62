"""The cache of Hugging Face: which folder it is, and what is in it."""

from __future__ import annotations

import os
import runpy
from pathlib import Path

import pytest

from backend.utils.errors import UserError
from backend.utils.hub_cache import hub_cache, is_dataset_cached, local_folder, require_hub_address


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "home/.cache/huggingface/hub"),
        ({"XDG_CACHE_HOME": "{tmp}/xdg"}, "xdg/huggingface/hub"),
        ({"HF_HOME": "{tmp}/hf", "XDG_CACHE_HOME": "{tmp}/xdg"}, "hf/hub"),
        ({"HF_HOME": "~/hf"}, "home/hf/hub"),
        ({"HUGGINGFACE_HUB_CACHE": "{tmp}/old", "HF_HOME": "{tmp}/hf"}, "old"),
        ({"HF_HUB_CACHE": "$HOME/new", "HUGGINGFACE_HUB_CACHE": "{tmp}/old", "HF_HOME": "{tmp}/hf"}, "home/new"),
    ],
    ids=["default", "XDG_CACHE_HOME", "HF_HOME", "HF_HOME with a tilde", "HUGGINGFACE_HUB_CACHE", "HF_HUB_CACHE"],
)
def test_the_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str):
    """One of two copies of this function ignored XDG_CACHE_HOME: a first launch did not see the models there."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(tmp=tmp_path))
    assert hub_cache() == tmp_path / expected
    # The library reads the variables when it is imported; this runs its module again without touching the imported one.
    assert hub_cache() == Path(runpy.run_module("huggingface_hub.constants")["HF_HUB_CACHE"])


def test_a_model_is_local_as_a_folder_or_as_a_cached_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "mine").mkdir()
    snapshots = tmp_path / "hub" / "models--owner--name" / "snapshots"
    for commit in ("older", "main"):
        (snapshots / commit).mkdir(parents=True)
    refs = snapshots.parent / "refs"
    refs.mkdir()
    (refs / "main").write_text("main\n")
    os.utime(snapshots / "older", (2e9, 2e9))
    assert local_folder(str(tmp_path / "mine")) == tmp_path / "mine"
    assert local_folder("owner/name") == snapshots / "main"
    (refs / "main").unlink()
    assert local_folder("owner/name") == snapshots / "older", "without a reference, the newest"
    for name in ("owner/other", "name", str(tmp_path / "gone")):
        assert local_folder(name) is None
    assert local_folder("owner/name", "dataset") is None


def test_a_dataset_is_cached_by_the_hub_or_by_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_DATASETS_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    (tmp_path / "hub" / "datasets--owner--MySums" / "blobs").mkdir(parents=True)
    assert not is_dataset_cached("owner/MySums"), "a download that never ended"
    (tmp_path / "datasets" / "owner___my_sums").mkdir(parents=True)
    assert is_dataset_cached("owner/MySums") and not is_dataset_cached("owner/Sums")
    (tmp_path / "hub" / "datasets--owner--Sums" / "snapshots").mkdir(parents=True)
    assert is_dataset_cached("owner/Sums")


BAD_PORTS = ["http://mirror.test:99999", "https://mirror.test:x", "http://[::1"]
NO_WEB = ["mirror.test", "ftp://mirror.test", "http://", "http://a b.test", "file:///etc", "http://a.test\x1b[2J"]


@pytest.mark.parametrize("address", [*NO_WEB, *BAD_PORTS])
def test_a_hub_without_a_web_address_is_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", address)
    with pytest.raises(UserError) as raised:
        require_hub_address()
    (fault,) = raised.value.faults
    assert fault.setting == "HF_ENDPOINT" and " is no web address; " in fault.sentence and fault.sentence.isprintable()
