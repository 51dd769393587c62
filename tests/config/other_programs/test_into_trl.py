"""Our settings in TRL's words: every word is one of TRL's, and what is read again is the same run."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from backend.config.config import SETTINGS, Config, parse
from backend.config.other_programs.into_trl import BY_FILES, INSTEAD, TrlSettings, into_trl
from backend.config.other_programs.translation import read_words
from backend.config.other_programs.trl import TRL
from backend.config.updates import final_rate
from backend.models.adapter_types import adapter_scale
from tests.support.cases import cases
from tests.support.random_settings import NEEDED, random_config

DOCUMENTED = yaml.safe_load((Path(__file__).parent / "trl_1_16.yaml").read_text())
"""Every argument of `trl grpo` in TRL 1.16 (a proof checks the file with TRL's own parser)."""
SCHEDULE = [key for key in SETTINGS if key.startswith("lr_")]
DECIDED = {"sampling_correction": ("auto",), "dtype": ("auto",), "device": ("auto", "gpu")}
"""Values that leave a choice to the run; there one is written."""


def made(**raw: Any) -> TrlSettings:
    return into_trl(parse(NEEDED | raw))


def left_out(**raw: Any) -> dict[str, str]:
    return {left.setting: left.instead for left in made(**raw).left_out}


def meaning(config: Config) -> dict[str, Any]:
    """The settings as what they amount to: those that TRL writes in one way and that may stand here in several."""
    ratio, steps = config.lr_warmup_ratio or 0, config.lr_warmup_steps
    steps = None if ratio else 0 if config.lr_warmup_ratio == 0 else steps
    values = config.model_dump() | (
        {"scale": adapter_scale(config), "lora_alpha": None}
        | {"use_rslora": config.use_rslora and config.lora_alpha is not None}
        | {"lora_keys": config.lora_keys or ["all-linear"], "eval_batch_size": config.prompts_per_evaluation_batch}
        | {"lr_final": final_rate(config.learning_rate, config.lr_final)}
        | {"run_name": config.tracker_run_name or config.run_name, "tracker_run_name": None}
        | {"report_to": config.report_to if config.report_to != ["none"] else []}
        | {"iters": 0 if config.epochs else config.iters, "lr_warmup_steps": steps, "lr_warmup_ratio": ratio}
    )
    if config.steps_per_eval:
        values["best_metric"] = config.best_metric or "eval/reward"
    if config.lr_schedule == "constant" and ratio:
        values["lr_schedule"] = "constant_with_warmup"
    return values | ({} if ratio or steps else {"lr_warmup_init": 0})


@cases("seed", range(40))
def test_a_config_comes_back_from_trl_as_the_same_run(seed: int) -> None:
    """Each setting is read again as it was, or is listed as left out or as carried by a file of the folder."""
    config = random_config(random.Random(f"trl {seed}")).model_copy(update={"train_mode": "grpo"})
    settings = into_trl(config)
    assert not settings.words.keys() - DOCUMENTED.keys()
    assert yaml.safe_load(yaml.safe_dump(settings.words)) == settings.words
    translation = read_words(settings.words)
    assert translation.program is TRL and translation.faults == []
    listed = {left.setting for left in settings.left_out} | settings.by_files.keys()
    listed |= set(SCHEDULE) if "lr_schedule" in listed else set()  # another curve, listed as a whole
    before, after = meaning(config), meaning(parse(translation.values))
    for key, value in before.items():
        if key in listed or not SETTINGS[key].applies(before) or value in DECIDED.get(key, ()):
            continue
        expected = pytest.approx(value, rel=1e-9) if isinstance(value, float) else value
        assert after[key] == expected, key


def test_only_what_differs_from_the_default_is_listed() -> None:
    assert left_out() == {} and {*BY_FILES, *INSTEAD} <= set(SETTINGS)
    assert made().by_files.keys() == {"num_layers", "val_batches"}
    assert made(num_layers=-1, val_batches=-1).by_files == {}


def test_units_are_completions_and_updates() -> None:
    batches = {"batch_size": 2, "gradient_accumulation_steps": 3, "steps_per_generation": 2}
    words = made(**batches, group_size=8, num_iterations=2, iters=10).words
    expected = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 3, "steps_per_generation": 6}
    expected |= {"num_generations": 8, "max_steps": 40, "save_steps": 400, "eval_steps": 800, "logging_steps": 40}
    assert {word: words[word] for word in expected} == expected
    assert "max_steps" not in made(epochs=2).words


def test_a_fall_that_ends_with_the_run_is_transformers_own() -> None:
    falling = {"lr_schedule": "cosine", "lr_warmup_ratio": 0.25, "lr_warmup_init": 0.0}
    assert "lr_decay_fraction" not in made(**falling, lr_decay_fraction=0.75).by_files
    by_file = made(**falling, lr_decay_fraction=1.0).by_files["lr_decay_fraction"]
    assert "trl grpo alone: the rate falls until the end" in by_file
    falling = {"lr_schedule": "linear", "lr_final": 0.0, "lr_warmup_steps": 20, "lr_warmup_init": 0.0}
    linear = made(**falling, iters=100, num_iterations=2, lr_decay_fraction=0.9)
    assert "lr_decay_fraction" not in linear.by_files and linear.words["lr_scheduler_type"] == "linear"


@cases(
    ("raw", "word", "value", "setting"),
    [
        ({"optimizer": "adam"}, "weight_decay", 0, "optimizer"),
        ({"optimizer": "muon"}, "optim", "adamw_torch", "optimizer"),
        ({"importance_sampling_level": "sequence_token"}, "importance_sampling_level", "sequence", ""),
        ({"grpo_loss_type": "bnpo", "gradient_accumulation_steps": 2}, "loss_type", "dapo", "grpo_loss_type"),
        ({"quantization": "mxfp4"}, "load_in_4bit", True, "quantization"),
        ({"sync_ref_model": True}, "sync_ref_model", None, "sync_ref_model"),
        (
            {"sampling_correction": "token_mask", "sampling_correction_max": ""},
            *("vllm_importance_sampling_clip_max", 1_000_000, "sampling_correction_max"),
        ),
        ({"load_best_at_end": True, "save_every": 3, "steps_per_eval": 2}, "load_best_model_at_end", None, ""),
        ({"load_best_at_end": True, "save_every": 3, "steps_per_eval": -1}, "load_best_model_at_end", None, ""),
        ({"eval_delay": 5, "steps_per_eval": -1}, "eval_delay", None, ""),
        ({"dynamic_sampling": True}, "dynamic_sampling", None, "dynamic_sampling"),
        ({"distillation_weight": 0.5}, "distillation_weight", None, "distillation_weight"),
    ],
)
def test_what_trl_lacks_is_listed(raw: dict[str, Any], word: str, value: Any, setting: str) -> None:
    assert made(**raw).words.get(word) == value
    assert (setting or next(iter(raw))) in left_out(**raw)
