"""The order of the form. A block has headings; below each stands first what MLX LoRA Studio's guide to GRPO documents, then what we add.

The documented settings of a block keep the order of the guide, over all its headings. A setting that depends on a documented one (the
warm-up on LR Schedule) follows it, unless it is advanced.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from backend.config.setting import Setting
from backend.config.settings import headings

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
"""Section → keys, in the order of the document."""


def documented_part(section: str, settings: Iterable[Setting]) -> list[Setting]:
    """Of the settings of a section those that the document has, in its order, each followed by what depends on it."""
    members = [about for about in settings if about.section == section]
    documented = DOCUMENTED.get(section, ())
    part: list[Setting] = []
    for key in documented:
        part += [about for about in members if about.key == key]
        part += [about for about in members if _follows(about, key) and about.key not in documented]
    return part


def _follows(about: Setting, key: str) -> bool:
    return about.when is not None and about.when[0] == key and not about.advanced


def in_form_order(sections: Iterable[str], settings: Iterable[Setting]) -> Mapping[str, Setting]:
    """Key → setting, section by section and heading by heading: the documented part, then the others, the advanced ones last."""
    settings = list(settings)
    ordered: dict[str, Setting] = {}
    for section in sections:
        members = [about for about in settings if about.section == section]
        members.sort(key=lambda about: about.advanced)  # stable: otherwise in the order of their declaration
        once = {about.key: about for about in (*documented_part(section, settings), *members)}
        ordered |= sorted(once.items(), key=lambda entry: headings.ORDER.index(entry[1].group))
    return ordered
