"""The state that the pages share: the draft, the run that is shown, preferences, and services created on first use.

Pages communicate only through this object's signals; none of them imports another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PySide6.QtCore import QObject, Signal

from app.model.consent import Consent
from app.model.form_session import FormSession
from app.model.memory_parts import GB, MemoryEstimator, MemoryParts
from app.model.prefs import Prefs
from app.model.time_forecast import TimeForecast
from backend.spec import config, places
from backend.spec.faults import Mistake
from backend.spec.places import RunFolder
from backend.spec.problem_report import ProblemFacts

if TYPE_CHECKING:
    from app.model.dataset import Dataset
    from app.model.downloads import Downloads
    from app.model.evaluations import Evaluations
    from app.model.reward_bench import RewardBench
    from app.model.run import Run
    from app.model.service import Service
    from app.model.updates import Updates

START, RUN, BENCH = "start", "run", "bench"
"""Causes of messages: an attempt to start a run, the run that is shown, an attempt to sample or score on the bench."""
FAULT_OFFER = (
    "Something went wrong inside GRPO Studio. Help, Report a problem… shows what, as a report that you can send."
)


class Session(FormSession):
    """One window's state: the form, the run that is shown, and the services.

    Attributes:
        consent, time_forecast – created with the session.
        service, downloads, dataset, reward_bench, evaluations, updates – created on first use: the first paint does not wait for their imports.
        run – the run that Monitor and Completions show, or None.
        estimate_memory(Config) – the memory of a run, or None if it cannot be estimated. Tests replace it.
        last_fault – the last fault of the helper process, for a report; None while there was none.
        confirm_over_memory(MemoryParts) – whether to train although the run surely does not fit. Set by the window.

    Signals:
        run_changed – `run` is another run now, or None.
        run_state_changed(str) – the state of `run`.
        export_requested(RunFolder) – export this run's model.
        chat_requested(RunFolder) – talk to this run's model, on the Chat page, which is shown first.
        settings_requested(RunFolder) – load this run's settings into the form.
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
    presets_requested = Signal()
    completions_requested = Signal(int, object)
    reward_rows_requested = Signal(list)
    problem_found = Signal(object)

    def __init__(self, prefs: Prefs | None = None, parent: QObject | None = None) -> None:
        super().__init__(prefs or Prefs(), parent)
        self.run: Run | None = None
        self._training: RunFolder | None = None
        self._service: Service | None = None
        self.last_fault: ProblemFacts | None = None
        self._downloads: Downloads | None = None
        self._dataset: Dataset | None = None
        self._reward_bench: RewardBench | None = None
        self._evaluations: Evaluations | None = None
        self._updates: Updates | None = None
        self.consent = Consent(self.prefs.folder / "trusted.json")
        self.time_forecast = TimeForecast(self)
        self.estimate_memory: MemoryEstimator = self._estimate_memory
        self.confirm_over_memory: Callable[[MemoryParts], bool] = lambda _memory_parts: False
        self.run_changed.connect(self.messages.review_soon)
        self.run_state_changed.connect(self.messages.review_soon)

    @property
    def service(self) -> Service:
        """The client of the helper process, which answers everything that takes time; created on first use."""
        if self._service is None:
            from app.model.service import Service

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
            from app.model.downloads import Downloads

            self._downloads = Downloads(self.service, self)
        return self._downloads

    @property
    def dataset(self) -> Dataset:
        """The draft's dataset, shared by every page that shows it; created on first use."""
        if self._dataset is None:
            from app.model.dataset import Dataset

            self._dataset = Dataset(self.draft, self.service, self)
        return self._dataset

    @property
    def reward_bench(self) -> RewardBench:
        """Completions and their scores on the reward bench; created on first use."""
        if self._reward_bench is None:
            from app.model.reward_bench import RewardBench

            self._reward_bench = RewardBench(self.draft, self.service, self.consent, self)
            self._reward_bench.refused.connect(self._say_bench_refused)
            self._reward_bench.busy_changed.connect(self.messages.review)
        return self._reward_bench

    def _say_bench_refused(self, sentence: str) -> None:
        """Say it until the bench is busy with something else, or the form is another."""
        bench, form_stays = self.reward_bench, self.while_form_stays()
        self.messages.say(sentence, BENCH, lambda: not bench.busy and form_stays() and not self._was_allowed(sentence))

    def _was_allowed(self, sentence: str) -> bool:
        from app.model.reward_bench import DECLINED

        return sentence == DECLINED and not self.consent.unconfirmed(self.draft.values())

    @property
    def evaluations(self) -> Evaluations:
        """The evaluations of the run that is shown; created on first use."""
        if self._evaluations is None:
            from app.model.evaluations import Evaluations

            self._evaluations = Evaluations(self.consent, self)
        return self._evaluations

    @property
    def updates(self) -> Updates:
        """The update check; created on first use."""
        if self._updates is None:
            from app.model.updates import Updates

            self._updates = Updates(self.prefs, lambda: self.service, self)
            self._updates.told.connect(self.message)
        return self._updates

    @property
    def is_training(self) -> bool:
        """Whether a run of this session is alive, even while another run is shown."""
        return self._live_folder() is not None or (self.run is not None and self.run.is_live)

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
        if self._is_busy() or self._shows_problem() or not self._fits_memory():
            return
        if not self._may_run_code(self.draft.values()):
            return
        try:
            folder = self._launch()
        except Mistake as mistake:
            self.messages.say(mistake.faults[0].sentence, START, self.while_form_stays())
            return
        self.open_run(folder.path)
        self.page_requested.emit("monitor")

    def resume_run(self, folder: RunFolder) -> None:
        """Resume a run from its newest checkpoint in a new process, and show it."""
        from app.model.processes import resume_training

        self.messages.withdraw(START)
        if self._is_busy():
            return
        try:
            if not self._may_run_code(config.read(folder.config)):
                return
            resume_training(folder)
        except Mistake as mistake:
            self.messages.say(mistake.faults[0].sentence, START)
            return
        self._training = folder
        if self.run is None or self.run.folder.path != folder.path:
            self.open_run(folder.path)
        assert self.run is not None
        self.run.expect_process()
        self.page_requested.emit("monitor")

    def _may_run_code(self, settings: Mapping[str, Any]) -> bool:
        """Whether the user's own reward code may run; says so where it may not."""
        allowed = self.consent.obtain(settings)
        if not allowed:
            sentence = "The reward file was not allowed to run, so nothing was started."
            self.messages.say(sentence, START, lambda: bool(self.consent.unconfirmed(self.draft.values())))
        return allowed

    def _is_busy(self) -> bool:
        """Whether a run is alive already; says so if it is."""
        if self.is_training:
            sentence = "One run at a time: stop the present run first, or let it finish."
            self.messages.say(sentence, START, lambda: self.is_training)
        return self.is_training

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
        from app.model.memory import memory_parts_of

        counts = self.dataset.counts
        return memory_parts_of(settings, counts.longest if counts is not None and counts.has_tokens else None)

    def memory_parts(self) -> MemoryParts | None:
        """The memory that a run of the form would need; None while that cannot be estimated."""
        try:
            return self.estimate_memory(self.draft.config())
        except Mistake:
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
        """Make the run's folder and start its trainer. Raises Mistake."""
        # Imported here and not above, so that the window can open and be tested without the means to start a trainer.
        from app.model.processes import start_training

        config = self.draft.config()
        name = config.run_name or places.default_run_name(config.model, config.train_type, config.train_mode)
        folder = places.make_run_folder(name)
        start_training(self.draft.as_yaml(), folder)
        self._training = folder
        return folder

    def open_run(self, path: Path) -> None:
        """Show this run, live or finished."""
        from app.model.run import Run  # brings numpy, which the first paint does not wait for

        self._release_run()
        self.run = Run(RunFolder(Path(path)), self)
        self.run.state_changed.connect(self.run_state_changed)
        self.run_changed.emit()

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
        live = next((run for run in places.all_runs() if run.is_locked()), None)
        if live is None:
            return False
        self._training = live
        self.open_run(live.path)
        self.messages.say(f"{live.name} is still training.", RUN, live.is_locked)
        return True

    def try_rewards(self, rows: list[int]) -> None:
        """Have the reward bench sample the model on these rows of the training split, counted from 1."""
        self.page_requested.emit("rewards")
        self.reward_rows_requested.emit(rows)

    def chat_with(self, folder: RunFolder) -> None:
        """Talk to this run's model."""
        self.page_requested.emit("chat")
        self.chat_requested.emit(folder)
