"""The lock under which tests that measure seconds have the machine to themselves."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from tests.support.exclusive_lock import MachineLock


class Holder:
    """Acquires the lock in a thread of its own and holds it until `release`."""

    def __init__(self, folder: Path, *, exclusive: bool) -> None:
        self.acquired, self._release, self._lock = threading.Event(), threading.Event(), MachineLock(folder)
        self._thread = threading.Thread(target=self._hold, args=(exclusive,), daemon=True)
        self._thread.start()

    def _hold(self, exclusive: bool) -> None:
        with self._lock.held(exclusive=exclusive):
            self.acquired.set()
            self._release.wait(20)

    def release(self) -> None:
        self._release.set()
        self._thread.join(20)


def test_shared_holders_overlap_and_an_exclusive_one_waits_for_all_and_blocks_later_ones(tmp_path: Path) -> None:
    shared = [Holder(tmp_path, exclusive=False) for _ in range(2)]
    assert all(holder.acquired.wait(10) for holder in shared)
    exclusive = Holder(tmp_path, exclusive=True)
    time.sleep(0.1)  # until it waits in the queue
    late = Holder(tmp_path, exclusive=False)
    assert not exclusive.acquired.wait(0.1)
    assert not late.acquired.wait(0.1), "a shared holder must not overtake a waiting exclusive one"
    for holder in shared:
        holder.release()
    assert exclusive.acquired.wait(10) and not late.acquired.wait(0.1)
    exclusive.release()
    assert late.acquired.wait(10)
    late.release()


def test_a_single_process_locks_nothing() -> None:
    with MachineLock(None).held(exclusive=True), MachineLock(None).held(exclusive=True):
        pass
