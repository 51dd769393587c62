"""Memory estimate of a run from its settings and its model's shape, and the plan by which its steps fit.

The estimate is the worst case: prompts of the greatest length and completions that all reach their limit. No weights
are loaded and no device is queried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from backend.config.config import Config
from backend.distributed.hosts_file import read_hosts
from backend.engine.chunk_sizes import MICRO_BATCH_TOKENS, SMALLEST_CHUNK, head_chunk
from backend.runs.steering import stage_configs
from backend.trainer.memory.model_shape import Linear, ModelShape
from backend.trainer.memory.phases import PREFILL_CHUNK, BackwardMemory, MemoryModel, MemoryPlan, Phase, row_costs_of
from backend.utils.errors import ConfigProblem, UserError
from backend.utils.machine import has_gpu

# One machine's share of a model whose layers are divided among several.

ROWS = ("o_proj", "down_proj", "out_proj", "w2", "fc2")
"""Ends of the names of matrices whose inputs are divided; of all others it is the outputs."""
WHOLE = ("kv_a_proj_with_mqa", "q_a_proj", "gate", "router", "norm")
"""Ends of the names of matrices that every machine has."""


def machines_of(config: Config) -> int:
    """The number of machines that share the model of a run; 1 if its hosts file cannot be read."""
    if config.parallelism == "tensor" and config.hosts:
        with suppress(UserError):  # whoever starts the run says so
            return max(1, len(read_hosts(config.hosts).hosts))
    return 1


def share_of(shape: ModelShape, machines: int) -> ModelShape:
    """What one of so many machines has: its part of every layer, and embedding and output layer whole."""
    if machines == 1:
        return shape
    layers = tuple(tuple(_part(linear, machines) for linear in layer) for layer in shape.layers)
    saved = sum(linear.bytes for layer in shape.layers for linear in layer)
    saved -= sum(linear.bytes for layer in layers for linear in layer)
    return replace(
        shape,
        heads=-(-shape.heads // machines),
        kv_heads=-(-shape.kv_heads // machines),
        layers=layers,
        weights=shape.weights - saved,
    )


def _part(linear: Linear, machines: int) -> Linear:
    if linear.name.endswith(WHOLE):
        return linear
    along = "inputs" if linear.name.endswith(ROWS) else "outputs"
    part = {along: -(-getattr(linear, along) // machines), "bytes": -(-linear.bytes // machines)}
    return replace(linear, **part)


GB = 1_000_000_000
TB = 1000 * GB

TARGET_SHARE = 0.92
"""Share of the limit that a plan aims at, so that the run stays below the limit where the estimate is a little low."""

SMALLEST_MICRO_BATCH = {False: 1, True: 1024}
"""On a CPU and on a GPU: tokens below which gradient checkpointing is tried before still smaller micro-batches.
Checkpointing costs a third; launching a GPU's kernels that often costs more."""

LEAST_GAIN = 1.15
"""Times as many tokens per second from which another number of completions is worth a sentence."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """The memory of a run's two phases under `plan`, in bytes.

    `machine` is what a run may use of this machine, `limit` what this one may use: the setting Memory limit, or
    `machine`. `reductions` names where the plan trades time for memory; `advice` says which settings to change where
    even that is not enough. `row_tip` says what more completions a step would gain on a GPU; "" where that is
    little, or memory is short.
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
    row_tip: str = ""

    @property
    def total(self) -> int:
        return max(self.rollout.total, self.training.total)

    @property
    def needed(self) -> int:
        """`total` without the arrays in flight."""
        return max(self.rollout.needed, self.training.needed)

    @property
    def fits(self) -> bool:
        return self.total <= self.limit

    @property
    def largest(self) -> Phase:
        return self.training if self.training.total >= self.rollout.total else self.rollout

    @property
    def sentence(self) -> str:
        """The verdict in words, with the lengths it assumes."""
        doing = "learning" if self.largest is self.training else "sampling"
        needs = f"{'Roughly' if self.rough else 'About'} {format_bytes(self.total)} while {doing}"
        lengths = f"with prompts of {self.prompt} and completions of {self.completion} tokens"
        if not self.fits:
            return f"{needs}, {lengths}, and there are {format_bytes(self.limit)}: it does not fit."
        held = f", held down by {_listed(self.reductions)}" if self.reductions else ""
        return f"{needs}, {lengths}{held}; there are {format_bytes(self.limit)}."

    @property
    def fault(self) -> ConfigProblem | None:
        """The fault to show before a run; None where it fits."""
        if self.fits:
            return None
        whose = "this machine can give" if self.limit == self.machine else "Memory limit allows"
        return ConfigProblem(
            "memory_limit",
            f"The run needs at least {format_bytes(self.total)}, and {whose} {format_bytes(self.limit)}. "
            f"{self.advice}{self._anyway}",
        )

    @property
    def _anyway(self) -> str:
        """The setting with which the run is tried all the same."""
        return f" To try it anyway, set Memory limit to {-(-self.total // GB)} GB." if self.total < TB else ""

    def to_dict(self) -> dict[str, Any]:
        return {
            "rollout": self.rollout.to_dict(),
            "training": self.training.to_dict(),
            "total": self.total,
            "machine": self.machine,
            "limit": self.limit,
            "fits": self.fits,
            "sentence": self.sentence,
            "advice": self.advice,
            "row_tip": self.row_tip,
            "prompt": self.prompt,
            "completion": self.completion,
            "plan": asdict(self.plan),
        }


