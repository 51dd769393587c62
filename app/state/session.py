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

from app.state.memory_parts import GB, MemoryEstimator, MemoryParts
from app.state.prefs import Prefs
from app.state.runs.run_files import CrashOffer, crash_offer, last_run
from app.state.service_session import ServiceSession
from backend.config import config
from backend.runs.run_folder import RunFolder, all_runs, default_run_name, make_run_folder
from backend.runs.run_format import check_format
from backend.runs.steering import run_config
from backend.runs.throughput import MOST_RUNS, CompletionTime, completion_time_of, seconds_per_completion
from backend.utils.errors import UserError
from backend.utils.whole_file import replace_file

if TYPE_CHECKING:
    from app.state.runs.run import Run
    from app.state.runs.run_queue import RunQueue


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
            from app.state.runs.run_queue import RunQueue

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
        from app.state.runs.run import Run  # brings numpy, which the first paint does not wait for

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
