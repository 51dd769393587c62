"""Event logs that real runs of the demo's model wrote, healthy and sick, in `tests/golden/diaries/NAME.jsonl.gz`."""

import gzip
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from backend.runs.events import Event, well_formed
from backend.runs.run_folder import RunFolder
from backend.trainer.health.watch import Watch

FOLDER = Path(__file__).parents[1] / "golden" / "diaries"


@dataclass(frozen=True, slots=True)
class Recording:
    """One recorded run."""

    name: str
    story: str
    settings: dict[str, Any]
    signs: list[str]
    events: list[Event]
    constructed: str = ""
    tail: str = ""

    def unpack(self, folder: Path) -> RunFolder:
        """Write it as a run folder: config.yaml and events.jsonl, with what the rules of today find in it."""
        folder.mkdir(parents=True)
        run = RunFolder(folder)
        run.config.write_text(yaml.safe_dump(self.settings), encoding="utf-8")
        lines = "".join(json.dumps(event, ensure_ascii=False) + "\n" for event in self.with_health())
        run.events.write_text(lines + self.tail, encoding="utf-8")
        return run

    def with_health(self) -> list[Event]:
        """The events as a trainer with the rules of today would have written them."""
        watch, events = Watch(self.settings), []
        for event in self.events:
            events.append(event)
            events += [{"v": 1, "t": event["t"], "kind": "health", **fields} for fields in watch.take(event)]
        return [event | {"seq": number} for number, event in enumerate(events)]

    def save(self) -> Path:
        header = asdict(self)
        del header["events"]
        path = FOLDER / f"{self.name}.jsonl.gz"
        lines = [json.dumps(value, ensure_ascii=False) for value in (header, *self.events)]
        # mtime=0: the same events give the same bytes.
        path.write_bytes(gzip.compress("\n".join([*lines, ""]).encode(), 9, mtime=0))
        return path


def names() -> Sequence[str]:
    """The names of all recordings, sorted."""
    return sorted(path.name.removesuffix(".jsonl.gz") for path in FOLDER.glob("*.jsonl.gz"))


@cache
def recording(name: str) -> Recording:
    lines = gzip.decompress((FOLDER / f"{name}.jsonl.gz").read_bytes()).decode().splitlines()
    header, *events = map(json.loads, lines)
    return Recording(**header, events=[well_formed(event) for event in events])
