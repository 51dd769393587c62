"""Tiny random reward models, rebuilt from the names and shapes of tests/golden/reward_models.json.

The scores there are those of TRL 1.16 (`GRPOTrainer._calculate_rewards`, float32) with transformers 5.24's models and
the same weights and tokenizer: "chat" of a user's message and its answer in the template, "plain" of both as they are.
"""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from backend.judges.reward_model import RewardModel
from backend.rewards.catalogue import read_call
from backend.types import Completion, Group, Problem
from tests.support.random_models import tiny_tokenizer

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[1] / "golden" / "reward_models.json").read_text())


def arrays_of(shapes: dict[str, list[int]]) -> dict[str, mx.array]:
    """Normal numbers of standard deviation 0.2, those of norms around 1."""
    random, arrays = np.random.RandomState(0), dict[str, mx.array]()
    for name in sorted(shapes):
        numbers = 0.2 * random.standard_normal(shapes[name]) + ("norm" in name and name.endswith("weight"))
        arrays[name] = mx.array(numbers.astype(np.float32))
    return arrays


def write_reward_model(folder: Path, kind: str = "qwen3", *, template: bool = True, **changes: Any) -> Path:
    """A model of GOLDEN in `folder`, with `changes` of its config.json."""
    about = GOLDEN["models"][kind]
    tiny_tokenizer(folder)
    if not template:
        file = folder / "tokenizer_config.json"
        file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "chat_template"}))
    (folder / "config.json").write_text(json.dumps(about["config"] | changes))
    mx.save_safetensors(str(folder / "model.safetensors"), arrays_of(about["shapes"]))
    return folder


def opened(folder: Path, arguments: str = "") -> RewardModel:
    model = RewardModel(read_call(f"{folder}{arguments}"), Path.cwd())
    model.load(None)
    return model


def golden_groups() -> list[Group]:
    """A group of one completion for each text of GOLDEN, of rows that are text."""
    return [
        Group(
            Problem(index, prompt, [{"role": "user", "content": prompt}], [], ""), [Completion([], [], answer, "eos")]
        )
        for index, (prompt, answer) in enumerate(GOLDEN["texts"])
    ]
