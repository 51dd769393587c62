"""An undoable change of the form: its state before and after. Plain data; `app.state.undo` applies it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class FormState:
    """The whole state of a draft: the value of every setting, the values on disk, and the path of that file."""

    values: Mapping[str, Any]
    on_disk: Mapping[str, Any]
    path: Path | None


@dataclass(frozen=True, slots=True)
class FormStep:
    """`what` follows the word Undo in the menu; `typed` is the setting that was typed into, "" for any other change."""

    what: str
    before: FormState
    after: FormState
    typed: str = ""

    @property
    def replaces_file(self) -> bool:
        """Whether the form belongs to another file afterwards."""
        return self.before.path != self.after.path or self.before.on_disk is not self.after.on_disk

    @property
    def is_empty(self) -> bool:
        return self.before == self.after
