"""Settings of a short run, drawn at random over everything that a run keeps from one step to the next."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

from backend.config.loss_menu import losses
from tests.support.random_models import tiny_model
from tests.support.small_run import QUICK, write_rows

REWARDS = '''
from backend.rewards import register_reward_function

def share(completion_ids, start, stop):
    return [sum(start <= token < stop for token in ids) / max(1, len(ids)) for ids in completion_ids]

@register_reward_function("low")
def low(prompts, completions, answer, types=None, completion_ids=None):
    """Share of the low half of the vocabulary."""
    return share(completion_ids, 0, 160)

@register_reward_function("middle")
def middle(prompts, completions, answer, types=None, completion_ids=None):
    """Share of the middle of the vocabulary."""
    return share(completion_ids, 80, 240)
'''
"""Rewards that vary over a random model's completions."""


class Inputs:
    """Models, rows and rewards that many runs share; made when first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.rewards = folder / "rewards.py"
        self.rewards.write_text(REWARDS, encoding="utf-8")
        self.rows = folder / "rows"
        for split, count in (("train", 12), ("valid", 3), ("test", 2)):
            write_rows(self.rows / f"{split}.jsonl", count)

    def model(self, dtype: str) -> Path:
        folder = self.folder / f"model-{dtype}"
        return folder if (folder / "config.json").exists() else tiny_model(folder, dtype=dtype)

    def settings(self, **changes: Any) -> dict[str, Any]:
        """Raw settings of a quick run named `mine` on these inputs."""
        usual = {
            "model": str(self.model("float32")), "data": str(self.rows), "run_name": "mine", "learning_rate": 1e-3,
            "reward_functions": ["low", "middle"], "reward_weights": [1.0, 0.5],
            "reward_functions_file": str(self.rewards),
        }  # fmt: skip
        return QUICK | usual | changes

    def draw(self, random: Random) -> dict[str, Any]:
        """Losses, μ, adapters or every weight, precision, saves, evaluations, stages, weights that adapt, bonus, reference, early ends,
        exports at the end."""
        choice, chance = random.choice, random.random
        model = self.model(choice(["float32", "float32", "bfloat16"]))
        raw = self.settings(
            model=str(model), seed=random.randrange(1000), iters=random.randint(3, 6),
            train_type=choice(["lora", "lora", "dora", "full"]),
            grpo_loss_type=choice([loss.key for loss in losses()]), num_iterations=choice([1, 1, 2, 3]),
            batch_size=choice([1, 1, 2]), steps_per_generation=choice([1, 1, 1, 2]),
            save_every=random.randint(1, 3), keep_checkpoints=random.randint(1, 3),
            optimizer=choice(["adamw", "adamw", "muon", "lion"]), lr_schedule=choice(["constant", "cosine", "linear"]),
            lr_warmup_steps=2, steps_per_eval=choice([0, 0, 1, 2]), val_batches=1, test=chance() < 0.2,
            reward_isolation=choice(["process", "thread"]),
            dropout=choice([0.0, 0.1]), beta=choice([0.0, 0.0, 0.1]),
        )  # fmt: skip
        if raw["train_type"] == "full":
            raw["dropout"] = 0.0
        if chance() < 0.25:
            raw |= {"entropy_coef": 0.01, "entropy_adaptive": chance() < 0.7}
        if chance() < 0.2:
            raw |= {"sync_ref_model": True, "ref_model_sync_steps": 2, "beta": 0.1}
        if chance() < 0.2:
            raw |= {"early_stopping_patience": 2}
        if chance() < 0.2:
            raw |= {"record_tokens": True}
        if chance() < 0.15:
            raw |= {"dynamic_sampling": True, "dynamic_sampling_rounds": 2}
        if chance() < 0.2:
            raw |= {"reward_weight_schedule": "adaptive"}
        elif chance() < 0.2:
            raw["stages"] = [
                {"iters": 2, "reward_functions": ["low"], "reward_weights": [1.0]},
                {"iters": random.randint(1, 3), "reward_functions": ["low", "middle"], "reward_weights": [0.5, 1.0]},
            ]
        if raw["train_type"] != "full":
            raw["fuse"] = chance() < 0.4
        if (raw["fuse"] or raw["train_type"] == "full") and chance() < 0.6:
            raw["lm_studio_name"] = "tortured"
        return raw | self._draw_course(random, raw)

    def _draw_course(self, random: Random, raw: dict[str, Any]) -> dict[str, Any]:
        """Where the run starts, what a stage has of its own, which checkpoint is the best, and what is in one."""
        choice, chance = random.choice, random.random
        drawn: dict[str, Any] = {}
        if raw["train_type"] != "full" and chance() < 0.25:
            drawn["adapter"] = str(self.adapter(raw))
        if "stages" in raw and chance() < 0.8:
            first, second = raw["stages"]
            own = {
                "learning_rate": 3e-4,
                "temperature": 1.2,
                "max_completion_length": choice([4, 8]),
                "group_size": choice([2, 3]),
            }
            other = {"data": str(write_rows(self.folder / "others.jsonl", 5))} if chance() < 0.6 else {}
            drawn["stages"] = [first, second | own | other, *([first] if chance() < 0.3 else [])]
        if chance() < 0.3:
            drawn |= {"load_best_at_end": True}
        if chance() < 0.2:
            drawn |= {"best_metric": choice(["grad_norm", "reward_std"]), "best_is_lowest": chance() < 0.5}
        if chance() < 0.2:
            # Plain SGD has no moments that a checkpoint without them would lose.
            drawn |= {"save_only_model": True, "optimizer": "sgd"}
        if raw["steps_per_eval"] and chance() < 0.3:
            drawn |= {"eval_delay": 3, "eval_batch_size": 2}
        return drawn

    def adapter(self, raw: dict[str, Any]) -> Path:
        """A trained adapter that fits these settings, as far as its files tell."""
        folder = self.folder / f"adapter-{Path(raw['model']).name}-{raw['train_type']}"
        if folder.exists():
            return folder
        import mlx.core as mx

        from backend.config.config import parse
        from backend.models.policy import load_policy
        from backend.models.saving import adapter_config, save_arrays

        config = parse(raw | {"beta": 0.0, "sync_ref_model": False})
        policy, arrays = load_policy(config), dict[str, mx.array]()
        for index, (name, array) in enumerate(policy.trainable().items()):
            arrays[name] = array + 0.02 * mx.random.normal(array.shape, key=mx.random.key(index))
        folder.mkdir()
        save_arrays(folder / "adapters.safetensors", arrays)
        (folder / "adapter_config.json").write_text(json.dumps(adapter_config(policy, config)))
        return folder
