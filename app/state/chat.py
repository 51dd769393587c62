"""A conversation with a run or a model, scored by the run's rewards, and the server that offers it to others."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from PySide6.QtCore import QCoreApplication, QObject, Signal

from app.state.consent import Consent
from app.state.memory import amount
from app.state.processes import ProcessOutcome, Service, VerbProcess, json_object
from app.state.reward_bench import SCORING_SETTINGS
from backend.config import config
from backend.config.config import Config
from backend.models.model_folder import object_or_empty
from backend.rewards.catalogue import scorable
from backend.runs.run_folder import RunFolder
from backend.runs.run_names import name_of
from backend.runs.saved_weights import WeightChoice, choices
from backend.runs.steering import run_config
from backend.trainer.memory.model_shape import shape_of
from backend.trainer.memory.phases import chat_bytes
from backend.utils.command import backend_command
from backend.utils.disk import DiskError, replace_file
from backend.utils.errors import ConfigProblem, UserError
from backend.utils.hub_cache import local_folder
from backend.utils.machine import machine_bytes

State = Literal["empty", "loading", "ready", "answering", "failed"]
KEPT_TURNS = 20  # turns of a run or model that are kept, and shown again when it is chosen


@dataclass(slots=True)
class ChatAnswer:
    """One side's answer. `figures`: of `backend.sampling.chat.Reply`; `problem`: why it was not given or scored;
    `turns`: before `text`, those with calls of tools."""

    text: str = ""
    turns: list[dict[str, Any]] = field(default_factory=list)
    state: Literal["waiting", "writing", "done", "stopped", "failed"] = "waiting"
    figures: dict[str, Any] = field(default_factory=dict)
    group: dict[str, Any] = field(default_factory=dict)
    scores: dict[str, float | None] = field(default_factory=dict)
    reward: float | None = None
    problem: str = ""


@dataclass(slots=True)
class ChatTurn:
    """`is_first`: it begins a conversation; `images`: paths of the prompt's pictures."""

    prompt: str
    expected: str
    answers: dict[str, ChatAnswer]
    is_first: bool
    images: list[str] = field(default_factory=list)


def conversation_file(folder: Path, name: str) -> Path:
    return folder / f"{Path(name).name[:60]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}.jsonl"


def read_turns(file: Path) -> list[ChatTurn]:
    """The last turns that were kept; none where there is no such file, or a damaged one."""
    turns: list[ChatTurn] = []
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        for line in file.read_text(encoding="utf-8").splitlines()[-KEPT_TURNS:]:
            turn = json.loads(line)
            turns.append(ChatTurn(**turn | {"answers": {side: ChatAnswer(**a) for side, a in turn["answers"].items()}}))
    return turns


@dataclass(frozen=True, slots=True)
class HeldOutRow:
    row: int
    of: int
    source: str
    prompt: str
    images: list[str]
    answer: str


