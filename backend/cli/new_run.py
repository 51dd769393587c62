"""From a config file to a run folder: apply `--set`, check everything, create the folder.

Everything is checked before anything is created, so that a mistake leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from backend.cli.exit_codes import STOPPED
from backend.cli.run_log import say
from backend.config.config import SETTINGS, TEXTS, Config, dump, parse, read, resolve_paths
from backend.config.other_programs.translation import with_changes
from backend.distributed.allowed_hosts import allow_hosts
from backend.rewards.catalogue.allowed_code import allow_named, require_allowed
from backend.runs.adapter_source import with_adapter
from backend.runs.events import EventLog
from backend.runs.run_folder import RunFolder, default_run_name, make_run_folder
from backend.runs.run_lock import hold_lock
from backend.trainer.control import StopPending, do_nothing, look_for_stop_word, remove_word
from backend.trainer.machine import relax_gpu_timeout
from backend.utils.disk_faults import DiskError
from backend.utils.documents import parse_yaml
from backend.utils.errors import UserError
from backend.utils.files import user_path
from backend.utils.text import quote
from backend.utils.whole_file import replace_file

if TYPE_CHECKING:
    from backend.trainer.run_inputs import RunInputs


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A run folder with a config.yaml inside, its settings, and the rows and reward functions that were read to check them."""

    folder: RunFolder
    settings: Config
    inputs: RunInputs | None = None
    lock: int | None = None
    """The handle of the run's lock, where this process holds it already: checking may take minutes."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Settings of a resumed run to change from its next step on."""
    warnings: tuple[str, ...] = ()
    """Sentences for its event log."""


def check_settings(
    raw: Mapping[str, Any], runs_dir: Path | None = None, look: Callable[[], None] = do_nothing
) -> tuple[Config, RunInputs]:
    """The settings, and what was read to check them. `look` is called now and then where that takes long. Raises UserError with all faults of the
    settings and of what they point to."""
    settings = parse(raw)
    relax_gpu_timeout(settings)  # before the import below, which imports mlx
    from backend.runs.start_progress import progress_listener, with_stop_check
    from backend.trainer.preflight import preflight

    with progress_listener(lambda line: say(line, sys.stderr)), with_stop_check(look):
        return settings, preflight(raw, runs_dir=runs_dir)


def new_run(raw: dict[str, Any], runs_dir: Path | None, name: str | None) -> PreparedRun:
    """Check the settings, then make a run folder and write them into it. Raises UserError."""
    # Paths in `raw` are relative to the working directory; config.yaml will be read again in the run's folder.
    raw = with_adapter(resolve_paths(Path.cwd(), raw), runs_dir) | ({} if name is None else {"run_name": name})
    settings, inputs = check_settings(raw, runs_dir)
    allow_named(raw)
    allow_hosts(settings.hosts)
    folder_name = settings.run_name or default_run_name(settings.model, settings.train_type, settings.train_mode)
    folder = make_run_folder(folder_name, runs_dir, reuse=bool(settings.run_name))
    try:
        replace_file(folder.config, dump(settings))
    except DiskError:
        with contextlib.suppress(OSError):  # a folder that held something before stays
            folder.path.rmdir()
        raise
    return PreparedRun(folder, settings, inputs)


def prepared_run(path: Path, *, allow_code: bool = False) -> PreparedRun:
    """A folder that the window has made, with config.yaml inside and no event log yet. Raises UserError, also for reward files that were never
    allowed here, unless `allow_code`. Exits with STOPPED where the run is told to stop meanwhile.

    Faults of its settings, and a stop, are written to the event log too, because the window sees nothing but the folder.
    """
    folder = RunFolder(Path(os.path.realpath(user_path(str(path), "run"))))
    if not folder.config.is_file():
        raise UserError("run", f"The folder {path} holds no config.yaml.")
    if folder.has_event_log:
        raise UserError("run", f"The run {folder.name} has a event log already; resume it, or start another.")
    # From now on, so that nobody takes a process that goes through a large dataset for one that has ended.
    lock = hold_lock(folder)
    remove_word(folder.control)  # of a process that is no more
    try:
        raw = with_adapter(read(folder.config), folder.path.parent)
        require_allowed(raw, allow=allow_code)
        return PreparedRun(folder, *check_settings(raw, folder.path, partial(look_for_stop_word, folder)), lock=lock)
    except UserError as mistake:
        _end_before_start(folder, lock, "failed", " ".join(fault.sentence for fault in mistake.faults))
        raise
    except StopPending:
        sentence = "Stopped before its first step, while its settings and data were checked."
        _end_before_start(folder, lock, "stopped", sentence)
        say(sentence, sys.stderr)
        raise typer.Exit(STOPPED) from None


def _end_before_start(folder: RunFolder, lock: int, kind: str, sentence: str) -> None:
    """Write the event log's only line, and let go of the run."""
    remove_word(folder.control)
    event_log = EventLog(folder.events)
    event_log.write(kind, step=0, reason=kind, sentence=sentence)
    event_log.close()
    os.close(lock)


def apply_changes(raw: dict[str, Any], changes: list[str]) -> dict[str, Any]:
    """The raw settings with every `--set key=value` over them, in our words (`with_changes`).

    A key without a value takes the setting out of the file. Raises UserError for a change that cannot be read.
    """
    changed = parse_changes(changes)
    translation = with_changes(raw, changed)
    if translation.faults:
        return raw | changed  # the check reports what is wrong
    return translation.values


def parse_changes(changes: Sequence[str]) -> dict[str, Any]:
    """The raw settings of `--set key=value …`. Raises UserError for one that cannot be read."""
    return dict(map(_parse_change, changes))


def _parse_change(text: str) -> tuple[str, Any]:
    """Key and value of `key=value`. A value is YAML, except for settings that are text: `run_name=007` is no number."""
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals:
        raise UserError("set", f"--set {quote(text)} must be written as key=value.")
    if key in SETTINGS and SETTINGS[key].kind in TEXTS:
        return key, value
    return key, parse_yaml(value, f"--set {quote(text)}", key)
