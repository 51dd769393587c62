"""Trackers follow a run's event log: every step once, under TRL's names, whatever happens to their processes, and
nothing leaves the machine unasked."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from backend.config.checks import cross_setting_faults
from backend.runs.events import EventLog, JsonLines, truncate_file
from backend.runs.run_folder import RunFolder, hold_lock
from backend.trainer.trackers import follow, packages
from backend.trainer.trackers.follow import MAKERS, about_run, track
from backend.trainer.trackers.packages import AboutRun, StepRecord, Tracker
from backend.utils.command import backend_environment
from tests.support import small_run
from tests.support.cases import cases

METRICS = {"reward": 1.5, "reward_std": 0.9, "reward_std_within_groups": 0.4, "kl": None, "time/step": 2.0}
METRICS |= {"clip_ratio_low": 0.1, "clip_ratio_total": 0.2, "rewards/exact/mean": 0.5}


class MadeUpRun:
    """A run whose event log and completions are written by a test."""

    def __init__(self, path: Path, **settings: Any) -> None:
        self.folder = RunFolder(path)
        path.mkdir(parents=True)
        raw = {"model": "/home/somebody/models/secret-place", "data": "d.jsonl", "save_every": 2} | settings
        self.folder.config.write_text(yaml.safe_dump(raw))
        self.begin()

    def begin(self) -> None:
        self.event_log, self.rows = EventLog(self.folder.events), JsonLines(self.folder.completions)

    def step(self, number: int, evaluated: bool = False, **metrics: Any) -> None:
        self.event_log.write("phase", phase="sampling")
        completion = {"text": f"=answer {number}", "tokens": 3, "stop": "eos", "rewards": {"exact": 0.5}, "reward": 0.5}
        row = {"step": number, "prompt": f"p{number}", "answer": "a", "type": None}
        self.rows.append(row | {"completions": [completion | {"advantage": a} for a in (1.0, -1.0)]})
        self.event_log.write("step", step=number, metrics=METRICS | {"loss": float(number)} | metrics)
        if evaluated:
            self.evaluate(number)

    def evaluate(self, number: int, split: str = "valid") -> None:
        self.event_log.write("eval", step=number, split=split, metrics={"reward": 10.0 + number})

    def end(self, kind: str = "finished") -> None:
        self.event_log.write(kind, step=0, sentence="")

    def cut_back(self, to: tuple[int, int]) -> None:
        for log, size in zip((self.event_log, self.rows), to, strict=True):
            log.close()
            truncate_file(log.path, size)
        self.begin()

    @property
    def sizes(self) -> tuple[int, int]:
        return self.event_log.size, self.rows.size

    def table(self, name: str = "metrics.csv") -> list[dict[str, str]]:
        with (self.folder.path / name).open(newline="") as file:
            return list(csv.DictReader(file))


@pytest.fixture
def made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MadeUpRun:
    monkeypatch.setattr(follow, "POLL_S", 0.01)
    return MadeUpRun(tmp_path / "runs" / "one")


def test_csv_has_a_row_a_step_and_a_row_a_completion(made_up: MadeUpRun) -> None:
    made_up.evaluate(0)
    made_up.step(1, evaluated=True)
    of_a_job = {"text": "4", "rewards": {"exact": None}, "reward": 0.0, "advantage": 0.0}
    made_up.rows.append({"step": 2, "prompt": "2+2", "answer": "", "type": None, "completions": [of_a_job]})
    made_up.step(2, entropy=0.25)
    track(made_up.folder, "csv", say=print)  # of a run that was cut off: it has no ending, and nobody holds it
    rows = made_up.table()
    columns = [[row[name] for row in rows] for name in ("step", "train/loss", "eval/reward", "train/entropy")]
    assert columns == [["0", "1", "2"], ["", "1.0", "2.0"], ["10.0", "11.0", ""], ["", "", "0.25"]]
    assert "train/kl" not in rows[0], "it was null in every step"
    assert rows[1]["train/reward_std"] == "0.9", "over the step, as in TRL"
    completions = made_up.table("completions.csv")
    expected = {"step": "1", "prompt": "p1", "exact": "0.5", "advantage": "1.0"}
    assert len(completions) == 5 and expected.items() <= completions[0].items()
    assert completions[0]["completion"] == "'=answer 1", "no formula for a spreadsheet"
    before = (made_up.folder.path / "metrics.csv").read_bytes()
    track(made_up.folder, "csv", say=print)
    assert (made_up.folder.path / "metrics.csv").read_bytes() == before


class Recorded(Tracker):
    """A tracker that keeps what it is told."""

    def __init__(self, about: AboutRun, calls: list[tuple[Any, ...]], on_send: Callable[[StepRecord], None]) -> None:
        super().__init__(about)
        self.calls, self.on_send = calls, on_send

    def open(self) -> None:
        self.calls.append(("open", self.about.name, self.about.project))

    def send(self, record: StepRecord) -> None:
        self.calls.append((record.step, record.training.get("loss")))
        self.on_send(record)

    def close(self, ending: str) -> None:
        self.calls.append(("close", ending))


def test_a_run_is_followed_until_its_lock_is_free(made_up: MadeUpRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a cut-back on the way, as a resume makes it: the tracker is opened again and told everything once more."""
    place, calls = list[tuple[int, int]](), list[tuple[Any, ...]]()

    def go_on(record: StepRecord) -> None:
        if record.step == 1 and not place:
            place.append(first)
            made_up.step(3)
        elif record.step == 2 and record.training["loss"] == 2.0:
            made_up.cut_back(place[0])
            made_up.step(2, loss=7.0)
            made_up.end("stopped")
            os.close(lock)

    monkeypatch.setitem(MAKERS, "csv", lambda about: Recorded(about, calls, go_on))
    lock = hold_lock(made_up.folder)
    made_up.step(1)
    first = made_up.sizes
    made_up.step(2)
    track(made_up.folder, "csv", say=print)
    opened = ("open", "one", "grpo-studio")
    assert calls == [opened, (1, 1.0), (2, 2.0), opened, (1, 1.0), (2, 7.0), ("close", "stopped")]


