"""Promises of docs/security.md that no other room's tests prove: what is never loaded, never followed, never shown as
HTML, never opened, and what only its owner may read."""

import ast
import os
import pickle
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from PySide6.QtCore import Qt

from app.state.prefs import Prefs
from app.widgets.basic.dialogs import QuestionBox
from app.widgets.basic.labels import label, plain_tip
from backend.cli.common import logging_to
from backend.config.checks import cross_setting_faults
from backend.export.exports import safe_name
from backend.runs import run_record
from backend.runs.queue import QueueFile
from backend.runs.run_folder import default_run_name, hold_lock, make_run_folder
from backend.utils.documents import parse_yaml
from backend.utils.errors import UserError
from backend.utils.files import append_regular
from backend.utils.places import RUNS_VARIABLE, preferences_folder
from tests.support import made_up_runs, small_run
from tests.support.cases import cases

ROOT = Path(__file__).parents[2]
SOURCES = [path for room in ("app", "backend") for path in sorted((ROOT / room).rglob("*.py"))]


def test_the_document_names_tests_that_exist() -> None:
    text = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    assert len(named) >= 15
    for file, name in named:
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), f"{file} has no test {name}"


OWN_PICKLES = [ROOT / "backend" / "rewards" / "worker.py"]
"""What the trainer sends to its own scoring process, over a pipe; what comes back is JSON."""


def test_no_module_unpickles_or_runs_a_models_code() -> None:
    """The sources name none of the ways to do it."""
    forbidden = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "torch"}
    keywords = ("trust_remote_code", "allow_pickle")
    for path in SOURCES:
        if "bench" in path.parts or path in OWN_PICKLES:  # bench compares with other trainers, which a person installs
            continue
        text = path.read_text(encoding="utf-8")
        if not any(word in text for word in (*forbidden, *keywords)):  # parsing all takes seconds, and most name none
            continue
        for node in ast.walk(ast.parse(text)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not forbidden & {name.split(".")[0] for name in names}, path
            if isinstance(node, ast.keyword) and node.arg in keywords:
                assert isinstance(node.value, ast.Constant) and node.value.value is False, path


class Bomb:
    """Unpickled, it leaves a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.mark),)


PICKLES = ("pytorch_model.bin", "model.pt", "model.pth", "weights.npz", "training_args.bin")


def test_pickles_in_a_model_folder_are_not_read(tmp_path: Path) -> None:
    from backend.config.config import parse
    from backend.models.policy import load_policy

    raw = small_run.settings_for(tmp_path)
    for name in PICKLES:
        (tmp_path / "model" / name).write_bytes(pickle.dumps(Bomb(tmp_path / "it-ran")))
    load_policy(parse(raw))
    assert not (tmp_path / "it-ran").exists()


def test_yaml_has_no_tags(tmp_path: Path) -> None:
    for text in (f"a: !!python/object/apply:os.mkdir ['{tmp_path}/it-ran']", "a: !!set {b}", "!own x"):
        with pytest.raises(UserError, match="tags are not read"):
            parse_yaml(text, "it", "config")
    assert not (tmp_path / "it-ran").exists()


NAMES = ("..", "../x", "a/b", "/etc", "a\\b", "a\0b", ".hidden", "a\nb", "\udcff", "a\u202eb", "x" * 300, "", "a:b")


@cases("name", NAMES)
def test_an_exports_name_cannot_leave_its_folder(name: str) -> None:
    with pytest.raises(UserError) as caught:
        safe_name(name)
    assert caught.value.faults[0].setting == "name"
    assert name == "" or cross_setting_faults({"run_name": name}), "nor a run's"


@pytest.mark.parametrize("place", ["checkpoints", "events.jsonl", "adapters/adapters.safetensors", "run.lock"])
def test_no_link_of_a_run_folder_is_written_through(place: str, tmp_path: Path) -> None:
    """Neither trained on, nor cleaned up: what the link leads to stays."""
    mine = made_up_runs.make_run(tmp_path / "mine", steps=4)
    for step in (1, 2, 3):
        (mine.checkpoints / f"{step:06}").mkdir(parents=True)
        for file in ("adapters.safetensors", "optimizer.safetensors", "state.json"):
            (mine.checkpoints / f"{step:06}" / file).write_text(f'{{"step": {step}}}')
    theirs = made_up_runs.make_run(tmp_path / "theirs", steps=4)
    link = theirs.path / place
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(mine.checkpoints if place == "checkpoints" else mine.events)
    before = sorted(mine.path.rglob("*"))
    for work in (run_record.free_space, hold_lock):
        with pytest.raises(UserError, match="is a link"):
            work(theirs)
    assert sorted(mine.path.rglob("*")) == before


@pytest.mark.parametrize(("made", "says"), [("link", "is a link"), ("pipe", "is a pipe")])
def test_the_log_of_a_run_folder_is_a_file_before_a_word_is_written_to_it(tmp_path: Path, made: str, says: str) -> None:
    """It is the first file that a resume writes. A pipe that nobody reads would be waited for, for ever."""
    run = made_up_runs.make_run(tmp_path / "theirs", steps=2)
    mine = tmp_path / "mine.txt"
    mine.write_text("mine")
    run.log.unlink(missing_ok=True)
    if made == "link":
        run.log.symlink_to(mine)
    else:
        os.mkfifo(run.log)
    with pytest.raises(UserError, match=says), logging_to(run):
        print("theirs")
    assert mine.read_text() == "mine"
    with pytest.raises(OSError):  # where it is put there between the look and the opening
        append_regular(run.log)


HTML = '<b>bold</b><img src="/etc/passwd">'


def test_text_of_others_is_never_html(qtbot) -> None:
    shown = label(HTML)
    box = QuestionBox(None, HTML, HTML, {"yes": "Yes", "no": "No", "cancel": "Cancel"})  # type: ignore[arg-type]
    qtbot.addWidget(shown)
    qtbot.addWidget(box)
    assert shown.textFormat() == box.textFormat() == Qt.TextFormat.PlainText
    assert plain_tip(HTML).startswith("<p>&lt;b&gt;") and plain_tip("a & b") == "a & b"


OPENS_PORTS = [ROOT / "backend" / "cli" / "endpoint.py", ROOT / "backend" / "distributed" / "channel.py"]
"""Where the endpoint and rank 0 of a run on several machines listen."""


def test_two_modules_open_ports() -> None:
    """Servers are made by few names, and the other sources have none of them."""
    names = r"\b(HTTPServer|QTcpServer|QLocalServer|create_server|start_server|socketserver)\b|\.listen\(\d"
    found = [path for path in SOURCES if re.search(names, path.read_text(encoding="utf-8"))]
    assert found == OPENS_PORTS


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("open_umask")
def test_folders_of_runs_and_preferences_are_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUNS_VARIABLE, str(tmp_path / "data" / "runs"))
    run = make_run_folder(default_run_name("m", "lora", "grpo"))
    QueueFile(tmp_path / "other" / "runs").change(is_paused=True)
    Prefs()
    made = [run.path, tmp_path / "data", tmp_path / "data" / "runs", tmp_path / "other", preferences_folder()]
    assert [mode(folder) for folder in made] == [0o700] * len(made)


@pytest.mark.usefixtures("open_umask")
def test_a_run_in_a_shared_folder_is_private_and_the_folder_stays_shared(tmp_path: Path) -> None:
    shared = tmp_path / "team"
    shared.mkdir(mode=0o775)
    (shared / "mine").mkdir(mode=0o777)
    run = make_run_folder("mine", shared, reuse=True)
    assert (mode(shared), mode(run.path)) == (0o775, 0o700)
