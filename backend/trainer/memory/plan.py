"""The memory plan of a run on this machine, and MLX's memory limit set to it."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten

from backend.config.config import Config
from backend.engine.device import has_metal, on_gpu
from backend.trainer.machine import StepSize
from backend.trainer.memory.estimate import Estimate, MemoryPlan, choose_dtype, estimate_run
from backend.trainer.memory.model_shape import shape_of
from backend.types import Problem
from backend.utils.errors import UserError
from backend.utils.hub_cache import local_folder
from backend.utils.machine import machine_bytes

WHOLE_STEP = StepSize()


def plan_limits(plan: MemoryPlan | None, most: StepSize = WHOLE_STEP) -> tuple[dict[str, Any], dict[str, Any]]:
    """The plan as keywords of `Learner` and of `Sampler`, at most `most`."""
    limits: dict[str, Any] = asdict(plan) if plan else {}
    limits |= {name: min(limits.get(name, size), size) for name, size in asdict(most).items() if size is not None}
    of_sampler = {name: limits.pop(name) for name in ("rows", "prefill_chunk", "merge") if name in limits}
    return limits, of_sampler


def dtype_here(configs: Sequence[Config], machine: int | None = None) -> tuple[str, str]:
    """`choose_dtype` here; `machine`: the bytes of the smallest of several machines."""
    here = machine_bytes(mx.get_active_memory(), working_set_bytes())
    return choose_dtype(configs, here if machine is None else min(here, machine), gpu=on_gpu())


def refuse_too_large(config: Config, stages: Sequence[Config] = ()) -> None:
    """Raises UserError for a model that this machine cannot train even on the shortest prompts."""
    _estimate(config, 1, stages)


def plan_memory(
    config: Config,
    policy: Any,
    prompts: Iterable[int],
    note: Callable[[str], None],
    stages: Sequence[Config] = (),
    images: int = 0,
) -> MemoryPlan | None:
    """The plan for prompts of these lengths in tokens, and MLX's memory limit set to it while `policy` lives; None
    where the model's sizes are not known. `stages`: the settings of each. `images`: most tokens of images in a prompt.
    `note` takes a sentence where memory constrains the run. Raises UserError where no plan fits."""
    # What the model was loaded in: by now another choice might be made.
    is_packed = any("scales" in module for module in policy.model.modules())
    is_wide = policy.split_model.dtype == mx.float32 and not is_packed
    dtype, prompt = "float32" if is_wide else config.dtype, max(prompts, default=0) or None
    needs = _estimate(config, prompt, stages, in_use=mx.get_active_memory(), dtype=dtype, images=images)
    if needs is None:
        return None
    if needs.reductions or not needs.fits:
        note(needs.sentence)
    # On a CPU MLX prepares operations and their arrays far ahead unless it reaches its memory limit, where it waits for
    # the device. Waiting at the bytes that a step needs costs no time. On a GPU the limit is all that the run may use:
    # it has to be kept busy, and freed buffers are reused from MLX's cache.
    if on_gpu() or not needs.memory.shape.is_transformer:
        limit = needs.limit
    else:  # MLX counts every array of the process, such as those of a second model
        loaded = (policy.model, policy.reference_model, policy.teacher_model)
        models = [model.parameters() for model in loaded if model is not None]
        own: dict[int, int] = {id(x): x.nbytes for _, x in cast("Any", tree_flatten([*models, policy.parameters()]))}
        limit = max(needs.rollout.needed, needs.training.needed) + max(mx.get_active_memory() - sum(own.values()), 0)
    _hold_limit(limit, policy)
    if (working_set := working_set_bytes()) is not None:
        mx.set_wired_limit(min(needs.limit, working_set))
    return needs.plan


def image_tokens(tokenizer: Any, problems: Iterable[Problem], longest: int) -> int:
    """Most tokens of images in a prompt of up to `longest` tokens, if its text is as short as in `problems`."""
    pictured = (problem for problem in problems if problem.images)
    texts = (len(problem.tokens) - sum(map(tokenizer.tokens_of, problem.images)) for problem in pictured)
    text = min(texts, default=None)
    return 0 if text is None else longest - text


def _estimate(
    config: Config, prompt: int | None, stages: Sequence[Config], in_use: int = 0, dtype: str = "", images: int = 0
) -> Estimate | None:
    shape = shape_of(local_folder(config.model))
    if shape is None:
        return None
    shape = shape.reading(images)
    machine = machine_bytes(in_use, working_set_bytes())
    needs = estimate_run(config, shape, machine, prompt, gpu=on_gpu(), stages=stages or [config], dtype=dtype)
    if needs.fault is not None and shape.is_transformer:  # activations of other architectures are guessed
        raise UserError([needs.fault])
    return needs


def working_set_bytes() -> int | None:
    """The memory that Metal recommends a process to use at most."""
    return int(mx.device_info()["max_recommended_working_set_size"]) if has_metal() else None


_limits_held: dict[object, int] = {}
_limit_before = 0


def _hold_limit(size: int, policy: Any) -> None:
    """Keep MLX's memory limit at the largest of the policies that live (a sweep has several), and restore it with the
    last one. They are collected in any order, so none may restore what it had found."""
    global _limit_before
    if not _limits_held:
        _limit_before = mx.set_memory_limit(size)
    key = object()

    def release() -> None:
        del _limits_held[key]
        mx.set_memory_limit(max(_limits_held.values(), default=_limit_before))

    _limits_held[key] = size
    mx.set_memory_limit(max(_limits_held.values()))
    weakref.finalize(policy, release).atexit = False  # at exit the old limit is of no use
