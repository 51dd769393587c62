"""The state that the pages share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PySide6.QtCore import QObject, Qt, QTimer, Signal

from app.state.consent import Consent
from app.state.dataset import Dataset
from app.state.draft import Draft
from app.state.jobs import Downloads
from app.state.messages import Messages, Offer, problems_to
from app.state.prefs import Prefs
from app.state.presets import Preset, use_data
from app.state.processes import Service
from app.state.reward_bench import DECLINED, RewardBench
from app.state.run_files import last_run
from app.state.run_list import RunQueue
from app.state.run_starter import RunStarter
from backend.runs.archive import MOST_RUNS, CompletionTime, completion_time_of, seconds_per_completion
from backend.runs.events import check_format
from backend.runs.run_folder import RunFolder, all_runs
from backend.runs.run_names import name_of
from backend.runs.steering import changed_values, read_changes
from backend.utils import places
from backend.utils.about import ProblemFacts
from backend.utils.files import resolved

if TYPE_CHECKING:  # imported on first use, so that the first paint does not wait for numpy
    from app.state.evaluations import Evaluations
    from app.state.machines import Machines
    from app.state.run import Run

FORM, RUN, FORMAT, BENCH = "form", "run", "format", "bench"
SERVICE_FAILED = "Something went wrong inside GRPO Studio. Help, Report a problem… shows a report that you can send."


class Session(QObject):
    """One window's state: the form, the run on show, the queue, and services created on first use."""

    page_requested = Signal(str)  # key
    field_requested = Signal(str)  # setting
    guide_requested = Signal(str)  # place
    undo_requested = Signal()
    presets_requested = Signal()
    message = Signal(str)  # what has happened; what is true for as long as its cause is said with `messages.say`
    run_changed = Signal()  # `run` is another
    run_state_changed = Signal(str)  # also once the run's process is gone
    export_requested = Signal(object)  # RunFolder, as for the next two
    chat_requested = Signal(object)
    settings_requested = Signal(object)  # into the form
    completions_requested = Signal(int, object)  # of this step under a filter, None: all
    prompt_requested = Signal(tuple)  # prompt_key, of which evaluations are to be shown
    reward_rows_requested = Signal(list)  # rows of the training split to sample on, counted from 1
    comparison_requested = Signal(list)  # paths of runs
    reward_line_requested = Signal(object, int, str)  # reward file, line at which a function failed, why
    problem_found = Signal(object)  # Run, which a bug has ended

    def __init__(self, prefs: Prefs | None = None) -> None:
        super().__init__()
        self.prefs = prefs or Prefs()
        self.draft = Draft(self.prefs.draft_file, self)
        self.messages = Messages(self)
        self.consent = Consent(self.prefs.folder / "trusted.json")
        self.starter = RunStarter(self)
        self.time_forecast = TimeForecast(self)
        self.run: Run | None = None  # that Monitor and Completions show
        self.launched: RunFolder | None = None  # that this session has started or found training
        self.last_fault: ProblemFacts | None = None  # of the helper process
        self._is_held = False
        self._release_timer = QTimer(self, singleShot=True, interval=200)
        self._release_timer.timeout.connect(self._await_release)
        self.message.connect(self.messages.say)
        for signal in (self.draft.changed, self.draft.problems_changed, self.run_changed, self.run_state_changed):
            signal.connect(self.messages.review_soon)
        self.draft.changed.connect(self._remember_file)
        self.draft.saved.connect(self._remember_file)
        self.run_changed.connect(self._await_release)
        self.run_state_changed.connect(self._await_release)

    @cached_property
    def service(self) -> Service:
        service = Service(self)
        service.failed.connect(self.remember_fault)
        return service

    def remember_fault(self, sentence: str, trace: str) -> None:
        self.last_fault = ProblemFacts(sentence, trace, settings=self.draft.values())
        self.message.emit(SERVICE_FAILED)

    @cached_property
    def downloads(self) -> Downloads:
        return Downloads(self.service, self)

    @cached_property
    def dataset(self) -> Dataset:
        dataset = Dataset(self.draft, self.service, self)
        # A new model can count the tokens of its prompts.
        self.downloads.finished.connect(lambda _: dataset.refresh(again=True))
        return dataset

    @cached_property
    def reward_bench(self) -> RewardBench:
        bench = RewardBench(self.draft, self.service, self.consent, self)

        def show_refusal(sentence: str) -> None:
            form_stays = self.while_form_stays()

            def holds() -> bool:
                is_allowed = sentence == DECLINED and not self.consent.code.missing(self.draft.values())
                return not bench.busy and form_stays() and not is_allowed

            self.messages.say(sentence, BENCH, holds)

        bench.refused.connect(show_refusal)
        bench.busy_changed.connect(self.messages.review)
        return bench

    @cached_property
    def evaluations(self) -> Evaluations:
        from app.state.evaluations import Evaluations

        return Evaluations(self.consent, self)

    @cached_property
    def machines(self) -> Machines:
        from app.state.machines import Machines

        return Machines(self.draft, lambda: self.service, self.consent, self)

    @cached_property
    def queue(self) -> RunQueue:
        queue = RunQueue(self)

        def on_started(run: RunFolder) -> None:
            shown = self.run
            watches = shown is None or self.is_launched(shown.folder) or shown.folder == run
            self.launched = run
            if watches and (shown is None or shown.folder != run):
                self.open_run(run.path)
            self.message.emit(f"{name_of(run)} has left the queue and begins.")

        queue.refused.connect(self.message)
        queue.started.connect(on_started)
        return queue

    def restore(self) -> None:
        with problems_to(lambda sentence: self._say_of_form(f"{sentence} The form shows the defaults.")):
            if self.prefs.draft_file.exists():
                self.draft.restore(self.prefs.config_file)
            else:
                self.draft.load(places.demo_config(), as_preset=True)
                self.draft.history.clear()

    def load_config(self, path: Path) -> None:
        path = resolved(Path(path))
        self.page_requested.emit("train")
        with problems_to(lambda sentence: self.draft.show_refusal(path, sentence)):
            self.draft.load(path)
            self.prefs.remember(path)
            text = f"Opened {path.name}"
            if (translation := self.draft.translation) is not None and translation.program:
                text += f", a file for {translation.program.name}"
            self._say_of_form(f"{text}.")

    def load_settings(self, folder: RunFolder, changes: Mapping[str, Any] | None = None, what: str = "") -> bool:
        """Load a run's settings at its end, with `changes`, which the message calls `what`; False if unreadable."""
        with problems_to(self._say_of_form):
            over = changed_values(read_changes(folder))
            at_end = ", as they were at its end" if over else ""
            over = over | {"run_name": ""} | dict(changes or {})  # the next run is another
            self.draft.load(folder.config, as_preset=True, over=over)
            self.page_requested.emit("train")
            self._say_undoable(f"These are the settings of {name_of(folder)}{at_end}{what}.")
            return True
        return False

    def apply_preset(self, preset: Preset) -> None:
        self.draft.apply(preset)
        self.page_requested.emit("train")
        self._say_undoable(f"{preset.title} is set.")

    def use_data(self, name: str) -> None:
        """Set the dataset to this file, folder or Hub id, and guess its columns."""
        before = self.draft.values()
        sentence = use_data(self.draft, name)
        self.show_setting("data")
        if self.draft.values() != before:
            self._say_undoable(sentence)

    def use_path(self, key: str, path: Path) -> None:
        if key == "reward_functions_file":
            self.draft.use_reward_file(str(path))
            key = "reward_functions"  # the table lists them
        else:
            self.draft.set(key, str(path))
        self.show_setting(key)

    def show_setting(self, key: str) -> None:
        self.page_requested.emit("train")
        self.field_requested.emit(key)

    def show_failed_line(self, file: Path, line: int, sentence: str) -> None:
        self.page_requested.emit("rewards")
        self.reward_line_requested.emit(file, line, sentence)

    def use_two_updates(self) -> None:
        self.draft.set("num_iterations", 2)
        self._say_undoable("Updates per rollout is 2 in the form, for the next run; a running one keeps its own.")

    def while_form_stays(self) -> Callable[[], bool]:
        values, path = self.draft.values(), self.draft.path
        return lambda: (self.draft.values(), self.draft.path) == (values, path)

    def _say_of_form(self, text: str, offer: Offer | None = None) -> None:
        self.messages.say(text, FORM, self.while_form_stays(), offer)

    def _say_undoable(self, text: str) -> None:
        self._say_of_form(text, Offer("Undo", self.undo_requested.emit))

    def _remember_file(self, key: str = "") -> None:
        if not key and self.prefs.config_file != self.draft.path:
            self.prefs.config_file = self.draft.path

    def open_run(self, path: Path | str) -> None:
        from app.state.run import Run  # loads numpy, which the first paint does not wait for

        self._release_run()
        self.run = run = Run(RunFolder(Path(path)), self)
        run.state_changed.connect(self.run_state_changed)
        run.restarted.connect(self._close_gone, Qt.ConnectionType.QueuedConnection)
        run.saved.connect(lambda step: self.message.emit(f"Saved: the run can be resumed from step {step:,}."))
        self.run_changed.emit()
        self.messages.withdraw(FORMAT)
        with problems_to(lambda sentence: self.messages.say(sentence, FORMAT, lambda: self.run is run)):
            check_format(run.folder)

    def close_run(self) -> None:
        if self.run is not None:
            self._release_run()
            self.run_changed.emit()

    def _close_gone(self) -> None:
        if self.run is not None and not self.run.folder.path.exists():
            name = self.run.folder.name
            self.close_run()
            self.messages.say(f"The folder of {name} was moved or deleted.", RUN)

    def _release_run(self) -> None:
        if self.run is not None:
            self.run.close()
            self.run.deleteLater()
            self.run = None

    def reattach(self) -> bool:
        live = min((run for run in all_runs() if run.is_locked()), key=lambda run: run.is_remote, default=None)
        if live is None:
            return False
        self.launched = None if live.is_remote else live
        self.open_run(live.path)
        self.messages.say(f"{name_of(live)} is still training.", RUN, live.is_locked)
        return True

    def show_last_run(self) -> None:
        if self.run is None and (last := last_run()) is not None:
            self.open_run(last.path)

    def chat_with(self, folder: RunFolder) -> None:
        self.page_requested.emit("chat")
        self.chat_requested.emit(folder)

    @property
    def is_training(self) -> bool:
        """A run of this session is alive on this machine, or the queue is about to start one."""
        run = self.run
        is_known = run is not None and (run.state != "reading" or self.is_launched(run.folder))
        is_shown = run is not None and is_known and run.is_live and not run.folder.is_remote
        return is_shown or self._live_folder() is not None or ("queue" in vars(self) and self.queue.is_active)

    def is_launched(self, run: RunFolder) -> bool:
        return self.launched is not None and self.launched.path == run.path

    def send(self, command: str) -> None:
        with problems_to(self.messages.say):
            if self.run is not None:
                self.run.send(command)

    def stop_training(self) -> None:
        live, run = self._live_folder(), self.run
        if run is not None and not run.folder.is_remote and (live is None or run.folder.path == live.path):
            run.send("stop")
        elif live is not None:
            live.say("stop")

    def _live_folder(self) -> RunFolder | None:
        return self.launched if self.launched is not None and self.launched.is_locked() else None

    def _await_release(self, _state: str = "") -> None:
        was_held, self._is_held = self._is_held, self._live_folder() is not None and not (self.run and self.run.is_live)
        if self._is_held:
            self._release_timer.start()
        elif was_held:
            self.run_state_changed.emit(self.run.state if self.run is not None else "")


class TimeForecast(QObject):
    """Seconds per completion on this machine, from archived runs, read one per turn of the event loop."""

    changed = Signal()  # the archive was read, and forecasts may differ

    def __init__(self, parent: QObject) -> None:
        super().__init__(parent)
        self._known: list[CompletionTime] = []
        self._read: list[CompletionTime] = []
        self._waiting: Iterator[RunFolder] = iter(())
        self._timer = QTimer(self, interval=15)
        self._timer.timeout.connect(self._read_one)

    def refresh(self) -> None:
        if not self._timer.isActive():
            self._read, self._waiting = [], islice(all_runs(), MOST_RUNS)
            self._timer.start()

    def seconds_per_completion(self, values: Mapping[str, Any]) -> float | None:
        """None if no run read so far has the same model."""
        return seconds_per_completion(values, self._known)

    def _read_one(self) -> None:
        if (run := next(self._waiting, None)) is not None:
            if (time := completion_time_of(run)) is not None:
                self._read.append(time)
            return
        self._timer.stop()
        if self._read != self._known:
            self._known = self._read
            self.changed.emit()
