"""Room for a run: its plan from what its model and this machine are, and MLX told to stay within it.

The sums are `backend.spec.memory.estimate`'s; here are the model's folder, the run's prompts and the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from backend.models.inventory import folder_of
from backend.spec.config import Config
from backend.spec.faults import Mistake
from backend.spec.memory.estimate import Estimate, MemoryPlan, estimate, machine_bytes
from backend.spec.memory.model_shape import ModelShape, shape_of


@dataclass(frozen=True, slots=True)
class PlannedMemory:
    """What learner and rollout are told; nothing where the model's sizes are not known."""

    plan: MemoryPlan | None

    @property
    def learner(self) -> dict[str, Any]:
        if self.plan is None:
            return {}
        plan = self.plan
        return {"micro_batch_tokens": plan.micro_batch_tokens, "chunk": plan.chunk, "recompute": plan.recompute}

    @property
    def rollout(self) -> dict[str, Any]:
        if self.plan is None:
            return {}
        return {"rows": self.plan.rows, "prefill_chunk": self.plan.prefill_chunk, "merge": self.plan.merge}


def refuse_too_large(config: Config) -> None:
    """Before anything is loaded: raises Mistake for a model that cannot be trained here even on the shortest prompts."""
    shape = _shape(config)
    if shape is not None:
        _refuse(estimate(config, shape, machine_bytes(), prompt=1, gpu=_on_gpu()))


def plan_memory(config: Config, policy: Any, prompts: Iterable[int], note: Callable[[str], None]) -> PlannedMemory:
    """The plan for prompts of these lengths; `note` is told what the memory has constrained. While `policy` lives MLX does
    not run further ahead of the device than the plan has room for. Raises Mistake where even the smallest does not fit."""
    shape = _shape(config)
    if shape is None:
        return PlannedMemory(None)
    machine = machine_bytes(held=mx.get_active_memory())
    found = estimate(config, shape, machine, max(prompts, default=0) or None, gpu=_on_gpu())
    _refuse(found)
    if found.reductions or not found.fits:
        note(found.sentence)
    _hold(found, policy)
    return PlannedMemory(found.plan)


def _refuse(found: Estimate) -> None:
    """A rough guess refuses nobody."""
    if found.fault is not None and not found.rough:
        raise Mistake([found.fault])


def _shape(config: Config) -> ModelShape | None:
    folder = folder_of(config.model)
    return shape_of(Path(folder)) if folder is not None else None


def _on_gpu() -> bool:
    return mx.default_device().type == mx.gpu


def _hold(found: Estimate, policy: Any) -> None:
    """MLX prepares operations, and their arrays, far ahead of the device unless its memory runs out; told how much a step
    needs it waits there, which costs no time. It notices late: a little is in flight all the same. A GPU has everything that
    the run may use: it wants to be kept busy, and keeps freed arrays to use again."""
    size = found.limit if _on_gpu() or found.rough else found.needed
    before = mx.set_memory_limit(size)
    weakref.finalize(policy, mx.set_memory_limit, before).atexit = False
    if mx.metal.is_available():
        most = int(mx.device_info()["max_recommended_working_set_size"])
        mx.set_wired_limit(min(found.limit, most))
