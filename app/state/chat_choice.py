"""What can be chatted with, and what it takes: runs with weights at each of their checkpoints, and models. Reads headers, no weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.state.memory_parts import amount
from backend.config import config
from backend.config.config import Config
from backend.runs.run_folder import RunFolder, all_runs
from backend.runs.steering import run_config
from backend.runs.weight_choices import WeightChoice, choices
from backend.trainer.memory.model_shape import shape_of
from backend.trainer.memory.phases import chat_bytes
from backend.utils.errors import UserError
from backend.utils.hub_cache import local_folder
from backend.utils.machine import machine_bytes


@dataclass(frozen=True, slots=True)
class ChatChoice:
    """A run or a model. `name` is what the engine calls it by; `settings` are a run's, empty for a model; `problem` is the sentence why it
    cannot be loaded."""

    name: str
    label: str
    settings: dict[str, Any] = field(default_factory=dict)
    checkpoints: tuple[WeightChoice, ...] = ()
    problem: str = ""

    @property
    def is_run(self) -> bool:
        return bool(self.settings)

    @property
    def is_full(self) -> bool:
        """Whether base and tuned share no weights."""
        return self.settings.get("train_type") == "full"

    @property
    def config(self) -> Config:
        """The settings of a run; for a model the defaults. Raises UserError."""
        return config.parse(self.settings or {"model": self.name, "data": "-", "system_prompt": ""})


def run_choice(run: RunFolder) -> ChatChoice:
    """A run as it is on disk now."""
    try:
        settings = run_config(run).model_dump()
    except UserError as mistake:
        return ChatChoice(str(run.path), run.name, {"model": ""}, problem=mistake.faults[0].sentence)
    saved = tuple(choices(run))
    problem = "" if saved else "It has no trained weights yet: they are there after its first checkpoint."
    return ChatChoice(str(run.path), run.name, settings, saved, problem)


def model_choice(name: str) -> ChatChoice:
    """A model by its folder or id."""
    path = Path(name)
    return ChatChoice(name, path.name if path.is_absolute() else name)


def memory_sentence(choice: ChatChoice, checkpoint: str) -> str:
    """What the chosen model will take of this machine's memory; "" where its size is not known."""
    size = needed_bytes(choice, checkpoint)
    if size is None:
        return ""
    limit, both = machine_bytes(), ", two models after full fine-tuning" if choice.is_full else ""
    if size <= limit:
        return f"Needs about {amount(size)} of {amount(limit)}{both}."
    return f"Needs about {amount(size)}{both}, and this machine has only {amount(limit)} to give."


def needed_bytes(choice: ChatChoice, checkpoint: str) -> int | None:
    """Bytes that the chat's process will hold; None where the model's size is not known."""
    try:
        settings = choice.config
    except UserError:
        return None
    folder = local_folder(settings.model)
    shape = shape_of(folder) if folder is not None else None
    weights = next((weights for weights in choice.checkpoints if weights.key == checkpoint), None)
    return chat_bytes(settings, shape, weights) if shape is not None else None


def live_run() -> RunFolder | None:
    """A run that is being trained at this moment, by this window or by any other process."""
    return next((run for run in all_runs() if run.is_locked()), None)
