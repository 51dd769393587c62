"""The state that the pages share: the form, services created on first use, the run that is shown, and the runs that wait.

Pages communicate only through this object's signals; none of them imports another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PySide6.QtCore import QObject, QTimer, Signal

from app.state.consent import Consent
from app.state.draft import Draft
from app.state.memory import GB, MemoryEstimator, MemoryParts
from app.state.messages import Messages, Offer
from app.state.prefs import Prefs
from app.state.presets import Preset
from app.state.run_files import CrashOffer, crash_offer, last_run
from backend.config import config
from backend.runs.run_folder import RunFolder, all_runs, default_run_name, make_run_folder
from backend.runs.run_format import check_format
from backend.runs.steering import changed_values, read_changes, run_config
from backend.runs.throughput import MOST_RUNS, CompletionTime, completion_time_of, seconds_per_completion
from backend.utils import places
from backend.utils.errors import UserError
from backend.utils.files import resolved
from backend.utils.problem_report import ProblemFacts
from backend.utils.whole_file import replace_file

if TYPE_CHECKING:
    from app.state.dataset import Dataset
    from app.state.evaluations import Evaluations
    from app.state.jobs import Downloads, Updates
    from app.state.machines import Machines
    from app.state.processes import Service
    from app.state.reward_bench import RewardBench
    from app.state.run import Run
    from app.state.run_list import RunQueue

# Seconds per completion on this machine, measured from archived runs, which are read one per turn of the event loop.

REST_MS = 15
"""Pause between two runs, so that typing and painting come first."""


class TimeForecast(QObject):
    """Signals:
    changed – the archive was read, and forecasts may differ.
    """

    changed = Signal()

    def __init__(self, parent: QObject | None = None, runs: Callable[[], Iterable[RunFolder]] = all_runs) -> None:
        super().__init__(parent)
        self._runs = runs
        self._known: list[CompletionTime] = []
        self._read: list[CompletionTime] = []
        self._waiting: Iterator[RunFolder] = iter(())
        self._timer = QTimer(self, interval=REST_MS)
        self._timer.timeout.connect(self._read_one)

    def refresh(self) -> None:
        """Read the archive again, unless it is being read."""
        if not self._timer.isActive():
            self._read, self._waiting = [], islice(self._runs(), MOST_RUNS)
            self._timer.start()

    def seconds_per_completion(self, values: Mapping[str, Any]) -> float | None:
        """Seconds per completion in the runs read so far; None if none of them has the same model."""
        return seconds_per_completion(values, self._known)

    def _read_one(self) -> None:
        run = next(self._waiting, None)
        if run is not None:
            time = completion_time_of(run)
            self._read += [time] if time is not None else []
            return
        self._timer.stop()
        if self._read != self._known:
            self._known = self._read
            self.changed.emit()


# ── session ──────────────────────────────────────────────────────────────────────────────────────────────────────────

START, RUN, FORMAT = "start", "run", "format"
"""Causes of messages: an attempt to start a run, the run that is shown, and a format of it that is newer than this version."""

RELEASE_MS = 200
"""How often it is looked whether the process of a run that has ended is gone."""


class FormSession(QObject):
    """The form and what can replace it: a file, a preset, a run's settings, a dataset.

    Attributes:
        prefs, draft – the app's own settings, and the form.
        messages – what the status strip says.

    Signals:
        page_requested(str) – show the page with this key.
        field_requested(str) – show and focus this setting on the Train page.
        guide_requested(str) – show this place of the guide.
        undo_requested – undo the last change of the form.
        message(str) – something has happened: one sentence for the status strip, for a while. What is true for as long as its
            cause is said with `messages.say`.
    """

    page_requested = Signal(str)
    field_requested = Signal(str)
    guide_requested = Signal(str)
    undo_requested = Signal()
    message = Signal(str)

    def __init__(self, prefs: Prefs, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.prefs = prefs
        self.draft = Draft(prefs.draft_file, self)
        self.messages = Messages(self)
        self.message.connect(self.messages.note)
        self.draft.changed.connect(self.messages.review_soon)
        self.draft.problems_changed.connect(self.messages.review_soon)
        self.draft.changed.connect(self._remember_file)
        self.draft.saved.connect(self._remember_file)

    def restore(self) -> None:
        """Restore the form of the last session, or load the demo on the first launch."""
        try:
            if self.prefs.draft_file.exists():
                self.draft.restore(self.prefs.config_file)
            else:
                self.draft.load(places.demo_config(), as_preset=True)
                self.draft.history_cleared.emit()
        except UserError as mistake:
            self.messages.say(
                f"{mistake.faults[0].sentence} The form shows the defaults.", FORM, self.while_form_stays()
            )

    def load_config(self, path: Path) -> None:
        """Open a YAML file in the form. If it cannot be read, the form stays unchanged, and a message says why."""
        path = resolved(Path(path))
        if self._load_form(path):
            self.prefs.remember(path)
            self.messages.say(f"Opened {path.name}{self._words_read()}", FORM, self.while_form_stays())

    def _words_read(self) -> str:
        """The end of the sentence that a file was opened: whose file it is, and how many words were translated and left out."""
        if (translation := self.draft.translation) is None:
            return "."
        fates = [word.fate for word in translation.words]
        counts = {"translated": fates.count("translated"), "left out": fates.count("without effect")}
        told = ", ".join(f"{count} {fate}" for fate, count in counts.items() if count)
        whose = f", a file for {translation.program.name}" if translation.program else ""
        return f"{whose}. Of its words, {told}." if told else f"{whose}."

    def apply_preset(self, preset: Preset) -> None:
        """Apply a preset to the form, and show it."""
        self.draft.apply(preset)
        self.page_requested.emit("train")
        self._say_undoable(f"{preset.title} is set.")

    def use_data(self, name: str) -> None:
        """Set the dataset to this file, folder or Hub id, and map the columns that can be guessed from it.

        A form that still holds the demo or no model also gets a model and settings to start from.
        """
        from app.state.presets import data_choice

        choice, before = data_choice(self.draft, name), self.draft.values()
        change = self.draft.start_from if choice.begins else self.draft.update
        change(choice.values, f"Data {choice.called}")
        self.page_requested.emit("train")
        self.field_requested.emit("data")
        if self.draft.values() != before:
            self._say_undoable(choice.sentence)

    def use_two_updates(self) -> None:
        """Set the form to two updates per rollout, so that the next run has a ratio that can be clipped."""
        self.draft.set("num_iterations", 2)
        self._say_undoable(
            "Updates per rollout is 2 in the form, for the next run; a run that has begun keeps its own."
        )

    def _say_undoable(self, sentence: str) -> None:
        """Say what was done to the form, with a link that undoes it while nothing else was changed."""
        self.messages.say(sentence, FORM, self.while_form_stays(), Offer("Undo", self.undo_requested.emit))

    def while_form_stays(self) -> Callable[[], bool]:
        """Whether the form is still the one of now."""
        values, path = self.draft.values(), self.draft.path
        return lambda: (self.draft.values(), self.draft.path) == (values, path)

    def use_path(self, key: str, path: Path) -> None:
        """Put a file or folder into a setting, and show it there."""
        if key == "reward_functions_file":
            self.draft.use_reward_file(str(path))
        else:
            self.draft.set(key, str(path))
        self.page_requested.emit("train")
        self.field_requested.emit(key)

    def _remember_file(self, key: str = "") -> None:
        """Remember the file behind the form; only a change of all settings (`key` empty) can have replaced it."""
        if not key and self.prefs.config_file != self.draft.path:
            self.prefs.config_file = self.draft.path

    def load_settings(self, folder: RunFolder) -> bool:
        """Load a run's settings, as they were at its end, into the form; returns whether they could be read. Saving then asks for a new
        file: the run's own is a record."""
        try:
            over = changed_values(read_changes(folder))
        except UserError as mistake:
            self.messages.say(mistake.faults[0].sentence, FORM, self.while_form_stays())
            return False
        loaded = self._load_form(folder.config, as_preset=True, over=over)
        if loaded:
            when = ", as they were at its end" if over else ""
            self._say_undoable(f"These are the settings of {folder.name}{when}.")
        return loaded

    def _load_form(self, path: Path, *, as_preset: bool = False, over: Mapping[str, Any] | None = None) -> bool:
        try:
            self.draft.load(path, as_preset=as_preset, over=over)
        except UserError as mistake:
            self.messages.say(mistake.faults[0].sentence, FORM, self.while_form_stays())
            return False
        self.page_requested.emit("train")
        return True


