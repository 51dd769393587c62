"""Valid settings away from their defaults: drawn at random, or all of them at once."""

import math
import random
from typing import Any

from backend.config.config import SETTINGS, Config, parse, valid_value
from backend.config.setting import Setting
from backend.utils.errors import UserError

NEEDED = {"model": "owner/model", "data": "owner/rows"}
# What is drawn for settings whose values no range tells
_SPLITS = {"valid_split": ["valid", "validation"], "train_split": ["train", "main"], "test_split": ["test", "held_out"]}
_NAMES = {"run_name": ["some name"], "tracker_project": ["sums"], "tracker_run_name": ["first"]}
_REPOS = {
    name: [f"owner/{name}"] for name in ("tokenizer", "adapter", "reference_model_path", "valid_data", "dataset_config")
}
_PROMPTS = {"system_prompt": ["Think: first.\nThen answer."], "prompt_template": ["Q: {question}"]}
_OUTPUTS = {"answer_pattern": ["#### (.*)"], "output_regex": ["[0-9]+"], "stop": [["#, #"], ["</answer>", "\n\n"]]}
_RATES = {"lr_warmup_ratio": [None, 0.0, 0.05, 0.5, 1.0], "lr_decay_fraction": [0.8, 1.0, 0.5, 1.5, 0.95]}
_RATES |= {"lr_warmup_steps": [0, 5, 40], "lr_final": [None, 0.0, 1e-6, 1e-4]}
_COUNTS = {"save_every": [-1, 1, 50, 100, 1_000_000_000], "steps_per_eval": [-1, 0, 10, 50], "epochs": [0, 0, 3]}
_COUNTS |= {"group_size": [2, 4, 8, 16], "num_generations_eval": [None, 1, 4], "data_seed": [None, 3]}
_LENGTHS = {"max_seq_length": [1024, 2048, 4096], "max_completion_length": [16, 512, 800], "validation_split": [0.1]}
_OTHERS: dict[str, list[Any]] = {
    "best_metric": ["eval/reward", "eval/kl", "reward"],
    "report_to": [["csv"], ["wandb", "csv"], ["trackio"]],
    "lora_keys": [["q_proj", "v_proj"], ["all-linear"], ["o_proj"]],
    "modules_to_save": [["lm_head"]],
    "chat_template_kwargs": [{"enable_thinking": False}],
    "eval_data": [{"more": "owner/more"}],
    "stop_when": [["kl > 0.8"]],
    "reward_functions": [["accuracy_reward", "diversity"], ["length_target(target=20, name=short)"], ["diversity"]],
}
_TEXTS = _SPLITS | _NAMES | _REPOS | _PROMPTS | _OUTPUTS | _RATES | _COUNTS | _LENGTHS | _OTHERS
_LARGEST = 64


def random_config(rng: random.Random, share: float = 0.3) -> Config:
    """Settings that validate; each is drawn with probability `share`, the others have their defaults."""
    while True:
        raw = NEEDED | {
            key: value
            for key, about in SETTINGS.items()
            if rng.random() < share and (value := _value(about, rng)) is not ...
        }
        try:
            return parse(raw)
        except UserError:
            continue


def _value(about: Setting, rng: random.Random) -> Any:
    if about.key in NEEDED:
        return ...
    if about.key in _TEXTS:
        return rng.choice(_TEXTS[about.key])
    if about.choices:
        return rng.choice(about.choices).value
    if about.kind == "bool":
        return rng.random() < 0.5
    if about.kind in ("int", "float"):
        return _number(about, rng)
    return ...


def _number(about: Setting, rng: random.Random) -> float:
    low = about.low if about.low is not None else 0.0
    high = min(about.high if about.high is not None else _LARGEST, max(_LARGEST, 2 * low))
    if about.kind == "int":
        return rng.randint(math.ceil(low) + about.low_open, max(math.ceil(low) + 1, math.floor(high) - about.high_open))
    return round(low + (high - low) * rng.uniform(0.001, 0.999) ** 2, 6) or high / 2


_GO_TOGETHER = {"train_mode": "grpo", "fuse": True, "epochs": 0, "ratio_against": "old", "sync_ref_model": False}
_GO_TOGETHER |= {"advantage_baseline": "group", "reward_weight_schedule": "constant", "rollout_quantization": "none"}
"""Of a form with everything filled in: values that checks across settings demand."""
_OF_KIND: dict[str, Any] = {"prose": "First: one.\nThen two.", "list": ["one", "two, three"], "numbers": [1.0, -0.5]}
_OF_KIND |= {"stages": [{"iters": 5, "reward_weights": [1.0, 0.5]}], "mapping": {"some": "option", "n": 3}}


def filled_form(*but: str) -> dict[str, Any]:
    """A valid value of every setting, other than its default where that goes together with the others."""
    return {key: _other_value(about) for key, about in SETTINGS.items() if key not in but} | _GO_TOGETHER


def _other_value(about: Setting) -> Any:
    listed = [*_TEXTS.get(about.key, ()), *(choice.value for choice in about.choices if not choice.is_hidden)]
    default = about.default
    if about.low is not None:
        listed += [2 * (default or 0), (default or 0) / 2, about.low + 1, about.low + 0.5]
    named = f"owner/{about.key}" if about.kind in ("model", "adapter", "dataset") else f"some {about.label.lower()}"
    listed.append(not default if about.kind == "bool" else _OF_KIND.get(about.kind, named))
    return next(value for value in listed if value != default and _is_valid(about.key, value))


def _is_valid(key: str, value: Any) -> bool:
    try:
        valid_value(key, value)
    except UserError:
        return False
    return True
