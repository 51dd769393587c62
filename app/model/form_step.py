"""One act upon the form as it was before and as it is after, so that it can be undone. Plain data: it undoes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class FormState:
    """All that a draft is: the value of every setting, those of the file behind it, and where that file lies."""

    values: Mapping[str, Any]
    on_disk: Mapping[str, Any]
    path: Path | None


@dataclass(frozen=True, slots=True)
class FormStep:
    """`what` follows the word Undo in the menu; `typed` is the setting that was typed into, "" for any other act."""

    what: str
    before: FormState
    after: FormState
    typed: str = ""

    @property
    def replaces_file(self) -> bool:
        """Whether another file stands behind the form after it."""
        return self.before.path != self.after.path or self.before.on_disk is not self.after.on_disk

    @property
    def is_empty(self) -> bool:
        return self.before == self.after