def test_settings_are_told_without_paths_of_this_machine(made_up: MadeUpRun) -> None:
    assert "somebody" not in json.dumps(about_run(made_up.folder).settings)
    about = about_run(MadeUpRun(made_up.folder.path.parent / "two", tracker_project="p", tracker_run_name="n").folder)
    assert (about.project, about.name) == ("p", "n")


HANGS = """
import sys, threading, time
from pathlib import Path
from backend.trainer.trackers import follow
from backend.trainer.trackers.packages import CsvTables
class Hanging(CsvTables):
    def close(self, ending):
        if sys.argv[2] == "thread":
            threading.Thread(target=lambda: [][1]).start()
        time.sleep(600)
follow.MAKERS["csv"], follow.HANG_S, follow.POLL_S = Hanging, 0.2 if sys.argv[2] == "answer" else 600, 0.05
sys.exit(follow.main(["csv", sys.argv[1]]))
"""


@pytest.mark.parametrize(
    ("lacks", "sentence"),
    [
        ("answer", "No answer for 0 s after the run was over; track sends the rest another time."),
        ("thread", "IndexError: list index out of range"),  # one of its package's has died
    ],
)
def test_a_tracker_that_waits_for_ever_ends_itself(made_up: MadeUpRun, lacks: str, sentence: str) -> None:
    made_up.step(1)
    made_up.folder.log.touch()
    command = [sys.executable, "-c", HANGS, str(made_up.folder.path), lacks]
    ended = subprocess.run(command, env=backend_environment(), capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (1, f"{sentence}\n")
    assert made_up.folder.log.read_text() == f"csv: {sentence}\n"


def read_event_files(folder: Path) -> dict[str, list[tuple[int, Any]]]:
    """Tag → (step, value or text) of every event in the folder, in order."""
    tensorboardX = pytest.importorskip("tensorboardX")
    found: dict[str, list[tuple[int, Any]]] = {}
    for path in sorted(folder.glob("events.*")):
        data, at = path.read_bytes(), 0
        while at < len(data):
            length = int.from_bytes(data[at : at + 8], "little")
            event = tensorboardX.proto.event_pb2.Event.FromString(data[at + 12 : at + 12 + length])
            at += 16 + length
            for value in event.summary.value:
                shown = value.simple_value if value.HasField("simple_value") else value.tensor.string_val[0].decode()
                found.setdefault(value.tag, []).append((event.step, shown))
    return found


def test_tensorboard_files_hold_every_step_once(made_up: MadeUpRun) -> None:
    made_up.step(1, evaluated=True)
    place = made_up.sizes
    made_up.step(2)
    track(made_up.folder, "tensorboard", say=print)
    made_up.cut_back(place)
    made_up.step(2, loss=7.0)
    made_up.step(3)
    made_up.end()
    track(made_up.folder, "tensorboard", say=print)
    found = read_event_files(made_up.folder.trackers / "tensorboard")
    assert found["train/loss"] == [(1, 1.0), (2, 7.0), (3, 3.0)] and found["eval/reward"] == [(1, 11.0)]
    (step, text), *_ = next(values for tag, values in found.items() if tag.startswith("completions"))
    assert step == 1 and "p1" in text and "train/kl" not in found


class FakeWandb:
    """What is used of wandb, and where its calls end."""

    def __init__(self) -> None:
        self.inits: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, Any]]] = []
        self.finished: list[int] = []
        self.environment: dict[str, str] = {}

    def init(self, **arguments: Any) -> FakeWandb:
        self.inits.append(arguments)
        self.environment = dict(os.environ)
        name = f"run-20261123_00000{len(self.inits)}-{arguments['id']}"
        folder = Path(arguments["dir"]) / "wandb" / (name if arguments["mode"] == "online" else f"offline-{name}")
        folder.mkdir(parents=True)
        (folder / f"run-20261123_1{arguments['id']}.wandb").touch()  # an id may look like a date
        return self

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self.logged.append((step, metrics))

    def finish(self, exit_code: int = 0) -> None:
        self.finished.append(exit_code)

    Settings = staticmethod(lambda **settings: settings)
    Table = staticmethod(lambda columns, data: [columns, *data])


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setenv("GRPO_STUDIO_PREFS", str(tmp_path / "prefs"))
    for name in ("WANDB_MODE", "WANDB_DIR", "WANDB_DATA_DIR", "WANDB_CACHE_DIR"):
        monkeypatch.setenv(name, "")  # so that it is taken back after the test
    monkeypatch.setattr(packages, "import_module", lambda name: fake)
    monkeypatch.setattr(follow, "missing_fault", lambda name: None)
    return fake


