"""The memory of a run with stages: that of the stage that needs most, for which the whole run is planned."""

from __future__ import annotations

from collections.abc import Sequence

from backend.spec.config import Config
from backend.spec.memory.estimate import Estimate, estimate
from backend.spec.memory.model_shape import ModelShape
from backend.spec.runs.steering import stage_configs


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
