"""When freed buffers are given back to the system."""

from __future__ import annotations

import mlx.core as mx
import pytest

from backend.engine.memory import CACHE_SHARE, release_cached_buffers
from backend.utils.machine import TREAT_CPU_AS


def _cached() -> int:
    """Bytes in MLX's cache after an array of 1 MB is freed."""
    mx.clear_cache()
    mx.eval(mx.zeros(250_000))
    return mx.get_cache_memory()


@pytest.mark.parametrize(("limit", "kept"), [(1 << 40, True), (1 << 20, False)])
def test_a_gpu_keeps_freed_buffers_until_its_limit_is_near(
    limit: int, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TREAT_CPU_AS, "gpu")
    monkeypatch.setattr(mx, "get_memory_limit", lambda: limit)
    cached = _cached()
    assert cached >= 1_000_000 and (mx.get_active_memory() + cached < CACHE_SHARE * limit) == kept
    release_cached_buffers()
    assert mx.get_cache_memory() == (cached if kept else 0)


def test_a_cpu_gives_them_back_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TREAT_CPU_AS, raising=False)
    assert _cached() >= 1_000_000
    release_cached_buffers()
    assert mx.get_cache_memory() == 0
