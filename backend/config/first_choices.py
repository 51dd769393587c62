"""The app's suggestions before the user has chosen anything: a model, a dataset, and a system prompt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from backend.utils.hub_cache import hub_cache

MODEL = "mlx-community/Qwen3-0.6B-4bit"
"""Small enough for every Mac, and good enough to learn something."""
DATASET = "mlx-community/Dolci-Think-RL-7B-2k"
"""The default of MLX LoRA Studio's guide to GRPO, with the columns `prompt` and `answer`."""
DATASET_ABOUT = "about 2,000 reasoning tasks, from Hugging Face"
SYSTEM_PROMPT = (
    "Think the question through before you answer. Write your thoughts between <think> and </think>, and after them "
    "only the final answer between <answer> and </answer>."
)
"""Describes the format that the five default rewards check; without it a model never writes the tags, and every reward
is 0."""


def model_to_begin_with() -> str:
    """A model id: MODEL where it was fetched already, else the smallest chat model of the Hugging Face cache, else
    MODEL."""
    cached = dict(_cached_models())
    return MODEL if MODEL in cached or not cached else min(cached, key=lambda name: cached[name])


def _cached_models() -> Iterator[tuple[str, int]]:
    """(id, bytes of its weights) of every model that generates text and is cached with its weights."""
    for folder in hub_cache().glob("models--*--*"):
        for snapshot in (folder / "snapshots").glob("*"):
            weights = [file.stat().st_size for file in snapshot.glob("*.safetensors") if file.exists()]
            if weights and _generates_text(snapshot / "config.json"):
                yield folder.name.removeprefix("models--").replace("--", "/", 1), sum(weights)
                break


def _generates_text(config: Path) -> bool:
    try:
        kinds: Any = json.loads(config.read_text(encoding="utf-8")).get("architectures")
    except (OSError, ValueError, AttributeError, RecursionError):
        return False
    return isinstance(kinds, list) and any(str(kind).endswith("ForCausalLM") for kind in cast("list[Any]", kinds))