def estimate(
    config: Config,
    shape: ModelShape,
    machine: int,
    prompt: int | None = None,
    *,
    gpu: bool | None = None,
) -> Estimate:
    """The memory of a run with these valid settings, under the quickest plan that fits; else under the smallest.

    `machine`: bytes that it may use (`machine_bytes`). `prompt`: tokens of the longest prompt, where known; else
    prompts are assumed to fill what `max_seq_length` leaves beside the completion. `gpu`: whether it computes on one
    (None: as this machine). Of a model that is divided among machines, the memory is that of each.
    """
    gpu = has_gpu() and config.device != "cpu" if gpu is None else gpu
    shape = share_of(shape, machines_of(config))
    fitted = _fit(config, shape, machine, prompt, gpu)
    if not fitted.fits:
        return replace(fitted, advice=_advice(config, shape, machine, prompt, gpu))
    return replace(fitted, row_tip=_row_tip(config, shape, prompt, fitted) if gpu else "")


def _fit(config: Config, shape: ModelShape, machine: int, prompt: int | None, gpu: bool) -> Estimate:
    longest = max(1, config.max_seq_length - config.max_completion_length)
    # Longer prompts than that are skipped by the prompt stream.
    memory = MemoryModel(config, shape, min(prompt or longest, longest), gpu=gpu)
    limit = round(config.memory_limit * GB) or machine
    # The quickest plan of all: `reductions` lists where the chosen one differs from it.
    first = next(_sampling_plans(memory, _learning_plans(memory)))
    learning = BackwardMemory(memory)
    budget = round(TARGET_SHARE * limit)
    # The phases follow each other and share no choice, so each gets the quickest plan that fits by itself.
    for_training = _first_that_fits(_learning_plans(memory), lambda plan: learning.phase(plan).total, budget)
    chosen = _first_that_fits(
        _sampling_plans(memory, iter([for_training])), lambda plan: memory.rollout(plan).total, budget
    )
    return Estimate(
        rollout=memory.rollout(chosen),
        training=learning.phase(chosen),
        plan=chosen,
        machine=machine,
        limit=limit,
        prompt=memory.prompt,
        completion=memory.completion,
        rough=not shape.is_transformer,
        reductions=tuple(_reductions(first, chosen, memory)),
    )


def _first_that_fits(plans: Iterator[MemoryPlan], size: Callable[[MemoryPlan], int], limit: int) -> MemoryPlan:
    """The first plan within the limit; else the plan that needs least memory."""
    smallest: tuple[int, MemoryPlan] | None = None
    for plan in plans:
        needs = size(plan)
        if needs <= limit:
            return plan
        # `<`, not `<=`: of plans that need the same, the first is the quickest.
        if smallest is None or needs < smallest[0]:
            smallest = (needs, plan)
    assert smallest is not None
    return smallest[1]


def _learning_plans(memory: MemoryModel) -> Iterator[MemoryPlan]:
    """Plans for training, the quickest first. Smaller micro-batches cost little until they are very small, gradient
    checkpointing costs a third, small chunks of logits read the output layer's weights often."""
    config, vocabulary = memory.config, memory.shape.vocabulary
    # The user's own chunk size replaces both of ours.
    configured = config.seq_step_size if config.efficient_long_context else None
    chunk = configured or head_chunk(vocabulary, memory.gpu)
    prefill = configured or PREFILL_CHUNK
    base = MemoryPlan(memory.rows, prefill, True, MICRO_BATCH_TOKENS[memory.gpu], chunk, config.grad_checkpoint)
    one_row = memory.prompt + memory.completion
    all_rows = config.batch_size * memory.group * one_row
    # Not below one row: a row is never split, so a smaller budget would change nothing.
    sizes = list(_halvings(min(MICRO_BATCH_TOKENS[memory.gpu], all_rows), one_row))
    yield base
    # False before True: checkpointing only where small micro-batches are not enough, unless the settings have it on
    # anyway.
    for recompute in sorted({base.recompute, True}):
        for size in sizes:
            if recompute or size >= SMALLEST_MICRO_BATCH[memory.gpu]:
                yield replace(base, micro_batch_tokens=size, recompute=recompute)
    # Last, because each chunk reads the output layer's weights again, often the largest matrix.
    for size in _halvings(chunk, SMALLEST_CHUNK):
        yield replace(base, micro_batch_tokens=sizes[-1], recompute=True, chunk=size)


