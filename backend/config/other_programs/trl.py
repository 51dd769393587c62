"""TRL's GRPO: its table, and what it takes for what a file leaves out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backend.config.other_programs import peft, trl_batches, trl_grpo, trl_schedule, trl_script, trl_training
from backend.config.other_programs.rewriting import as_bool
from backend.config.other_programs.words import OtherProgram

_SECTIONS = {
    "How long a run is": trl_training.LENGTH,
    "Sampling": trl_grpo.GENERATION,
    "Loss and rewards": trl_grpo.OBJECTIVE,
    "Optimizer and learning rate": trl_training.OPTIMIZER,
    "Evaluating, saving, reporting": trl_training.RHYTHM,
    "Precision, device, seeds, trackers": trl_training.MACHINE,
    "Model and adapters (ModelConfig)": trl_grpo.MODEL,
    "The script `trl grpo`": trl_grpo.SCRIPT,
    "Generation by vLLM, recording": trl_grpo.RUNNING,
    "Everything else of TrainingArguments": trl_training.PLUMBING,
}
_DEFAULTS: dict[str, Any] = {
    "learning_rate": 1e-6, "lr_scheduler_type": "linear", "weight_decay": 0.0, "seed": 42, "num_train_epochs": 3,
    "per_device_train_batch_size": 8, "num_generations": 8, "temperature": 1.0, "top_p": 1.0, "top_k": 0,
    "beta": 0.0, "epsilon": 0.2, "loss_type": "dapo", "gradient_checkpointing": True, "eval_strategy": "no", "save_steps": 500,
}  # fmt: skip
"""Of TRL 1.16's GRPOConfig, where they are not ours."""
_ADAPTER_DEFAULTS = {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "lora_target_modules": ["q_proj", "v_proj"]}
"""Of its ModelConfig; the modules are PEFT's for Llama, Qwen and their like."""


def _defaults(raw: Mapping[str, Any]) -> dict[str, Any]:
    defaults = dict(_DEFAULTS)
    if any(raw.get(word) not in (None, -1, "-1") for word in ("max_steps", "iters")):
        del defaults["num_train_epochs"]
    if "evaluation_strategy" in raw:
        del defaults["eval_strategy"]
    if raw.get("per_gpu_train_batch_size") is not None:
        del defaults["per_device_train_batch_size"]
    if "model_name_or_path" in raw:  # the layout of `trl grpo`: without use_peft, every weight is trained
        defaults |= {"use_peft": False, "dataset_test_split": "test"}
        defaults |= _ADAPTER_DEFAULTS if as_bool(raw.get("use_peft")) else {}
    return defaults | peft.defaults(raw.get(peft.WORD))


TRL = OtherProgram(
    key="trl",
    name="TRL",
    source="document 003 (TRL 0.16 with transformers 4.49), and TRL 1.16 with transformers 5.23",
    words={name: word for section in _SECTIONS.values() for name, word in section.items()},
    regroups=(
        trl_batches.batches, trl_batches.length, trl_batches.rhythm, trl_schedule.optimizer, trl_schedule.schedule, trl_script.model,
        peft.peft_config, trl_script.adapters, trl_script.dataset, trl_script.rewards, trl_script.generation, trl_script.best, trl_script.machine,
    ),
    defaults=_defaults,
    sections={title: tuple(section) for title, section in _SECTIONS.items()},
)  # fmt: skip
