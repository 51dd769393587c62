"""Dialogs of Hugging Face: the account, the preview of an upload, and training on a rented machine."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from PySide6.QtCore import Qt, QUrl, Signal
from PySide6.QtGui import QCloseEvent, QImage, QResizeEvent, QTextDocument
from PySide6.QtWidgets import QFrame, QLabel, QLineEdit, QTextBrowser, QWidget

from app import theme
from app.state.processes import ProcessOutcome, Service, VerbProcess, json_object
from app.widgets.basic.controls import ComboBox, ElidedLabel, NumberEdit
from app.widgets.basic.dialogs import Dialog, open_link, open_path
from app.widgets.basic.labels import button, label, plain_tip, progress_bar, show_text
from app.widgets.basic.layout import column, configure, grid, holder, row, set_shown, wrap_in_card
from app.widgets.basic.number_format import dollars, file_size
from app.widgets.basic.tables import BaseTable, Column, TextsModel
from app.widgets.form.value_text import value_label
from backend.config.config import SETTINGS, Config
from backend.config.other_programs.into_trl import into_trl, require_grpo

Account = dict[str, Any]
MARGIN, SIDE = 16, 260
FIRST_FILES = 9
HOURS = "6"
INTRO = (
    "TRL trains on a rented machine. Your data and reward files go into a private bucket; log, charts and adapter come "
    "back into the run, which you can stop from here."
)
ANONYMOUS = "Not logged in. Jobs need an account, which pays for them."


class VerbDialog(Dialog):
    """A dialog that runs a verb, shows its progress and result, and cancels it before it closes. It is not modal."""

    def __init__(self, title: str, what: str, parent: QWidget | None, size: tuple[int, int] | None = None) -> None:
        super().__init__(title, parent, size)
        self.task: VerbProcess | None = None
        self.progress = progress_bar(f"Progress of the {what}", visible=False)
        self.outcome_label = label(wrap=True, selectable=True)

    @property
    def is_running(self) -> bool:
        return self.task is not None and self.task.is_running

    def run_verb(self, command: list[str]) -> None:
        self.task = VerbProcess(command, self)
        self.task.line.connect(self._read)
        self.task.done.connect(self.progress.hide)
        self.task.done.connect(self.on_end)
        self.show_progress("Starting…", None)
        self.task.start()

    def show_progress(self, sentence: str, done: float | None) -> None:
        """`done` from 0 to 1; None for a busy bar without an end in sight."""
        self.progress.setRange(0, 0 if done is None else 1000)
        if done is not None:
            self.progress.setValue(round(1000 * done))
        set_shown(self.progress, True)

    def on_result(self, content: dict[str, Any]) -> None:
        """Take a line that is no progress; `on_end` has all lines."""

    def on_end(self, outcome: ProcessOutcome) -> None:
        raise NotImplementedError

    def _read(self, line: str) -> None:
        content = json_object(line)
        if "progress" in content:
            self.show_progress(content["progress"], content.get("done"))
        else:
            self.on_result(content)

    def report(self, sentence: str, role: str) -> None:
        show_text(self.outcome_label, sentence)
        self.outcome_label.setStyleSheet(f"color: {getattr(theme.palette(), role).name()};")

    def closeEvent(self, event: QCloseEvent) -> None:
        if self.task is not None and self.task.is_running:
            self.task.done.connect(self.close)
            self.task.cancel()
            event.ignore()
        else:
            super().closeEvent(event)


class CardView(QTextBrowser):
    """A model card as its page will show it, the settings at the top as they are written."""

    def __init__(self, card: str, folder: Path) -> None:
        super().__init__()
        self._folder, self._card = folder, card
        configure(
            self,
            name="Model card",
            role="reading",
            font=theme.body_font(),
            frameShape=QFrame.Shape.NoFrame,
            horizontalScrollBarPolicy=Qt.ScrollBarPolicy.ScrollBarAlwaysOff,
            openLinks=False,
        )
        self.anchorClicked.connect(lambda url: open_link(url.toString()) if url.scheme() in ("http", "https") else None)
        self.document().setDocumentMargin(MARGIN)
        self._draw()

    def _draw(self) -> None:
        _, settings, body = self._card.split("---\n", 2) if self._card.startswith("---\n") else ("", "", self._card)
        top = f"```yaml\n{settings}```\n\n" if settings else ""
        html = MarkdownIt("commonmark", {"html": False}).enable("table").render(top + body)
        # Qt takes a cell's style for all of its style, and shows the line break at the end of a block of code.
        html = re.sub(r'style="text-align:(\w+)"', r'align="\1"', html).replace("\n</code></pre>", "</code></pre>")
        window, hairline = theme.palette().window.name(), theme.palette().hairline.name()
        self.document().setDefaultStyleSheet(
            f"pre {{ background-color: {window}; white-space: pre-wrap; margin-top: 8px; }}"
            "code { font-family: monospace; }"
            "p, li { margin-top: 8px; margin-bottom: 0; } h1 { margin-top: 16px; } h2, h3 { margin-top: 24px; }"
            "table { border-collapse: collapse; margin-top: 8px; }"
            f"th, td {{ border: 1px solid {hairline}; padding: 4px; }}"
        )
        self.setHtml(html)

    def loadResource(self, kind: int, name: QUrl) -> Any:
        file = self._folder / Path(name.path()).name
        if kind != QTextDocument.ResourceType.ImageResource.value or not name.isRelative() or not file.is_file():
            return None
        picture, ratio = QImage(str(file)), self.devicePixelRatioF()
        room = round((self.viewport().width() - 2 * MARGIN - 4) * ratio)
        if picture.width() > room > 0:
            picture = picture.scaledToWidth(room, Qt.TransformationMode.SmoothTransformation)
        picture.setDevicePixelRatio(ratio)
        return picture

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        if event.size().width() != event.oldSize().width():
            self._draw()  # pictures have the width of the text


class HubAccount(QWidget):
    """The account at Hugging Face, and a line for a token: without one that may write, or if `is_always_open`."""

    can_write_changed = Signal(bool)
    found = Signal(dict)  # Account, empty if nobody is logged in

    def __init__(self, service: Service, *, is_always_open: bool = False) -> None:
        super().__init__()
        self._service, self._is_always_open, self.can_write = service, is_always_open, False
        self.label = label(wrap=True, selectable=True)
        self.token = configure(
            QLineEdit(placeholderText="Access token (write)"),
            name="Access token for Hugging Face",
            echoMode=QLineEdit.EchoMode.Password,
            returnPressed=self.log_in,
        )
        tip = "Stores the token in the system's keychain only"
        self.button = button("Log in", self.log_in, tip=tip, autoDefault=False)
        column(self.label, row((self.token, 1), self.button), into=self)

    def ask(self, anonymous: str, refused: str = "{problem}") -> None:
        """Find out who is logged in. `refused`: about a stored token (`source`) that does not serve (`problem`)."""

        def on_account(account: Account) -> None:
            problem = refused.format(**account) if "problem" in account else anonymous
            account = {} if "problem" in account else account
            self.found.emit(account)
            self.show_account(account, problem)

        self.show_account({}, "Asking Hugging Face…")
        self._service.ask("hub_account", on_account, owner=self)

    def show_account(self, account: Account, problem: str) -> None:
        self.can_write = can_write = bool(account) and account["can_write"]
        if can_write:
            problem = f"{account['name']} (token from {account['source']})"
        elif account:
            problem = f"{account['name']}, but this token may only read."
        self.label.setText(problem)
        for widget in (self.token, self.button):
            set_shown(widget, self._is_always_open or not can_write)
        self.button.setEnabled(True)
        self.can_write_changed.emit(can_write)

    def log_in(self) -> None:
        token = self.token.text().strip()
        self.token.clear()
        if not token:
            return

        def on_account(account: Account) -> None:
            self.found.emit(account)
            self.show_account(account, "")

        self.button.setEnabled(False)
        # The token reaches the warm process through its stdin, and is kept in the keychain only.
        self._service.ask(
            "hub_login",
            on_account,
            on_refused=lambda problems: self.show_account({}, problems[0].sentence),
            token=token,
        )


class UploadDialog(VerbDialog):
    """Shows the preview that the verb has printed. Closing it pauses a running upload."""

    def __init__(
        self, preview: Mapping[str, Any], command: list[str], service: Service, parent: QWidget | None = None
    ) -> None:
        super().__init__("Upload to Hugging Face", "upload", parent, (1120, 740))
        self.preview, self.command = preview, command
        self._paused, self._page = False, ""
        folder = Path(preview["folder"])
        self.card = CardView(preview["card"], folder)
        self.account = HubAccount(service)
        tip = "Opens README.md; saved changes are sent"
        self.edit = button("Edit the card", lambda: open_path(folder / "README.md"), tip=tip, autoDefault=False)
        self.upload = button("Upload", self._press, primary=True)
        self.upload.setFocus()

        right = Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignTop
        files: list[tuple[QLabel, QLabel | None]] = []
        for file in preview["files"][:FIRST_FILES]:
            size = label(file_size(file["bytes"]), theme.figures_font(), "muted", align=right)
            files.append((label(file["name"], wrap=True), size))
        if (more := len(preview["files"]) - FIRST_FILES) > 0:
            files.append((label(f"and {more} more", role="muted"), None))
        visible = "Private: others cannot see it." if preview["private"] else "Public: everybody can see it."
        files_grid = grid(files, stretch=0, spacing=(theme.SPACE, theme.SPACE // 2))
        sections = {
            "Repository": (label(preview["repo"], wrap=True, selectable=True), label(visible, role="muted", wrap=True)),
            f"Files, {file_size(preview['bytes'])}": (holder(files_grid),),
            "Account": (self.account,),
        }
        parts = []
        for title, widgets in sections.items():
            head = label(title, role="caption")
            head.setContentsMargins(0, theme.SPACE, 0, 0)
            parts += [configure(part, width=SIDE) for part in (head, *widgets)]
        body = row((wrap_in_card(self.card), 1), column(*parts, None, self.edit), spacing=3 * theme.SPACE)
        foot = row((self.outcome_label, 1), button("Close", self.close, autoDefault=False), self.upload)
        column((body, 1), self.progress, foot, into=self, spacing=2 * theme.SPACE, margins=2 * theme.SPACE)
        self.report("Nothing has been sent yet.", "muted")
        self.account.can_write_changed.connect(self.upload.setEnabled)
        self.account.show_account(preview["account"] or {}, preview["account_problem"])

    def _press(self) -> None:
        if self._page:
            open_link(self._page)
        elif self.task is not None and self.task.is_running:
            self._paused = True
            self.upload.setEnabled(False)
            self.task.cancel()
        else:
            self._paused = False
            self.upload.setText("Pause")
            self.run_verb(self.command)

    def show_progress(self, sentence: str, done: float | None) -> None:
        super().show_progress(sentence, done)
        self.report(sentence, "muted")

    def on_result(self, content: dict[str, Any]) -> None:
        self._page = content.get("place", self._page)

    def on_end(self, outcome: ProcessOutcome) -> None:
        self.upload.setEnabled(True)
        if outcome.ok and self._page:
            self.report(f"Uploaded to {self._page}.", "good")
            self.upload.setText("Open the page")
            self.edit.setEnabled(False)
            return
        self._page = ""
        self.upload.setText("Resume")
        if self._paused:
            self.report("Paused. Uploaded files stay there.", "muted")
        else:
            self.report(outcome.problem, "bad")

    def closeEvent(self, event: QCloseEvent) -> None:
        self._paused = True
        super().closeEvent(event)


class JobDialog(Dialog):
    """Asks for the machine of a run with these settings. Raises UserError for those that TRL cannot train."""

    submitted = Signal(str, float, str)  # flavor, hours, owner

    def __init__(self, config: Config, service: Service, parent: QWidget | None = None) -> None:
        require_grpo(config)
        left_out = into_trl(config).left_out
        super().__init__("Train on Hugging Face", parent, (620, 640))
        self._hardware: list[Mapping[str, Any]] = []
        self._wanted: tuple[str, float] | None = None  # machine and hours
        model, data = (value_label(SETTINGS[key], getattr(config, key)) for key in ("model", "data"))
        what = ElidedLabel(colour="text", text=f"{model} on {data}")
        names = ", ".join(SETTINGS[left.setting].label for left in left_out)
        tip = plain_tip("\n".join(f"{SETTINGS[left.setting].label}: {left.instead}" for left in left_out))
        missing = label(f"Not carried over: {names}.", role="muted", wrap=True, toolTip=tip, shown=bool(names))
        gpu = (Column("GPU", 130), Column("GPU memory", 100))
        self.model = TextsModel(self, (Column("Machine"), *gpu, Column("Per hour", 90, True)))
        self.table = BaseTable(model=self.model, single=True, name="Hardware")
        self.table.selectionModel().selectionChanged.connect(self._show)
        self.table.activated.connect(self._submit)
        self.state = label("Asking Hugging Face for its hardware…", role="muted", wrap=True)
        tip = "The job is ended after this time, whatever it has done"
        self.hours = NumberEdit("h", text=HOURS, width=96, name="Time-out", tip=tip, textChanged=self._show)
        self.owner = ComboBox(name="Paid by", length=16)
        self.account = HubAccount(service)
        self.most, self.sum = label(font=theme.title_font()), label(role="muted", wrap=True)
        self.submit = button("Submit", self._submit, primary=True)
        self._owner_name = label("Paid by", role="muted", buddy=self.owner)
        hours_name = label("Time-out", role="muted", buddy=self.hours)
        fields = ((hours_name, row(self.hours, None)), (self._owner_name, row(self.owner, None)))
        cost = row((column(self.most, self.sum, spacing=2), 1), button("Cancel", self.reject), self.submit)
        parts = (what, label(INTRO, role="muted", wrap=True), missing, (wrap_in_card(self.table), 1), self.state)
        column(*parts, grid(fields, stretch=1), self.account, cost, into=self, spacing=12, margins=2 * theme.SPACE)
        self.account.found.connect(self._list_owners)
        self.account.can_write_changed.connect(self._show)
        self.account.ask(ANONYMOUS)
        service.ask(
            "hub_hardware",
            self._show_hardware,
            on_refused=lambda faults: self.state.setText(faults[0].sentence),
            owner=self,
        )
        self._show()

    def _show_hardware(self, answer: dict[str, Any]) -> None:
        self._hardware = answer["hardware"]
        names = ("title", "accelerator", "memory")
        rows = [(*(str(each[name]) for name in names), dollars(each["usd_per_hour"])) for each in self._hardware]
        self.model.set_rows(rows)
        show_text(self.state, "" if rows else "Hugging Face offers no GPU now.")
        if rows:
            self.table.selectRow(0)
            self.table.setFocus()

    def _list_owners(self, account: Account) -> None:
        names = [account["name"], *account["organisations"]] if account else []
        self.owner.fill({name: name for name in names})
        for part in (self._owner_name, self.owner):
            set_shown(part, bool(names))

    def _show(self) -> None:
        try:
            hours = float(self.hours.text().replace(",", "."))
        except ValueError:
            hours = 0.0
        most = about = ""
        self._wanted = None
        if not 0 < hours < 1000:
            about = "The time-out is a number of hours."
        elif rows := self.table.selected_rows():
            machine = self._hardware[rows[0]]
            price = machine["usd_per_hour"]
            most = f"At most {dollars(price * hours)}"
            about = f"{hours:g} h at {dollars(price)} an hour; a run that ends earlier costs less."
            self._wanted = machine["name"], hours
        self.most.setText(most)
        self.sum.setText(about)
        self.owner.setEnabled(self.owner.count() > 1)
        self.submit.setEnabled(self._wanted is not None and self.account.can_write)

    def _submit(self) -> None:
        if self._wanted is not None and self.submit.isEnabled():
            self.accept()
            self.submitted.emit(*self._wanted, self.owner.currentData())
