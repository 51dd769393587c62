"""Running Apple's command-line tools: what is run is printed, and a failure is one sentence with the tool's own
words."""

from __future__ import annotations

import subprocess
from pathlib import Path


class ToolFailed(Exception):
    """A tool of Apple's ended with an error; the message is for people."""


def run(*command: str | Path) -> str:
    """Run a command and return its stdout. Raises ToolFailed when it fails or is not there."""
    words = [str(word) for word in command]
    print("+", *words, flush=True)
    try:
        done = subprocess.run(words, capture_output=True, text=True)
    except FileNotFoundError:
        raise ToolFailed(f"{words[0]} was not found; it comes with Xcode's command line tools on a Mac.") from None
    if done.returncode:
        raise ToolFailed(
            f"{words[0]} failed with exit code {done.returncode}:\n{done.stderr.strip() or done.stdout.strip()}"
        )
    return done.stdout
