"""The dialog before an upload: card and files, account and login, upload, pause, resume, the end."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image
from PySide6.QtCore import Qt, QUrl
from PySide6.QtGui import QTextDocument
from PySide6.QtWidgets import QLineEdit

from app.state.processes import VerbProcess
from app.widgets import upload_dialog
from app.widgets import upload_dialog as card_view
from app.widgets.upload_dialog import Account, UploadDialog, UploadPreview

CARD = """---
library_name: mlx
---

# Sums

| function | end |
|---|---:|
| accuracy | 1.9 |

![curves](curves.png) ![tracker](https://example.org/pixel.png)

```bash
pip install mlx-lm
```
"""
ME: Account = {"name": "someone", "organisations": [], "can_write": True, "source": "keychain"}
DONE = {"path": "/runs/sums", "place": "https://hub.example/someone/sums", "bytes": 3, "sentences": []}


class Logins:
    """Stands in for the warm process: keeps the question until the test answers it."""

    def __init__(self) -> None:
        self.token = ""

    def __call__(self, token: str, on_account: Callable[[Account], None], on_refused: Callable[[str], None]) -> None:
        self.token, self.accept, self.refuse = token, on_account, on_refused


MakeDialog = Callable[..., UploadDialog]


@pytest.fixture
def logins() -> Logins:
    return Logins()


@pytest.fixture
def make_dialog(qtbot, tmp_path: Path, logins: Logins) -> MakeDialog:
    """Makes the dialog; each upload it starts runs the next of these Python programs instead."""
    Image.new("RGB", (3000, 600), "white").save(tmp_path / "curves.png")

    def make(*programs: str, account: Account | None = ME, files: int = 2) -> UploadDialog:
        sizes = [{"name": f"file-{number}", "bytes": 1_000_000} for number in range(files)]
        content = {"repo": "someone/sums", "private": True, "folder": str(tmp_path), "bytes": 2_000_000, "files": sizes}
        content |= {"card": CARD, "account": account, "account_problem": "" if account else "You are not logged in."}
        left = list(programs)
        dialog = UploadDialog(
            UploadPreview.read(content),
            ["upload"],
            lambda command, parent: VerbProcess([sys.executable, "-c", left.pop(0)], parent),
            logins,
        )
        dialog.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose, False)
        qtbot.show(dialog)
        return dialog

    return make


def printing(*lines: object, then: str = "") -> str:
    return "import sys, time\n" + "".join(f"print({json.dumps(line)!r}, flush=True)\n" for line in lines) + then


def test_card_is_drawn(make_dialog: MakeDialog, monkeypatch):
    card = make_dialog().card
    text = card.toPlainText()
    assert text.startswith("library_name: mlx") and "accuracy" in text and "|" not in text and "# Sums" not in text
    image = QTextDocument.ResourceType.ImageResource.value
    picture = card.loadResource(image, QUrl("curves.png"))
    assert 300 < picture.width() <= card.viewport().width() * card.devicePixelRatioF(), "it fits the page"
    assert card.loadResource(image, QUrl("https://example.org/pixel.png")) is None, "the network was asked"
    opened: list[str] = []
    monkeypatch.setattr(card_view, "open_link", opened.append)
    card.anchorClicked.emit(QUrl("https://arxiv.org/abs/2402.03300"))
    card.anchorClicked.emit(QUrl("training.yaml"))
    assert opened == ["https://arxiv.org/abs/2402.03300"]


def test_a_token_goes_to_the_keychain_and_is_forgotten_here(make_dialog: MakeDialog, logins: Logins):
    dialog = make_dialog(account=None)
    assert dialog.account.label.text() == "You are not logged in." and not dialog.upload.isEnabled()
    assert dialog.account.token.echoMode() == QLineEdit.EchoMode.Password
    dialog.account.token.setText(" hf_x ")
    dialog.account.button.click()
    assert logins.token == "hf_x" and dialog.account.token.text() == "" and not dialog.account.button.isEnabled()
    logins.refuse("It is not accepted.")
    assert dialog.account.label.text() == "It is not accepted." and dialog.account.token.isVisible()
    dialog.account.token.setText("hf_y")
    dialog.account.log_in()
    logins.accept(ME | {"can_write": False})
    assert dialog.account.label.text() == "someone, but this token may only read." and not dialog.upload.isEnabled()
    dialog.account.token.setText("hf_z")
    dialog.account.log_in()
    logins.accept(ME)
    assert dialog.upload.isEnabled() and not dialog.account.token.isVisible()


def test_upload_pause_resume_and_the_page(qtbot, make_dialog: MakeDialog, monkeypatch):
    progress = {"progress": "Uploading: 1.0 MB of 2.0 MB.", "done": 0.5}
    dialog = make_dialog(printing(progress, then="time.sleep(60)"), printing(progress, DONE))
    dialog.upload.click()
    qtbot.waitUntil(lambda: dialog.progress.value() == 500)
    assert dialog.upload.text() == "Pause" and dialog.outcome_label.text() == "Uploading: 1.0 MB of 2.0 MB."
    dialog.upload.click()
    qtbot.waitUntil(lambda: dialog.upload.text() == "Resume")
    assert dialog.outcome_label.text().startswith("Paused.") and dialog.upload.isEnabled()
    assert not dialog.progress.isVisible()
    dialog.upload.click()
    qtbot.waitUntil(lambda: dialog.upload.text() == "Open the page")
    assert dialog.outcome_label.text() == "Uploaded to https://hub.example/someone/sums."
    opened: list[str] = []
    monkeypatch.setattr(upload_dialog, "open_link", opened.append)
    dialog.upload.click()
    assert opened == ["https://hub.example/someone/sums"]


def test_closing_pauses_the_upload_first(qtbot, make_dialog: MakeDialog):
    dialog = make_dialog(printing({"progress": "Uploading.", "done": 0.1}, then="time.sleep(60)"))
    dialog.upload.click()
    qtbot.waitUntil(lambda: dialog.progress.value() == 100)
    dialog.close()
    assert dialog.isVisible(), "it waits for the process"
    qtbot.waitUntil(lambda: not dialog.isVisible())
