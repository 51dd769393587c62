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
from app.model.draft import Draft
from app.model.memory_parts import GB, MemoryEstimator, MemoryParts
from app.model.prefs import Prefs
from app.model.presets import Preset, preset
from app.model.run_summary import columns_sentence
from app.model.time_forecast import TimeForecast
from backend.spec import config, places
from backend.spec.dataset_columns import columns_of, guessed
from backend.spec.faults import Mistake
from backend.spec.first_choices import SYSTEM_PROMPT, model_to_begin_with
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

FAULT_OFFER = (
    "Something went wrong inside GRPO Studio. Help, Report a problem… shows what, as a report that you can send."
)


class Session(QObject):
    """One window's state.

    Attributes:
        prefs, draft, consent, time_forecast – created with the session.
        service, downloads, dataset, reward_bench, evaluations, updates – created on first use: the first paint does not wait for their imports.
        run – the run that Monitor and Completions show, or None.
        estimate_memory(Config) – the memory of a run, or None if it cannot be estimated. Tests replace it.
        last_fault – the last fault of the helper process, for a report; None while there was none.
        confirm_over_memory(MemoryParts) – whether to train although the run surely does not fit. Set by the window.

    Signals:
        page_requested(str) – show the page with this key.
        field_requested(str) – show and focus this setting on the Train page.
        run_changed – `run` is another run now, or None.
        run_state_changed(str) – the state of `run`.
        export_requested(RunFolder) – export this run's model.
        chat_requested(RunFolder) – talk to this run's model, on the Chat page, which is shown first.
        settings_requested(RunFolder) – load this run's settings into the form.
        presets_requested – show the presets.
        completions_requested(int, str or None) – show the completions of this step that the filter of this name leaves; None: all.
        reward_rows_requested(list[int]) – sample on these rows of the training split, counted from 1.
        problem_found(Run) – report the fault of the program that has ended this run.
        message(str) – one sentence for the status strip.
    """

    page_requested = Signal(str)
    field_requested = Signal(str)
    run_changed = Signal()
    run_state_changed = Signal(str)
    export_requested = Signal(object)
    chat_requested = Signal(object)
    settings_requested = Signal(object)
    presets_requested = Signal()
    completions_requested = Signal(int, object)
    reward_rows_requested = Signal(list)
    problem_found = Signal(object)
    message = Signal(str)

    def __init__(self, prefs: Prefs | None = None, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.prefs = prefs or Prefs()
        self.draft = Draft(self.prefs.draft_file, self)
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
        self.draft.changed.connect(self._remember_file)
        self.draft.saved.connect(self._remember_file)

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
            self._reward_bench.refused.connect(self.message)
        return self._reward_bench

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
        if self._is_busy() or self._shows_problem() or not self._fits_memory():
            return
        if not self._may_run_code(self.draft.values()):
            return
        try:
            folder = self._launch()
        except Mistake as mistake:
            self.message.emit(mistake.faults[0].sentence)
            return
        self.open_run(folder.path)
        self.message.emit("")
        self.page_requested.emit("monitor")

    def resume_run(self, folder: RunFolder) -> None:
        """Resume a run from its newest checkpoint in a new process, and show it."""
        from app.model.processes import resume_training

        if self._is_busy():
            return
        try:
            if not self._may_run_code(config.read(folder.config)):
                return
            resume_training(folder)
        except Mistake as mistake:
            self.message.emit(mistake.faults[0].sentence)
            return
        self._training = folder
        if self.run is None or self.run.folder.path != folder.path:
            self.open_run(folder.path)
        assert self.run is not None
        self.run.expect_process()
        self.page_requested.emit("monitor")

    def _may_run_code(self, settings: Mapping[str, Any]) -> bool:
        """Whether the user's own reward code may run; emits a message where it may not."""
        allowed = self.consent.obtain(settings)
        if not allowed:
            self.message.emit("The reward file was not allowed to run, so nothing was started.")
        return allowed

    def _is_busy(self) -> bool:
        """Whether a run is alive already; emits a message if so."""
        if self.is_training:
            self.message.emit("One run at a time: stop the present run first, or let it finish.")
        return self.is_training

    def _shows_problem(self) -> bool:
        faults = self.draft.problems()
        if faults:
            rest = f" There {'is one more problem' if len(faults) == 2 else f'are {len(faults) - 1} more problems'}."
            self.page_requested.emit("train")
            self.field_requested.emit(faults[0].setting)
            self.message.emit(faults[0].sentence + (rest if len(faults) > 1 else ""))
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
        self.message.emit(f"Not started. {memory_parts.sentence}")
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
        self.run.saved.connect(lambda step: self.message.emit(f"Saved: the run can be resumed from step {step:,}."))
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
        self.message.emit(f"{live.name} is still training.")
        return True

    def restore(self) -> None:
        """Restore the form of the last session, or load the demo on the first launch."""
        try:
            if self.prefs.draft_file.exists():
                self.draft.restore(self.prefs.config_file)
            else:
                self.draft.load(places.demo_config(), as_preset=True)
                self.draft.history_cleared.emit()
        except Mistake as mistake:
            self.message.emit(f"{mistake.faults[0].sentence} The form shows the defaults.")

    def load_config(self, path: Path) -> None:
        """Open a YAML file in the form. If it cannot be read, the form stays unchanged, and `message` says why."""
        path = Path(path).resolve()
        if self._load_form(path):
            self.prefs.remember(path)
            left = len(self.draft.left_out)
            note = f" {left} of its keys {'was' if left == 1 else 'were'} left out." if left else ""
            self.message.emit(f"Opened {path.name}.{note}")

    def apply_preset(self, preset: Preset) -> None:
        """Apply a preset to the form, and show it."""
        self.draft.apply(preset)
        self.page_requested.emit("train")
        self.message.emit(f"{preset.title} is set. Undo brings back what was there.")

    def use_data(self, name: str) -> None:
        """Set the dataset to this file, folder or Hub id, and map the columns that can be guessed from it.

        A form that still holds the demo or no model also gets a model and settings to start from.
        """
        path = Path(name).expanduser()
        columns, called = guessed(columns_of(path)), path.name or name
        values = {"data": name, **columns}
        if self.draft.is_demo or not str(self.draft.value("model")).strip():
            self.draft.start_from(self._first_values() | values, f"Data {called}")
        else:
            self.draft.update(values, f"Data {called}")
        self.page_requested.emit("train")
        self.field_requested.emit("data")
        if columns:
            self.message.emit(columns_sentence(called, columns))

    def _first_values(self) -> dict[str, Any]:
        """Settings for a user who has chosen nothing but data: a quick preset, a first model, a system prompt."""
        quick = preset(places.resources() / "presets" / "fast_try.yaml")
        return {**quick.values, "model": model_to_begin_with(), "system_prompt": SYSTEM_PROMPT}

    def try_rewards(self, rows: list[int]) -> None:
        """Have the reward bench sample the model on these rows of the training split, counted from 1."""
        self.page_requested.emit("rewards")
        self.reward_rows_requested.emit(rows)

    def chat_with(self, folder: RunFolder) -> None:
        """Talk to this run's model."""
        self.page_requested.emit("chat")
        self.chat_requested.emit(folder)

    def use_path(self, key: str, path: Path) -> None:
        """Put a file or folder into a setting, and show it there."""
        self.draft.set(key, str(path))
        self.page_requested.emit("train")
        self.field_requested.emit(key)

    def _remember_file(self, key: str = "") -> None:
        """Remember the file behind the form; only a change of all settings (`key` empty) can have replaced it."""
        if not key and self.prefs.config_file != self.draft.path:
            self.prefs.config_file = self.draft.path

    def load_settings(self, folder: RunFolder) -> None:
        """Load a run's settings into the form. Saving then asks for a new file: the run's own is a record."""
        if self._load_form(folder.config, as_preset=True):
            self.message.emit(f"These are the settings of {folder.name}.")

    def _load_form(self, path: Path, *, as_preset: bool = False) -> bool:
        try:
            self.draft.load(path, as_preset=as_preset)
        except Mistake as mistake:
            self.message.emit(mistake.faults[0].sentence)
            return False
        self.page_requested.emit("train")
        return True
