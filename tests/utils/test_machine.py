"""What is known of the machine without mlx, and its folders: that of the runs and LM Studio's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from backend.utils import machine, places

GIB = 1 << 30


@pytest.fixture
def as_on_a_mac(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(machine, "sysctl", lambda name: b"")
    return monkeypatch


def test_a_mac_gives_a_share_of_its_memory_and_no_more_than_metal_recommends(as_on_a_mac: pytest.MonkeyPatch) -> None:
    """The working sets that Metal reports: 5.3 GiB of 8, 10.7 of 16, 48 of 64."""
    given: dict[int, int] = {}
    for size in (8, 16, 64):
        as_on_a_mac.setattr(machine, "_physical", lambda size=size: size * GIB)
        given[size] = machine.machine_bytes() + machine.PROCESS_BYTES
    assert given == {8: 8 * GIB * 2 // 3, 16: 16 * GIB * 2 // 3, 64: 48 * GIB}
    assert machine.machine_bytes(working_set=20 * GIB) == 20 * GIB - machine.PROCESS_BYTES
    assert machine.machine_bytes(working_set=60 * GIB) == 48 * GIB - machine.PROCESS_BYTES


def test_a_working_set_that_the_user_has_raised_counts(as_on_a_mac: pytest.MonkeyPatch) -> None:
    values = {"iogpu.wired_limit_mb": (14336).to_bytes(8, sys.byteorder), "machdep.cpu.brand_string": b"Apple M5 Max\0"}
    as_on_a_mac.setattr(machine, "sysctl", lambda name: values[name])
    assert machine.working_set_of(16 * GIB) == 14 * GIB
    machine.chip.cache_clear()
    assert machine.chip() == "Apple M5 Max"
    machine.chip.cache_clear()


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac's memory is shared otherwise")
def test_on_linux_what_the_run_holds_already_counts_as_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_available", lambda: 10 * GIB)
    more = machine.machine_bytes(held=4 * GIB) - machine.machine_bytes()
    assert more == 3 * GIB, "three quarters of it"
    assert machine.machine_bytes() == int(7.5 * GIB) - machine.PROCESS_BYTES


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


def test_the_program_works_with_few_open_files() -> None:
    """mlx-lm's import sets a limit of 4096, which is refused where the hard limit is lower."""
    code = "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (99, 999)); import backend; "
    code += "r.setrlimit(r.RLIMIT_NOFILE, (2048, 4096)); assert r.getrlimit(r.RLIMIT_NOFILE) == (999, 999)"
    subprocess.run([sys.executable, "-c", code], check=True)
