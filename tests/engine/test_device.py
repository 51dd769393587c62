"""The setting `device`: what mlx computes on follows it, and a device that is not there is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from backend.engine import device
from backend.trainer.preflight import check
from backend.utils.errors import UserError
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