FORM = "form"
"""The cause of messages about what was done to the whole form."""


class ServiceSession(FormSession):
    """The form, and the services that work on it.

    Attributes:
        consent – created with the session.
        service, downloads, dataset, reward_bench, evaluations, machines, updates – created on first use.
        last_fault – the last fault of the helper process, for a report; None while there was none.
    """

    def __init__(self, prefs: Prefs, parent: QObject | None = None) -> None:
        super().__init__(prefs, parent)
        self.consent = Consent(self.prefs.folder / "trusted.json")
        self.last_fault: ProblemFacts | None = None
        self._service: Service | None = None
        self._downloads: Downloads | None = None
        self._dataset: Dataset | None = None
        self._reward_bench: RewardBench | None = None
        self._evaluations: Evaluations | None = None
        self._machines: Machines | None = None
        self._updates: Updates | None = None

    @property
    def service(self) -> Service:
        """The client of the helper process, which answers everything that takes time; created on first use."""
        if self._service is None:
            from app.state.processes import Service

            self._service = Service(self)
            self._service.failed.connect(self._remember_fault)
        return self._service

    def _remember_fault(self, sentence: str, trace: str) -> None:
        """Keep what went wrong inside the helper process; the page that asked shows its sentence."""
        self.last_fault = ProblemFacts(sentence, trace, settings=self.draft.values())
        self.message.emit(FAULT_OFFER)

    @property
    def downloads(self) -> Downloads:
        """Downloads from the Hub; created on first use."""
        if self._downloads is None:
            from app.state.jobs import Downloads

            self._downloads = Downloads(self.service, self)
        return self._downloads

    @property
    def dataset(self) -> Dataset:
        """The draft's dataset, shared by every page that shows it; created on first use."""
        if self._dataset is None:
            from app.state.dataset import Dataset

            self._dataset = dataset = Dataset(self.draft, self.service, self)
            self.downloads.finished.connect(lambda _: dataset.reload())  # with a model come the tokens of its prompts
        return self._dataset

    @property
    def reward_bench(self) -> RewardBench:
        """Completions and their scores on the reward bench; created on first use."""
        if self._reward_bench is None:
            from app.state.reward_bench import RewardBench

            self._reward_bench = RewardBench(self.draft, self.service, self.consent, self)
            self._reward_bench.refused.connect(self._say_bench_refused)
            self._reward_bench.busy_changed.connect(self.messages.review)
        return self._reward_bench

    def _say_bench_refused(self, sentence: str) -> None:
        """Say it until the bench is busy with something else, or the form is another."""
        bench, form_stays = self.reward_bench, self.while_form_stays()
        self.messages.say(sentence, BENCH, lambda: not bench.busy and form_stays() and not self._was_allowed(sentence))

    def _was_allowed(self, sentence: str) -> bool:
        from app.state.reward_bench import DECLINED

        return sentence == DECLINED and not self.consent.unconfirmed(self.draft.values())

    @property
    def evaluations(self) -> Evaluations:
        """The evaluations of the run that is shown; created on first use."""
        if self._evaluations is None:
            from app.state.evaluations import Evaluations

            self._evaluations = Evaluations(self.consent, self)
        return self._evaluations

    @property
    def machines(self) -> Machines:
        """The machines of the form's run; created on first use."""
        if self._machines is None:
            from app.state.machines import Machines

            self._machines = Machines(self.draft, lambda: self.service, self.consent, self)
        return self._machines

    @property
    def updates(self) -> Updates:
        """The update check; created on first use."""
        if self._updates is None:
            from app.state.jobs import Updates

            self._updates = Updates(self.prefs, lambda: self.service, self)
            self._updates.told.connect(self.message)
        return self._updates


