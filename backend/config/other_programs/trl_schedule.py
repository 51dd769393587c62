"""TRL's optimizer and learning-rate schedule (transformers/optimization.py, `get_scheduler`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from backend.config.other_programs.rewriting import Translator, as_number
from backend.utils.documents import parse_yaml
from backend.utils.errors import UserError
from backend.utils.text import about_value, quote

SCHEDULES = {
    **{name: name for name in ("linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup")},
    **dict.fromkeys(("cosine_with_min_lr", "cosine_warmup_with_min_lr"), "cosine"),
    **{name: name for name in ("inverse_sqrt", "warmup_stable_decay")},
}  # fmt: skip
"""Its name of a schedule → ours."""
_FALLING = ("linear", "cosine", "cosine_with_restarts", "polynomial")
_POLYNOMIAL_END = 1e-7
"""Of `get_polynomial_decay_schedule_with_warmup`; the others end at 0."""

OPTIMIZERS = {
    **dict.fromkeys(
        (*("adamw", "adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused", "adamw_apex_fused", "adamw_hf"),
         *("adamw_anyprecision", "paged_adamw", "paged_adamw_32bit")),
        ("adamw", ""),
    ),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit"), ("adamw", "8")),
    **dict.fromkeys(("lion", "lion_32bit", "paged_lion", "paged_lion_32bit"), ("lion", "")),
    **dict.fromkeys(("lion_8bit", "paged_lion_8bit"), ("lion", "8")),
    **{name: (name, "") for name in ("adafactor", "sgd", "adagrad", "rmsprop")},
    **dict.fromkeys(("rmsprop_bnb", "rmsprop_bnb_32bit"), ("rmsprop", "")),
}  # fmt: skip
"""Its name of an optimizer → (ours, bits of its state)."""
_OPTIM_ARGS = {"weight_decay": "weight_decay", "eps": "adam_epsilon", "beta1": "adam_beta1", "beta2": "adam_beta2"}


def optimizer(to: Translator) -> None:
    """`optim`, `optim_args` and `adafactor`."""
    if to.flag("adafactor"):
        to.fill("optimizer", "adafactor", "adafactor")
    if (name := to.take("optim")) is not None:
        if (known := OPTIMIZERS.get(str(name).strip().lower())) is None:
            sentence = f"There is no optimizer {quote(name, 40)} here; adamw is nearest, with optimizer_bits: 8 for a small state."
            to.refuse("optim", sentence)
        else:
            to.fill("optimizer", known[0], "optim")
            if known[1]:
                to.fill("optimizer_bits", known[1], "optim")
    for pair in str(to.take("optim_args") or "").replace(" ", "").split(","):
        name, _, value = pair.partition("=")
        if name in _OPTIM_ARGS:
            to.fill(_OPTIM_ARGS[name], value, "optim_args")
        elif name:
            to.refuse("optim_args", f"optim_args has {quote(name, 40)}, which has no place here; take it out.")


def schedule(to: Translator) -> None:
    """`lr_scheduler_type`, its kwargs and the warm-up, with transformers' own ends. After `length`."""
    named, has_warmup = to.take("lr_scheduler_type"), to.has("warmup_ratio", "warmup_steps")
    if named is None and has_warmup and to.program == "trl" and not to.has("lr_schedule"):
        named = "linear"
        to.remark("warmup_ratio" if to.has("warmup_ratio") else "warmup_steps", "with TRL's linear schedule")
    options = mapping(to, "lr_scheduler_kwargs")
    _warmup(to)
    if named is None:
        return
    word, kind = "lr_scheduler_type", str(named).strip().lower().removeprefix("schedulertype.")
    if (ours := SCHEDULES.get(kind)) is None:
        built = ", ".join(sorted(set(SCHEDULES.values())))
        return to.refuse(
            word, about_value("The schedule ", kind, f" of transformers is not built; one of {built} is.", 40)
        )
    to.fill("lr_schedule", ours, word)
    if ours == "constant":
        return None
    if not to.has("lr_warmup_steps", "lr_warmup_ratio"):
        to.suggest("lr_warmup_steps", 0)
    to.suggest("lr_warmup_init", 0.0)
    if ours in _FALLING:
        _ends(to, ours, options)
    elif ours == "warmup_stable_decay":
        _late_fall(to, options)
    for name in options:
        to.refuse("lr_scheduler_kwargs", f"{kind} has no {quote(name, 40)} here; take it out of lr_scheduler_kwargs.")
    return None


