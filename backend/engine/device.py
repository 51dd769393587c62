"""The device of this process. Only this module asks mlx, so that a test can answer otherwise.

The environment variable `GRPO_STUDIO_TREAT_CPU_AS=gpu` makes a CPU take the choices of a GPU: budgets, queueing ahead,
row counts, the paths without x86 stand-ins. It changes no kernel: those that only Metal has are asked for by
`has_metal`.
"""

from __future__ import annotations

import platform

import mlx.core as mx

from backend.utils.errors import UserError
from backend.utils.machine import treats_cpu_as_gpu

OWN = mx.default_device()
"""mlx's own choice in this process."""


def use(choice: str) -> None:
    """Have mlx compute on what the setting `device` says, from now on. Raises UserError where there is no such
    device."""
    check(choice)
    mx.set_default_device({"auto": OWN, "gpu": mx.gpu, "cpu": mx.cpu}[choice])  # pyright: ignore[reportArgumentType]


def check(choice: str) -> None:
    """Raise UserError for a device that mlx does not have here."""
    if choice == "gpu" and not mx.is_available(mx.gpu):
        raise UserError("device", "MLX has no GPU on this machine; choose Automatic or CPU.")


def on_gpu() -> bool:
    """True if this process makes the choices of a GPU."""
    return treats_cpu_as_gpu() or mx.default_device().type == mx.gpu


def on_cpu() -> bool:
    """True if it makes those of a CPU."""
    return not on_gpu()


def on_x86() -> bool:
    """True if that is an x86 processor."""
    return on_cpu() and platform.machine() in ("x86_64", "AMD64")


def has_metal() -> bool:
    """True if Metal kernels run here."""
    return mx.metal.is_available() and mx.default_device().type == mx.gpu


CACHE_SHARE = 0.8
"""Share of MLX's memory limit that arrays and freed buffers may take together before the buffers are given back."""


def release_cached_buffers() -> None:
    """Between sampling and learning, which allocate buffers of different sizes: give freed buffers back to the system,
    on a GPU only under pressure.

    A GPU's buffers are zeroed and mapped again when the next step allocates them, which takes tenths of a second for
    some gigabytes, and MLX itself frees old ones before it exceeds its limit. On a CPU allocating costs nothing to
    speak of, and memory that is kept is taken from other programs.
    """
    if on_cpu() or mx.get_active_memory() + mx.get_cache_memory() > CACHE_SHARE * mx.get_memory_limit():
        mx.clear_cache()
