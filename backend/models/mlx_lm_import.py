"""The first import of mlx-lm, where several threads may need it at once."""

from __future__ import annotations

import threading

_first = threading.Lock()


def import_mlx_lm() -> None:
    """Import mlx-lm, waiting for another thread that does. Call before importing a part of it.

    Its package imports its parts. A thread that has begun with a part waits for the package, and the thread that imports the package for that part:
    Python finds the deadlock and raises `_DeadlockError` in one of them.
    """
    with _first:
        import mlx_lm  # noqa: F401  # pyright: ignore[reportUnusedImport]
