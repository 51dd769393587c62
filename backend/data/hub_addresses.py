"""Which addresses the `datasets` library may open: those of the Hub, and of this disk.

A dataset's README names the files of its splits, and fsspec, which opens them, knows some thirty kinds of address besides: http, ftp, ssh, the
clouds. Opening a stranger's dataset must not contact a machine that the stranger chose.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import fsspec
from fsspec.registry import known_implementations, register_implementation

OPENED = {"hf", "file", "local", "zip", "tar", "dir"}
"""Kinds of address that may be opened; archives lie on the Hub or on this disk themselves."""
REFUSED = "its README names a file outside its own repository"
_NO_CLASS = f"{__name__}.none.Place"
"""A class that cannot be imported: what fsspec cannot import, it does not put among what is loaded, so nothing of this stays."""


class RefusedPlace(fsspec.AbstractFileSystem):
    """In the place of a file system that would contact a machine."""

    cachable = False

    def __init__(self, *_: Any, **__: Any) -> NoReturn:
        raise PermissionError(REFUSED)


class _Registry:
    """fsspec's two tables, of which there is one in a process: classes that are loaded, and names of those that are not yet."""

    def __init__(self) -> None:
        self._lock, self._users = threading.Lock(), 0
        self._loaded: dict[str, Any] = {}
        self._known: dict[str, Any] = {}

    def restrict(self) -> None:
        with self._lock:
            self._users += 1
            if self._users > 1:
                return
            self._loaded = {kind: cls for kind, cls in fsspec.registry.items() if kind not in OPENED}
            self._known = {kind: about for kind, about in known_implementations.items() if kind not in OPENED}
            for kind in self._loaded:
                register_implementation(kind, RefusedPlace, clobber=True)
            known_implementations.update({kind: {"class": _NO_CLASS, "err": REFUSED} for kind in self._known})

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users:
                return
            known_implementations.update(self._known)
            for kind, cls in self._loaded.items():
                register_implementation(kind, cls, clobber=True)


_registry = _Registry()


@contextmanager
def own_addresses_only() -> Iterator[None]:
    """Inside, whatever fsspec is asked to open at an address not of OPENED is refused with REFUSED, in all threads of this process."""
    _registry.restrict()
    try:
        yield
    finally:
        _registry.release()
