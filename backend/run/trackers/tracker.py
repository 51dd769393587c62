"""What a tracker has to be, and what it is told about the run as a whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from backend.run.trackers.records import Sent, StepRecord
from backend.spec.run_folder import RunFolder


@dataclass(frozen=True, slots=True)
class AboutRun:
    """`settings` are those of the run without paths of this machine; `may_upload`: the user has allowed the network."""

    folder: RunFolder
    project: str
    name: str
    settings: dict[str, Any]
    may_upload: bool = False


class Tracker(Protocol):
    """One run in one tracker. Its methods may raise anything and take as long as they do: the run does not wait for them."""

    def open(self, about: AboutRun) -> Sent:
        """Begin, or go on with what an earlier process has sent. → how far that was; whoever writes everything anew returns `Sent()`.

        Called again where the diary was cut back. Raises Mistake for what a user can mend.
        """
        ...

    def send(self, record: StepRecord) -> None:
        """Take one record, of which nothing was sent yet."""
        ...

    def flush(self, sent: Sent) -> None:
        """After the records that there are for now; `sent` includes them. Raises DiskFault, and is called again then."""
        ...

    def close(self, ending: str) -> None:
        """The run is over: finished, stopped, failed, or "" where it was cut off."""
        ...
