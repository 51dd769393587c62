"""mlx-lm's choices on Metal, made on any machine, with stand-ins for its kernels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import deepseek_v41, gated_delta, kimi_k3, rwkv7

FILES = (gated_delta, kimi_k3, rwkv7, deepseek_v41)


class KernelWithoutGradientError(AssertionError):
    """A kernel was taken that training cannot differentiate."""


def take_metal_s_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test ends."""
    metal = vars(mx) | {"default_device": lambda: mx.gpu, "metal": SimpleNamespace(is_available=lambda: True)}
    for file in FILES:
        monkeypatch.setattr(file, "mx", SimpleNamespace(**metal))

    def other_numbers(q: mx.array, *arrays: Any) -> tuple[mx.array, mx.array]:
        out, state = gated_delta.gated_delta_ops(q, *arrays)
        return 1.01 * out, state

    def no_gradient(*args: Any, **more: Any) -> None:
        raise KernelWithoutGradientError

    monkeypatch.setattr(gated_delta, "gated_delta_kernel", other_numbers)
    for file, kernel in ((kimi_k3, "_attn_res_kernel"), (deepseek_v41, "_sinkhorn_kernel"), (rwkv7, "_wkv7_kernel")):
        monkeypatch.setattr(file, kernel, no_gradient)
