"""Memory estimate of a run from its settings and its model's shape, and the plan by which its steps fit. It assumes
prompts of the greatest length and completions that all reach their limit, loads no weights and queries no device."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

from backend.config.config import Config
from backend.distributed.hosts_file import read_hosts
from backend.engine.chunk_sizes import MICRO_BATCH_TOKENS, SMALLEST_CHUNK, head_chunk
from backend.judges.model_reward import loaded_models
from backend.runs.steering import stage_configs
from backend.trainer.memory.model_shape import Linear, ModelShape, shape_of
from backend.trainer.memory.phases import DTYPE_BYTES, PREFILL_CHUNK, MemoryModel, MemoryPlan, Phase
from backend.utils.errors import ConfigProblem, UserError
from backend.utils.hub_cache import local_folder
from backend.utils.machine import has_gpu

GB = 1_000_000_000
TB = 1000 * GB

TARGET_SHARE = 0.92  # share of the limit that a plan aims at

SMALLEST_MICRO_BATCH = {False: 1, True: 1024}
"""On a CPU and on a GPU: tokens below which gradient checkpointing is tried before still smaller micro-batches.
Checkpointing costs a third; launching a GPU's kernels that often costs more."""

SLOWER = {False: ("16 bits", "about 6", "about 20"), True: ("packed weights", "at least 12", "at least 20")}
"""What is not packed and what is → name, and how many times as long as in float32 sampling and learning take on a CPU.
Measured on x86 with layers of Qwen3-0.6B's size, packed weights with float32 scales; with 16-bit scales it is more."""

PARTS = {  # a part of a phase's memory → its title, and what it is
    "weights": ("Weights", "The model as it is loaded."),
    "adapters": ("Adapters", "What LoRA or DoRA adds to the model."),
    "optimizer": ("Optimizer", "What the optimizer remembers of every weight that learns."),
    "gradients": ("Gradients", "One number for every weight that learns."),
    "reference": ("Reference", "The weights of the reference model that are its own."),
    "draft model": ("Draft model", "The model that drafts tokens."),
    "rollout weights": ("Rollout weights", "The quantised copy that completions are sampled from."),
    "teacher": ("Teacher", "The model that is learned from, which does not change."),
    "vision": ("Vision", "The part that reads images, and what it read of a step's images."),
    "reward models": ("Reward models", "Models that score completions."),
    "decoding weights": ("Decoding", "Weights that only sampling uses, such as those with the adapters inside."),
    "KV cache": ("KV cache", "Keys and values of the completions that are decoded together."),
    "activations": ("Activations", "What the backward pass needs of the tokens that go through the model together."),
    "prompts": ("Prompts", "Keys and values of prompts that several micro-batches share, and their gradients."),
    "kept": ("Step's start", "What learns, as it was before the step, for a lost machine; or a teacher's outputs."),
    "logits": ("Logits", "A number for each word of the vocabulary, for the tokens at work."),
    "in flight": ("In flight", "Arrays that MLX has prepared ahead of the device."),
}

