"""The lock under which tests that measure seconds have the machine to themselves."""

from __future__ import annotations

import time
from pathlib import Path
from threading import Event, Thread

from tests.support.exclusive_lock import MachineLock


def holder(folder: Path, *, exclusive: bool) -> tuple[Event, Event]:
    """A thread that acquires the lock: (set once it has it, set it to have it released)."""
    acquired, release = Event(), Event()

    def hold() -> None:
        with MachineLock(folder).held(exclusive=exclusive):
            acquired.set()
            release.wait(20)

    Thread(target=hold, daemon=True).start()
    return acquired, release


def test_an_exclusive_holder_waits_for_all_and_blocks_later_ones(tmp_path: Path) -> None:
    shared = [holder(tmp_path, exclusive=False) for _ in range(2)]
    assert all(acquired.wait(10) for acquired, _ in shared)
    exclusive, end = holder(tmp_path, exclusive=True)
    time.sleep(0.1)  # until it waits in the queue
    late, end_late = holder(tmp_path, exclusive=False)
    assert not exclusive.wait(0.1)
    assert not late.wait(0.1), "a shared holder must not overtake a waiting exclusive one"
    for _, release in shared:
        release.set()
    assert exclusive.wait(10) and not late.wait(0.1)
    end.set()
    assert late.wait(10)
    end_late.set()


def test_a_single_process_locks_nothing() -> None:
    with MachineLock(None).held(exclusive=True), MachineLock(None).held(exclusive=True):
        pass
