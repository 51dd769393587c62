"""The setting `device`, and when freed buffers are given back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from backend.engine import device
from backend.engine.device import CACHE_SHARE, release_cached_buffers
from backend.trainer.preflight import check
from backend.utils.errors import UserError
from backend.utils.machine import TREAT_CPU_AS
from tests.support import small_run


@pytest.fixture(autouse=True)
def _own_device_again() -> Iterator[None]:
    yield
    mx.set_default_device(device.OWN)


def test_cpu_is_used_and_automatic_is_what_mlx_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[object] = []
    monkeypatch.setattr(mx, "set_default_device", chosen.append)
    monkeypatch.setattr(mx, "is_available", lambda kind: True)
    for choice in ("cpu", "gpu", "auto"):
        device.use(choice)
    assert chosen == [mx.cpu, mx.gpu, device.OWN]


def test_a_gpu_that_is_not_there_is_refused_by_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "is_available", lambda kind: kind != mx.gpu)
    with pytest.raises(UserError, match="MLX has no GPU"):
        device.use("gpu")
    faults = check(small_run.settings_for(tmp_path, device="gpu"))
    assert [fault.setting for fault in faults] == ["device"]
    assert not check(small_run.settings_for(tmp_path, device="cpu"))


def _cached() -> int:
    """Bytes in MLX's cache after an array of 1 MB is freed."""
    mx.clear_cache()
    mx.eval(mx.zeros(250_000))
    return mx.get_cache_memory()


@pytest.mark.parametrize(("limit", "kept"), [(1 << 40, True), (1 << 20, False)])
def test_a_gpu_keeps_buffers_until_its_limit_is_near(limit: int, kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TREAT_CPU_AS, "gpu")
    monkeypatch.setattr(mx, "get_memory_limit", lambda: limit)
    cached = _cached()
    assert cached >= 1_000_000 and (mx.get_active_memory() + cached < CACHE_SHARE * limit) == kept
    release_cached_buffers()
    assert mx.get_cache_memory() == (cached if kept else 0)
