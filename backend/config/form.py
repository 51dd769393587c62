"""The order of the form: blocks, headings, and within a heading first what MLX LoRA Studio's guide documents."""

from __future__ import annotations

from collections.abc import Iterable

from backend.config.setting import Setting

SECTIONS: dict[str, str] = {
    "algorithm": "Algorithm",
    "model_data": "Model & Data",
    "fine_tune": "Fine-tune",
    "training": "Training Settings",
    "columns": "Dataset Columns",
    "output": "Output",
    "preference": "Preference And Judge",
    "generation": "GRPO Generation And Rewards",
}
"""Section key → title, in the order of the form."""

MACHINES = "Machines"
HEADINGS = (
    "",  # settings without a heading come first
    *("LoRA Settings", "Weights"),
    *("Steps and batches", "Learning rate and optimizer", "Evaluation and checkpoints", "Memory, test and fusing"),
    *("Supervised learning", "Early stopping", MACHINES),
    *("Columns", "Prompts", "Answers", "Rows and splits", "Held-out prompts"),
    *("Sampling", "Loss", "Self-distillation", "Entropy", "Advantages", "Rewards over the run"),
    *("Limits of reward functions", "Tools and environments"),
)
"""In the order of the form."""

DOCUMENTED: dict[str, tuple[str, ...]] = {
    "algorithm": ("train_mode",),
    "model_data": ("model", "data", "lm_studio_name"),
    "fine_tune": ("train_type", "num_layers", "rank", "scale", "dropout", "quantization"),
    "training": (
        *("iters", "epochs", "batch_size", "max_seq_length", "seed", "learning_rate", "optimizer", "lr_schedule"),
        *("steps_per_report", "steps_per_eval", "save_every", "val_batches", "gradient_accumulation_steps"),
        *("seq_step_size", "test_batches", "grad_checkpoint", "mask_prompt", "fuse"),
    ),
    "columns": ("prompt_feature", "answer_feature", "type_feature"),
    "output": ("run_name",),
    "preference": ("beta", "reference_model_path"),
    "generation": (
        *("group_size", "max_completion_length", "temperature", "epsilon", "top_p", "top_k", "min_p", "epsilon_high"),
        *("grpo_loss_type", "importance_sampling_level"),
        *("reward_functions", "reward_weights", "reward_functions_file"),
    ),
}
"""Section → keys of the guide, in its order."""


def documented_part(section: str, settings: Iterable[Setting]) -> list[Setting]:
    """The documented settings of a section, each followed by what depends on it and is not advanced."""
    members = [about for about in settings if about.section == section]
    documented = DOCUMENTED.get(section, ())
    part: list[Setting] = []
    for key in documented:
        part += [about for about in members if about.key == key]
        dependent = (about for about in members if about.when is not None and about.when[0] == key)
        part += [about for about in dependent if not about.advanced and about.key not in documented]
    return part


def in_form_order(settings: Iterable[Setting]) -> dict[str, Setting]:
    """Key → setting: by section and heading, the documented ones first, the advanced ones last."""
    settings = list(settings)
    ordered: dict[str, Setting] = {}
    for section in SECTIONS:
        members = [about for about in settings if about.section == section]
        members.sort(key=lambda about: about.advanced)  # stable: otherwise in the order of declaration
        once = {about.key: about for about in (*documented_part(section, settings), *members)}
        ordered |= sorted(once.items(), key=lambda entry: HEADINGS.index(entry[1].group))
    return ordered
