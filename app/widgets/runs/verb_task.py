"""What dialogs need of a running command, and how they read its last sentence."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Protocol

from PySide6.QtGui import QCloseEvent
from PySide6.QtWidgets import QWidget

_SETTING_PREFIX = re.compile(r"^[a-z_]+: ")


class VerbTask(Protocol):
    """A running command; `app.model.processes.VerbProcess` has it.

    Signals:
        line(str) – a line of output.
        done(outcome) – it has ended; the outcome has `ok`, `sentence` and `output`.
    """

    line: Any  # of type Signal, which pyright cannot match with a class attribute of the implementation
    done: Any

    @property
    def is_running(self) -> bool: ...
    def start(self) -> None: ...
    def cancel(self) -> None: ...


MakeTask = Callable[[list[str], QWidget], VerbTask]
"""Makes a task that has not been started, from a command line and a parent."""


def is_held_open(dialog: QWidget, task: VerbTask | None, event: QCloseEvent) -> bool:
    """Whether a dialog stays open as its command is running. That is then cancelled, and the dialog closes when it has ended: closing at
    once would delete the process object, which kills the process before it has cleaned up."""
    if task is None or not task.is_running:
        return False
    task.done.connect(dialog.close)
    task.cancel()
    event.ignore()
    return True


def without_setting(sentence: str) -> str:
    """A sentence of the command line without the name of its setting."""
    return _SETTING_PREFIX.sub("", sentence)


def json_object(line: str) -> dict[str, Any]:
    """A line of a verb's `--json` output; {} for any other line, such as an error's, which the outcome repeats."""
    try:
        content = json.loads(line)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}