def _sampling_plans(memory: MemoryModel, learnings: Iterator[MemoryPlan]) -> Iterator[MemoryPlan]:
    """Plans for sampling under a plan for training, the quickest first: without merged weights, with smaller prefill
    chunks, with fewer rows at a time."""
    base = next(learnings)
    yield base
    # Chunks in the inner loop: smaller ones cost less speed than decoding fewer rows together.
    for rows in memory.row_costs.fewer(memory.rows):
        for chunk in _halvings(base.prefill_chunk, 64):
            yield replace(base, rows=rows, prefill_chunk=chunk, merge=False)


def _halvings(first: int, last: int) -> Iterator[int]:
    """`first`, half of it and so on, and `last` in the end."""
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


def _advice(config: Config, shape: ModelShape, machine: int, prompt: int | None, gpu: bool) -> str:
    """The first change of settings that makes the run fit; else the change that saves most, and a smaller model."""
    # `_fit`, not `estimate`, which would ask for advice on the advice.
    tried = [
        (condition, _fit(config.model_copy(update=change), shape, machine, prompt, gpu))
        for condition, change in _possible_changes(config, shape)
    ]
    for condition, changed in tried:
        if changed.fits:
            return f"{condition} it would need {format_bytes(changed.total)}."
    if not tried:
        return "Choose a smaller model."
    condition, changed = min(tried, key=lambda change: change[1].total)
    condition = f"{condition[0].lower()}{condition[1:]}"
    return f"Choose a smaller model; {condition} this one still needs {format_bytes(changed.total)}."


def _possible_changes(config: Config, shape: ModelShape) -> Iterator[tuple[str, dict[str, Any]]]:
    """(how the sentence begins, changed settings) to try, the least loss of quality first."""
    if config.train_type == "full":
        yield "With LoRA instead of full fine-tuning", {"train_type": "lora"}
    elif not shape.quantised and config.quantization in ("none", "8", "6"):
        yield "With 4-bit quantization", {"quantization": "4"}
    completion = config.max_completion_length
    while completion > 128:
        completion //= 2
        # Max Seq shrinks too, or longer prompts could fill the space that shorter completions free.
        shorter = config.max_seq_length - config.max_completion_length + completion
        yield (
            f"With Completion at {completion} tokens",
            {"max_completion_length": completion, "max_seq_length": shorter},
        )
    if config.train_type == "full" and not shape.quantised:
        yield "With LoRA on the model in 4 bits", {"train_type": "lora", "quantization": "4"}


def _row_tip(config: Config, shape: ModelShape, prompt: int | None, now: Estimate) -> str:
    """What a GPU would gain by as many completions a step as fill its tiles, and their memory."""
    count = config.prompts_per_step * config.group_size
    costs = row_costs_of(config, shape, gpu=True)
    full = costs.filled(count)
    slower = costs.time_of(full) / costs.time_of(count)
    gain = full / count / slower
    # Without full attention one prompt's group is decoded at a time, however many there are.
    if not shape.has_full_attention or gain < LEAST_GAIN or now.plan.rows < costs.planned(count):
        return ""
    # About: the product of whole prompts and a whole group is not always `full`.
    more = config.model_copy(update={"group_size": -(-full // config.prompts_per_step)})
    filled = _fit(more, shape, now.machine, prompt, gpu=True)
    if not filled.fits or filled.plan.rows < full:
        return ""
    time = "the same time" if slower < 1.05 else f"{slower:.1f} times the time"
    more_memory = format_bytes(max(filled.total - now.total, 0))
    return (
        f"A step samples {count} completions. This GPU decodes {full} in {time}: up to {gain:.1f} times as "
        f"many tokens per second, for {more_memory} more memory. Raise Group or Batch."
    )


def _listed(parts: tuple[str, ...]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def format_bytes(size: float) -> str:
    """“9.8 GB”, “640 MB”, “0.3 MB”; “3.7 TB” and “2.1 million TB” for settings that no machine can hold."""
    if size >= 1e6 * TB:
        return f"{size / (1e6 * TB):.3g} million TB"
    if size >= TB:
        return f"{size / TB:.1f} TB"
    if size >= GB:
        return f"{size / GB:.1f} GB"
    return f"{size / 1e6:.0f} MB" if size >= 1e7 else f"{size / 1e6:.1f} MB"


def estimate_run(
    config: Config, shape: ModelShape, machine: int, prompt: int | None = None, *, gpu: bool | None = None
) -> Estimate:
    """As `estimate`, for a run as its settings describe it."""
    return estimate_stages(stage_configs(config), shape, machine, prompt, gpu=gpu)


def estimate_stages(
    stages: Sequence[Config], shape: ModelShape, machine: int, prompt: int | None = None, *, gpu: bool | None = None
) -> Estimate:
    """The estimate of the stage that needs most; `stages`: the settings of each."""
    estimates = [estimate(config, shape, machine, prompt, gpu=gpu) for config in stages]
    return max(estimates, key=lambda result: (not result.fits, result.total))


def machines_note(config: Config) -> str:
    """A sentence on whose memory the estimate is about; "" for a run on one machine."""
    if not config.hosts:
        return ""
    if config.parallelism == "data":
        return "Every machine needs that much: each holds the whole model."
    return "That is for the whole model on one machine; divided, each machine holds a part of it."
