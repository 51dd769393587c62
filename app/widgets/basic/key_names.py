"""Keys as this platform has and writes them: ⌘G and ⌘⌫ on macOS, Ctrl+G and Delete elsewhere."""

from __future__ import annotations

import re
import sys

from PySide6.QtGui import QKeySequence

REMOVE_KEYS = "Ctrl+Backspace" if sys.platform == "darwin" else "Delete"
"""Removes what is selected. A Mac's keyboard has no Delete key: the one labelled so is Backspace, and the Finder's keys are ⌘⌫."""
_KEYS = re.compile(r"\b(?:(?:Ctrl|Alt|Shift|Meta)\+)+[^\s),;]+")


def key_name(keys: QKeySequence) -> str:
    """What the platform's menus call these keys."""
    return keys.toString(QKeySequence.SequenceFormat.NativeText)


def with_key_names(text: str) -> str:
    """The text, in which keys are portable (“Shows the next one (Ctrl+G)”), with the platform's names for them."""
    return _KEYS.sub(lambda found: key_name(QKeySequence(found[0])), text)
