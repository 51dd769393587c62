"""The dialog before an upload to Hugging Face: card, files, repository, account, and the button that sends it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from PySide6.QtCore import Qt, QUrl
from PySide6.QtGui import QCloseEvent, QImage, QResizeEvent, QTextDocument
from PySide6.QtWidgets import QDialog, QFrame, QGridLayout, QLineEdit, QProgressBar, QTextBrowser, QVBoxLayout, QWidget

from app import theme
from app.state.processes import VerbProcess
from app.widgets.basic.dialogs import open_link, open_path
from app.widgets.basic.labels import button, label
from app.widgets.basic.layout import column, on_screen, row, set_shown, wrap_in_card
from app.widgets.basic.number_format import file_size

MakeTask = Callable[[list[str], QWidget], VerbProcess]
"""Makes a process that has not been started, from a command line and a parent."""
Account = dict[str, Any]
"""{name, organisations, can_write, source}, or {} when logged out."""
LogIn = Callable[[str, Callable[[Account], None], Callable[[str], None]], None]
"""Checks a token and keeps it in the keychain."""
MARGIN, SIDE = 16, 260
FIRST_FILES = 9
"""Files that are listed."""


def cancel_before_closing(dialog: QWidget, task: VerbProcess | None, event: QCloseEvent) -> bool:
    """Cancel a dialog's running command and close the dialog when it has ended. Returns if there was one."""
    if task is None or not task.is_running:
        return False
    task.done.connect(dialog.close)
    task.cancel()
    event.ignore()
    return True


def without_setting(sentence: str) -> str:
    return re.sub(r"^[a-z_]+: ", "", sentence)


def json_object(line: str) -> dict[str, Any]:
    """A line of a verb's `--json` output."""
    try:
        content = json.loads(line)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def show_share(bar: QProgressBar, done: float | None) -> None:
    """Show a progress of 0 to 1; None for a busy bar without an end in sight."""
    bar.setRange(0, 0 if done is None else 1000)
    if done is not None:
        bar.setValue(round(1000 * done))
    set_shown(bar, True)


class CardView(QTextBrowser):
    """A model card as its page will show it, the settings at the top as they are written."""

    def __init__(self) -> None:
        super().__init__()
        self._folder, self._card = Path(), ""
        self.setOpenLinks(False)
        self.anchorClicked.connect(lambda url: open_link(url.toString()) if url.scheme() in ("http", "https") else None)
        self.setAccessibleName("Model card")
        self.setFont(theme.body_font())
        self.setProperty("role", "reading")
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.document().setDocumentMargin(MARGIN)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)

    def show_card(self, card: str, folder: Path) -> None:
        self._folder, self._card = folder, card
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


@dataclass(frozen=True, slots=True)
class UploadPreview:
    """The verb's preview: the repository, the files with their bytes, the card's text and where it lies."""

    repo: str
    private: bool
    folder: Path
    bytes: int
    files: list[tuple[str, int]]
    card: str
    account: Account
    account_problem: str

    @classmethod
    def read(cls, content: dict[str, Any]) -> UploadPreview:
        files = [(file["name"], file["bytes"]) for file in content["files"]]
        changed = {"folder": Path(content["folder"]), "files": files, "account": content["account"] or {}}
        return cls(**{**{name: content[name] for name in cls.__slots__}, **changed})


