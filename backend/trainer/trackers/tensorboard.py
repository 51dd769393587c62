"""The tracker tensorboard: event files in trackers/tensorboard of the run's folder, by tensorboardX.

They are written anew from the event log whenever a process of this tracker begins or the event log was cut back, so they hold each step once.
A TensorBoard that shows the folder meanwhile drops what it had read: the new file begins before the first step.
"""

from __future__ import annotations

import shutil
from importlib import import_module
from typing import Any

from backend.trainer.trackers import completion_table
from backend.trainer.trackers.records import AboutRun, Sent, StepRecord
from backend.utils.disk_faults import writing
from backend.utils.private_files import make_private_folder

FOLDER = "tensorboard"
ROWS = 16
"""Completions of a step in its table, which is text here and is read whole by the browser."""
LONGEST_CELL = 2_000
"""Characters of a text in it."""


class TensorBoardFiles:
    def __init__(self) -> None:
        self._writer: Any = None

    def open(self, about: AboutRun) -> Sent:
        if self._writer is not None:
            self._writer.close()
        folder = about.folder.trackers / FOLDER
        with writing(folder):
            if folder.exists():
                shutil.rmtree(folder)
            make_private_folder(folder)
            # purge_step: a reader that has seen later steps of an older file forgets them.
            self._writer = import_module("tensorboardX").SummaryWriter(logdir=str(folder), purge_step=0)
        settings = "\n".join(f"    {key}: {value}" for key, value in about.settings.items())
        self._writer.add_text("settings", settings, 0)
        return Sent()

    def send(self, record: StepRecord) -> None:
        for name, value in record.metrics().items():
            self._writer.add_scalar(name, value, record.step)
        if record.groups:
            self._writer.add_text("completions", _markdown(record), record.step)

    def flush(self, sent: Sent) -> None:
        self._writer.flush()

    def close(self, ending: str) -> None:
        self._writer.close()


def _markdown(record: StepRecord) -> str:
    """The first completions of a step as a table in Markdown."""
    header, rows = completion_table.table(record.groups)
    return "\n".join(["|".join(map(_cell, line)) for line in (header, ["---"] * len(header), *rows[:ROWS])])


def _cell(value: Any) -> str:
    """Text on one line, in which nothing is a column's border, a line of a table or HTML."""
    text = "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)[:LONGEST_CELL]
    for character, escaped in (
        ("&", "&amp;"),
        ("<", "&lt;"),
        (">", "&gt;"),
        ("|", "&#124;"),
        ("\r", ""),
        ("\n", "<br>"),
    ):
        text = text.replace(character, escaped)
    return text
