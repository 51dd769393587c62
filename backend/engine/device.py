"""The device of this process. `GRPO_STUDIO_TREAT_CPU_AS=gpu` makes a CPU take a GPU's choices (budgets, row counts, no
x86 stand-ins), but no Metal kernels."""

import platform

import mlx.core as mx

from backend.utils.errors import UserError
from backend.utils.machine import treats_cpu_as_gpu

OWN = mx.default_device()  # mlx's own choice


def use(choice: str) -> None:
    """Set mlx's default device from the setting `device`. Raises UserError if it does not exist."""
    check(choice)
    mx.set_default_device({"auto": OWN, "gpu": mx.gpu, "cpu": mx.cpu}[choice])  # pyright: ignore[reportArgumentType]


def check(choice: str) -> None:
    """Raises UserError for a device that mlx does not have here."""
    if choice == "gpu" and not mx.is_available(mx.gpu):
        raise UserError("device", "MLX has no GPU on this machine; choose Automatic or CPU.")


def on_gpu() -> bool:
    """True if this process makes the choices of a GPU."""
    return treats_cpu_as_gpu() or mx.default_device().type == mx.gpu


def on_cpu() -> bool:
    return not on_gpu()


def on_x86() -> bool:
    return on_cpu() and platform.machine() in ("x86_64", "AMD64")


def has_metal() -> bool:
    """True if Metal kernels run here."""
    return mx.metal.is_available() and mx.default_device().type == mx.gpu


CACHE_SHARE = 0.8  # of MLX's memory limit, for arrays and freed buffers together


def release_cached_buffers() -> None:
    """Between sampling and learning: give freed buffers back, on a GPU only under pressure, where mapping them again
    takes tenths of a second."""
    if on_cpu() or mx.get_active_memory() + mx.get_cache_memory() > CACHE_SHARE * mx.get_memory_limit():
        mx.clear_cache()
