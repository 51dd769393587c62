"""The optimizer and its schedule in transformers' words: the opposite of `trl_schedule`.

The exported train.py sets the rate of every update by our own code (`backend.training.schedules`), so where transformers has
another curve, what is written here is only what `trl grpo` does without that script.
"""

from __future__ import annotations

from typing import Any

from backend.config.other_programs.into_trl.writing import TrlWriting
from backend.config.other_programs.trl_schedule import OPTIMIZERS
from backend.config.updates import OWN, final_rate, warmup_updates

WRITTEN_AS = {
    ("adamw", ""): "adamw_torch", ("adamw", "8"): "adamw_bnb_8bit", ("lion", ""): "lion_32bit", ("lion", "8"): "lion_8bit",
    ("adafactor", ""): "adafactor", ("sgd", ""): "sgd", ("adagrad", ""): "adagrad", ("rmsprop", ""): "rmsprop",
}  # fmt: skip
"""(our optimizer, bits of its state) → that of its names in `OPTIMIZERS` which is transformers' usual one."""
_FROM_A_LINE = {"linear", "exponential", "step"}
WHOLE_RUN = 0.999999
"""A warm-up over all updates, as a share below 1."""


def optimizer(to: TrlWriting) -> None:
    """`optim`, with the nearest where transformers has none of that name."""
    config = to.config
    bits = "8" if config.optimizer_bits == "8" and to.applies("optimizer_bits") else ""
    name = WRITTEN_AS.get((config.optimizer, bits))
    if name is not None:
        assert OPTIMIZERS[name] == (config.optimizer, bits)
        return to.put(optim=name)
    to.put(optim=WRITTEN_AS["adamw", bits])
    if config.optimizer == "adam":
        to.leave("optimizer", "AdamW without weight decay is the same update")
        return to.put(weight_decay=0.0)
    to.leave("optimizer", "transformers has no such optimizer: AdamW, which wants a learning rate of its own")
    return None


def schedule(to: TrlWriting) -> None:
    """`lr_scheduler_type`, its options and the warm-up."""
    kind, options = _schedule(to)
    to.put(lr_scheduler_type=kind)
    if options:
        to.put(lr_scheduler_kwargs=options)
    _warmup(to, kind)
    if kind not in ("constant", "constant_with_warmup", "inverse_sqrt", "warmup_stable_decay"):
        _share(to)


def _curve(to: TrlWriting, setting: str, alone: str) -> None:
    """`alone`: what `trl grpo` does without train.py."""
    to.hand_over(setting, f"train.py follows the curve of GRPO Studio; trl grpo alone: {alone}")


def _schedule(to: TrlWriting) -> tuple[str, dict[str, Any]]:
    """(transformers' name, its options), the nearest where it has no such curve."""
    config = to.config
    name, final = config.lr_schedule, final_rate(config.learning_rate, config.lr_final)
    if name == OWN:
        to.leave("lr_schedule", "constant, at the learning rate as it is set")
        return "constant", {}
    if name == "constant":
        return ("constant_with_warmup" if config.lr_warmup_ratio else "constant"), {}
    if name in ("constant_with_warmup", "inverse_sqrt"):
        return name, {}
    if final >= config.learning_rate:
        _curve(to, "lr_schedule", "constant with warm-up, as the final rate is not below the learning rate")
        return "constant_with_warmup", {}
    if name == "cosine":
        return ("cosine", {}) if not final else ("cosine_with_min_lr", {"min_lr": final})
    if name == "cosine_with_restarts":
        if final:
            _curve(to, "lr_final", "each cosine falls to 0")
        return name, {"num_cycles": config.lr_cycles}
    if name == "warmup_stable_decay":
        return _late_fall(to, final)
    if name == "linear" and not final:
        return "linear", {}
    if name in _FROM_A_LINE:
        _curve(to, "lr_schedule", f"polynomial with power 1, a line to {final:g}")
        return "polynomial", {"lr_end": final, "power": 1.0}
    return "polynomial", {"lr_end": final, "power": config.lr_power}


def _late_fall(to: TrlWriting, final: float) -> tuple[str, dict[str, Any]]:
    config = to.config
    if to.updates is None or config.lr_decay_fraction > 1:
        _curve(to, "lr_schedule", "constant with warm-up, as it wants the length of the fall in updates")
        return "constant_with_warmup", {}
    decay = max(1, round(config.lr_decay_fraction * to.updates))
    if decay / to.updates != config.lr_decay_fraction:
        _curve(to, "lr_decay_fraction", f"the last {decay:,} updates")
    return "warmup_stable_decay", {"num_decay_steps": decay, "min_lr_ratio": final / config.learning_rate}


def _warmup(to: TrlWriting, kind: str) -> None:
    """Updates, or below 1 a share of the run: transformers 5 has one word for both."""
    config, ratio = to.config, to.config.lr_warmup_ratio
    if kind == "constant":
        return
    if ratio is not None and ratio < 1:
        to.put(warmup_steps=ratio)
    elif ratio is not None:  # 1, which transformers would read as one update
        _curve(to, "lr_warmup_ratio", f"{WHOLE_RUN:%} of the updates")
        to.put(warmup_steps=WHOLE_RUN)
    else:
        to.put(warmup_steps=warmup_updates(config, to.updates or 0))
    if to.words["warmup_steps"] and config.lr_warmup_init:
        _curve(to, "lr_warmup_init", "the warm-up begins at 0")


def _share(to: TrlWriting) -> None:
    """transformers' rate falls from the end of the warm-up to the end of the run."""
    config, after = to.config, 1.0
    if config.lr_warmup_ratio is not None:
        after = 1.0 - config.lr_warmup_ratio
    elif to.updates is not None:
        after = 1.0 - config.lr_warmup_steps / to.updates
    is_known = to.updates is not None or config.lr_warmup_ratio is not None or not config.lr_warmup_steps
    if not is_known or config.lr_decay_fraction != after:
        _curve(to, "lr_decay_fraction", "the rate falls until the end of the run")
