"""What mlx computes on in this process: the only place that asks, so that a test can answer otherwise.

The environment variable `GRPO_STUDIO_TREAT_CPU_AS=gpu` makes a CPU take the choices of a GPU: budgets, queueing ahead, row counts,
the paths without x86 stand-ins. It changes no kernel: those that only Metal has are asked for by `has_metal`.
"""

from __future__ import annotations

import platform

import mlx.core as mx

from backend.utils.errors import UserError
from backend.utils.machine import treats_cpu_as_gpu

OWN = mx.default_device()
"""What mlx computes on by itself in this process."""


def use(choice: str) -> None:
    """Have mlx compute on what the setting `device` says, from now on. Raises UserError where there is no such device."""
    check(choice)
    mx.set_default_device({"auto": OWN, "gpu": mx.gpu, "cpu": mx.cpu}[choice])  # pyright: ignore[reportArgumentType]


def check(choice: str) -> None:
    """Raise UserError for a device that mlx does not have here."""
    if choice == "gpu" and not mx.is_available(mx.gpu):
        raise UserError("device", "MLX has no GPU on this machine; choose Automatic or CPU.")


def on_gpu() -> bool:
    """Whether this process makes the choices of a GPU."""
    return treats_cpu_as_gpu() or mx.default_device().type == mx.gpu


def on_cpu() -> bool:
    """Whether it makes those of a CPU."""
    return not on_gpu()


def on_x86() -> bool:
    """Whether that is an x86 processor."""
    return on_cpu() and platform.machine() in ("x86_64", "AMD64")


def has_metal() -> bool:
    """Whether Metal kernels run here."""
    return mx.metal.is_available() and mx.default_device().type == mx.gpu
