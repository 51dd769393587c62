"""The keys of mlx-grpo: the arguments that its README lists, and the fields of its TrainingArgs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from backend.config.other_programs.keys import TABLES, OtherProgram, Translator, as_number, tables_of
from backend.utils.text import quote

CONTENT_REWARDS = ("jaccard", "math_eval", "choice_correctness")
"""Values of its `reward_content_type`; our reward functions have the same names."""
FORMAT_REWARD = "r1_soft_format_reward_func"


def _rewards(to: Translator) -> None:
    if not to.has("reward_content_type", "reward_format_weight", "reward_content_weight"):
        return
    kind = str(to.take("reward_content_type") or "jaccard").strip().lower()
    weights = [to.number("reward_format_weight"), to.number("reward_content_weight")]
    if kind not in CONTENT_REWARDS:
        sentence = f"reward_content_type cannot be {quote(kind, 40)}; it is one of {', '.join(CONTENT_REWARDS)}."
        to.refuse("reward_content_type", sentence)
        return
    to.fill("reward_functions", [FORMAT_REWARD, kind], "reward_content_type")
    to.fill("reward_weights", [0.5 if weight is None else weight for weight in weights], "reward_format_weight")


def _data_and_schedule(to: Translator) -> None:
    if to.has("train_dataset_path") and to.has("dataset_name"):
        to.take("dataset_name")
        to.remarks["dataset_name"] = "train_dataset_path is given, which comes first"
    if to.program == "mlx_grpo" and to.has("max_prompt_len"):
        to.values.setdefault("long_prompts", "cut_left")
    if isinstance(mapping := to.values.get("lr_schedule_config"), Mapping) and not to.has("lr_schedule"):
        to.values["lr_schedule"] = dict(cast("Mapping[str, Any]", to.take("lr_schedule_config")))
    elif mapping is not None:
        sentence = "lr_schedule_config must be a mapping, as mlx-lm's lr_schedule, and stand alone."
        to.refuse("lr_schedule_config", sentence)
    if as_number(to.values.get("grad_clip_norm"), 1.0) < 0:
        to.values["grad_clip_norm"] = 0
    if to.flag("use_wandb"):
        to.values.setdefault("report_to", ["wandb"])


MLX_GRPO = OtherProgram(
    key="mlx_grpo",
    name="mlx-grpo",
    source="document 002, and mlx_grpo_trainer_aligned.py of the repository that it describes",
    sections=tables_of("mlx_grpo"),
    regroups=(_rewards, _data_and_schedule),
    defaults=lambda raw: TABLES["defaults"]["mlx_grpo"],
)
