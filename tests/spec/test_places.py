"""Paths: run folders and their names, the lock that ends with its process, control words, LM Studio."""

from __future__ import annotations

import fcntl
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import pytest

from backend.spec import places
from backend.spec.checks import cross_setting_faults
from backend.spec.command import backend_command, backend_environment, shell_line
from backend.spec.events import Diary
from backend.spec.faults import Mistake
from backend.spec.places import RunFolder, all_runs, default_run_name, find_run, make_run_folder
from backend.spec.run_lock import hold_lock
from backend.spec.user_input.text import shown

HOLDER = """
import sys
from pathlib import Path
from backend.spec.places import RunFolder
from backend.spec.run_lock import hold_lock
handle = hold_lock(RunFolder(Path(sys.argv[1])))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "runs" / "mine")
    folder.path.mkdir(parents=True)
    folder.config.write_text("iters: 1\n")
    return folder


@contextmanager
def another_process(run: RunFolder) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the run's lock until its stdin is closed."""
    command = [sys.executable, "-P", "-c", HOLDER, str(run.path)]
    holder = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=backend_environment()
    )
    assert holder.stdout and holder.stdout.readline() == "held\n"
    try:
        yield holder
    finally:
        holder.kill()
        holder.communicate()


# ── the lock ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_two_processes_cannot_lock_one_run_and_a_killed_one_releases_it(run: RunFolder) -> None:
    assert not run.is_locked()
    with another_process(run) as holder:
        assert run.is_locked()
        with pytest.raises(Mistake, match="run: The run mine is being trained by another process; stop that one first"):
            hold_lock(run)
        assert run.is_locked(), "asking takes nothing away"
        holder.send_signal(signal.SIGKILL)
        holder.wait(10)
        assert not run.is_locked()
        os.close(hold_lock(run))
    assert not run.is_locked()


def test_one_process_cannot_lock_a_run_twice(run: RunFolder) -> None:
    handle = hold_lock(run)
    with pytest.raises(Mistake):
        hold_lock(run)
    os.close(handle)
    os.close(hold_lock(run))


def test_a_window_that_tests_the_lock_does_not_keep_a_trainer_out(run: RunFolder) -> None:
    """Testing the lock takes a shared lock for a moment; a trainer that starts in that moment must not be refused."""
    run.lock.touch()
    glance = os.open(run.lock, os.O_RDONLY)
    fcntl.flock(glance, fcntl.LOCK_SH)
    threading.Timer(0.1, os.close, [glance]).start()
    os.close(hold_lock(run))


def test_testing_the_lock_often_leaks_no_file_handles(run: RunFolder) -> None:
    run.lock.touch()
    before = len(os.listdir("/dev/fd"))
    assert not any(run.is_locked() for _ in range(50))
    assert len(os.listdir("/dev/fd")) == before


def test_a_run_that_cannot_be_written_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(Mistake, match="cannot be written: No such file or directory"):
        hold_lock(RunFolder(tmp_path / "gone"))


# ── run folders ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_default_run_name_has_model_train_type_and_date() -> None:
    now = datetime(2026, 11, 20, 9, 8, 7)
    assert default_run_name("owner/Qwen3-0.6B", "lora", "grpo", now) == "Qwen3-0.6B-lora-grpo-2026-11-20-090807"
    for model in ("~/my models/Größe 2/", "..", "/", "", "x" * 500, "a/.hidden", "名前"):
        name = default_run_name(model, "full", "grpo", now)
        assert name.endswith("-full-grpo-2026-11-20-090807") and not name.startswith((".", "-"))
        assert not list(cross_setting_faults({"run_name": name})), name


def test_a_taken_run_name_gets_a_number(tmp_path: Path) -> None:
    names = [make_run_folder("mine", tmp_path / "deep" / "runs").name for _ in range(3)]
    assert names == ["mine", "mine-2", "mine-3"]


def test_a_chosen_run_name_is_reused_until_it_has_a_diary(tmp_path: Path) -> None:
    run = make_run_folder("mine", tmp_path, reuse=True)
    assert make_run_folder("mine", tmp_path, reuse=True) == run
    run.events.touch()
    assert make_run_folder("mine", tmp_path, reuse=True) == run, "an empty diary is none"
    Diary(run.events).write("phase", phase="loading")
    with pytest.raises(Mistake, match="run_name: The run mine exists already; choose another name, or resume it"):
        make_run_folder("mine", tmp_path, reuse=True)


def test_a_chosen_run_name_is_not_reused_while_its_lock_is_held(tmp_path: Path) -> None:
    """Between taking the lock and the first line of the diary a trainer loads a model; its config must stay its own."""
    run = make_run_folder("mine", tmp_path, reuse=True)
    handle = hold_lock(run)
    with pytest.raises(Mistake, match="exists already"):
        make_run_folder("mine", tmp_path, reuse=True)
    os.close(handle)


