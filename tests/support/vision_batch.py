"""One GRPO batch of a tiny Qwen3-VL with pictures, of which golden/vision_grpo.json has TRL 1.16's numbers: its own
trainer made them (tests/support/trl_vision.py of commit 35de9688)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.support.vision_models import LAYERS, chat, picture

RANK, SCALE, BETA, TEMPERATURE, G = 2, 4.0, 0.04, 0.9, 3
SHAPES = {
    "q": (32, 32),
    "k": (32, 16),
    "v": (32, 16),
    "o": (32, 32),
    "gate": (32, 64),
    "up": (32, 64),
    "down": (64, 32),
}


def chats(folder: Path) -> list[list[dict[str, Any]]]:
    """Two prompts of unequal length with pictures of unequal size; the pictures are written into `folder`."""
    first, second = picture(folder / "a.png", 64, 48, 1), picture(folder / "b.png", 32, 64, 2)
    return [chat("What is it?", first), chat("How many boxes are in it? Add the digits.", second)]


def completions() -> list[list[list[int]]]:
    """Ids of G completions of each prompt, of unequal lengths; some end, some are cut."""
    draw = np.random.default_rng(3)
    rows = [[draw.integers(3, 288, draw.integers(2, 9)).tolist() for _ in range(G)] for _ in range(2)]
    for row in (rows[0][0], rows[1][2]):
        row.append(1)
    return rows


REWARDS = [[1.0, 0.25, 0.0], [0.5, 0.75, 0.125]]


def adapters() -> dict[str, np.ndarray]:
    """Random values of the adapters, B too, by the names that LoRA has here: `model.layers.0.….lora_a` [in, r]."""
    draw, found = np.random.default_rng(4), {}
    for layer in range(LAYERS):
        for name, (inputs, outputs) in SHAPES.items():
            part = "mlp" if name in ("gate", "up", "down") else "self_attn"
            path = f"model.layers.{layer}.{part}.{name}_proj"
            found[f"{path}.lora_a"] = 0.1 * draw.normal(size=(inputs, RANK)).astype(np.float32)
            found[f"{path}.lora_b"] = 0.1 * draw.normal(size=(RANK, outputs)).astype(np.float32)
    return found


def name_in_peft(name: str) -> str:
    """Ours → PEFT's, whose arrays are transposed."""
    path = name.removeprefix("model.").replace("lora_a", "lora_A.weight").replace("lora_b", "lora_B.weight")
    return f"base_model.model.model.language_model.{path}"
