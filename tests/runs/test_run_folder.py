"""Run folders: their names, how they are found and made, the lock that ends with its process; and one that is moved,
deleted or taken over while it trains: nothing is lost, nobody writes twice."""

import errno
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from backend.config.checks import cross_setting_faults
from backend.config.config import load
from backend.runs import checkpoint, guards
from backend.runs.events import EventLog, read_events
from backend.runs.run_folder import (
    LAUNCH_VARIABLE,
    RunFolder,
    all_runs,
    default_run_name,
    find_run,
    held_for_launch,
    hold_lock,
    make_run_folder,
)
from backend.runs.run_record import disk_use
from backend.trainer.run_process import train
from backend.utils import places
from backend.utils.command import backend_environment
from backend.utils.disk import gigabytes
from backend.utils.errors import UserError
from backend.utils.files import remove_tree, require_plain_files
from backend.utils.text import quote
from tests.support import small_run

TRIES = """
import sys
from pathlib import Path
from backend.runs.run_folder import RunFolder, hold_lock
from backend.utils.errors import UserError
try:
    handle = hold_lock(RunFolder(Path(sys.argv[1])))
except UserError as mistake:
    sys.exit(str(mistake))
print("trains", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def made_run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "runs" / "mine")
    folder.path.mkdir(parents=True)
    folder.config.write_text("iters: 1\n")
    return folder


@contextmanager
def another_process(run: RunFolder) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the run's lock until its stdin is closed."""
    command = [sys.executable, "-P", "-c", TRIES, str(run.path)]
    pipe, environment = subprocess.PIPE, backend_environment()
    holder = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
    assert holder.stdout and holder.stdout.readline() == "trains\n"
    try:
        yield holder
    finally:
        holder.kill()
        holder.communicate()


def test_two_processes_cannot_lock_one_run_and_a_killed_one_releases_it(made_run: RunFolder) -> None:
    assert not made_run.is_locked()
    with another_process(made_run) as holder:
        assert made_run.is_locked()
        with pytest.raises(UserError, match="run: The run mine is being trained by another process; stop that one"):
            hold_lock(made_run)
        assert made_run.is_locked(), "asking takes nothing away"
        holder.send_signal(signal.SIGKILL)
        holder.wait(10)
        assert not made_run.is_locked()
        os.close(hold_lock(made_run))
    assert not made_run.is_locked()


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


def test_a_chosen_run_name_is_reused_until_it_has_an_event_log_or_is_locked(tmp_path: Path) -> None:
    """Between taking the lock and the first line of the event log a trainer loads a model."""
    run = make_run_folder("mine", tmp_path, reuse=True)
    assert make_run_folder("mine", tmp_path, reuse=True) == run
    handle = hold_lock(run)
    with pytest.raises(UserError, match="exists already"):
        make_run_folder("mine", tmp_path, reuse=True)
    os.close(handle)
    run.events.touch()
    assert make_run_folder("mine", tmp_path, reuse=True) == run, "an empty event log is none"
    EventLog(run.events).write("phase", phase="loading")
    with pytest.raises(UserError, match="run_name: The run mine exists already; choose another name, or resume it"):
        make_run_folder("mine", tmp_path, reuse=True)


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


