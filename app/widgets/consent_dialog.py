"""The questions before a user's code runs and before a hosts file is used: its contents and its effect."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from PySide6.QtCore import Qt
from PySide6.QtGui import QShowEvent
from PySide6.QtWidgets import QDialog, QWidget

from app import theme
from app.widgets.basic.dialogs import open_path
from app.widgets.basic.labels import button, label
from app.widgets.basic.layout import card, column, configure, grid, row
from app.widgets.basic.number_format import figure
from backend.distributed.hosts_file import HostsToAllow
from backend.rewards.allowed_code import JUDGES_SERVER, CodeToAllow
from backend.tools.mcp_settings import ServerSettings
from backend.utils.text import quote

MOST = 12
IN_PROCESS = "It runs in its own process. It can read your files, though not keys and tokens in their usual places"
IN_TRAINER = "It runs inside the trainer, with your rights: it can read and change your files and use the network."
OR_SAYS_SO = "If the system cannot ensure that, the run says so."
SERVER = (
    "The model calls its tools while it trains. A server that is started has your rights: it can read and change your "
    "files and use the network. Allow only servers that you know."
)
JUDGES = (
    "It is on another machine: the prompts and completions of the run are sent there. Allow only servers that you know."
)
CONNECTS = (
    "GRPO Studio connects to each of them over ssh, with your keys, and starts itself there. A run sends them its "
    "prompts, completions, the text of its reward file and its weights, unencrypted. Allow only machines that you know."
)
LISTENS = (
    "All of them are on this machine. While they train, MLX opens ports without authentication at the addresses of the "
    "file. Allow only a file that you know."
)


RUN, CONNECT = ("Allow and Run", "Do Not Run"), ("Allow and Connect", "Do Not Connect")
Facts = list[tuple[str, str, str]]  # name, text, and the text's role, such as "problem"


class AllowDialog(QDialog):
    def __init__(
        self,
        title: str,
        question: str,
        meaning: str,
        files: Mapping[Path, Facts] | Mapping[str, Facts],
        buttons: tuple[str, str],
        parent: QWidget | None = None,
    ) -> None:
        """`files`, or servers by name, have the facts about each; `buttons` are the texts of yes and no."""
        super().__init__(parent)
        configure(self, windowTitle=title, minimumWidth=theme.scaled(520))
        # A focused button with autoDefault would take Return from the default one.
        self.allow = button(buttons[0], self.accept, autoDefault=False)
        self.decline = button(buttons[1], self.reject, default=True)
        paths = [path for path in files if isinstance(path, Path)]

        def show_files() -> None:
            for path in paths:
                open_path(path)

        show = button("Show the File", show_files, autoDefault=False, shown=bool(paths))
        top, cards = Qt.AlignmentFlag.AlignTop, []
        for facts in files.values():
            rows = [
                (label(name, role="muted", align=top), label(text, role=role, wrap=True, selectable=True))
                for name, text, role in facts
            ]
            cards.append(card(grid(rows, stretch=1, spacing=(12, 4), margins=(12, 10, 12, 10))))
        texts = (label(question, theme.heading_font(), wrap=True), label(meaning, role="muted", wrap=True))
        # Not a QDialogButtonBox: with a default button in it, Tab skips the first button.
        foot = row(show, None, self.decline, self.allow)
        column(*texts, *cards, foot, into=self, spacing=12, margins=3 * theme.SPACE)
        self.decline.setFocus()

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        # Qt's size hint wraps labels at a narrower width than the dialog gets, and is too high.
        self.resize(self.width(), self.heightForWidth(self.width()))

    def is_allowed(self) -> bool:
        return self.exec() == QDialog.DialogCode.Accepted


def consent_dialog(files: Sequence[CodeToAllow], parent: QWidget | None = None) -> AllowDialog:
    """The question before reward code runs, with Allow and Run, and Do Not Run."""
    names = " and ".join(file.code.path.name for file in files)
    question = f"Run the code in {names}?"
    if all(file.changed for file in files):
        has = "has" if len(files) == 1 else "have"
        question = f"{names} {has} changed since you allowed it to run. Run it as it is now?"
    if any(file.rights.in_trainer for file in files):
        rights = IN_TRAINER
    else:
        has_network = any(file.rights.network for file in files)
        network = ", and send them over the network. It" if has_network else ". It has no network, and"
        rights = f"{IN_PROCESS}{network} can change nothing outside its own folder. {OR_SAYS_SO}"
    meaning = f"It is a program. {rights} Allow only code that you know."
    shown: dict[Path, Facts] = {}
    for file in files:
        code = file.code
        facts = shown[code.path] = [
            ("File", str(code.path), ""),
            ("Size", f"{figure(code.size)} bytes{', changed' if file.changed else ''}", ""),
            ("Functions", _listed(code.functions) or "none found in its text", ""),
            ("Imports", _listed(code.imports) or "none", ""),
        ]
        if code.reaches:
            facts.append(("Among them", f"{_listed(code.reaches)}, for files, programs or the network", "problem"))
        if code.beside:
            text = f"{_listed(code.beside)}. Also run; you are not asked again when only these change."
            facts.append(("Beside it", text, ""))
    return AllowDialog("Code", question, meaning, shown, RUN, parent)


def _listed(names: Sequence[str], between: str = ", ", last: str = " and") -> str:
    more = [f"{last} {len(names) - MOST} more"] if len(names) > MOST else []
    return between.join(names[:MOST]) + "".join(more)


def servers_dialog(servers: Mapping[str, ServerSettings], parent: QWidget | None = None) -> AllowDialog:
    """The question before servers of MCP or OpenEnv are first started, or judges of other machines first asked."""
    question = f"Use the {' and the '.join(quote(name, 55) for name in servers)}?"
    facts: dict[str, Facts] = {
        name: [
            ("Server", quote(name, 55), ""),
            ("Connects to" if server.url else "Starts", quote(server.starts, 300), ""),
        ]
        for name, server in servers.items()
    }
    are_judges = {name.startswith(JUDGES_SERVER) for name in servers}
    meaning = "\n\n".join([SERVER] * (False in are_judges) + [JUDGES] * (True in are_judges))
    return AllowDialog("Servers", question, meaning, facts, RUN, parent)


def hosts_dialog(asked: HostsToAllow, parent: QWidget | None = None) -> AllowDialog:
    """The question before a hosts file is first used: its machines, and the data sent to them."""
    name = quote(asked.path.name, 60)
    if asked.changed:
        question = f"{name} has changed since you allowed it. Use it as it is now?"
    else:
        question = f"Connect to the machines in {name}?" if asked.others else f"Train with the ranks in {name}?"
    meaning, others = CONNECTS if asked.others else LISTENS, asked.others
    here = [host for rank, host in enumerate(asked.hosts.hosts) if asked.hosts.is_here(rank)]
    machines = []
    for host in others:
        elsewhere = ", ".join(address for address in host.ips if address != host.ssh)
        machines.append(f"{quote(host.ssh, 90)}{f' at {elsewhere}' if elsewhere else ''}")
    programs = [(host, host.program or host.folder) for host in others]
    starts = [f"{quote(host.ssh, 40)}: {quote(place, 90)}" for host, place in programs if place]
    listed = {
        "Machines": machines or [f"this one, with {len(here)} ranks"],
        "Starts there": starts,
        "Listens at": list(dict.fromkeys(address for host in here for address in host.ips)),
        "Sets": [quote(variable, 90) for variable in asked.hosts.envs],
    }
    facts: Facts = [("File", str(asked.path), "")]
    for title, lines in listed.items():
        if lines:
            role = "problem" if title == "Starts there" else ""
            facts.append((title, _listed(lines, "\n", "\nand"), role))
    return AllowDialog("Machines", question, meaning, {asked.path: facts}, CONNECT, parent)
