"""Folders of this machine: the runs folder and LM Studio's models."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from backend.utils import places


def test_the_runs_folder_follows_the_platform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv(places.RUNS_VARIABLE, raising=False)
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    assert places.runs_folder() == tmp_path / ".local" / "share" / "grpo-studio" / "runs"
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert places.runs_folder() == tmp_path / "data" / "grpo-studio" / "runs"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert places.runs_folder() == tmp_path / "Library" / "Application Support" / "GRPO Studio" / "runs"
    monkeypatch.setenv(places.RUNS_VARIABLE, "~/elsewhere")
    assert places.runs_folder() == tmp_path / "elsewhere"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_lm_studios_home_is_read_from_its_pointer_file(home: Path) -> None:
    assert places.lm_studio_home() == home / ".lmstudio"
    (home / ".cache" / "lm-studio").mkdir(parents=True)
    assert places.lm_studio_home() == home / ".cache" / "lm-studio"
    pointer = home / ".lmstudio-home-pointer"
    pointer.write_text("~/studio\n")
    assert places.lm_studio_home() == home / "studio"
    assert pointer.read_text() == "~/studio\n", "read, never written"
    for unreadable in (b"", b" \n", b"\xff\xfe"):
        pointer.write_bytes(unreadable)
        assert places.lm_studio_home() == home / ".cache" / "lm-studio"


def test_lm_studios_models_folder_is_read_from_its_settings(home: Path) -> None:
    settings = home / ".lmstudio" / "settings.json"
    settings.parent.mkdir()
    assert places.lm_studio_models() == home / ".lmstudio" / "models"
    settings.write_text(json.dumps({"downloadsFolder": "/Volumes/Big/models"}))
    assert places.lm_studio_models() == Path("/Volumes/Big/models")
    settings.write_text(json.dumps({"downloadsFolder": "~/models"}))
    assert places.lm_studio_models() == home / "models"
    for unhelpful in ("{}", '{"downloadsFolder": ""}', '{"downloadsFolder": 3}', "[]", "not json", ""):
        settings.write_text(unhelpful)
        assert places.lm_studio_models() == home / ".lmstudio" / "models"