def test_a_run_is_found_by_path_and_by_name(made_run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = made_run.path.parent
    monkeypatch.setenv(places.RUNS_VARIABLE, str(runs))
    monkeypatch.chdir(runs.parent)
    for name, folder in (("mine", None), ("runs/mine", None), (made_run.path, None), ("mine", runs)):
        assert find_run(name, folder) == made_run
    where = f"neither a run folder at that path nor one in {quote(runs, 80)}."
    with pytest.raises(UserError, match=re.escape(f"There is no run yours: {where}")):
        find_run("yours")


def tried(run: RunFolder, **variables: str) -> str:
    """What another process gets to hear that would train the run."""
    environment = {key: value for key, value in os.environ.items() if key != LAUNCH_VARIABLE} | variables
    command = [sys.executable, "-c", TRIES, str(run.path)]
    done = subprocess.run(command, env=environment, input="", capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_only_what_the_launcher_has_started_trains_the_run_between_two_starts(made_run: RunFolder) -> None:
    run = made_run
    with held_for_launch(run):
        assert run.is_locked()
        os.close(hold_lock(run))  # its own, as for the event log's last line
        assert run.is_locked(), "no rank is alive, and the window does not take the run for crashed"
        assert "is being trained by another process" in tried(run)
        assert "trains" in tried(run, **{LAUNCH_VARIABLE: os.environ[LAUNCH_VARIABLE]})
        assert "is being trained" in tried(run, **{LAUNCH_VARIABLE: str(run.path.with_name("another"))})
        with pytest.raises(UserError, match="is being trained"), held_for_launch(run):
            raise AssertionError("two launchers")
    assert not run.is_locked() and not run.launch_lock.exists() and LAUNCH_VARIABLE not in os.environ
    assert "trains" in tried(run)
    handle = hold_lock(run)
    with pytest.raises(UserError, match="is being trained"), held_for_launch(run):
        raise AssertionError("beside a trainer")
    assert not run.launch_lock.exists()
    os.close(handle)


def test_a_size_has_three_digits_and_no_exponent() -> None:
    sizes = [0, 999_400, 999_500, 12_340_000, 999.4e6, 999.6e6, 999.6e9, 1.25e12, 1234e12]
    texts = ["0 kB", "999 kB", "1 MB", "12.3 MB", "999 MB", "1 GB", "1 TB", "1.25 TB", "1,234 TB"]
    assert list(map(gigabytes, sizes)) == texts


def test_folders_of_any_depth_are_counted_walked_and_deleted(tmp_path: Path) -> None:
    """os.walk and shutil.rmtree of Python 3.11 recurse, and a path has at most 4,096 bytes."""
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    run.log.write_text("log")
    here = os.open(run.path, os.O_RDONLY)
    for _ in range(1_100):
        os.mkdir("deep", dir_fd=here)
        below = os.open("deep", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    assert disk_use(run) == {"log.txt": 3}
    require_plain_files(run.path)
    remove_tree(run.path)
    assert not run.path.exists()


@pytest.fixture(autouse=True)
def always_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "LOOK_EVERY_S", 0.0)


def trained(models: Path, run: RunFolder, at_step_2: Callable[[], Any], **changes: Any) -> Any:
    """The ending of a run during whose second step something happens."""

    def echo(event: dict[str, Any]) -> None:
        if event["kind"] == "step" and event["step"] == 2:
            at_step_2()

    raw = small_run.settings_for(models, **small_run.low_half(models) | {"iters": 3, "learning_rate": 1e-3} | changes)
    return small_run.train_here(raw, run, echo)


@pytest.mark.parametrize("save_every", [2, 100], ids=["while it is saved", "between two saves"])
def test_a_moved_folder_is_saved_where_it_is(models: Path, run: RunFolder, tmp_path: Path, save_every: int) -> None:
    there = RunFolder(tmp_path / "elsewhere" / "renamed")
    there.path.parent.mkdir()
    ending = trained(models, run, lambda: run.path.rename(there.path), save_every=save_every)
    assert (ending.kind, ending.exit_code, ending.step) == ("stopped", 3, 2)
    assert f"because its folder was moved to {there.path}; everything is saved there." in ending.sentence
    assert not run.path.exists()
    saved = checkpoint.newest(there)
    assert saved is not None and saved.state.step == 2 and (there.adapters / "adapters.safetensors").exists()
    assert list(read_events(there.events))[-1]["kind"] == "stopped" and not there.is_locked()
    assert train(load(there.config), there, command="resume").kind == "finished"
    assert small_run.steps(there) == [1, 2, 3]


@pytest.mark.parametrize("emptied", [False, True])
def test_a_folder_that_is_deleted_or_emptied_ends_the_run(models: Path, run: RunFolder, emptied: bool) -> None:
    def delete() -> None:
        for path in run.path.iterdir() if emptied else [run.path]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    ending = trained(models, run, delete, save_every=1)
    assert (ending.kind, ending.exit_code) == ("failed", 2)
    why = "was deleted while it trained, or its disk is gone, so step 2 could not be saved."
    assert ending.sentence == f"run: The folder of the run mine {why}"
    assert run.path.exists() == emptied, "it does not come back"


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_is_refused(run: RunFolder, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    run.path.mkdir(parents=True)

    def none(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", none)
    with pytest.raises(UserError, match=r"runs_dir: The run folder .* is on a file system without locks"):
        hold_lock(run)
    assert not run.is_locked()