def _late_fall(to: Translator, options: dict[str, Any]) -> None:
    """`get_wsd_schedule`: falls over its last num_decay_steps updates to min_lr_ratio of the peak."""
    decay, updates = as_number(options.pop("num_decay_steps", None)), _updates(to)
    options.pop("num_stable_steps", None)  # the rest of the run
    if not decay or not updates:
        sentence = (
            "warmup_stable_decay needs num_decay_steps in lr_scheduler_kwargs, and max_steps; or set lr_decay_fraction."
        )
        return to.refuse("lr_scheduler_kwargs", sentence)
    share, peak = as_number(options.pop("min_lr_ratio", 0.0), 0.0), as_number(to.values.get("learning_rate"), 0.0)
    to.suggest("lr_final", (share or 0.0) * (peak or 0.0))
    to.suggest("lr_decay_fraction", decay / updates)
    return None


def _updates(to: Translator) -> float | None:
    """Updates of the run, where its length is known in steps."""
    iters = None if to.values.get("epochs") else as_number(to.values.get("iters"))
    return iters and iters * to.peek("num_iterations", default=1) * to.peek("steps_per_generation", default=1)


def _ends(to: Translator, ours: str, options: dict[str, Any]) -> None:
    """What a falling schedule falls to, and over what share of the run."""
    end: Any = options.pop("lr_end", _POLYNOMIAL_END) if ours == "polynomial" else options.pop("min_lr", None)
    share, peak = as_number(options.pop("min_lr_rate", None)), as_number(to.values.get("learning_rate"))
    if end is None and share is not None and peak is not None:
        end = share * peak
    to.suggest("lr_final", 0.0 if end is None else end)
    to.suggest("lr_decay_fraction", _share_after_warmup(to))
    if ours == "cosine_with_restarts":
        to.suggest("lr_cycles", options.pop("num_cycles", 1))
    if ours == "polynomial":
        to.suggest("lr_power", options.pop("power", 1.0))
    if ours == "cosine" and as_number(options.get("num_cycles")) == 0.5:
        options.pop("num_cycles")  # half a wave: from the peak to the end, which is what Cosine decay is


def _share_after_warmup(to: Translator) -> float:
    """The fall lasts from the end of the warm-up to the end of the run."""
    ratio = as_number(to.values.get("lr_warmup_ratio"))
    if ratio is None:
        steps, updates = as_number(to.values.get("lr_warmup_steps")), _updates(to)
        ratio = steps / updates if steps and updates else 0.0
    return 1.0 - ratio if 0 <= ratio < 1 else 1.0


def _warmup(to: Translator) -> None:
    ratio, steps = to.number("warmup_ratio"), to.number("warmup_steps")
    if steps is not None and 0 < steps < 1:  # transformers 5: a share of the run
        ratio, steps = steps, None
    if steps:  # as there, a number of updates comes before a ratio
        to.fill("lr_warmup_steps", int(steps), "warmup_steps")
    elif ratio:
        to.fill("lr_warmup_ratio", ratio, "warmup_ratio")
    elif steps == 0 or ratio == 0:
        to.suggest("lr_warmup_steps", 0)


def mapping(to: Translator, word: str) -> dict[str, Any]:
    """The options under a word: a mapping, or one as text, as a command line has it."""
    value = to.take(word)
    if isinstance(value, str) and value.strip():
        try:
            value = parse_yaml(value, word, word)  # JSON is YAML
        except UserError as mistake:
            to.faults += mistake.faults
            return {}
    if value in (None, ""):
        return {}
    if not isinstance(value, Mapping):
        to.refuse(word, f"{word} must be a mapping of options, not {quote(cast('object', value), 60)}.")
        return {}
    return {str(key): option for key, option in cast("Mapping[Any, Any]", value).items() if option is not None}
