"""The memory of a run as the window shows it."""

from __future__ import annotations

from app.state.memory import NAMES
from backend.config.config import load, parse
from backend.trainer.memory.estimate import estimate_run
from backend.trainer.memory.model_shape import shape_of
from backend.utils.hub_cache import local_folder
from backend.utils.machine import machine_bytes
from backend.utils.places import demo_config


def test_every_part_of_an_estimate_has_a_label() -> None:
    """Prompts that several micro-batches share once stood in the list under their internal name."""
    demo = load(demo_config()).model_dump()
    folder = local_folder(demo["model"])
    assert folder is not None
    shape = shape_of(folder)
    assert shape is not None
    reported = set()
    long = demo | {"beta": 0.1, "max_completion_length": 2000, "max_seq_length": 4096}
    full, lora = {"train_type": "full", "gradient_accumulation_steps": 8}, {"train_type": "lora", "num_layers": -1}
    for changes in (full, lora):
        result = estimate_run(parse(long | changes), shape, machine_bytes(), prompt=400)
        reported |= {*result.rollout.sizes, *result.training.sizes}
    assert {"prompts", "adapters", "KV cache", "logits"} <= reported, "the settings above no longer reach these parts"
    assert reported <= set(NAMES)