SPLIT_BY_INPUTS = ("o_proj", "down_proj", "out_proj", "w2", "fc2")
WHOLE = ("kv_a_proj_with_mqa", "q_a_proj", "gate", "router", "norm")
"""Ends of the names of matrices that tensor parallelism divides by inputs, and not at all."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """The memory of a run's two phases under `plan`, in bytes. `limit`: the setting Memory limit, or `machine`.
    `reductions` names where the plan trades time for memory; `advice` says which settings to change where that is not
    enough. `speed_note`: what a CPU computes in."""

    memory: MemoryModel
    plan: MemoryPlan
    rollout: Phase
    training: Phase
    machine: int
    limit: int
    reductions: tuple[str, ...] = ()
    advice: str = ""
    speed_note: str = ""

    @property
    def total(self) -> int:
        return max(self.rollout.total, self.training.total)

    @property
    def fits(self) -> bool:
        return self.total <= self.limit

    @property
    def largest(self) -> Phase:
        return self.training if self.training.total >= self.rollout.total else self.rollout

    @property
    def sentence(self) -> str:
        doing = "learning" if self.largest is self.training else "sampling"
        needs = f"{'About' if self.memory.shape.is_transformer else 'Roughly'} {format_bytes(self.total)} while {doing}"
        lengths = f"with prompts of {self.memory.prompt} and completions of {self.memory.completion} tokens"
        if self.memory.row:
            lengths = f"with rows of {self.memory.row} tokens"
        if not self.fits:
            return f"{needs}, {lengths}, and there are {format_bytes(self.limit)}: it does not fit."
        held = f", held down by {', '.join(self.reductions)}" if self.reductions else ""
        return f"{needs}, {lengths}{held}; there are {format_bytes(self.limit)}."

    @property
    def fault(self) -> ConfigProblem | None:
        if self.fits:
            return None
        whose = "this machine can give" if self.limit == self.machine else "Memory limit allows"
        anyway = f" To try it anyway, set Memory limit to {-(-self.total // GB)} GB." if self.total < TB else ""
        needs = f"The run needs at least {format_bytes(self.total)}, and {whose} {format_bytes(self.limit)}."
        return ConfigProblem("memory_limit", f"{needs} {self.advice}{anyway}")

    def to_dict(self) -> dict[str, Any]:
        plain = ("total", "machine", "limit", "fits", "sentence", "advice", "speed_note")
        return {
            "rollout": self.rollout.to_dict(),
            "training": self.training.to_dict(),
            **{name: getattr(self, name) for name in plain},
            **{name: getattr(self.memory, name) for name in ("prompt", "completion")},
            "plan": asdict(self.plan),
        }


def estimate_run(
    config: Config,
    shape: ModelShape,
    machine: int,
    prompt: int | None = None,
    *,
    gpu: bool | None = None,
    stages: Sequence[Config] = (),
    dtype: str = "",
) -> Estimate:
    """The memory of a run under the quickest plan that fits; else under the smallest. Of a run in stages, the one that
    needs most; `stages`: the settings of each. `machine`: bytes that it may use. `prompt`: tokens of the longest
    prompt; None for what `max_seq_length` leaves beside the completion. `gpu` None: as this machine. `dtype`: what the
    run computes in, where it was chosen already. Of a model that is divided among machines, the memory of each."""
    gpu = has_gpu() and config.device != "cpu" if gpu is None else gpu
    if config.is_divided:
        with suppress(UserError):  # whoever starts the run says so
            shape = share_of(shape, max(1, len(read_hosts(config.hosts).hosts)))
    configs, speed_note = list(stages or stage_configs(config)), ""
    if not gpu:
        dtype, speed_note = _type_on_cpu(configs, shape, machine, dtype)
    entries = list(dict.fromkeys(entry for settings in configs for entry in settings.reward_functions))
    changes: dict[str, Any] = {"dtype": dtype or config.dtype}
    changes |= {"reward_functions": entries} if loaded_models(entries) else {}  # those of all stages stay in memory
    fit = partial(_fit, shape=shape, machine=machine, prompt=prompt, gpu=gpu)
    estimates = (fit(each.model_copy(update=changes)) for each in configs)
    largest = max(estimates, key=lambda result: (not result.fits, result.total))
    return replace(largest, speed_note=speed_note, advice="" if largest.fits else _advice(largest.memory, fit))


def choose_dtype(configs: Sequence[Config], machine: int, *, gpu: bool) -> tuple[str, str]:
    """(`dtype` that runs compute in, a sentence on it): on a CPU float32 for "auto" where all fit."""
    shape = shape_of(local_folder(configs[0].model))
    if gpu or shape is None:
        return configs[0].dtype, ""
    estimate = estimate_run(configs[0], shape, machine, gpu=False, stages=configs)
    return estimate.memory.config.dtype, estimate.speed_note


def _type_on_cpu(configs: Sequence[Config], shape: ModelShape, machine: int, chosen: str) -> tuple[str, str]:
    config = configs[0]
    is_packed = shape.quantised or config.quantization != "none"
    is_float32 = shape.width == DTYPE_BYTES["float32"] or config.train_type == "full"
    if config.dtype == "float32" or (config.dtype == "auto" and is_float32 and not is_packed):
        return config.dtype, ""
    what, sampling, learning = SLOWER[is_packed]
    factors = f"sampling takes {sampling} times and learning {learning} times as long as in float32"
    if config.dtype != "auto":
        return config.dtype, f"On a CPU {what} are slow: {factors}."
    # At the longest prompts, so that the choice holds when they are known.
    in_float32 = [config.model_copy(update={"dtype": "float32"}) for config in configs]
    wide = max((_fit(config, shape, machine, None, False) for config in in_float32), key=lambda fitted: fitted.total)
    if chosen != "auto" and wide.fits:
        expanded = ", to which the packed weights are expanded" if is_packed else ""
        return "float32", f"On a CPU {what} are slow, so the run computes in float32{expanded} (Precision: Automatic)."
    needs = f"float32 would need {format_bytes(wide.total)}, and there are {format_bytes(wide.limit)}"
    return "auto", f"On a CPU {what} are slow, and {needs}: {factors}."


def share_of(shape: ModelShape, machines: int) -> ModelShape:
    """What one of several machines holds: its part of every layer, and embedding and output layer whole."""

    def part(linear: Linear) -> Linear:
        if linear.name.endswith(WHOLE):
            return linear
        along = "inputs" if linear.name.endswith(SPLIT_BY_INPUTS) else "outputs"
        return replace(linear, **{along: -(-getattr(linear, along) // machines), "bytes": -(-linear.bytes // machines)})

    layers = tuple(tuple(map(part, layer)) for layer in shape.layers)
    whole, parts = (sum(linear.bytes for layer in each for linear in layer) for each in (shape.layers, layers))
    heads, kv_heads = (-(-count // machines) for count in (shape.heads, shape.kv_heads))
    return replace(shape, heads=heads, kv_heads=kv_heads, layers=layers, weights=shape.weights - whole + parts)


def _fit(config: Config, shape: ModelShape, machine: int, prompt: int | None, gpu: bool) -> Estimate:
    longest = max(1, config.max_seq_length - (0 if config.learns_labels else config.max_completion_length))
    # Longer prompts than that are skipped by the prompt stream.
    memory = MemoryModel(config, shape, min(prompt or longest, longest), gpu=gpu)
    limit = round(config.memory_limit * GB) or machine
    budget = round(TARGET_SHARE * limit)

    def first_that_fits(plans: Iterator[MemoryPlan], phase_of: Callable[[MemoryPlan], Phase]) -> MemoryPlan:
        tried: dict[int, MemoryPlan] = {}
        for plan in plans:
            if (total := phase_of(plan).total) <= budget:
                return plan
            tried.setdefault(total, plan)
        return tried[min(tried)]

    # The phases follow each other and share no choice, so each gets the quickest plan that fits by itself.
    quickest = next(_learning_plans(memory))
    learning = first_that_fits(_learning_plans(memory), memory.training)
    # Chunks in the inner loop: smaller ones cost less speed than decoding fewer rows together.
    sampling_plans = (
        replace(learning, rows=rows, prefill_chunk=chunk, merge=False)
        for rows in memory.row_costs.fewer(memory.rows)
        for chunk in _halvings(learning.prefill_chunk, 64)
    )
    chosen = first_that_fits(chain([learning], sampling_plans), memory.rollout)
    reductions = {
        f"decoding {chosen.rows} of {quickest.rows} completions at a time": chosen.rows < quickest.rows,
        f"reading prompts {chosen.prefill_chunk} tokens at a time": chosen.prefill_chunk < quickest.prefill_chunk,
        "decoding with adapters beside the weights": quickest.merge and not chosen.merge,
        f"learning from {chosen.micro_batch_tokens} tokens at a time": (
            chosen.micro_batch_tokens < quickest.micro_batch_tokens
        ),
        "gradient checkpointing": chosen.recompute and not quickest.recompute,
        f"computing logits for {chosen.chunk} tokens at a time": chosen.chunk < quickest.chunk,
    }
    training = memory.training(chosen)
    return Estimate(
        memory=memory,
        plan=chosen,
        rollout=memory.rollout(chosen, allowed=0 if gpu else training.needed),
        training=training,
        machine=machine,
        limit=limit,
        reductions=tuple(words for words, is_taken in reductions.items() if is_taken),
    )


def _learning_plans(memory: MemoryModel) -> Iterator[MemoryPlan]:
    config, most = memory.config, MICRO_BATCH_TOKENS[memory.gpu]
    # The user's own chunk size replaces both of ours.
    configured = config.seq_step_size if config.efficient_long_context else None
    chunk = configured or head_chunk(memory.shape.vocabulary, memory.gpu)
    base = MemoryPlan(memory.rows, configured or PREFILL_CHUNK, True, most, chunk, config.grad_checkpoint)
    one_row = memory.prompt + memory.completion
    # Not below one row: a row is never split, so a smaller budget would change nothing.
    sizes = list(_halvings(min(most, config.batch_size * memory.group * one_row), one_row))
    yield base
    # False before True: checkpointing only where small micro-batches are not enough, or the settings have it on.
    for recompute in sorted({base.recompute, True}):
        for size in sizes:
            if recompute or size >= SMALLEST_MICRO_BATCH[memory.gpu]:
                yield replace(base, micro_batch_tokens=size, recompute=recompute)
    # Last, because each chunk reads the output layer's weights again, often the largest matrix.
    for size in _halvings(chunk, SMALLEST_CHUNK):
        yield replace(base, micro_batch_tokens=sizes[-1], recompute=True, chunk=size)


def _halvings(first: int, last: int) -> Iterator[int]:
    size = first
    while size > last:
        yield size
        size = -(-size // 2)
    yield min(first, last)


def _advice(memory: MemoryModel, fit: Callable[[Config], Estimate]) -> str:
    config, shape = memory.config, memory.shape
    changes: dict[str, dict[str, Any]] = {}
    if config.train_type == "full":
        changes["With LoRA instead of full fine-tuning"] = {"train_type": "lora"}
    elif not shape.quantised and config.quantization in ("none", "8", "6"):
        changes["With 4-bit quantization"] = {"quantization": "4"}
    length = row = config.max_seq_length if config.learns_labels else config.max_completion_length
    while length > 128:
        length //= 2
        # Max Seq shrinks with Completion, or longer prompts could fill the space that shorter completions free.
        change = {"max_seq_length": config.max_seq_length - row + length}
        if not config.learns_labels:
            change["max_completion_length"] = length
        changes[f"With {'Max Seq' if config.learns_labels else 'Completion'} at {length} tokens"] = change
    if config.train_type == "full" and not shape.quantised:
        changes["With LoRA on the model in 4 bits"] = {"train_type": "lora", "quantization": "4"}
    tried: dict[str, int] = {}
    for condition, change in changes.items():
        changed = fit(config.model_copy(update=change))
        if changed.fits:
            return f"{condition} it would need {format_bytes(changed.total)}."
        tried[condition] = changed.total
    if not tried:
        return "Choose a smaller model."
    least = min(tried, key=lambda condition: tried[condition])
    condition = f"{least[0].lower()}{least[1:]}"
    return f"Choose a smaller model; {condition} this one still needs {format_bytes(tried[least])}."


def format_bytes(size: float) -> str:
    """“9.8 GB”, “640 MB”, “0.3 MB”; “3.7 TB” and “2.1 million TB” for settings that no machine can hold."""
    if size < GB:
        return f"{size / 1e6:.0f} MB" if size >= 1e7 else f"{size / 1e6:.1f} MB"
    if size < TB:
        return f"{size / GB:.1f} GB"
    return f"{size / TB:.1f} TB" if size < 1e6 * TB else f"{size / (1e6 * TB):.3g} million TB"


def machines_note(config: Config) -> str:
    """A sentence on whose memory the estimate is about; "" for a run on one machine."""
    if not config.hosts:
        return ""
    if config.parallelism == "data":
        return "Every machine needs that much: each holds the whole model."
    return "That is for the whole model on one machine; divided, each machine holds a part of it."