class ChatWithModel(QObject):
    """The conversation. `turns` are kept in `folder`; `sides`, `bytes`, `notes`, `has_tools` are of what is loaded."""

    state_changed = Signal()
    turns_changed = Signal()
    answer_changed = Signal(int, str)
    row_changed = Signal()
    message = Signal(str)

    def __init__(self, consent: Consent, folder: Path, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.consent, self._folder, self._make_service = consent, folder, Service
        self._service: Service | None = None
        self.state: State = "empty"
        self.choice: ChatChoice | None = None
        self.checkpoint, self.problem, self.bytes = "", "", 0  # `checkpoint`: the weights loaded, or being loaded
        self.sides: list[str] = []
        self.has_tools = False
        self.notes: list[str] = []
        self.turns: list[ChatTurn] = []
        self.row: HeldOutRow | None = None  # picked last
        self._first = 0
        self._opening_row: int | None = None
        self._question: int | None = None
        self._may_score = False

    @property
    def is_loaded(self) -> bool:
        return self.state in ("ready", "answering")

    def choose(self, choice: ChatChoice) -> None:
        """Show what was asked of this run or model; another one is unloaded."""
        if self.choice is None or choice.name != self.choice.name:
            self.unload()
            self.turns = read_turns(conversation_file(self._folder, choice.name))
            self._first = max((place for place, turn in enumerate(self.turns) if turn.is_first), default=0)
        self.choice = choice
        self.turns_changed.emit()

    def load(self, choice: ChatChoice, checkpoint: str) -> None:
        self.unload()
        self.choose(choice)
        self.checkpoint = checkpoint
        self._may_score = choice.is_run and self.consent.obtain(choice.settings)
        self._service = self._make_service(self)
        self._set_state("loading")

        def on_loaded(answer: dict[str, Any]) -> None:
            self.sides, self.bytes, self.notes = answer["sides"], answer["bytes"], answer["notes"]
            self.has_tools = bool(answer.get("has_tools"))
            if choice.is_run and not self._may_score:
                self.notes.append("The code was not allowed to run, so answers are not scored.")
            self._set_state("ready")

        self._service.ask("chat_load", on_loaded, on_refused=self._fail, name=choice.name, checkpoint=checkpoint)

    def unload(self) -> None:
        self.stop()
        if self._service is not None:
            self._service.close(wait=False)
            self._service = None
        self.sides, self.notes, self.bytes, self.row, self._question = [], [], 0, None, None
        self.has_tools = False
        self._set_state("empty")

    def _fail(self, faults: Sequence[ConfigProblem]) -> None:
        self.unload()
        self._set_state("failed", _sentences(faults))

    def _set_state(self, state: State, problem: str = "") -> None:
        self.state, self.problem = state, problem
        self.state_changed.emit()

    def pick_row(self, number: int) -> None:
        """Read a row of the run's held-out split, counted from 0."""

        def on_row(answer: dict[str, Any]) -> None:
            self.row = HeldOutRow(**answer)
            self.row_changed.emit()

        if self._service is not None and self.is_loaded:
            self._service.ask("chat_row", on_row, on_refused=self._on_refused, row=number)

    def reset(self) -> None:
        self.stop()
        self.turns, self._first, self._opening_row = [], 0, None
        self._keep_turns()
        self.turns_changed.emit()

    def _keep_turns(self) -> None:
        if self.choice is None:
            return
        lines = [json.dumps(asdict(turn)) for turn in self.turns[-KEPT_TURNS:]]
        with suppress(DiskError, OSError):  # it is shown all the same
            self._folder.mkdir(parents=True, exist_ok=True)
            replace_file(conversation_file(self._folder, self.choice.name), "".join(f"{line}\n" for line in lines))

    def send(
        self,
        prompt: str,
        sides: Sequence[str],
        how: Mapping[str, Any],
        *,
        images: Sequence[str] = (),
        expected: str = "",
        system: str | None = None,
        continues: bool = False,
    ) -> None:
        """Have `sides` answer; `continues`: they see the turns before. `how`: what `sampling_of` gives, and tools."""
        sides = [side for side in self.sides if side in sides]
        if self._service is None or self.state != "ready" or not sides:
            return
        images, shown = list(images), self.row
        row = shown if shown is not None and (prompt, images) == (shown.prompt, shown.images) else None
        if row is not None or not continues:
            self._first, self._opening_row = len(self.turns), row.row if row is not None else None
        turns: dict[str, list[list[Any]]] = {}
        for side in sides:
            given = [(turn, turn.answers[side]) for turn in self.turns[self._first :] if side in turn.answers]
            answered = [(turn, answer) for turn, answer in given if answer.state != "failed"]
            turns[side] = [[turn.prompt, answer.text, answer.turns, turn.images] for turn, answer in answered]
        is_first = self._first == len(self.turns)
        self.turns.append(ChatTurn(prompt, expected, {side: ChatAnswer() for side in sides}, is_first, images))
        self._set_state("answering")
        self.turns_changed.emit()
        self._question = self._service.ask(
            "chat_reply",
            lambda _answer: self._end_answers("stopped"),
            on_refused=self._on_reply_refused,
            on_progress=self._on_progress,
            prompt=prompt,
            images=images,
            sides=sides,
            turns=turns,
            row=self._opening_row,
            answer=expected,
            system=system,
            **how,
        )

    def stop(self) -> None:
        if self._service is not None and self._question is not None:
            self._service.cancel(self._question)
            self._end_answers("stopped")

    def _on_progress(self, progress: dict[str, Any]) -> None:
        index = len(self.turns) - 1
        for side, text in progress.get("new_text", {}).items():
            answer = self.turns[index].answers[side]
            answer.text += text
            answer.state = "writing"
            self.answer_changed.emit(index, side)
        if side := progress.get("turns_of"):  # its calls run, or have run
            answer = self.turns[index].answers[side]
            answer.turns, answer.text = progress["turns"], ""
            self.answer_changed.emit(index, side)
        if side := progress.get("side"):  # its answer has ended
            answer = self.turns[index].answers[side]
            # The text of all tokens: pieces differ from it where a tokenizer cleans up spaces.
            answer.text, answer.group = progress.pop("text"), progress.pop("group")
            answer.turns = progress.pop("turns", [])
            answer.figures, answer.state = progress, "done"
            self.answer_changed.emit(index, side)
            self._score(index, side)

    def _on_reply_refused(self, faults: list[ConfigProblem]) -> None:
        for answer in self.turns[-1].answers.values():
            if answer.state != "done":
                answer.problem = _sentences(faults)
        self._end_answers("failed")
        if self._service is not None and not self._service.is_running:  # the model is gone with its process
            self._fail(faults)

    def _end_answers(self, state: Literal["stopped", "failed"]) -> None:
        self._question = None
        index = len(self.turns) - 1
        for side, answer in self.turns[index].answers.items():
            if answer.state in ("waiting", "writing"):
                answer.state = state
                self.answer_changed.emit(index, side)
        self._keep_turns()
        self._set_state("ready")

    def _score(self, index: int, side: str) -> None:
        if self._service is None or self.choice is None or not self._may_score:
            return
        settings, answer = self.choice.settings, self.turns[index].answers[side]
        has_answer = bool(answer.group.get("answer"))
        names, weights = scorable(settings["reward_functions"], settings["reward_weights"], has_answer=has_answer)
        if not names:
            return
        scored_by = {"reward_functions": names, "reward_weights": weights}
        chosen = {key: settings[key] for key in SCORING_SETTINGS} | scored_by

        def on_scores(scored: dict[str, Any]) -> None:
            errors = [scored.get("failed")]
            if not errors[0]:
                ((row,),) = scored["scored"]
                answer.scores, answer.reward = row["rewards"], row["reward"]
                errors = [function["error"] for function in scored["functions"]]
            answer.problem = " ".join(error["sentence"] for error in errors if error)
            self._tell(index, side, answer)

        self._service.ask(
            "score",
            on_scores,
            on_refused=lambda faults: on_scores({"failed": {"sentence": _sentences(faults)}}),
            settings=chosen,
            groups=[answer.group],
            with_cases=False,
        )

    def _tell(self, index: int, side: str, answer: ChatAnswer) -> None:
        if index < len(self.turns) and self.turns[index].answers.get(side) is answer:
            self._keep_turns()
            self.answer_changed.emit(index, side)

    def _on_refused(self, faults: list[ConfigProblem]) -> None:
        self.message.emit(_sentences(faults))


def _sentences(faults: Sequence[ConfigProblem]) -> str:
    return " ".join(fault.sentence for fault in faults)


def sampling_of(choice: ChatChoice) -> dict[str, Any]:
    try:
        config = choice.config
    except UserError:
        return {}
    return {
        **{name: getattr(config, name) for name in ("temperature", "top_p", "top_k", "min_p")},
        "max_tokens": config.max_completion_length,
        "seed": 0,
        "free_output": False if config.holds_output else None,
    }


@dataclass(frozen=True, slots=True)
class ChatChoice:
    """`reads_images`: False for a model on this machine that reads text only."""

    name: str
    label: str
    settings: dict[str, Any] = field(default_factory=dict)
    checkpoints: tuple[WeightChoice, ...] = ()
    problem: str = ""
    reads_images: bool = True

    @property
    def is_run(self) -> bool:
        return bool(self.settings)

    @property
    def config(self) -> Config:
        """The settings of a run; the defaults for a model. Raises UserError."""
        return config.parse(self.settings or {"model": self.name, "data": "-", "system_prompt": ""})


def run_choice(run: RunFolder) -> ChatChoice:
    try:
        settings = run_config(run).model_dump()
    except UserError as mistake:
        return ChatChoice(str(run.path), name_of(run), {"model": ""}, problem=mistake.faults[0].sentence)
    saved = tuple(choices(run))
    problem = "" if saved else "It has no trained weights yet: they are there after its first checkpoint."
    return ChatChoice(str(run.path), name_of(run), settings, saved, problem, _reads_images(settings["model"]))


def model_choice(name: str) -> ChatChoice:
    path = Path(name)
    return ChatChoice(name, path.name if path.is_absolute() else name, reads_images=_reads_images(name))


def _reads_images(model: str) -> bool:
    folder = local_folder(model)
    return folder is None or "vision_config" in object_or_empty(folder / "config.json")


def memory_sentence(choice: ChatChoice, checkpoint: str) -> str:
    try:
        settings = choice.config
    except UserError:
        return ""
    shape = shape_of(local_folder(settings.model))
    if shape is None:
        return ""
    weights = next((weights for weights in choice.checkpoints if weights.key == checkpoint), None)
    size = chat_bytes(settings, shape, weights)
    is_full = choice.settings.get("train_type") == "full"
    limit, both = machine_bytes(), ", two models after full fine-tuning" if is_full else ""
    if size <= limit:
        return f"Needs about {amount(size)} of {amount(limit)}{both}."
    return f"Needs about {amount(size)}{both}, and this machine has only {amount(limit)} to give."


EndpointState = Literal["off", "starting", "serving", "stopping"]


class Endpoint(QObject):
    """The OpenAI-compatible server, one at a time: a child process that ends with the window."""

    changed = Signal()

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.state: EndpointState = "off"
        self.title, self.problem = "", ""  # its run or model, as the page names it; why it has ended by itself
        self.url, self.models, self.needs_key = "", list[str](), False  # what the server prints once it listens
        self._task: VerbProcess | None = None
        if (app := QCoreApplication.instance()) is not None:
            app.aboutToQuit.connect(self.close)

    def start(self, choice: ChatChoice, checkpoint: str, port: int) -> None:
        weights = next((weights.label for weights in choice.checkpoints if weights.key == checkpoint), "")
        self.title, self.problem = f"{choice.label}, {weights}" if weights else choice.label, ""
        options = ["--checkpoint", checkpoint] if checkpoint else []
        options += ["--port", str(port), "--parent", str(os.getpid()), "--json"]
        self._task = task = VerbProcess(backend_command("endpoint", choice.name, *options), self)
        task.printed.connect(self._read)
        task.done.connect(self._on_end)
        self._show("starting")
        task.start()

    def stop(self) -> None:
        if self._task is not None:
            self._show("stopping")
            self._task.cancel()

    def close(self) -> None:
        """End the process, and return once it has ended."""
        if self._task is not None:
            self._task.cancel(wait=True)

    def _read(self, line: str) -> None:
        if (told := json_object(line)) and self.state == "starting":
            self.url, self.models, self.needs_key = told["url"], told["models"], told["needs_key"]
            self._show("serving")

    def _on_end(self, outcome: ProcessOutcome) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.deleteLater()
        if self.state != "stopping":
            self.problem = "The server was ended by another program." if outcome.ok else outcome.problem
        self._show("off")

    def _show(self, state: EndpointState) -> None:
        self.state = state
        self.changed.emit()
