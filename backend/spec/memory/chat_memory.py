"""The memory that a chat with a run or a model takes, from file headers: base, what was trained, and keys and values of a conversation."""

from __future__ import annotations

from backend.spec.config import Config
from backend.spec.machine import has_gpu
from backend.spec.memory.model_shape import ModelShape
from backend.spec.memory.phases import MemoryModel
from backend.spec.weight_choices import WeightChoice

CHAT_PROCESS_BYTES = 250_000_000
"""Memory of the chat's process beside its arrays: 125 MB on Linux with the demo, and as much again for a large vocabulary's tokenizer and
the rows of a dataset. It imports less than a trainer (`backend.spec.machine.PROCESS_BYTES`)."""

CONTEXT = 4096
"""Tokens of a conversation that are reckoned with, on each side."""


def chat_bytes(config: Config, shape: ModelShape, weights: WeightChoice | None) -> int:
    """Bytes that a process with base and tuned loaded holds; of a plain model (`weights` None) with that alone.

    Full fine-tuning leaves two models of one size, whatever a checkpoint was saved in; adapters are as large as their file.
    """
    memory = MemoryModel(
        config.model_copy(update={"train_type": "lora"}), shape, 0, gpu=has_gpu() and config.device != "cpu"
    )
    base, has_two = memory.weights(), weights is not None and config.train_type == "full"
    trained = 0 if weights is None else base if has_two else weights.bytes
    sides = 1 if weights is None else 2
    return base + trained + sides * memory.cache(1, CONTEXT) + CHAT_PROCESS_BYTES
