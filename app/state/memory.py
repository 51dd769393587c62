"""The memory of a run as the window shows it, from the figures of `backend.trainer.memory.estimate`."""

from __future__ import annotations

from dataclasses import replace

from app.state.memory_parts import MemoryPart, MemoryParts
from backend.config.config import Config
from backend.models.suggested_models import suggested
from backend.trainer.memory.estimate import Estimate, estimate_run, machines_note
from backend.trainer.memory.model_shape import ModelShape, shape_of
from backend.utils.hub_cache import local_folder
from backend.utils.machine import machine_bytes

NAMES = {
    "weights": ("Weights", "The model as it is loaded."),
    "adapters": ("Adapters", "What LoRA or DoRA adds to the model."),
    "optimizer": ("Optimizer", "What the optimizer remembers of every weight that learns."),
    "gradients": ("Gradients", "One number for every weight that learns."),
    "reference": ("Reference", "The weights of the reference model that are its own."),
    "decoding weights": ("Decoding", "Weights with the adapters inside, while completions are sampled."),
    "KV cache": ("KV cache", "Keys and values of the completions that are decoded together."),
    "activations": ("Activations", "What the backward pass needs of the tokens that go through the model together."),
    "prompts": ("Prompts", "Keys and values of prompts that several micro-batches share, and their gradients."),
    "kept": ("Step's start", "What learns, as it was before the step, which a lost machine may take back."),
    "logits": ("Logits", "A number for each word of the vocabulary, for the tokens at work."),
    "in flight": ("In flight", "Arrays that MLX has prepared ahead of the device."),
}


def memory_parts_of(config: Config, prompt: int | None = None) -> MemoryParts | None:
    """The memory of a run in its largest phase; None for a model that is neither on this machine nor a suggested one, or lacks facts
    in its config.

    `prompt` is the length of the longest prompt in tokens, where it is known.
    """
    folder, known = local_folder(config.model), suggested(config.model)
    shape = shape_of(folder) if folder is not None else known.shape if known is not None else None
    return memory_parts_of_shape(config, shape, prompt) if shape is not None else None


def memory_parts_of_shape(config: Config, shape: ModelShape, prompt: int | None = None) -> MemoryParts:
    """The memory of a run with a model of this shape, whichever the config names."""
    return replace(
        _memory_parts(estimate_run(config, shape, machine_bytes(), prompt)), machines_note=machines_note(config)
    )


def _memory_parts(result: Estimate) -> MemoryParts:
    # The estimate has already chosen chunk sizes that fit, if any do. What is still too large cannot be made smaller: no slack.
    named = [(NAMES.get(part.name, (part.name.capitalize(), "")), part.bytes) for part in result.largest.allocations]
    parts = tuple(MemoryPart(name, size, about) for (name, about), size in named)
    return MemoryParts(parts, limit=result.limit, advice=result.advice, slack=0.0, row_tip=result.row_tip)