def test_wandb_is_offline_unless_asked(made_up: MadeUpRun, wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a login exists: a YAML file of somebody else must not upload anything."""
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    made_up.step(1)
    made_up.end()
    track(made_up.folder, "wandb", say=print)
    (init,) = wandb.inits
    assert init["mode"] == wandb.environment["WANDB_MODE"] == "offline" and init["project"] == "grpo-studio"
    assert init["settings"]["x_disable_meta"] and init["settings"]["disable_git"] and not init["settings"]["save_code"]
    assert "somebody" not in json.dumps(init["config"]) and "0" * 40 not in json.dumps(init)
    (step, logged), *_ = wandb.logged
    assert (step, logged["train/loss"], logged["completions"][1][2]) == (1, 1.0, "=answer 1")
    assert wandb.finished == [0]
    kept = [path for path in made_up.folder.path.rglob("*") if path.is_file() and b"0" * 40 in path.read_bytes()]
    assert kept == []


def test_wandb_offline_is_written_again_and_online_is_one_run(made_up: MadeUpRun, wandb: FakeWandb) -> None:
    made_up.step(1)
    made_up.step(2)
    track(made_up.folder, "wandb", say=print)
    track(made_up.folder, "wandb", say=print)
    assert [step for step, _ in wandb.logged] == [1, 2, 1, 2]
    assert len([*Path(wandb.inits[0]["dir"]).glob("wandb/offline-*")]) == 1, "the first was deleted"
    link = made_up.folder.path.with_name("link")
    link.symlink_to(made_up.folder.path)
    track(RunFolder(link), "wandb", may_upload=True, say=print)
    assert len({init["id"] for init in wandb.inits}) == 1
    assert [init["resume"] for init in wandb.inits] == [None, None, "allow"]


def test_a_folder_names_no_run_of_mine(made_up: MadeUpRun, wandb: FakeWandb) -> None:
    """Neither one of somebody else, nor a new run at the place of one that was deleted."""
    made_up.step(1)
    copy = RunFolder(shutil.copytree(made_up.folder.path, made_up.folder.path.parent / "two"))
    track(made_up.folder, "wandb", say=print)
    track(copy, "wandb", say=print)
    os.utime(made_up.folder.config, (1, 1))
    track(made_up.folder, "wandb", say=print)
    assert len({init["id"] for init in wandb.inits}) == 3


class FakeTrackio:
    def __init__(self) -> None:
        self.kept: list[Any] = []
        self.environment: dict[str, str] = {}

    def init(self, *, project: str, name: str, config: dict[str, Any], **more: Any) -> None:
        assert more == {"resume": "never", "embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        self.environment = dict(os.environ)
        run = SimpleNamespace(config=config, name=name, steps=[])
        run.delete = lambda: self.kept.remove(run)
        self.kept.append(run)

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self.kept[-1].steps.append(step)

    def Api(self) -> Any:
        if not self.kept:
            return SimpleNamespace(runs=self.refuse)
        return SimpleNamespace(runs=lambda project: self.kept)

    def refuse(self, project: str) -> Any:
        raise ValueError(f"Project '{project}' does not exist")

    Table = staticmethod(lambda columns, data: data)

    def finish(self) -> None: ...


def test_trackio_keeps_a_run_and_is_local(made_up: MadeUpRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = FakeTrackio()
    monkeypatch.setattr(packages, "import_module", lambda name: fake)
    monkeypatch.setattr(follow, "missing_fault", lambda name: None)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_WEBHOOK_URL"):
        monkeypatch.setenv(name, "somewhere")
    other = SimpleNamespace(config={"lr": 1}, name="one", steps=[9])
    made_up.step(1)
    track(made_up.folder, "trackio", say=print)  # into a project that does not exist yet
    fake.kept.insert(0, other)
    made_up.step(2)
    for _ in range(2):
        track(made_up.folder, "trackio", say=print)
    assert fake.kept[0] is other and [run.steps for run in fake.kept[1:]] == [[1, 2]]
    assert [name for name in fake.environment if name.startswith("TRACKIO_")] == ["TRACKIO_DIR"]
    assert str(made_up.folder.path) not in json.dumps(fake.kept[1].config)


@cases(
    ("settings", "sentence"),
    [
        ({"report_to": ["mlflow"]}, "There is no tracker mlflow; there are csv, tensorboard, trackio, wandb, none and"),
        ({"report_to": ["none", "csv"]}, "none stands alone: take it out of Report to, or the other trackers."),
        *(({"tracker_project": name}, "") for name in ("stranger/leak", "..", "a\nb", "-" * 200, "https://x")),
    ],
)
def test_trackers_exist_and_a_project_is_a_name_and_nobodys_account(settings: dict[str, Any], sentence: str) -> None:
    (fault,) = cross_setting_faults(settings)
    assert fault.setting in settings and fault.sentence.startswith(sentence) and len(fault.sentence) < 200
    assert cross_setting_faults({"tracker_project": "My runs 2"}) == []


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunFolder]:
    """A run without a tracker, and the folder of its model and rows."""
    place = tmp_path_factory.mktemp("plain")
    raw = small_run.settings_for(place, **small_run.low_half(place))
    return place, small_run.trained(raw, RunFolder(place / "run"))


HARM: dict[str, str] = {  # what the process of a tracker does → its program
    "never ends": "import time; time.sleep(300)",
    "is killed": "import os; os.kill(os.getpid(), 9)",
    "is stopped": "import os; os.kill(os.getpid(), 19)",
}


@pytest.mark.parametrize("harm", [*HARM, "works", "cannot be started"])
def test_a_tracker_changes_nothing_of_a_run(plain: tuple[Path, RunFolder], tmp_path: Path, monkeypatch, harm: str):
    """Its numbers are the same, and the run waits for none of them."""
    place, alone = plain
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start(*arguments: Any, **more: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*arguments, **more))
        if harm == "is killed":
            started[-1].wait(60)  # so that the run is sure to see it
        return started[-1]

    if harm in HARM:
        monkeypatch.setattr(follow, "module_command", lambda module: [sys.executable, "-S", "-c", HARM[harm]])
    if harm == "cannot be started":
        monkeypatch.setattr(follow, "module_command", lambda module: [str(tmp_path / "nothing")])
    monkeypatch.setattr(follow.subprocess, "Popen", start)
    began = time.monotonic()
    raw = small_run.settings_for(place, report_to=["csv"], **small_run.low_half(place))
    run = small_run.trained(raw, RunFolder(tmp_path / "run"))
    took = time.monotonic() - began
    small_run.assert_same_run(run, alone)
    notes = [event["sentence"] for event in small_run.events(run, "note") if "csv" in event["sentence"]]
    if harm == "never ends":
        assert started[0].poll() is None and took < 60
        started[0].kill()
    if harm == "cannot be started":
        assert notes[0].startswith("csv is not started: ") and not started
        return
    assert notes[0] == "What csv writes of this run is in metrics.csv and completions.csv of the run's folder."
    assert all(note.startswith("csv has ended:") for note in notes[1:])
    assert len(notes) == (2 if harm == "is killed" else 1)
    started[0].wait(60)  # also the one that was stopped: at its end the run lets it go on
    if harm == "works":
        assert started[0].returncode == 0, (run.trackers / "csv.log").read_text()
        assert [row["step"] for row in csv.DictReader((run.path / "metrics.csv").open())] == ["1", "2", "3"]
