"""The machine and the versions that a device file states. Nothing of the machine's user, and not its host name."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version

import mlx.core as mx
import psutil

from backend.bench.schema import Machine
from backend.engine.device import has_metal, on_gpu
from backend.trainer.memory.estimate import GB
from backend.utils.machine import processor


def this_machine() -> Machine:
    macos, working_set = platform.mac_ver()[0], working_set_bytes()
    return Machine(
        chip=str(mx.device_info()["device_name"]) if on_gpu() else processor(),
        cores=os.cpu_count() or 1,
        memory_gb=round(psutil.virtual_memory().total / GB, 1),
        working_set_gb=working_set / GB if working_set else None,
        system=f"macOS {macos}" if macos else platform.system(),
        computes_on="gpu" if on_gpu() else "cpu",
    )


def working_set_bytes() -> int | None:
    """What Metal recommends a process to use at most; None without Metal."""
    return int(mx.device_info()["max_recommended_working_set_size"]) if has_metal() else None


def versions() -> dict[str, str]:
    ours = {name: version(name) for name in ("grpo-studio", "mlx", "mlx-lm")}
    return ours | {"Python": platform.python_version()}
