"""The questions before a user's code runs and before a hosts file is used: its contents and its effect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PySide6.QtCore import Qt
from PySide6.QtGui import QShowEvent
from PySide6.QtWidgets import QDialog, QGridLayout, QPushButton, QWidget

from app import theme
from app.widgets.basic.dialogs import open_path
from app.widgets.basic.labels import button, label
from app.widgets.basic.layout import card, column, row
from app.widgets.basic.number_format import figure
from backend.distributed.hosts_file import Host, HostsToAllow
from backend.rewards.allowed_code import CodeToAllow
from backend.utils.text import quote

MOST = 12
"""Names, machines and programs that are listed."""
IN_PROCESS = "It runs in its own process. It can read your files, though not keys and tokens in their usual places"
CONNECTS = (
    "GRPO Studio connects to each of them over ssh, with your keys, and starts itself there. A run sends them its "
    "prompts, completions, the text of its reward file and its weights, unencrypted. Allow only machines that you know."
)
LISTENS = (
    "All of them are on this machine. While they train, MLX opens ports without authentication at the addresses of the "
    "file. Allow only a file that you know."
)


@dataclass(frozen=True, slots=True)
class StatedFact:
    """A row of a card; `warns` gives it the colour of problems."""

    name: str
    text: str
    warns: bool = False


@dataclass(frozen=True, slots=True)
class ShownFile:
    """A file that the question is about, and the card of its facts."""

    path: Path
    facts: Sequence[StatedFact]


class AllowDialog(QDialog):
    """A modal question."""

    def __init__(
        self,
        title: str,
        question: str,
        meaning: str,
        files: Sequence[ShownFile],
        yes: str,
        no: str,
        parent: QWidget | None = None,
    ) -> None:
        super().__init__(parent)
        self.setWindowTitle(title)
        self.setMinimumWidth(theme.scaled(520))
        self.allow, self.decline = QPushButton(yes), QPushButton(no)
        show = button("Show the File", lambda: [open_path(file.path) for file in files])
        texts = (label(question, theme.heading_font(), wrap=True), label(meaning, role="muted", wrap=True))
        # Not a QDialogButtonBox: with a default button in it, Tab skips the first button.
        buttons = row(show, None, self.decline, self.allow)
        column(*texts, *map(_card, files), buttons, into=self, spacing=12, margins=3 * theme.SPACE)
        for other in (self.allow, show):  # a focused button with autoDefault would take Return from the default one
            other.setAutoDefault(False)
        self.decline.setDefault(True)
        self.allow.clicked.connect(self.accept)
        self.decline.clicked.connect(self.reject)
        self.decline.setFocus()

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        # Qt's size hint wraps labels at a narrower width than the dialog gets, and is too high.
        self.resize(self.width(), self.heightForWidth(self.width()))

    def is_allowed(self) -> bool:
        return self.exec() == QDialog.DialogCode.Accepted


def _card(file: ShownFile) -> QWidget:
    grid = QGridLayout()
    grid.setContentsMargins(12, 10, 12, 10)
    grid.setHorizontalSpacing(12)
    grid.setVerticalSpacing(4)
    grid.setColumnStretch(1, 1)
    for place, fact in enumerate(file.facts):
        grid.addWidget(label(fact.name, role="muted"), place, 0, Qt.AlignmentFlag.AlignTop)
        text = label(fact.text, role="problem" if fact.warns else "", wrap=True, selectable=True)
        grid.addWidget(text, place, 1)
    return card(grid)


class ConsentDialog(AllowDialog):
    """The question before reward code runs, with Allow and Run, and Do Not Run."""

    def __init__(self, files: Sequence[CodeToAllow], parent: QWidget | None = None) -> None:
        names = " and ".join(file.code.path.name for file in files)
        question = f"Run the code in {names}?"
        if all(file.changed for file in files):
            has = "has" if len(files) == 1 else "have"
            question = f"{names} {has} changed since you allowed it to run. Run it as it is now?"
        if any(file.rights.in_trainer for file in files):
            rights = (
                "It runs inside the trainer, with your rights: it can read and change your files and use the network."
            )
        else:
            if any(file.rights.network for file in files):
                rights = f"{IN_PROCESS}, and send them over the network. It can change nothing outside its own folder."
            else:
                rights = f"{IN_PROCESS}. It has no network, and can change nothing outside its own folder."
            rights += " If the system cannot ensure that, the run says so."
        meaning = f"It is a program. {rights} Allow only code that you know."
        shown = [ShownFile(file.code.path, _code_facts(file)) for file in files]
        super().__init__("Reward code", question, meaning, shown, "Allow and Run", "Do Not Run", parent)


def ask_consent(files: Sequence[CodeToAllow], parent: QWidget | None = None) -> bool:
    """Ask if the files may run, and wait for the answer."""
    return ConsentDialog(files, parent).is_allowed()


def _code_facts(file: CodeToAllow) -> list[StatedFact]:
    code = file.code
    facts = [
        StatedFact("File", str(code.path)),
        StatedFact("Size", f"{figure(code.size)} bytes{', changed' if file.changed else ''}"),
        StatedFact("Functions", _names(code.functions) or "none found in its text"),
        StatedFact("Imports", _names(code.imports) or "none"),
    ]
    if code.reaches:
        text = f"{_names(code.reaches)}, for files, programs or the network"
        facts.append(StatedFact("Among them", text, warns=True))
    if code.beside:
        text = f"{_names(code.beside)}. Also run; you are not asked again when only these change."
        facts.append(StatedFact("Beside it", text))
    return facts


def _names(names: Sequence[str]) -> str:
    return ", ".join(names[:MOST]) + (f" and {len(names) - MOST} more" if len(names) > MOST else "")


class HostsDialog(AllowDialog):
    """The question before a hosts file is first used: its machines, and the data sent to them."""

    def __init__(self, asked: HostsToAllow, parent: QWidget | None = None) -> None:
        name = quote(asked.path.name, 60)
        if asked.changed:
            question = f"{name} has changed since you allowed it. Use it as it is now?"
        else:
            question = f"Connect to the machines in {name}?" if asked.others else f"Train with the ranks in {name}?"
        meaning, shown = CONNECTS if asked.others else LISTENS, [ShownFile(asked.path, _host_facts(asked))]
        super().__init__("Machines", question, meaning, shown, "Allow and Connect", "Do Not Connect", parent)


def _host_facts(asked: HostsToAllow) -> list[StatedFact]:
    others = asked.others
    here = [host for rank, host in enumerate(asked.hosts.hosts) if asked.hosts.is_here(rank)]
    machines = _lines([_machine(host) for host in others]) or f"this one, with {len(here)} ranks"
    facts = [StatedFact("File", str(asked.path)), StatedFact("Machines", machines)]
    places = [(host, host.program or host.folder) for host in others]
    if programs := [f"{quote(host.ssh, 40)}: {quote(place, 90)}" for host, place in places if place]:
        facts.append(StatedFact("Starts there", _lines(programs), warns=True))
    if addresses := [address for host in here for address in host.ips]:
        facts.append(StatedFact("Listens at", _lines(list(dict.fromkeys(addresses)))))
    if asked.hosts.envs:
        facts.append(StatedFact("Sets", _lines([quote(variable, 90) for variable in asked.hosts.envs])))
    return facts


def _machine(host: Host) -> str:
    elsewhere = ", ".join(address for address in host.ips if address != host.ssh)
    return f"{quote(host.ssh, 90)}{f' at {elsewhere}' if elsewhere else ''}"


def _lines(texts: list[str]) -> str:
    return "\n".join([*texts[:MOST], *([f"and {len(texts) - MOST} more"] if len(texts) > MOST else [])])