@pytest.mark.parametrize("reuse", [False, True])
def test_a_runs_folder_that_cannot_be_written_is_a_mistake_and_leaves_nothing(tmp_path: Path, reuse: bool) -> None:
    (tmp_path / "file").write_text("not a folder")
    for folder, why in (("file", "Not a directory"), ("file/deeper", "Not a directory")):
        with pytest.raises(Mistake, match=f"runs_dir: The runs folder .*{folder} cannot be written: {why}"):
            make_run_folder("mine", tmp_path / folder, reuse=reuse)
    if Path("/proc/self").exists():
        with pytest.raises(Mistake, match="The runs folder /proc/runs cannot be written: No such file or directory"):
            make_run_folder("mine", Path("/proc/runs"), reuse=reuse)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_file_in_place_of_the_run_folder_is_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(Mistake, match="exists and is not a folder"):
        make_run_folder("mine", tmp_path, reuse=True)
    assert make_run_folder("mine", tmp_path).name == "mine-2"


def test_runs_are_listed_newest_first_and_only_runs(tmp_path: Path) -> None:
    for age, name in enumerate(("new", "older", "oldest")):
        folder = make_run_folder(name, tmp_path)
        folder.config.write_text("iters: 1\n")
        os.utime(folder.config, (time.time() - age * 60,) * 2)
    (tmp_path / "no config").mkdir()
    (tmp_path / "a file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("queue.json", "queue.lock", "queue-runner.lock", "queue.log"):
        (tmp_path / name).touch()
    for name in (".new-from-3.77", "sweeps/rates"):  # a clone that is being made, a sweep's own folder
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.yaml").touch()
    assert [run.name for run in all_runs(tmp_path)] == ["new", "older", "oldest"]
    assert list(all_runs(tmp_path / "nowhere")) == []


def test_a_run_is_found_by_path_and_by_name(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = run.path.parent
    monkeypatch.setenv(places.RUNS_VARIABLE, str(runs))
    monkeypatch.chdir(runs.parent)
    for name, folder in (("mine", None), ("runs/mine", None), (run.path, None), ("mine", runs)):
        assert find_run(name, folder) == run
    with pytest.raises(
        Mistake,
        match=re.escape(f"There is no run yours: neither a run folder at that path nor one in {shown(runs, 80)}."),
    ):
        find_run("yours")


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


# ── control words ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_control_word_is_written_atomically(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    run.say("pause")
    run.say("stop")
    assert run.control.read_text() == "stop", "the newer word counts"
    assert sorted(path.name for path in run.path.iterdir()) == ["config.yaml", "control"]
    run.control.unlink()
    moved = []
    monkeypatch.setattr(Path, "replace", lambda draft, target: moved.append((draft.read_text(), target)))
    run.say("save")
    assert moved == [("save", run.control)] and not run.control.exists()


# ── LM Studio ────────────────────────────────────────────────────────────────────────────────────────────────────────


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


# ── the command line of a verb ───────────────────────────────────────────────────────────────────────────────────────


def test_a_bundled_app_starts_the_trainers_executable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert backend_command("train", "--run", "a b") == [sys.executable, "-P", "-m", "backend", "train", "--run", "a b"]
    assert shell_line(["python", "a b"]) == "python 'a b'"
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    for program in ("grpo-studio", "grpo-studio-backend"):  # from the window, and from the trainer itself
        monkeypatch.setattr(sys, "executable", f"/opt/GRPO Studio/{program}")
        assert backend_command("train", "x") == ["/opt/GRPO Studio/grpo-studio-backend", "train", "x"]
    assert backend_environment({"HOME": "/h"}) == {"HOME": "/h"}, "a program of the user's must not import our packages"


def test_the_environment_puts_our_packages_first() -> None:
    root = str(places.project_root())
    assert backend_environment({})["PYTHONPATH"] == root
    environment = backend_environment({"PYTHONPATH": "/theirs", "HOME": "/h"})
    assert environment["PYTHONPATH"] == f"{root}{os.pathsep}/theirs" and environment["HOME"] == "/h"
    assert environment["PYTHONUNBUFFERED"] == "1" and environment["PYTHONIOENCODING"] == "utf-8"


# Hugging Face's caches


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
def test_the_hub_cache_is_the_one_that_huggingface_hub_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str
):
    """One of two copies of this function ignored XDG_CACHE_HOME, so that a first launch did not see the models there."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(tmp=tmp_path))
    assert places.hub_cache() == tmp_path / expected
    # The library reads the variables when it is imported; this runs its module again without touching the imported one.
    assert places.hub_cache() == Path(runpy.run_module("huggingface_hub.constants")["HF_HUB_CACHE"])


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
    assert places.local_folder(str(tmp_path / "mine")) == tmp_path / "mine"
    assert places.local_folder("owner/name") == snapshots / "main"
    (refs / "main").unlink()
    assert places.local_folder("owner/name") == snapshots / "older", "without a reference, the newest"
    for name in ("owner/other", "name", str(tmp_path / "gone")):
        assert places.local_folder(name) is None
    assert places.local_folder("owner/name", "dataset") is None


def test_a_dataset_is_cached_once_the_hub_or_the_datasets_library_kept_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_DATASETS_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    (tmp_path / "hub" / "datasets--owner--MySums" / "blobs").mkdir(parents=True)
    assert not places.is_dataset_cached("owner/MySums"), "a download that never ended"
    (tmp_path / "datasets" / "owner___my_sums").mkdir(parents=True)
    assert places.is_dataset_cached("owner/MySums") and not places.is_dataset_cached("owner/Sums")
    (tmp_path / "hub" / "datasets--owner--Sums" / "snapshots").mkdir(parents=True)
    assert places.is_dataset_cached("owner/Sums")
