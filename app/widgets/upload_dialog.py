"""What an upload to Hugging Face would send, and the button that sends it: card, files, repository, account.

The preview comes from the verb `export --to hub --preview`; Upload runs the same command without it. Pausing ends that process, and
resuming starts it again: what the Hub has is not sent twice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from PySide6.QtCore import Qt, QUrl
from PySide6.QtGui import (
    QCloseEvent,
    QImage,
    QResizeEvent,
    QTextBlockFormat,
    QTextCursor,
    QTextDocument,
    QTextFormat,
    QTextFrameFormat,
    QTextTable,
)
from PySide6.QtWidgets import (
    QDialog,
    QFrame,
    QGridLayout,
    QHBoxLayout,
    QLineEdit,
    QProgressBar,
    QTextBrowser,
    QVBoxLayout,
    QWidget,
)

from app import theme
from app.widgets.basic.dialogs import open_link, open_path
from app.widgets.basic.labels import button, label
from app.widgets.basic.layout import on_screen, set_shown, wrap_in_card

# What dialogs need of a running command, and how they read its last sentence.

_SETTING_PREFIX = re.compile(r"^[a-z_]+: ")


class VerbTask(Protocol):
    """A running command; `app.state.processes.VerbProcess` has it.

    Signals:
        line(str) – a line of output.
        done(outcome) – it has ended; the outcome has `ok`, `sentence` and `output`.
    """

    line: Any  # of type Signal, which pyright cannot match with a class attribute of the implementation
    done: Any

    @property
    def is_running(self) -> bool: ...
    def start(self) -> None: ...
    def cancel(self) -> None: ...


MakeTask = Callable[[list[str], QWidget], VerbTask]
"""Makes a task that has not been started, from a command line and a parent."""


def is_held_open(dialog: QWidget, task: VerbTask | None, event: QCloseEvent) -> bool:
    """Whether a dialog stays open as its command is running. That is then cancelled, and the dialog closes when it has ended: closing at
    once would delete the process object, which kills the process before it has cleaned up."""
    if task is None or not task.is_running:
        return False
    task.done.connect(dialog.close)
    task.cancel()
    event.ignore()
    return True


def without_setting(sentence: str) -> str:
    """A sentence of the command line without the name of its setting."""
    return _SETTING_PREFIX.sub("", sentence)


def json_object(line: str) -> dict[str, Any]:
    """A line of a verb's `--json` output; {} for any other line, such as an error's, which the outcome repeats."""
    try:
        content = json.loads(line)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


# ── upload dialog ────────────────────────────────────────────────────────────────────────────────────────────────────

# A model card as a page will show it: Markdown with its tables and pictures, the settings at the top as they are
# written.

_MARGIN = 16
_TOP = (theme.SPACE, 2 * theme.SPACE, 3 * theme.SPACE)
"""Pixels above a paragraph, a title, a heading."""


class CardView(QTextBrowser):
    """Read-only. Links to the web are opened by the desktop; pictures are as wide as the text at most."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._folder, self._card = Path(), ""
        self.setOpenLinks(False)
        self.anchorClicked.connect(_open_web_link)
        self.setAccessibleName("Model card")
        self.setFont(theme.body_font())
        self.setProperty("role", "reading")
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.document().setDocumentMargin(_MARGIN)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)

    def show_card(self, card: str, folder: Path) -> None:
        """`folder` is where the card's pictures are."""
        self._folder, self._card = folder, card
        self._draw()

    def _draw(self) -> None:
        _, settings, body = self._card.split("---\n", 2) if self._card.startswith("---\n") else ("", "", self._card)
        top = f"```yaml\n{settings}```\n\n" if settings else ""
        self.document().clear()
        self.document().setMarkdown(top + body, QTextDocument.MarkdownFeature.MarkdownDialectGitHub)
        _space_blocks(self.document())
        for table in self.document().rootFrame().childFrames():
            if isinstance(table, QTextTable):
                _style_table(table)
        self.moveCursor(QTextCursor.MoveOperation.Start)

    def loadResource(self, kind: int, name: QUrl) -> Any:
        file = self._folder / Path(name.path()).name
        if kind != QTextDocument.ResourceType.ImageResource.value or not name.isRelative() or not file.is_file():
            return None  # nothing is fetched from the network
        picture, ratio = QImage(str(file)), self.devicePixelRatioF()
        room = round((self.viewport().width() - 2 * _MARGIN - 4) * ratio)
        if picture.width() > room > 0:
            picture = picture.scaledToWidth(room, Qt.TransformationMode.SmoothTransformation)
        picture.setDevicePixelRatio(ratio)
        return picture

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        if event.size().width() != event.oldSize().width():
            self._draw()  # pictures have the width of the text


