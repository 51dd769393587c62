"""The export dialog: what there is to choose, what stands in the way, the command, progress and the result."""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from PIL import Image
from PySide6.QtCore import Qt, QUrl
from PySide6.QtGui import QTextDocument
from PySide6.QtWidgets import QLineEdit

from app.state.processes import VerbProcess
from app.widgets import export_panel, hub_dialogs
from app.widgets.export_panel import ExportPanel
from app.widgets.hub_dialogs import Account, UploadDialog
from backend.runs.run_folder import RunFolder
from backend.utils.errors import ConfigProblem
from tests.support import made_up_runs
from tests.support.trainer_by_hand import add_checkpoints
from tests.support.windows import ServiceByHand

RESULT = {"path": "/models/mine", "place": "/models/mine", "bytes": 2_500_000, "sentences": ["It is equal.", "Quite."]}


@pytest.fixture
def run(tmp_path: Path, monkeypatch) -> RunFolder:
    """A LoRA run with two checkpoints, in a home with LM Studio."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".lmstudio" / "models").mkdir(parents=True)
    run = made_up_runs.make_run(tmp_path / "run", steps=3)
    run.config.write_text("model: nowhere\ntrain_type: lora\n", encoding="utf-8")
    add_checkpoints(run, {10: 0.75, 20: 0.5}, size=1_000_000)
    run.adapters.mkdir()
    for name in ("adapters.safetensors", "adapter_config.json"):
        (run.adapters / name).write_bytes(b"x" * 3_000_000)
    return run


def run_instead(monkeypatch, programs: Sequence[str]) -> None:
    """Each verb that a dialog starts runs the next of these Python programs."""
    left = list(programs)
    process = lambda _, parent: VerbProcess([sys.executable, "-c", left.pop(0)], parent)  # noqa: E731
    monkeypatch.setattr(hub_dialogs, "VerbProcess", process)


MakePanel = Callable[..., ExportPanel]


@pytest.fixture
def make_panel(qtbot, run: RunFolder, monkeypatch) -> MakePanel:
    def make(*programs: str) -> ExportPanel:
        run_instead(monkeypatch, programs)
        panel = ExportPanel(run, ServiceByHand())  # pyright: ignore
        panel.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose, False)
        qtbot.addWidget(panel)
        panel.open_beside()
        return panel

    return make


def choose(panel: ExportPanel, **keys: str) -> None:
    for name, key in keys.items():
        box = getattr(panel.choices, name)
        box.setCurrentIndex(box.findData(key))


def test_the_command_is_what_was_chosen(make_panel: MakePanel, run: RunFolder, tmp_path: Path) -> None:
    panel = make_panel()
    chosen = ["--to", "lmstudio", "--name", "run", "--format", "full", "--held-out", "32", "--json"]
    assert panel.command()[-11:] == ["export", str(run.path), *chosen]
    choose(panel, target="folder", format="adapter", weights="best")
    panel.choices.name.setText(" mine ")
    chosen = ["--to", "folder", "--name", "mine", "--format", "adapter", "--checkpoint", "best", "--folder"]
    assert panel.command()[-13:] == ["export", str(run.path), *chosen, str(tmp_path), "--json"]
    assert panel.choices.format_line.text().endswith("About 1.00\u202fMB.") and panel.start.isEnabled()
    choose(panel, weights="")
    assert panel.choices.format_line.text().endswith("About 3.00\u202fMB.")
    losses = run.events.read_text(encoding="utf-8").replace('"reward"', '"loss"')
    run.events.write_text(losses, encoding="utf-8")
    panel.show_run(str(run.path))
    assert panel.choices.held_out.isHidden() and "--held-out" not in panel.command(), "SFT has no rewards to compare"


def test_what_is_in_the_way_is_said_and_export_waits(make_panel: MakePanel, tmp_path: Path) -> None:
    panel = make_panel()
    assert panel.start.isEnabled() and not panel.outcome_label.isVisible() and not panel.choices.overwrite.isVisible()
    choose(panel, format="adapter")
    assert not panel.start.isEnabled() and "complete models only" in panel.outcome_label.text()
    choose(panel, format="4bit")
    panel.choices.name.setText(" ")
    assert not panel.start.isEnabled() and panel.outcome_label.text() == "Give the model a name."
    (tmp_path / ".lmstudio" / "models" / "grpo-studio" / "mine").mkdir(parents=True)
    panel.choices.name.setText("mine")
    assert panel.choices.overwrite.isVisible() and not panel.start.isEnabled()
    assert panel.outcome_label.text() == "A model of that name exists." and "--overwrite" not in panel.command()
    panel.choices.overwrite.setChecked(True)
    assert panel.start.isEnabled() and not panel.outcome_label.isVisible() and "--overwrite" in panel.command()


def test_progress_and_result(qtbot, make_panel: MakePanel, monkeypatch, tmp_path: Path) -> None:
    report = "print(json.dumps({'progress': 'Writing.', 'done': 0.25}), flush=True)"
    waiting = f"import json, time, pathlib; {report}; t = pathlib.Path({str(tmp_path / 'go')!r})\n"
    waiting += "while not t.exists(): time.sleep(0.01)\n"
    panel = make_panel(waiting + f"print({json.dumps(RESULT)!r})")
    qtbot.keyClick(panel.choices.name, Qt.Key.Key_Return)
    qtbot.waitUntil(lambda: panel.progress.value() == 250)
    assert panel.progress_label.text() == "Writing." and not panel.choices.isEnabled()
    assert panel.close_button.text() == "Cancel"
    (tmp_path / "go").touch()
    qtbot.waitUntil(panel.outcome_label.isVisible)
    assert panel.outcome_label.text() == "The model is at /models/mine (2.50\u202fMB)."
    assert panel.details_label.text() == "It is equal.\nQuite." and not panel.progress.isVisible()
    qtbot.waitUntil(lambda: panel.height() >= panel.layout().totalHeightForWidth(panel.width()), timeout=500)
    opened = []
    monkeypatch.setattr(export_panel, "open_path", opened.append)
    monkeypatch.setattr(export_panel, "open_link", lambda link: opened.append(link))
    panel.reveal.click()
    panel.open_app.click()
    assert opened == [Path("/models/mine"), "lmstudio://"]
    assert "Start it, and look under My Models" in panel.outcome_label.text(), "no program took the link"
    choose(panel, format="8bit")
    assert not panel.reveal.isVisible() and not panel.details_label.isVisible()


def test_ollama_keeps_the_model_itself(qtbot, make_panel: MakePanel, run: RunFolder) -> None:
    panel = make_panel(f"print({json.dumps(RESULT | {'place': 'Ollama, as run'})!r})")
    choose(panel, target="ollama")
    assert not panel.start.isEnabled()
    assert panel.outcome_label.text() == "Ollama takes GGUF files only; choose a GGUF format."
    choose(panel, format="gguf-q8_0")
    assert panel.choices.folder.text() == "Among Ollama's own models." and not panel.choices.choose.isVisible()
    panel.choices.overwrite.setChecked(True)
    chosen = ["--to", "ollama", "--name", "run", "--format", "gguf-q8_0", "--overwrite", "--json"]
    assert panel.command()[-10:] == ["export", str(run.path), *chosen]
    panel.start.click()
    qtbot.waitUntil(panel.outcome_label.isVisible)
    assert panel.outcome_label.text() == "The model is in Ollama, as run (2.50\u202fMB)."
    assert not panel.reveal.isVisible()


def test_an_error_is_shown_in_place_and_export_can_be_tried_again(qtbot, make_panel: MakePanel) -> None:
    refusal = "import sys; print('{\"progress\": \"Writing.\"}'); print('export: The disk is full.', file=sys.stderr)"
    refusal += "; sys.exit(2)"
    panel = make_panel(refusal)
    panel.start.click()
    qtbot.waitUntil(panel.outcome_label.isVisible)
    assert panel.outcome_label.text() == "The disk is full." and panel.start.isEnabled()
    assert not panel.reveal.isVisible() and panel.choices.isEnabled() and not panel.progress.isVisible()
    choose(panel, target="folder")  # the error of LM Studio's folder once stayed beside the choice of another one
    assert panel.outcome_label.text() != "The disk is full."


def test_upload_previews_first(qtbot, make_panel: MakePanel, monkeypatch, tmp_path: Path) -> None:
    about = {"repo": "someone/run", "private": False, "folder": str(tmp_path), "bytes": 3, "files": []}
    about |= {"card": "# Run", "account": None, "account_problem": "Nobody."}
    panel = make_panel(f"print({json.dumps({'preview': about})!r})")
    choose(panel, target="hub", format="adapter")
    assert panel.choices.repo.placeholderText() == panel.run.name, "more was cut after a default name"
    assert panel.start.text() == "Preview…" and panel.choices.repo.isVisible() and not panel.choices.name.isVisible()
    assert panel.start.isEnabled(), "without a name it is the run's, under the account's"
    panel.choices.public.setChecked(True)
    assert panel.command()[-7:] == ["--to", "hub", "--public", "--format", "adapter", "--preview", "--json"]
    opened: list[UploadDialog] = []
    monkeypatch.setattr(UploadDialog, "show", lambda dialog: opened.append(dialog))
    panel.start.click()
    qtbot.waitUntil(lambda: bool(opened))
    qtbot.addWidget(opened[0])
    assert not panel.isVisible() and opened[0].preview["repo"] == "someone/run"
    command = " ".join(opened[0].command)
    assert command.endswith("--to hub --repo someone/run --public --format adapter --json")
    choose(panel, target="lmstudio")
    assert panel.start.text() == "Export" and panel.choices.name.text() == "run"


def test_settings_to_trl(make_panel: MakePanel, run: RunFolder, tmp_path: Path, qtbot) -> None:
    run.config.write_text("model: nowhere\ndata: rows\noptimizer: muon\nnum_layers: 2\n", encoding="utf-8")
    panel = make_panel(f"print({json.dumps(RESULT)!r})")
    choose(panel, target="trl")
    panel.choices.set_folder(tmp_path)
    panel.choices.name.setText("for-trl")
    shown = [panel.choices.weights, panel.choices.format, panel.choices.held_out, panel.choices.account]
    assert [widget.isVisible() for widget in shown] == [False, False, False, True]
    text = panel.choices.account.text()
    assert "Optimizer: muon" in text and "AdamW, which wants a learning rate of its own" in text
    assert "train.py puts adapters on the last layers only" in text
    words = [str(run.path), "--to", "trl", "--name", "for-trl", "--folder", str(tmp_path), "--json"]
    assert panel.command()[-8:] == words
    panel.start_export()
    qtbot.waitUntil(lambda: "folder for TRL" in panel.outcome_label.text())
    assert "README.md" in panel.details_label.text()
    (tmp_path / "for-trl").mkdir()
    panel.choices.show_choice()
    assert panel.choices.obstacle == "A folder of that name exists."
    choose(panel, target="folder")
    assert panel.choices.weights.isVisible() and not panel.choices.account.isVisible()


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


MakeDialog = Callable[..., UploadDialog]


@pytest.fixture
def service() -> ServiceByHand:
    return ServiceByHand()


@pytest.fixture
def make_dialog(qtbot, tmp_path: Path, service: ServiceByHand, monkeypatch) -> MakeDialog:
    Image.new("RGB", (3000, 600), "white").save(tmp_path / "curves.png")

    def make(*programs: str, account: Account | None = ME, files: int = 2) -> UploadDialog:
        sizes = [{"name": f"file-{number}", "bytes": 1_000_000} for number in range(files)]
        content = {"repo": "someone/sums", "private": True, "folder": str(tmp_path), "bytes": 2_000_000, "files": sizes}
        content |= {"card": CARD, "account": account, "account_problem": "" if account else "You are not logged in."}
        run_instead(monkeypatch, programs)
        dialog = UploadDialog(content, ["upload"], service)  # pyright: ignore
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
    monkeypatch.setattr(hub_dialogs, "open_link", opened.append)
    card.anchorClicked.emit(QUrl("https://arxiv.org/abs/2402.03300"))
    card.anchorClicked.emit(QUrl("training.yaml"))
    assert opened == ["https://arxiv.org/abs/2402.03300"]


def test_a_token_goes_to_the_keychain_and_is_forgotten_here(make_dialog: MakeDialog, service: ServiceByHand):
    dialog = make_dialog(account=None)
    assert dialog.account.label.text() == "You are not logged in." and not dialog.upload.isEnabled()
    assert dialog.account.token.echoMode() == QLineEdit.EchoMode.Password
    dialog.account.token.setText(" hf_x ")
    dialog.account.button.click()
    asked = service.last("hub_login")
    assert asked.arguments == {"token": "hf_x"}
    assert dialog.account.token.text() == "" and not dialog.account.button.isEnabled()
    asked.refuse([ConfigProblem("token", "It is not accepted.")])
    assert dialog.account.label.text() == "It is not accepted." and dialog.account.token.isVisible()
    dialog.account.token.setText("hf_y")
    dialog.account.log_in()
    service.last("hub_login").answer(ME | {"can_write": False})
    assert dialog.account.label.text() == "someone, but this token may only read." and not dialog.upload.isEnabled()
    dialog.account.token.setText("hf_z")
    dialog.account.log_in()
    service.last("hub_login").answer(ME)
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
    monkeypatch.setattr(hub_dialogs, "open_link", opened.append)
    dialog.upload.click()
    assert opened == ["https://hub.example/someone/sums"]


def test_closing_pauses_the_upload_first(qtbot, make_dialog: MakeDialog):
    dialog = make_dialog(printing({"progress": "Uploading.", "done": 0.1}, then="time.sleep(60)"))
    dialog.upload.click()
    qtbot.waitUntil(lambda: dialog.progress.value() == 100)
    dialog.close()
    assert dialog.isVisible(), "it waits for the process"
    qtbot.waitUntil(lambda: not dialog.isVisible())
