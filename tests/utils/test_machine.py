"""What is known of the machine without mlx, as on a Mac and as here."""

from __future__ import annotations

import sys

import pytest

from backend.utils import machine

GIB = 1 << 30


@pytest.fixture
def as_on_a_mac(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(machine, "sysctl", lambda name: b"")
    return monkeypatch


def test_a_mac_gives_a_share_of_its_memory_and_no_more_than_metal_recommends(as_on_a_mac: pytest.MonkeyPatch) -> None:
    """The working sets that Metal reports: 5.3 GiB of 8, 10.7 of 16, 48 of 64."""
    given: dict[int, int] = {}
    for size in (8, 16, 64):
        as_on_a_mac.setattr(machine, "_physical", lambda size=size: size * GIB)
        given[size] = machine.machine_bytes() + machine.PROCESS_BYTES
    assert given == {8: 8 * GIB * 2 // 3, 16: 16 * GIB * 2 // 3, 64: 48 * GIB}
    assert machine.machine_bytes(working_set=20 * GIB) == 20 * GIB - machine.PROCESS_BYTES
    assert machine.machine_bytes(working_set=60 * GIB) == 48 * GIB - machine.PROCESS_BYTES


def test_a_working_set_that_the_user_has_raised_counts(as_on_a_mac: pytest.MonkeyPatch) -> None:
    values = {"iogpu.wired_limit_mb": (14336).to_bytes(8, sys.byteorder), "machdep.cpu.brand_string": b"Apple M5 Max\0"}
    as_on_a_mac.setattr(machine, "sysctl", lambda name: values[name])
    assert machine.working_set_of(16 * GIB) == 14 * GIB
    machine.chip.cache_clear()
    assert machine.chip() == "Apple M5 Max"
    machine.chip.cache_clear()


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac's memory is shared otherwise")
def test_on_linux_what_the_run_holds_already_counts_as_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_available", lambda: 10 * GIB)
    more = machine.machine_bytes(held=4 * GIB) - machine.machine_bytes()
    assert more == 3 * GIB, "three quarters of it"
    assert machine.machine_bytes() == int(7.5 * GIB) - machine.PROCESS_BYTES
