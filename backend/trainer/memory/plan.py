"""The memory plan of a run on this machine, and MLX's memory limit set to it.

The arithmetic is `backend.trainer.memory.estimate`'s; this module knows the model's folder, the run's prompts and
the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from backend.config.config import Config
from backend.engine.device import has_metal, on_gpu
from backend.trainer.machine import StepSize
from backend.trainer.memory.estimate import Estimate, MemoryPlan, estimate_stages
from backend.trainer.memory.model_shape import ModelShape, shape_of
from backend.utils.errors import UserError
from backend.utils.hub_cache import local_folder
from backend.utils.machine import machine_bytes

WHOLE_STEP = StepSize()


def learner_limits(plan: MemoryPlan | None, most: StepSize = WHOLE_STEP) -> dict[str, Any]:
    """The plan as keywords of `Learner`, held to `most`; what neither limits is left to the learner's defaults."""
    limits: dict[str, Any] = {}
    if plan is not None:
        limits |= {"micro_batch_tokens": plan.micro_batch_tokens, "chunk": plan.chunk, "recompute": plan.recompute}
    return _held_to(limits, "micro_batch_tokens", most.micro_batch_tokens)


def rollout_limits(plan: MemoryPlan | None, most: StepSize = WHOLE_STEP) -> dict[str, Any]:
    """The plan as keywords of `Rollout`, held to `most`."""
    limits: dict[str, Any] = {}
    if plan is not None:
        limits |= {"rows": plan.rows, "prefill_chunk": plan.prefill_chunk, "merge": plan.merge}
    return _held_to(limits, "rows", most.rows)


def _held_to(limits: dict[str, Any], name: str, most: int | None) -> dict[str, Any]:
    return limits if most is None else limits | {name: min(limits.get(name, most), most)}


def refuse_too_large(config: Config, stages: Sequence[Config] = ()) -> None:
    """Raises UserError for a model that this machine cannot train even on the shortest prompts. Loads nothing.
    `stages`: the settings of each, where they are not those of `config`."""
    shape = _shape(config)
    if shape is not None:
        machine = machine_bytes(working_set=_working_set())
        _refuse(estimate_stages(stages or [config], shape, machine, prompt=1, gpu=on_gpu()))


def plan_memory(
    config: Config, policy: Any, prompts: Iterable[int], note: Callable[[str], None], stages: Sequence[Config] = ()
) -> MemoryPlan | None:
    """The plan for prompts of these lengths in tokens, and MLX's memory limit set to it while `policy` lives.

    `stages`: the settings of each stage, for whose largest the plan is made, where they are not those of `config`.
    `note` is called with a sentence where the memory limit constrains the run. None where the model's sizes are not
    known. Raises UserError where even the smallest plan does not fit.
    """
    shape = _shape(config)
    if shape is None:
        return None
    machine = machine_bytes(mx.get_active_memory(), _working_set())
    needs = estimate_stages(stages or [config], shape, machine, max(prompts, default=0) or None, gpu=on_gpu())
    _refuse(needs)
    if needs.reductions or not needs.fits:
        note(needs.sentence)
    _set_memory_limit(needs, policy)
    return needs.plan


def _refuse(needs: Estimate) -> None:
    """Raise the estimate's fault; a rough one, of an architecture whose sizes are guessed, stops no run."""
    if needs.fault is not None and not needs.rough:
        raise UserError([needs.fault])


def _shape(config: Config) -> ModelShape | None:
    folder = local_folder(config.model)
    return shape_of(Path(folder)) if folder is not None else None


def _set_memory_limit(needs: Estimate, policy: Any) -> None:
    """Keep MLX from allocating further ahead of the device than the plan allows, until `policy` is collected.

    On a CPU MLX prepares operations and their arrays far ahead unless it reaches its memory limit, where it waits
    for the device. Waiting at the bytes that a step needs costs no time. MLX checks the limit late, so a little more
    is in flight all the same. On a GPU the limit is all that the run may use: it has to be kept busy, and freed
    buffers are reused from MLX's cache.
    """
    others = max(
        mx.get_active_memory() - _bytes(policy), 0
    )  # such as a second model: MLX counts every array of the process
    _LIMITS.hold(needs.limit if on_gpu() or needs.rough else needs.needed + others, policy)
    if (working_set := _working_set()) is not None:
        mx.set_wired_limit(min(needs.limit, working_set))


def _bytes(policy: Any) -> int:
    """Bytes of the policy's arrays, and of its reference's, each counted once."""
    models = [model.parameters() for model in (policy.model, policy.reference_model) if model is not None]
    arrays = {id(array): array.nbytes for _, array in tree_flatten([*models, policy.parameters()])}
    return sum(arrays.values())


class _PolicyLimits:
    """MLX's memory limit is the largest of the policies that live, and what it was before any where none does.

    Of several that live, as in a sweep, any may compute next. They are collected in any order: if each restored what
    it had found, a limit could outlive its policy, and every later operation of the process would wait for the
    device.
    """

    def __init__(self) -> None:
        self._before = 0
        self._sizes: dict[object, int] = {}

    def hold(self, size: int, policy: Any) -> None:
        if not self._sizes:
            self._before = mx.set_memory_limit(size)
        key = object()
        self._sizes[key] = size
        mx.set_memory_limit(max(self._sizes.values()))
        weakref.finalize(policy, self._release, key).atexit = False  # at exit the old limit is of no use

    def _release(self, key: object) -> None:
        del self._sizes[key]
        mx.set_memory_limit(max(self._sizes.values(), default=self._before))


_LIMITS = _PolicyLimits()


def _working_set() -> int | None:
    """Bytes that Metal recommends a process to use at most; None where there is no Metal."""
    return int(mx.device_info()["max_recommended_working_set_size"]) if has_metal() else None