BENCH = "bench"
"""The cause of messages about an attempt to sample or score on the bench."""
FAULT_OFFER = (
    "Something went wrong inside GRPO Studio. Help, Report a problem… shows what, as a report that you can send."
)


class Session(ServiceSession):
    """One window's state: the form and the services of its base classes, the run that is shown, and the runs that wait.

    Attributes:
        queue – the runs that wait; created on first use.
        run – the run that Monitor and Completions show, or None.
        estimate_memory(Config) – the memory of a run, or None if it cannot be estimated. Tests replace it.
        confirm_over_memory(MemoryParts) – whether to train although the run surely does not fit. Set by the window.

    Signals:
        run_changed – `run` is another run now, or None.
        run_state_changed(str) – the state of `run`, also once its process is gone.
        export_requested(RunFolder) – export this run's model.
        chat_requested(RunFolder) – talk to this run's model, on the Chat page, which is shown first.
        settings_requested(RunFolder) – load this run's settings into the form.
        waiting_settings_requested(RunFolder) – load the settings of a run that waits into the form, which then keeps them for it.
        presets_requested – show the presets.
        completions_requested(int, str or None) – show the completions of this step that the filter of this name leaves; None: all.
        reward_rows_requested(list[int]) – sample on these rows of the training split, counted from 1.
        problem_found(Run) – report the fault of the program that has ended this run.
    """

    run_changed = Signal()
    run_state_changed = Signal(str)
    export_requested = Signal(object)
    chat_requested = Signal(object)
    settings_requested = Signal(object)
    waiting_settings_requested = Signal(object)
    presets_requested = Signal()
    completions_requested = Signal(int, object)
    reward_rows_requested = Signal(list)
    problem_found = Signal(object)

    def __init__(self, prefs: Prefs | None = None, parent: QObject | None = None) -> None:
        super().__init__(prefs or Prefs(), parent)
        self.run: Run | None = None
        self._training: RunFolder | None = None
        self._queue: RunQueue | None = None
        self.time_forecast = TimeForecast(self)
        self.estimate_memory: MemoryEstimator = self._estimate_memory
        self.confirm_over_memory: Callable[[MemoryParts], bool] = lambda _memory_parts: False
        self.run_changed.connect(self.messages.review_soon)
        self.run_state_changed.connect(self.messages.review_soon)
        self._is_held = False
        self._release_timer = QTimer(self, singleShot=True, interval=RELEASE_MS)
        self._release_timer.timeout.connect(self._await_release)
        self.run_changed.connect(self._await_release)
        self.run_state_changed.connect(self._await_release)

    @property
    def queue(self) -> RunQueue:
        """The runs that wait; created on first use."""
        if self._queue is None:
            from app.state.run_list import RunQueue

            self._queue = RunQueue(self)
            self._queue.refused.connect(self.message)
            self._queue.started.connect(self._follow_queue)
        return self._queue

    def _follow_queue(self, run: RunFolder) -> None:
        """A run that waited begins: show it to a user who was watching the one before it, and to nobody who reads another."""
        shown, watched = self.run, self._training
        watches = shown is None or (watched is not None and shown.folder.path == watched.path) or shown.folder == run
        self._training = run
        if watches and (shown is None or shown.folder != run):
            self.open_run(run.path)
        self.message.emit(f"{run.name} has left the queue and begins.")

    @property
    def is_training(self) -> bool:
        """Whether a run of this session is alive, even while another run is shown, or the queue is about to start one."""
        run = self.run
        # One that is still being read counts as starting, whatever its end.
        is_known = run is not None and (run.has_caught_up or self.is_launched(run.folder) or run.folder.is_locked())
        is_shown = run is not None and is_known and run.is_live
        return is_shown or self._live_folder() is not None or (self._queue is not None and self._queue.is_active)

    def _await_release(self, _state: str = "") -> None:
        """A run that has ended holds its folder until its process is gone, and no other can start: tell once more when it lets go."""
        was_held, self._is_held = self._is_held, self._live_folder() is not None and not (self.run and self.run.is_live)
        if self._is_held:
            self._release_timer.start()
        elif was_held:
            self.run_state_changed.emit(self.run.state if self.run is not None else "")

    def stop_training(self) -> None:
        """Ask the live run to save and stop."""
        live = self._live_folder()
        if self.run is not None and (live is None or self.run.folder.path == live.path):
            self.run.send("stop")
        elif live is not None:
            live.say("stop")

    def _live_folder(self) -> RunFolder | None:
        return self._training if self._training is not None and self._training.is_locked() else None

    def start_run(self) -> None:
        """Train with the form's settings in a new process; if they have problems, show the first problem instead."""
        self.messages.withdraw(START)
        if self._is_busy() or not self._is_ready():
            return
        try:
            folder = self._launch()
        except UserError as mistake:
            self.messages.say(mistake.faults[0].sentence, START, self.while_form_stays())
            return
        self.open_run(folder.path)
        self.page_requested.emit("monitor")

    def queue_run(self) -> None:
        """Let a run with the form's settings wait its turn; of a waiting run that is being edited, keep the settings."""
        self.messages.withdraw(START)
        if not self._is_ready():
            return
        if self.queue.edited is not None:
            name = self.queue.edited.name
            if self.queue.keep_settings(self.draft.as_yaml()):
                self.message.emit(f"{name} waits with these settings.")
            return
        try:
            folder = self._new_folder()
            replace_file(folder.config, self.draft.as_yaml())
        except UserError as mistake:
            self.messages.say(mistake.faults[0].sentence, START, self.while_form_stays())
            return
        if self.queue.add(folder):
            self.message.emit(f"{folder.name} waits in the queue.")

    def _is_ready(self) -> bool:
        """Whether the form's settings are sound, fit in memory and may run; shows what is in the way."""
        is_sound = not self._shows_problem() and self._fits_memory()
        return (
            is_sound
            and self._may_run_code(self.draft.values())
            and self._may_use_hosts(str(self.draft.value("hosts") or ""))
        )

    def resume_run(self, folder: RunFolder, *options: str) -> None:
        """Resume a run from its newest checkpoint in a new process, and show it. `options`: of the verb `resume`."""
        from app.state.processes import resume_training

        self.messages.withdraw(START)
        if self._is_busy():
            return
        try:
            check_format(folder)  # before its settings, of which a newer version may have others
            hosts = "" if "--hosts" in options else run_config(folder).hosts  # an option is the user's own choice
            if not self._may_run_code(config.read(folder.config), folder.path) or not self._may_use_hosts(hosts):
                return
            resume_training(folder, *options)
        except UserError as mistake:
            self.messages.say(mistake.faults[0].sentence, START)
            return
        self._training = folder
        if self.run is None or self.run.folder.path != folder.path:
            self.open_run(folder.path)
        assert self.run is not None
        self.run.expect_process()
        self.page_requested.emit("monitor")

    def queue_existing(self, folder: RunFolder) -> None:
        """Let a run that has begun before wait its turn, in which it is resumed."""
        self.messages.withdraw(START)
        try:
            check_format(folder)
            may_run = self._may_run_code(config.read(folder.config), folder.path)
            may_run = may_run and self._may_use_hosts(run_config(folder).hosts)
        except UserError as mistake:
            self.messages.say(mistake.faults[0].sentence, START)
            return
        if may_run and self.queue.add(folder):
            self.message.emit(f"{folder.name} waits in the queue.")

    def _may_run_code(self, settings: Mapping[str, Any], folder: Path | None = None) -> bool:
        """Whether the user's own reward code may run; says so where it may not. Relative paths are taken from `folder`."""
        allowed = self.consent.obtain(settings, folder)
        if not allowed:
            sentence = "The reward file was not allowed to run, so nothing was started."
            self.messages.say(sentence, START, lambda: bool(self.consent.unconfirmed(self.draft.values())))
        return allowed

    def _may_use_hosts(self, hosts: str) -> bool:
        """Whether the machines of this hosts file may be contacted; says so where they may not."""
        allowed = self.consent.obtain_hosts(hosts)
        if not allowed:
            sentence = "The machines of the hosts file may not be contacted, so nothing was started."
            self.messages.say(sentence, START, lambda: not self.consent.has_hosts(hosts))
        return allowed

    def _is_busy(self) -> bool:
        """Whether a run is alive already; says so if it is."""
        if self.is_training:
            sentence = "One run at a time: stop the present run first, let it finish, or add this one to the queue."
            self.messages.say(sentence, START, lambda: self.is_training)
            return True
        from backend.runs.sweeps.sweep_results import live_sweep

        if (sweep := live_sweep()) is not None:
            sentence = f"The sweep {sweep.name} is training: stop it on Sweeps first, or let it finish."
            self.messages.say(sentence, START, sweep.process.is_locked)
        return sweep is not None

    def _shows_problem(self) -> bool:
        faults = self.draft.problems()
        if faults:
            rest = f" There {'is one more problem' if len(faults) == 2 else f'are {len(faults) - 1} more problems'}."
            self.page_requested.emit("train")
            self.field_requested.emit(faults[0].setting)
            sentence = faults[0].sentence + (rest if len(faults) > 1 else "")
            self.messages.say(sentence, START, lambda: self.draft.problems() == faults)
        return bool(faults)

    def _estimate_memory(self, settings: config.Config) -> MemoryParts | None:
        from app.state.memory import memory_parts_of

        counts = self.dataset.counts
        return memory_parts_of(settings, counts.longest if counts is not None and counts.has_tokens else None)

    def memory_parts(self) -> MemoryParts | None:
        """The memory that a run of the form would need; None while that cannot be estimated."""
        try:
            return self.estimate_memory(self.draft.config())
        except UserError:
            return None

    def _fits_memory(self) -> bool:
        """Whether the run fits or may fit in memory, or the user starts it although it does not."""
        memory_parts = self.memory_parts()
        if memory_parts is None or memory_parts.verdict != "over":
            return True
        if self.confirm_over_memory(memory_parts):
            # The trainer makes the same estimate, and would refuse the run for it.
            self.draft.set("memory_limit", math.ceil(memory_parts.total / GB))
            return True
        self.messages.say(f"Not started. {memory_parts.sentence}", START, self.while_form_stays())
        return False

    def _launch(self) -> RunFolder:
        """Make the run's folder and start its trainer. Raises UserError."""
        # Imported here and not above, so that the window can open and be tested without the means to start a trainer.
        from app.state.processes import start_training

        folder = self._new_folder()
        start_training(self.draft.as_yaml(), folder)
        self._training = folder
        return folder

    def _new_folder(self) -> RunFolder:
        """A folder for a run of the form. Raises UserError."""
        config = self.draft.config()
        return make_run_folder(config.run_name or default_run_name(config.model, config.train_type, config.train_mode))

    def open_run(self, path: Path) -> None:
        """Show this run, live or finished."""
        from app.state.run import Run  # brings numpy, which the first paint does not wait for

        self._release_run()
        self.run = Run(RunFolder(Path(path)), self)
        self.run.state_changed.connect(self.run_state_changed)
        self.run.saved.connect(lambda step: self.message.emit(f"Saved: the run can be resumed from step {step:,}."))
        self.run_changed.emit()
        self._say_format(self.run)

    def _say_format(self, run: Run) -> None:
        """Say that a newer version has written the run, as long as it is shown."""
        self.messages.withdraw(FORMAT)
        try:
            check_format(run.folder)
        except UserError as mistake:
            self.messages.say(mistake.faults[0].sentence, FORMAT, lambda: self.run is run)

    def close_run(self) -> None:
        """Show no run; a live run continues to train."""
        if self.run is not None:
            self._release_run()
            self.run_changed.emit()

    def _release_run(self) -> None:
        if self.run is not None:
            self.run.close()
            self.run.deleteLater()
            self.run = None

    def reattach(self) -> bool:
        """Show the newest run that is still training, if there is one: an earlier window may have started it."""
        live = next((run for run in all_runs() if run.is_locked()), None)
        if live is None:
            return False
        self._training = live
        self.open_run(live.path)
        self.messages.say(f"{live.name} is still training.", RUN, live.is_locked)
        return True

    def show_last_run(self) -> None:
        """Show the run that has trained last, where none is shown yet."""
        last = last_run() if self.run is None else None
        if last is not None:
            self.open_run(last.path)

    def crash_to_offer(self) -> CrashOffer | None:
        """The run that is shown, where it crashed and was not offered to be resumed before."""
        return crash_offer(self.run.folder, self.prefs.offered_crash) if self.run is not None else None

    def is_launched(self, run: RunFolder) -> bool:
        """Whether this session has started the run, or found it training."""
        return self._training is not None and self._training.path == run.path

    def try_rewards(self, rows: list[int]) -> None:
        """Have the reward bench sample the model on these rows of the training split, counted from 1."""
        self.page_requested.emit("rewards")
        self.reward_rows_requested.emit(rows)

    def chat_with(self, folder: RunFolder) -> None:
        """Talk to this run's model."""
        self.page_requested.emit("chat")
        self.chat_requested.emit(folder)
