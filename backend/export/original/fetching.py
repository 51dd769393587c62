"""Download the original of a base model during an export, told as its progress."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from backend.export.build import Progress
from backend.models import hub_download


def fetch_original(name: str, progress: Progress) -> Path:
    """Download a model from Hugging Face; → its folder. What has arrived is kept when it breaks off. Raises UserError."""
    return hub_download.download(name, "model", _ReportFetching(f"Downloading the original weights, {name}.", progress))


class _ReportFetching:
    """A `hub_download.DownloadListener`: an export is cancelled by ending its process, so there is nothing to check."""

    def __init__(self, sentence: str, progress: Progress) -> None:
        self._sentence, self._progress = sentence, progress

    def report(self, state: dict[str, Any]) -> None:
        self._progress(self._sentence, state["done"] / state["total"] if state["total"] else None)

    def check(self) -> None: ...

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
