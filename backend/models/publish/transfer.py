"""Bytes on their way to the Hub, counted. huggingface_hub sends them; it tells of them by progress bars only.

It sends a file by one of two ways: to Xet's chunk storage where hf_xet is installed and HF_HUB_DISABLE_XET is not set, else as a Git LFS
object by HTTP. Either way the storage is asked first, and what it has is not sent again.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from huggingface_hub import CommitOperationAdd
from huggingface_hub.utils import _xet_progress_reporting, disable_progress_bars, enable_progress_bars
from huggingface_hub.utils._runtime import is_xet_available

Heard = Callable[[int], None]
"""Receives how many bytes of a file have been sent."""


class CountedFile(io.FileIO):
    """A file that tells how far it has been read. A retry seeks back, and the count goes back with it."""

    def __init__(self, path: Path, heard: Heard) -> None:
        super().__init__(path)
        self._heard = heard

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(-1 if size is None else size)
        self._heard(self.tell())
        return data or b""


class CountedAddition(CommitOperationAdd):
    """A file of a commit. `heard` is told of its bytes as they are sent to the LFS storage."""

    def __init__(self, name: str, path: Path, heard: Heard) -> None:
        self._path, self._heard = path, heard
        super().__init__(path_in_repo=name, path_or_fileobj=path)

    @contextlib.contextmanager
    def as_file(self, with_tqdm: bool = False) -> Iterator[BinaryIO]:
        # with_tqdm marks the reading that sends; without it the library reads a file for its hash or into the commit.
        with CountedFile(self._path, self._heard) if with_tqdm else open(self._path, "rb") as file:
            yield file  # type: ignore[misc]


@contextlib.contextmanager
def xet_progress(heard: Heard) -> Iterator[None]:
    """Within this context the library's uploads to Xet are told to `heard` instead of to progress bars.

    The library makes its reporter by the name that is replaced here, and only where progress bars are on. Where it does not use Xet
    this does nothing.
    """
    if not is_xet_available():
        yield
        return

    class Reporter:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def update_progress(self, group_report: Any, item_reports: dict[Any, Any]) -> None:
            heard(group_report.total_bytes_completed)

        def close(self, *_: Any) -> None: ...

    library_reporter = _xet_progress_reporting.XetUploadProgressReporter
    enable_progress_bars()
    _xet_progress_reporting.XetUploadProgressReporter = Reporter  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        _xet_progress_reporting.XetUploadProgressReporter = library_reporter
        disable_progress_bars()
