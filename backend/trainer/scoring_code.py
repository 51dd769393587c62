"""Whether a run that is resumed scores with the same reward files as before: somebody may have mended one meanwhile, or by mistake.

The SHA-256 of each file stands in the event log's `started`, by the file's name: a run's folder and its files may have been moved together.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from backend.config.config import Config
from backend.rewards.catalogue.allowed_code import code_files, read_code
from backend.runs.events import LONGEST_LINE, parse_line
from backend.runs.run_folder import RunFolder
from backend.utils.errors import UserError
from backend.utils.regular_file import open_regular
from backend.utils.text import quote

Fingerprints = Mapping[str, str]
"""Name of a reward file → SHA-256 of its contents."""


def fingerprints(config: Config) -> Fingerprints:
    """Those of the files that these settings name; of one that cannot be read there is none."""
    found: dict[str, str] = {}
    for path in code_files(config.model_dump()):
        with suppress(UserError):
            found[path.name] = read_code(path).fingerprint
    return found


def change_since(run: RunFolder, now: Fingerprints, step: int) -> str:
    """A sentence where a file is not as it was when the event log's last process began; "" otherwise. `step`: the last one that is kept."""
    before = _recorded(run) if now and step else {}
    changed = [name for name, fingerprint in now.items() if before.get(name, fingerprint) != fingerprint]
    if not changed:
        return ""
    names, are = quote(", ".join(changed), 60), "has" if len(changed) == 1 else "have"
    return (
        f"{names} {are} changed since this run was trained last: the steps up to {step} were scored with what was there before, those from "
        f"{step + 1} on with what is there now."
    )


def _recorded(run: RunFolder) -> Fingerprints:
    """What the last `started` says that has any."""
    last: Fingerprints = {}
    with suppress(OSError), open_regular(run.events) as event_log:
        while line := event_log.readline(LONGEST_LINE):
            # Most lines are steps, which need not be parsed for this.
            if b'"started"' in line and (event := parse_line(line)) is not None and event["kind"] == "started":
                last = event.get("reward_files") or last
    return last
