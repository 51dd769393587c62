"""The tracker trackio: one run in the database that trackio keeps on this machine, which `trackio show` displays. Never on a Space.

Written anew whenever a process of this tracker begins or the event log was cut back: the run that an earlier process made of this folder is
found by a mark in its settings, and deleted.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from importlib import import_module
from typing import Any

from backend.trainer.trackers.completion_table import logged
from backend.trainer.trackers.records import AboutRun, Sent, StepRecord

MARK = "grpo_studio_run"
"""The key of the mark: a sum of the folder's path, which does not tell the path."""
KEPT_VARIABLE = "TRACKIO_DIR"
"""Where the database is. trackio's other variables could name a server, a Space or a webhook to which everything would go."""


class TrackioRun:
    def __init__(self) -> None:
        self._trackio: Any = None

    def open(self, about: AboutRun) -> Sent:
        for variable in [name for name in os.environ if name.startswith("TRACKIO_") and name != KEPT_VARIABLE]:
            del os.environ[variable]
        if self._trackio is not None:
            self._trackio.finish()
        self._trackio = import_module("trackio")
        mark = hashlib.sha256(str(about.folder.path).encode()).hexdigest()[:16]
        with contextlib.suppress(ValueError):  # there is no such project yet
            for run in list(self._trackio.Api().runs(about.project)):
                if (run.config or {}).get(MARK) == mark:
                    run.delete()
        self._trackio.init(
            project=about.project, name=about.name, config=about.settings | {MARK: mark}, resume="never", embed=False,
            auto_log_gpu=False, auto_log_cpu=False,
        )  # fmt: skip
        return Sent()

    def send(self, record: StepRecord) -> None:
        self._trackio.log(logged(record, self._trackio), step=record.step)

    def flush(self, sent: Sent) -> None:
        """trackio writes from a thread of its own."""

    def close(self, ending: str) -> None:
        self._trackio.finish()
