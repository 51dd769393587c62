"""TRL's batches, length and rhythm: it counts completions and updates of the weights, GRPO Studio counts prompts and steps.

In TRL, `per_device_train_batch_size` completions are a batch, `gradient_accumulation_steps` batches an update, and
`steps_per_generation` batches are sampled at once (by default those of one update); each rollout is gone through
`num_iterations` times (trl/trainer/grpo_config.py, `__post_init__`, and its RepeatSampler). Here a step samples
`batch_size` × `gradient_accumulation_steps` × `steps_per_generation` prompts, and makes `num_iterations` × `steps_per_generation`
updates of them.
"""

from __future__ import annotations

import math

from backend.config.other_programs.rewriting import Translator, as_number, plain
from backend.config.setting import MOST_COMPLETIONS, NEVER
from backend.utils.text import quote

BATCH = ("per_device_train_batch_size", "per_gpu_train_batch_size")
_TRL_BATCH, _OUR_GROUP, _TRL_LOGGING = 8, 4, 10
"""TRL's default batch in completions, our default group, TRL's default of logging_steps."""
_MOST = MOST_COMPLETIONS**2
"""Completions of an update: as many as Batch and Gradient accumulation allow together."""


def batches(to: Translator) -> None:
    """Completions a batch, batches an update and batches a rollout → our prompts, and the pieces that a step is made of."""
    counts_batches = to.has("steps_per_generation") and to.program == "trl" and not to.has("batch_size")
    if not to.has(*BATCH, "generation_batch_size") and not counts_batches:
        return
    word = next((word for word in (*BATCH, "generation_batch_size") if to.has(word)), "steps_per_generation")
    group = int(to.peek("num_generations", "group_size", default=_OUR_GROUP))
    size, sampled = to.count(*BATCH), to.count("generation_batch_size")
    accumulated, rollout = to.count("gradient_accumulation_steps"), to.count("steps_per_generation")
    if to.faults or group < 1:
        return
    size, accumulated = size or _TRL_BATCH, accumulated or 1
    if sampled and rollout:
        return to.refuse(word, "generation_batch_size and steps_per_generation say the same; give one of them.")
    if sampled and sampled % size:
        sentence = f"generation_batch_size ({sampled:,}) must be a multiple of per_device_train_batch_size ({size:,})."
        return to.refuse("generation_batch_size", sentence)
    _fill_batches(to, word, size, accumulated, sampled // size if sampled else rollout or accumulated, group)
    return None


def _fill_batches(to: Translator, word: str, size: int, accumulated: int, rollout: int, group: int) -> None:
    """`size` completions a batch, `accumulated` batches an update, `rollout` batches sampled at once, `group` completions a prompt."""
    if rollout < accumulated and accumulated % rollout == 0 and to.peek("num_iterations", default=1) == 1:
        rollout = accumulated  # the policy does not change between the batches of an update: sampled at once, they are the same
    if rollout % accumulated:
        sentence = f"steps_per_generation ({rollout:,}) must be a multiple of gradient_accumulation_steps ({accumulated:,}) here."
        return to.refuse("steps_per_generation", sentence)
    completions = size * accumulated
    if completions > _MOST:
        sentence = f"An update of {quote(size, 24)} × {quote(accumulated, 24)} completions is more than the {_MOST:,} that one may have here."
        return to.refuse(word, sentence)
    prompts, rest = divmod(completions, group)
    if rest:
        sentence = f"An update of {size:,} × {accumulated:,} completions is not whole groups of {group:,}; make it a multiple of {group:,}."
        return to.refuse(word, sentence)
    piece = _largest_divisor(prompts, max(1, size // group))
    to.fill("batch_size", piece, word)
    to.fill("gradient_accumulation_steps", prompts // piece, word)
    if rollout > accumulated:
        to.fill("steps_per_generation", rollout // accumulated, word)
    noun = "prompt" if prompts == 1 else "prompts"
    to.remark(word, f"{size:,} × {accumulated:,} completions an update are {prompts:,} {noun} of {group:,}")
    return None


def _largest_divisor(number: int, most: int) -> int:
    """The largest divisor of a number that is at most `most`. Tries the numbers up to its root."""
    roots = range(1, math.isqrt(number) + 1)
    return max(part for root in roots if number % root == 0 for part in (root, number // root) if part <= most)


def length(to: Translator) -> None:
    """`max_steps` and `num_train_epochs` → iters or epochs. As in TRL, max_steps above 0 is what counts."""
    updates, steps = _updates_a_step(to), to.number("max_steps")
    if steps is not None and steps > 0:
        to.fill("iters", math.ceil(steps / updates), "max_steps")
        if updates > 1:
            to.remark("max_steps", f"{plain(steps):,} updates, {updates:,} a step")
        if to.has("num_train_epochs"):
            to.take("num_train_epochs")
            to.remark("num_train_epochs", "max_steps is given, which counts")
        return
    passes = to.number("num_train_epochs")
    if passes is None:
        return
    if passes < 0 or passes != int(passes):
        sentence = (
            f"num_train_epochs must be a whole number of passes here, not {quote(passes, 40)}; or give max_steps."
        )
        to.refuse("num_train_epochs", sentence)
    else:
        to.fill("epochs", int(passes), "num_train_epochs")


def _updates_a_step(to: Translator) -> int:
    """Updates of the weights in one step of ours, once `batches` has been read."""
    return max(1, int(to.peek("num_iterations", default=1) * to.peek("steps_per_generation", default=1)))


def rhythm(to: Translator) -> None:
    """When to evaluate, save and report, after `length`."""
    logging = _steps(to, "logging_steps")
    if logging is not None:
        to.fill("steps_per_report", logging, "logging_steps")
    _evaluation(to, logging)
    strategy, steps = _strategy(to, "save_strategy"), _steps(to, "save_steps")
    if strategy == "no":
        to.fill("save_every", NEVER, "save_strategy")
    elif steps is not None:
        to.fill("save_every", steps, "save_steps")
    if to.program == "trl" and (delay := to.number("eval_delay")) is not None:
        to.values["eval_delay"] = math.ceil(delay / _updates_a_step(to))
    if (limit := to.take("save_total_limit")) is not None:
        to.fill("keep_checkpoints", limit, "save_total_limit")


def _evaluation(to: Translator, logging: int | None) -> None:
    word = "eval_strategy" if to.has("eval_strategy") else "evaluation_strategy"
    strategy, steps = _strategy(to, "eval_strategy", "evaluation_strategy"), _steps(to, "eval_steps")
    if strategy == "no":
        to.fill("steps_per_eval", 0, word)
    elif strategy == "steps" or steps is not None:
        to.fill("steps_per_eval", steps or logging or _TRL_LOGGING, word if strategy else "eval_steps")
        to.suggest("val_batches", -1)
    prompts = to.count("per_device_eval_batch_size", "per_gpu_eval_batch_size")
    if prompts is not None:
        group = to.peek("num_generations_eval", "num_generations", "group_size", default=_OUR_GROUP)
        to.fill("eval_batch_size", math.ceil(prompts / max(1, group)), "per_device_eval_batch_size")


def _strategy(to: Translator, *words: str) -> str:
    """`no`, `steps`, or nothing; a fault for passes of the dataset, whose length in steps is not known here."""
    word = next((word for word in words if to.has(word)), words[0])
    value = to.take(*words)
    strategy = "no" if value is False else "" if value is None else str(value).strip().lower()
    if strategy == "best":
        to.remark(word, "the best checkpoint is kept in any case")
        return ""
    if strategy not in ("", "no", "steps"):
        nearest = "save_steps" if word == "save_strategy" else "eval_steps"
        to.refuse(word, f"{word} cannot be {quote(value, 40)}: runs count steps; write steps, with {nearest}.")
        return ""
    return strategy


def _steps(to: Translator, word: str) -> int | None:
    """Updates, or below 1 a share of the run, in steps of ours, rounded up."""
    number = to.number(word)
    if number is None:
        return None
    if number >= 1:
        return math.ceil(number / _updates_a_step(to))
    iters = as_number(to.values.get("iters"))
    if number <= 0 or iters is None or to.values.get("epochs"):
        to.refuse(word, f"{word} is {number:g}: give a number of steps, or with a share of the run its max_steps too.")
        return None
    return max(1, math.ceil(number * iters))
