"""The question before a user's code runs: which file, what is in it, and what it could reach.

The facts come from the source text (`backend.rewards.allowed_code`); nothing is run to find them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PySide6.QtCore import Qt
from PySide6.QtGui import QShowEvent
from PySide6.QtWidgets import QDialog, QFrame, QGridLayout, QHBoxLayout, QPushButton, QVBoxLayout, QWidget

from app import theme
from app.widgets.basic.dialogs import open_path
from app.widgets.basic.labels import button, label
from app.widgets.basic.number_format import figure
from backend.distributed.hosts_file import Host, HostsToAllow
from backend.rewards.allowed_code import CodeToAllow
from backend.utils.text import quote

WIDTH = 520


@dataclass(frozen=True, slots=True)
class StatedFact:
    """A row of a card. `warns`: it is what should make a person think."""

    name: str
    text: str
    warns: bool = False


@dataclass(frozen=True, slots=True)
class ShownFile:
    """A file that the question is about, and the card of its facts."""

    path: Path
    facts: Sequence[StatedFact]


class AllowDialog(QDialog):
    """A modal question; Return and Escape both mean no.

    Attributes:
        allow, decline – its buttons.
    """

    def __init__(
        self, title: str, question: str, meaning: str, files: Sequence[ShownFile], yes: str, no: str, parent: QWidget | None = None
    ) -> None:  # fmt: skip
        super().__init__(parent)
        self.setWindowTitle(title)
        self.setMinimumWidth(theme.scaled(WIDTH))
        column = QVBoxLayout(self)
        column.setContentsMargins(*(3 * theme.SPACE,) * 4)
        column.setSpacing(12)
        column.addWidget(label(question, theme.heading_font(), wrap=True))
        column.addWidget(label(meaning, role="muted", wrap=True))
        for file in files:
            column.addWidget(_card(file.facts))
        self.allow, self.decline = QPushButton(yes), QPushButton(no)
        column.addLayout(self._buttons([file.path for file in files]))
        self.decline.setFocus()

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        # Qt's size hint allows for wrapped labels at a narrower width than the dialog gets, and is too high.
        self.resize(self.width(), self.heightForWidth(self.width()))

    def is_allowed(self) -> bool:
        """Ask, and wait for the answer."""
        return self.exec() == QDialog.DialogCode.Accepted

    def _buttons(self, paths: Sequence[Path]) -> QHBoxLayout:
        # No QDialogButtonBox: with a default button in it, Tab passes over the first button of a dialog that has no other stops.
        show = button("Show the File", lambda: [open_path(path) for path in paths])
        row = QHBoxLayout()
        row.setSpacing(theme.SPACE)
        row.addWidget(show)
        row.addStretch(1)
        for answer in (self.decline, self.allow):
            row.addWidget(answer)
        for other in (self.allow, show):  # a focused button with autoDefault would take Return from the default one
            other.setAutoDefault(False)
        self.decline.setDefault(True)
        self.allow.clicked.connect(self.accept)
        self.decline.clicked.connect(self.reject)
        return row


def _card(facts: Sequence[StatedFact]) -> QFrame:
    card = QFrame()
    card.setProperty("role", "card")
    grid = QGridLayout(card)
    grid.setContentsMargins(12, 10, 12, 10)
    grid.setHorizontalSpacing(12)
    grid.setVerticalSpacing(4)
    grid.setColumnStretch(1, 1)
    for row, fact in enumerate(facts):
        grid.addWidget(label(fact.name, role="muted"), row, 0, Qt.AlignmentFlag.AlignTop)
        grid.addWidget(label(fact.text, role="problem" if fact.warns else "", wrap=True, selectable=True), row, 1)
    return card


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


MOST_LINES = 12
"""Machines, and programs, that are listed."""
MEANING = (
    "GRPO Studio connects to each of them over ssh, with your keys, and starts itself there. A run sends them its prompts, completions, "
    "the text of its reward file and its weights, unencrypted. Allow only machines that you know."
)
HERE_ALONE = (
    "All of them are on this machine. While they train, MLX opens ports at the addresses of the file, which ask for no proof. Allow only a "
    "file that you know."
)


class HostsDialog(AllowDialog):
    """The question, with Allow and Do Not Connect."""

    def __init__(self, asked: HostsToAllow, parent: QWidget | None = None) -> None:
        name = quote(asked.path.name, 60)
        question = (
            f"{name} has changed since you allowed it. Use it as it is now?"
            if asked.changed
            else f"Connect to the machines in {name}?"
            if asked.others
            else f"Train with the ranks in {name}?"
        )
        super().__init__(
            "Machines", question, MEANING if asked.others else HERE_ALONE, [ShownFile(asked.path, _machine_facts(asked))],
            "Allow and Connect", "Do Not Connect", parent,
        )  # fmt: skip


def _machine_facts(asked: HostsToAllow) -> list[StatedFact]:
    others = asked.others
    here = [host for rank, host in enumerate(asked.hosts.hosts) if asked.hosts.is_here(rank)]
    facts = [
        StatedFact("File", str(asked.path)),
        StatedFact(
            "Machines", _machine_lines([_machine(host) for host in others]) or f"this one, with {len(here)} ranks"
        ),
    ]
    if programs := [
        f"{quote(host.ssh, 40)}: {quote(place, 90)}" for host in others if (place := host.program or host.folder)
    ]:
        facts.append(StatedFact("Starts there", _machine_lines(programs), warns=True))
    if addresses := [address for host in here for address in host.ips]:
        facts.append(StatedFact("Listens at", _machine_lines(list(dict.fromkeys(addresses)))))
    if asked.hosts.envs:
        facts.append(StatedFact("Sets", _machine_lines([quote(variable, 90) for variable in asked.hosts.envs])))
    return facts


def _machine(host: Host) -> str:
    elsewhere = ", ".join(address for address in host.ips if address != host.ssh)
    return f"{quote(host.ssh, 90)}{f' at {elsewhere}' if elsewhere else ''}"


def _machine_lines(texts: list[str]) -> str:
    more = [f"and {len(texts) - MOST_LINES} more"] if len(texts) > MOST_LINES else []
    return "\n".join([*texts[:MOST_LINES], *more])
