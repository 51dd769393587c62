"""Bytes a run will need, from its settings and its model's shape; how its steps are cut up so that they fit; and what to
say of it.

The estimate is for prompts as long as they get and completions that all run to their limit: what a run must survive.
Nothing is loaded and nothing asked of a device.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from backend.spec.config import Config
from backend.spec.faults import Fault
from backend.spec.memory.backward import BackwardMemory
from backend.spec.memory.chunking import MICRO_BATCH_TOKENS, SMALLEST_CHUNK, head_chunk
from backend.spec.memory.model_shape import ModelShape
from backend.spec.memory.phases import PREFILL_CHUNK, MemoryModel, MemoryPlan, Phase

GB = 1_000_000_000
PROCESS_BYTES = 600_000_000
"""What Python and the libraries hold beside MLX's arrays, data and tokenizer included."""

USABLE_SHARE = 0.75
"""Of the memory there is: the system and other programs want theirs."""

TARGET_SHARE = 0.92
"""A plan is chosen to need this share of the limit, so that the run stays below it where the estimate is a little low."""

SMALLEST_MICRO_BATCH = {False: 1, True: 1024}
"""Tokens below which a micro-batch is not cut on a CPU and on a GPU before layers are worked out again: that costs a third,
launching a GPU's work so often costs more."""

ON_GPU = sys.platform == "darwin"


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a run needs. Bytes throughout.

    `machine` is what a run may have of this machine, `limit` what this one is held to: the setting Memory limit, or that.
    `reductions` names what the plan gives up to fit; `advice` what to change where even that does not do.
    """

    rollout: Phase
    training: Phase
    plan: MemoryPlan
    machine: int
    limit: int
    prompt: int
    completion: int
    rough: bool
    reductions: tuple[str, ...] = ()
    advice: str = ""

    @property
    def total(self) -> int:
        return max(self.rollout.total, self.training.total)

    @property
    def needed(self) -> int:
        """The same without what MLX prepares ahead."""
        return max(self.rollout.needed, self.training.needed)

    @property
    def fits(self) -> bool:
        return self.total <= self.limit

    @property
    def largest(self) -> Phase:
        return self.training if self.training.total >= self.rollout.total else self.rollout

    @property
    def sentence(self) -> str:
        """The verdict in words, with what was assumed."""
        doing = "learning" if self.largest is self.training else "sampling"
        needs = f"{'Roughly' if self.rough else 'About'} {format_bytes(self.total)} while {doing}"
        lengths = f"with prompts of {self.prompt} and completions of {self.completion} tokens"
        if not self.fits:
            return f"{needs}, {lengths}, and there are {format_bytes(self.limit)}: it does not fit."
        held = f", held down by {_listed(self.reductions)}" if self.reductions else ""
        return f"{needs}, {lengths}{held}; there are {format_bytes(self.limit)}."

    @property
    def fault(self) -> Fault | None:
        """What a person can mend before a run; None where it fits."""
        if self.fits:
            return None
        whose = "this machine can give" if self.limit == self.machine else "Memory limit allows"
        return Fault(
            "memory_limit",
            f"Even cut up as small as it goes the run needs {format_bytes(self.total)}, and {whose} {format_bytes(self.limit)}. "
            f"{self.advice} To try all the same, set Memory limit to {-(-self.total // GB)} GB.",
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "rollout": self.rollout.to_dict(), "training": self.training.to_dict(), "total": self.total,
            "machine": self.machine, "limit": self.limit, "fits": self.fits, "sentence": self.sentence,
            "advice": self.advice, "prompt": self.prompt, "completion": self.completion, "plan": asdict(self.plan),
        }  # fmt: skip


def machine_bytes(held: int = 0) -> int:
    """What a run may have of this machine: a safe share of a Mac's memory, about what Metal recommends as working set;
    elsewhere of what is available, to which comes what the run has already (`held`)."""
    if sys.platform == "darwin":
        return int(USABLE_SHARE * _physical())
    return max(0, int(USABLE_SHARE * (_available() + held)) - PROCESS_BYTES)


def _physical() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _available() -> int:
    """As Linux tells it."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return _physical()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), _physical())


def estimate(
    config: Config,
    shape: ModelShape,
    machine: int,
    prompt: int | None = None,
    *,
    gpu: bool = ON_GPU,
) -> Estimate:
    """The memory of a run with these sound settings, cut up so that it fits if it can.

    `machine` is what it may have, in bytes (`machine_bytes`). `prompt` is the length of the longest prompts in tokens,
    where it is known; else prompts are taken to fill what Max Seq leaves them.
    """
    found = _fit(config, shape, machine, prompt, gpu)
    return found if found.fits else replace(found, advice=_advice(config, shape, machine, prompt, gpu))


def _fit(config: Config, shape: ModelShape, machine: int, prompt: int | None, gpu: bool) -> Estimate:
    room = max(1, config.max_seq_length - config.max_completion_length)
    memory = MemoryModel(config, shape, min(prompt or room, room), gpu=gpu)
    limit = round(config.memory_limit * GB) or machine
    first = next(_sampling_plans(memory, _learning_plans(memory)))
    learning = BackwardMemory(memory)
    budget = round(TARGET_SHARE * limit)
    learnt = _first_that_fits(_learning_plans(memory), lambda plan: learning.phase(plan).total, budget)
    chosen = _first_that_fits(_sampling_plans(memory, iter([learnt])), lambda plan: memory.rollout(plan).total, budget)
    return Estimate(
        rollout=memory.rollout(chosen), training=learning.phase(chosen), plan=chosen, machine=machine, limit=limit,
        prompt=memory.prompt, completion=memory.completion, rough=not shape.known, reductions=tuple(_reductions(first, chosen, memory)),
    )  # fmt: skip