def _space_blocks(document: QTextDocument) -> None:
    """Qt's Markdown leaves no room between paragraphs, and never breaks a line of code."""
    block, before = document.begin(), None
    while block.isValid():
        style, is_code = block.blockFormat(), block.blockFormat().nonBreakableLines()
        in_table = QTextCursor(block).currentTable() is not None
        style.setTopMargin(0 if in_table else _TOP[min(style.headingLevel(), 2)])
        if is_code:
            style.setNonBreakableLines(False)
            style.setBackground(theme.palette().window)
            style.setTopMargin(0 if before == _language(style) else theme.SPACE)
        QTextCursor(block).setBlockFormat(style)
        block, before = block.next(), _language(style) if is_code else None


def _language(style: QTextBlockFormat) -> str:
    """Of a block of code; two blocks in a row differ by it."""
    return str(style.property(QTextFormat.Property.BlockCodeLanguage))


def _style_table(table: QTextTable) -> None:
    """Hairlines instead of Qt's frames; a column's heading is aligned as its cells are."""
    for column in range(table.columns() if table.rows() > 1 else 0):
        below = table.cellAt(1, column).firstCursorPosition().blockFormat().alignment()
        heading = table.cellAt(0, column).firstCursorPosition()
        aligned = heading.blockFormat()
        aligned.setAlignment(below)
        heading.setBlockFormat(aligned)
    style = table.format()
    style.setBorder(1)
    style.setBorderStyle(QTextFrameFormat.BorderStyle.BorderStyle_Solid)
    style.setBorderBrush(theme.palette().hairline)
    style.setBorderCollapse(True)
    style.setCellPadding(4)
    style.setCellSpacing(0)
    style.setTopMargin(theme.SPACE)
    table.setFormat(style)


def _open_web_link(url: QUrl) -> None:
    if url.scheme() in ("http", "https"):
        open_link(url.toString())


# ── upload dialog ────────────────────────────────────────────────────────────────────────────────────────────────────

_WIDTH, _HEIGHT, _SIDE = 1120, 740, 260
FIRST_FILES = 9
"""Files that are listed; of more the number is said."""

Account = dict[str, Any]
"""{name, organisations, can_write, source}, or {} where nobody is logged in."""


