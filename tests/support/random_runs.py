"""A run as the trainer leaves it, with random trained weights, without training."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm

from backend.config import config as spec_config
from backend.export.writer import save_model
from backend.models.policy import load_policy
from backend.runs.run_folder import RunFolder
from tests.support.adapters import save_adapters

PROMPT = mx.array([[2, 40, 41, 42, 100, 200, 7, 300, 5]])


def write_run(
    folder: Path, model: Path | str, train_type: str = "lora", quantization: str = "none", **settings: Any
) -> mx.array:
    """Make the run folder of a model; → the trained model's logits [9, V] of PROMPT."""
    run = RunFolder(folder)
    run.path.mkdir(parents=True)
    usual = {"num_layers": -1, "rank": 4, "scale": 4.0, "dropout": 0.1, "quantization": quantization}
    config = spec_config.parse({"model": str(model), "data": "any.jsonl", "train_type": train_type} | usual | settings)
    run.config.write_text(spec_config.dump(config), encoding="utf-8")
    trained = load_policy(config)
    mx.random.seed(7)
    trained.assign({name: x + 0.1 * mx.random.normal(x.shape) for name, x in trained.trainable().items()})
    if train_type == "full":
        save_model(trained, config, run.model)
    else:
        save_adapters(trained, config, run.adapters)
    trained.model.eval()
    logits: Any = trained.model(PROMPT)
    mx.eval(logits)
    return logits[0]


def logits_of(folder: Path) -> mx.array:
    """mlx-lm's logits [9, V] of PROMPT."""
    model: Any = mlx_lm.load(str(folder))[0]
    return model(PROMPT)[0]


def furthest(a: mx.array, b: mx.array) -> float:
    """The largest difference."""
    return mx.abs(a.astype(mx.float32) - b.astype(mx.float32)).max().item()  # pyright: ignore