class UploadDialog(QDialog):
    """Not modal. Closing it pauses a running upload."""

    def __init__(
        self,
        preview: UploadPreview,
        command: list[str],
        make_task: MakeTask,
        log_in: LogIn,
        parent: QWidget | None = None,
    ) -> None:
        super().__init__(parent)
        self.preview, self.command, self._make_task, self._log_in = preview, command, make_task, log_in
        self._account = preview.account
        self._task: VerbProcess | None = None
        self._paused = False
        self._page = ""
        self.setWindowTitle("Upload to Hugging Face")
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self.resize(on_screen(self, 1120, 740))
        self.card = CardView()
        self.card.show_card(preview.card, preview.folder)
        self.account_label = label(wrap=True)
        self.token = QLineEdit()
        self.token.setEchoMode(QLineEdit.EchoMode.Password)
        self.token.setPlaceholderText("Access token (write)")
        self.token.setAccessibleName("Access token for Hugging Face")
        self.token.returnPressed.connect(self.log_in)
        self.log_in_button = button("Log in", self.log_in, tip="Stores the token in the system's keychain only")
        readme = preview.folder / "README.md"
        self.edit = button("Edit the card", lambda: open_path(readme), tip="Opens README.md; saved changes are sent")
        self.progress = QProgressBar(textVisible=False)
        self.progress.setAccessibleName("Progress of the upload")
        self.progress.hide()
        self.sentence = label("Nothing has been sent yet.", role="muted", wrap=True, selectable=True)
        close = button("Close", self.close)
        self.upload = button("Upload", self._press, primary=True)
        for widget in (self.log_in_button, self.edit, close):
            widget.setAutoDefault(False)
        self.upload.setDefault(True)
        self.upload.setFocus()
        body = row((wrap_in_card(self.card), 1), self._side(), spacing=3 * theme.SPACE)
        foot = row((self.sentence, 1), close, self.upload)
        column((body, 1), self.progress, foot, into=self, spacing=2 * theme.SPACE, margins=2 * theme.SPACE)
        self._show_account(preview.account_problem)

    def _side(self) -> QVBoxLayout:
        preview = self.preview
        files = QWidget()
        grid = QGridLayout(files)
        grid.setContentsMargins(0, 0, 0, 0)
        grid.setVerticalSpacing(theme.SPACE // 2)
        grid.setColumnStretch(0, 1)
        right = Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignTop
        for place, (name, size) in enumerate(preview.files[:FIRST_FILES]):
            grid.addWidget(label(name, wrap=True), place, 0)
            grid.addWidget(label(file_size(size), theme.figures_font(), "muted", align=right), place, 1)
        if len(preview.files) > FIRST_FILES:
            grid.addWidget(label(f"and {len(preview.files) - FIRST_FILES} more", role="muted"), FIRST_FILES, 0)
        visible = "Private: others cannot see it." if preview.private else "Public: everybody can see it."
        heads = [
            label(text, role="caption") for text in ("Repository", f"Files, {file_size(preview.bytes)}", "Account")
        ]
        for head in heads:
            head.setContentsMargins(0, theme.SPACE, 0, 0)
        repo = label(preview.repo, wrap=True, selectable=True)
        parts = (
            *(heads[0], repo, label(visible, role="muted", wrap=True)),
            *(heads[1], files, heads[2], self.account_label, self.token, self.log_in_button),
        )
        for part in parts:
            part.setFixedWidth(theme.scaled(SIDE))
        return column(*parts, None, self.edit)

    def _show_account(self, problem: str) -> None:
        account = self._account
        can_write = bool(account) and account["can_write"]
        if can_write:
            problem = f"{account['name']} (token from {account['source']})"
        elif account:
            problem = f"{account['name']}, but this token may only read."
        self.account_label.setText(problem)
        set_shown(self.token, not can_write)
        set_shown(self.log_in_button, not can_write)
        self.upload.setEnabled(can_write)

    def log_in(self) -> None:
        token = self.token.text().strip()
        self.token.clear()
        if token:
            self.log_in_button.setEnabled(False)
            self._log_in(token, lambda account: self._on_answer(account, ""), lambda text: self._on_answer({}, text))

    def _on_answer(self, account: Account, problem: str) -> None:
        self.log_in_button.setEnabled(True)
        self._account = account
        self._show_account(problem)

    def _press(self) -> None:
        if self._page:
            open_link(self._page)
        elif self._task is not None and self._task.is_running:
            self.pause()
        else:
            self.start()

    def start(self) -> None:
        self._paused = False
        self._task = self._make_task(self.command, self)
        self._task.line.connect(self._read)
        self._task.done.connect(self._end)
        self._report("Starting…", "muted")
        show_share(self.progress, None)
        self.upload.setText("Pause")
        self._task.start()

    def pause(self) -> None:
        if self._task is not None and self._task.is_running:
            self._paused = True
            self.upload.setEnabled(False)
            self._task.cancel()

    def _read(self, line: str) -> None:
        content = json_object(line)
        if "progress" in content:
            self._report(content["progress"], "muted")
            show_share(self.progress, content.get("done"))
        elif "place" in content:
            self._page = content["place"]

    def _end(self, outcome: Any) -> None:
        self.upload.setEnabled(True)
        set_shown(self.progress, False)
        if outcome.ok and self._page:
            self._report(f"Uploaded to {self._page}.", "good")
            self.upload.setText("Open the page")
            self.edit.setEnabled(False)
            return
        self._page = ""
        self.upload.setText("Resume")
        if self._paused:
            self._report("Paused. Uploaded files stay there.", "muted")
        else:
            self._report(without_setting(outcome.sentence), "bad")

    def _report(self, sentence: str, role: str) -> None:
        self.sentence.setText(sentence)
        self.sentence.setStyleSheet(f"color: {getattr(theme.palette(), role).name()};")

    def closeEvent(self, event: QCloseEvent) -> None:
        self._paused = True
        if not cancel_before_closing(self, self._task, event):
            super().closeEvent(event)