def _first_that_fits(plans: Iterator[MemoryPlan], size: Callable[[MemoryPlan], int], limit: int) -> MemoryPlan:
    """The first plan within the limit; else the one that needs least."""
    smallest: tuple[int, MemoryPlan] | None = None
    for one in plans:
        needs = size(one)
        if needs <= limit:
            return one
        if smallest is None or needs < smallest[0]:
            smallest = (needs, one)
    assert smallest is not None
    return smallest[1]


def _learning_plans(memory: MemoryModel) -> Iterator[MemoryPlan]:
    """Ways to learn, the quickest first: smaller micro-batches cost little until they are very small, working layers out
    again costs a third, small chunks of logits read the output layer's weights often."""
    config, vocabulary = memory.config, memory.shape.vocabulary
    asked = config.seq_step_size if config.efficient_long_context else None
    chunk = asked or head_chunk(vocabulary, memory.gpu)
    prefill = asked or PREFILL_CHUNK
    base = MemoryPlan(memory.rows, prefill, True, MICRO_BATCH_TOKENS[memory.gpu], chunk, config.grad_checkpoint)
    one_row = memory.prompt + memory.completion
    whole = config.batch_size * memory.group * one_row
    sizes = list(_halvings(min(MICRO_BATCH_TOKENS[memory.gpu], whole), one_row))
    yield base
    for recompute in sorted({base.recompute, True}):
        for size in sizes:
            if recompute or size >= SMALLEST_MICRO_BATCH[memory.gpu]:
                yield replace(base, micro_batch_tokens=size, recompute=recompute)
    for size in _halvings(chunk, SMALLEST_CHUNK):
        yield replace(base, micro_batch_tokens=sizes[-1], recompute=True, chunk=size)


def _sampling_plans(memory: MemoryModel, learnings: Iterator[MemoryPlan]) -> Iterator[MemoryPlan]:
    """Ways to sample for a way to learn, the quickest first: without the second copy of weights, with prompts read in
    smaller pieces, and with fewer rows at a time."""
    base = next(learnings)
    yield base
    for rows in _halvings(memory.rows, 1):
        for chunk in _halvings(base.prefill_chunk, 64):
            yield replace(base, rows=rows, prefill_chunk=chunk, merge=False)


def _halvings(first: int, last: int) -> Iterator[int]:
    """`first`, half of it and so on, and `last` at the end."""
    size = first
    while size > last:
        yield size
        size = -(-size // 2)
    yield min(first, last)


def _reductions(first: MemoryPlan, chosen: MemoryPlan, memory: MemoryModel) -> Iterator[str]:
    if chosen.rows < first.rows:
        yield f"decoding {chosen.rows} of {first.rows} completions at a time"
    if chosen.prefill_chunk < first.prefill_chunk:
        yield f"reading prompts {chosen.prefill_chunk} tokens at a time"
    if first.merge and not chosen.merge:
        yield "decoding with adapters beside the weights"
    if chosen.micro_batch_tokens < first.micro_batch_tokens:
        yield f"learning from {chosen.micro_batch_tokens} tokens at a time"
    if chosen.recompute and not first.recompute:
        yield "gradient checkpointing"
    if chosen.chunk < first.chunk:
        yield f"working logits out for {chosen.chunk} tokens at a time"


# ── what to change ───────────────────────────────────────────────────────────────────────────────────────────────────


def _advice(config: Config, shape: ModelShape, machine: int, prompt: int | None, gpu: bool) -> str:
    """The first change that makes it fit; else the one that saves most, and a smaller model."""
    tried = [
        (words, _fit(config.model_copy(update=change), shape, machine, prompt, gpu))
        for words, change in _possible_changes(config, shape)
    ]
    for words, found in tried:
        if found.fits:
            return f"{words} it would need {format_bytes(found.total)}."
    if not tried:
        return "Choose a smaller model."
    words, found = min(tried, key=lambda one: one[1].total)
    return (
        f"Choose a smaller model; {words[0].lower()}{words[1:]} this one would still need {format_bytes(found.total)}."
    )


def _possible_changes(config: Config, shape: ModelShape) -> Iterator[tuple[str, dict[str, Any]]]:
    """What to change first, what it costs in quality least to most."""
    if config.train_type == "full":
        yield "With LoRA instead of full fine-tuning", {"train_type": "lora"}
    elif not shape.quantised and config.quantization in ("none", "8", "6"):
        yield "With 4-bit quantization", {"quantization": "4"}
    completion = config.max_completion_length
    while completion > 128:
        completion //= 2
        # Max Seq goes along, or the prompts would get what the completions give up.
        shorter = config.max_seq_length - config.max_completion_length + completion
        yield (
            f"With Completion at {completion} tokens",
            {"max_completion_length": completion, "max_seq_length": shorter},
        )
    if config.train_type == "full" and not shape.quantised:
        yield "With LoRA on the model in 4 bits", {"train_type": "lora", "quantization": "4"}


def _listed(parts: tuple[str, ...]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def format_bytes(size: float) -> str:
    """“9.8 GB”, “640 MB”, “0.3 MB”."""
    if size >= GB:
        return f"{size / GB:.1f} GB"
    return f"{size / 1e6:.0f} MB" if size >= 1e7 else f"{size / 1e6:.1f} MB"