class LogIn(Protocol):
    """Checks a token and keeps it in the keychain; calls one of both with the account, or with a sentence."""

    def __call__(
        self, token: str, on_account: Callable[[Account], None], on_refused: Callable[[str], None]
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class UploadPreview:
    """What the verb found: the repository, the files with their bytes, the card's text and where it lies."""

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
        return cls(content["repo"], content["private"], Path(content["folder"]), content["bytes"], files, content["card"],
                   content["account"] or {}, content["account_problem"])  # fmt: skip


class UploadDialog(QDialog):
    """Not modal. Closing it pauses a running upload; the prepared folder stays until it was sent.

    Attributes:
        card – the card as it will be shown.
        upload – the button that sends: Upload, then Pause, then Resume or Open the page.
        sentence – how far it is, what is in the way, or how it ended.
    """

    def __init__(
        self,
        preview: UploadPreview,
        command: list[str],
        make_task: MakeTask,
        log_in: LogIn,
        parent: QWidget | None = None,
    ) -> None:
        super().__init__(parent)
        self.preview, self._command, self._make_task, self._log_in = preview, command, make_task, log_in
        self._account = preview.account
        self._task: VerbTask | None = None
        self._paused = self._closing = False
        self._page = ""
        self.setWindowTitle("Upload to Hugging Face")
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self.resize(on_screen(self, _WIDTH, _HEIGHT))
        self._build()
        self._lay_out()
        self._show_account(preview.account_problem)

    # ── what is shown ───────────────────────────────────────────────────────────────────────────

    def _build(self) -> None:
        self.card = CardView()
        self.card.show_card(self.preview.card, self.preview.folder)
        self.account_label = label(wrap=True)
        self.token = QLineEdit()
        self.token.setEchoMode(QLineEdit.EchoMode.Password)
        self.token.setPlaceholderText("Access token (write)")
        self.token.setAccessibleName("Access token for Hugging Face")
        self.token.returnPressed.connect(self.log_in)
        self.log_in_button = button(
            "Log In", self.log_in, tip="Keeps the token in the system's keychain, and nowhere else"
        )
        self.edit = button("Edit the Card", self._edit_card, tip="Opens README.md; what is saved there is sent")
        self.progress = QProgressBar()
        self.progress.setTextVisible(False)
        self.progress.setAccessibleName("Progress of the upload")
        self.progress.hide()
        self.sentence = label("Nothing has been sent yet.", role="muted", wrap=True, selectable=True)
        self.close_button = button("Close", self.close)
        self.upload = button("Upload", self._press, primary=True)
        for widget in (self.log_in_button, self.edit, self.close_button):
            widget.setAutoDefault(False)
        self.upload.setDefault(True)
        self.upload.setFocus()

    def _lay_out(self) -> None:
        body = QHBoxLayout()
        body.setSpacing(3 * theme.SPACE)
        body.addWidget(wrap_in_card(self.card), 1)
        body.addLayout(self._side())
        buttons = QHBoxLayout()
        buttons.addWidget(self.sentence, 1)
        buttons.addWidget(self.close_button)
        buttons.addWidget(self.upload)
        column = QVBoxLayout(self)
        column.setContentsMargins(*(2 * theme.SPACE,) * 4)
        column.setSpacing(2 * theme.SPACE)
        column.addLayout(body, 1)
        column.addWidget(self.progress)
        column.addLayout(buttons)

    def _side(self) -> QVBoxLayout:
        """Repository, files and account."""
        preview = self.preview
        column = QVBoxLayout()
        column.setSpacing(theme.SPACE)
        visible = "Private: others cannot see it." if preview.private else "Public: everybody can see it."
        parts = (
            _heading("Repository"), _side_label(preview.repo), _side_label(visible, "muted"),
            _heading(f"Files, {_size(preview.bytes)}"), _file_list(preview.files),
            _heading("Account"), self.account_label, self.token, self.log_in_button,
        )  # fmt: skip
        for part in parts:
            part.setFixedWidth(theme.scaled(_SIDE))
            column.addWidget(part)
        column.addStretch(1)
        column.addWidget(self.edit)
        return column

    def _show_account(self, problem: str) -> None:
        """Whose account it is, or how to log in. Upload waits for an account that may write."""
        account = self._account
        if not account:
            self.account_label.setText(problem)
        elif not account["can_write"]:
            self.account_label.setText(f"{account['name']}, but this token may only read.")
        else:
            self.account_label.setText(f"{account['name']} (token from {account['source']})")
        can = bool(account) and account["can_write"]
        set_shown(self.token, not can)
        set_shown(self.log_in_button, not can)
        self.upload.setEnabled(can)

    def _edit_card(self) -> None:
        open_path(self.preview.folder / "README.md")

    # ── logging in ──────────────────────────────────────────────────────────────────────────────

    def log_in(self) -> None:
        """Send the token away to be kept, and forget it here."""
        token = self.token.text().strip()
        self.token.clear()
        if token:
            self.log_in_button.setEnabled(False)
            self._log_in(token, self._on_account, self._on_refused)

    def _on_account(self, account: Account) -> None:
        self.log_in_button.setEnabled(True)
        self._account = account
        self._show_account("")

    def _on_refused(self, sentence: str) -> None:
        self.log_in_button.setEnabled(True)
        self._account = {}
        self._show_account(sentence)

    # ── the upload ──────────────────────────────────────────────────────────────────────────────

    @property
    def _is_running(self) -> bool:
        return self._task is not None and self._task.is_running

    def _press(self) -> None:
        if self._page:
            open_link(self._page)
        elif self._is_running:
            self.pause()
        else:
            self.start()

    def start(self) -> None:
        """Upload, or go on with it."""
        self._paused = False
        self._task = self._make_task(self._command, self)
        self._task.line.connect(self._read)
        self._task.done.connect(self._end)
        self._show_progress("Starting.", None)
        self.upload.setText("Pause")
        self._task.start()

    def pause(self) -> None:
        """Stop for now; what has arrived stays there."""
        if self._task is not None and self._is_running:
            self._paused = True
            self.upload.setEnabled(False)
            self._task.cancel()

    def _read(self, line: str) -> None:
        content = json_object(line)
        if "progress" in content:
            self._show_progress(content["progress"], content.get("done"))
        elif "place" in content:
            self._page = content["place"]

    def _show_progress(self, sentence: str, done: float | None) -> None:
        self._say(sentence, "muted")
        self.progress.setRange(0, 0 if done is None else 1000)
        if done is not None:
            self.progress.setValue(round(1000 * done))
        set_shown(self.progress, True)

    def _end(self, outcome: Any) -> None:
        self.upload.setEnabled(True)
        set_shown(self.progress, False)
        if outcome.ok and self._page:
            self._say(f"It is at {self._page}.", "good")
            self.upload.setText("Open the Page")
            self.edit.setEnabled(False)
        else:
            self._page = ""
            self.upload.setText("Resume")
            if self._paused:
                self._say("Paused. What has arrived is kept there.", "muted")
            else:
                self._say(without_setting(outcome.sentence), "bad")
        if self._closing:
            self.close()

    def _say(self, sentence: str, role: str) -> None:
        self.sentence.setText(sentence)
        self.sentence.setStyleSheet(f"color: {getattr(theme.palette(), role).name()};")

    def closeEvent(self, event: QCloseEvent) -> None:
        if self._is_running:
            # Closing deletes the process object, which kills the process; it is asked to end first.
            self._closing = True
            self.pause()
            event.ignore()
        else:
            super().closeEvent(event)


def _heading(text: str) -> QWidget:
    heading = label(text, role="caption")
    heading.setContentsMargins(0, theme.SPACE, 0, 0)
    return heading


def _side_label(text: str, role: str = "") -> QWidget:
    return label(text, role=role, wrap=True, selectable=True)


def _file_list(files: list[tuple[str, int]]) -> QWidget:
    """Names and sizes, the largest first."""
    box = QWidget()
    grid = QGridLayout(box)
    grid.setContentsMargins(0, 0, 0, 0)
    grid.setVerticalSpacing(theme.SPACE // 2)
    grid.setColumnStretch(0, 1)
    right = Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignTop
    for row, (name, size) in enumerate(files[:FIRST_FILES]):
        grid.addWidget(label(name, wrap=True), row, 0)
        grid.addWidget(label(_size(size), theme.figures_font(), "muted", align=right), row, 1)
    if len(files) > FIRST_FILES:
        grid.addWidget(label(f"and {len(files) - FIRST_FILES} more", role="muted"), FIRST_FILES, 0)
    return box


def _size(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"
