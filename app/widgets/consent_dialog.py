"""The question before a user's code runs: which file, what is in it, and what it could reach.

The facts come from the source text (`backend.rewards.catalogue.allowed_code`); nothing is run to find them.
"""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtWidgets import QWidget

from app.widgets.basic.allow_dialog import AllowDialog, ShownFile, StatedFact
from app.widgets.basic.number_format import figure
from backend.rewards.catalogue.allowed_code import CodeToAllow

MAX_NAMES = 12
"""Names shown of a long list."""


class ConsentDialog(AllowDialog):
    """The question, with Allow and Do Not Run."""

    def __init__(self, files: Sequence[CodeToAllow], parent: QWidget | None = None) -> None:
        shown = [ShownFile(file.code.path, _facts(file)) for file in files]
        super().__init__("Reward code", _question(files), _rights(files), shown, "Allow and Run", "Do Not Run", parent)


def ask_consent(files: Sequence[CodeToAllow], parent: QWidget | None = None) -> bool:
    """Ask, and wait for the answer: whether the files may run."""
    return ConsentDialog(files, parent).is_allowed()


def _question(files: Sequence[CodeToAllow]) -> str:
    names = " and ".join(file.code.path.name for file in files)
    if all(file.changed for file in files):
        return (
            f"{names} {'has' if len(files) == 1 else 'have'} changed since you allowed it to run. Run it as it is now?"
        )
    return f"Run the code in {names}?"


def _rights(files: Sequence[CodeToAllow]) -> str:
    """What the code may do, where it runs; of several runs, the one with the most rights."""
    if any(file.rights.in_trainer for file in files):
        rights = "It runs inside the trainer, with your rights: it can read and change your files and use the network."
    elif any(file.rights.network for file in files):
        rights = (
            "It runs in a process of its own. It can read your files, though not keys and tokens in their usual places, "
            "and send what it reads over the network. It can change nothing outside a folder of its own."
        )
    else:
        rights = (
            "It runs in a process of its own. It can read your files, though not keys and tokens in their usual places. It "
            "has no network, and can change nothing outside a folder of its own."
        )
    limits = (
        ""
        if any(file.rights.in_trainer for file in files)
        else " Where the system cannot ensure that, the run says so."
    )
    return f"It is a program. {rights}{limits} Allow only code that you know."


def _facts(file: CodeToAllow) -> list[StatedFact]:
    code = file.code
    facts = [
        StatedFact("File", str(code.path)),
        StatedFact("Size", f"{figure(code.size)} bytes{', changed' if file.changed else ''}"),
        StatedFact("Functions", _names(code.functions) or "none that can be read off its text"),
        StatedFact("Imports", _names(code.imports) or "none"),
    ]
    if code.reaches:
        facts.append(
            StatedFact("Among them", f"{_names(code.reaches)}, for files, programs or the network", warns=True)
        )
    if code.beside:
        facts.append(
            StatedFact("Beside it", f"{_names(code.beside)}. Also run; a change there alone is not asked about.")
        )
    return facts


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more
