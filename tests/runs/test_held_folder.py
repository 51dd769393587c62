"""A run's folder that is moved, deleted or taken over while it trains, and locks that do not hold: nothing is lost,
nobody writes twice."""

import errno
import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from backend.config.config import load
from backend.runs import checkpoint, guards
from backend.runs.events import read_events
from backend.runs.run_folder import RunFolder, hold_lock
from backend.trainer.run_process import train
from backend.utils.errors import UserError
from tests.support import small_run


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
