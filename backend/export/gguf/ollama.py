"""Ollama as a place that an export goes to: `ollama create` on a finished folder with a GGUF file and a Modelfile."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from backend.export import atomic_folder
from backend.utils.errors import UserError

USUAL_PLACES = ("/usr/local/bin", "/opt/homebrew/bin", "/Applications/Ollama.app/Contents/Resources", "~/.local/bin")
"""Where installers put the program. One that the Finder started sees /usr/bin and /bin alone."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}(:[A-Za-z0-9._-]{1,80})?")
TIMEOUT_S = 3600
MODELFILE = "Modelfile"


@dataclass(frozen=True, slots=True)
class OllamaModel:
    """A model in Ollama's own store. `target` names it on this disk only while it is built."""

    name: str
    target: Path
    workshop: Path
    overwrite: bool

    def check(self) -> None:
        """Raise UserError for a name that Ollama does not take, one that is there, or without a running Ollama."""
        if not NAME.fullmatch(self.name):
            raise UserError(
                "name", f"Ollama takes letters, digits, dots, dashes and underlines as a name, not {self.name!r}."
            )
        listed = _ollama("list").splitlines()[1:]
        names = {line.split()[0].removesuffix(":latest").lower() for line in listed if line.strip()}
        if self.name.removesuffix(":latest").lower() in names and not self.overwrite:
            raise UserError(
                "overwrite", f"Ollama has a model {self.name} already; choose another name, or overwrite it."
            )

    def deliver(self, built: Path) -> str:
        """Raise UserError with Ollama's own words where it refuses the model; it then keeps what it had."""
        _ollama("create", self.name, "-f", str(built / MODELFILE))
        return f"Ollama, as {self.name}"


def ollama_model(name: str, run: Path, overwrite: bool) -> OllamaModel:
    return OllamaModel(name, run / f"ollama-{name.replace(':', '-')}", atomic_folder.nearest_existing(run), overwrite)


def find_ollama() -> str | None:
    """The program, on the PATH or where installers put it."""
    places = os.pathsep.join([os.environ.get("PATH", ""), *(str(Path(place).expanduser()) for place in USUAL_PLACES)])
    return shutil.which("ollama", path=places)


def _ollama(*arguments: str) -> str:
    """What the command prints. Raises UserError where it is missing or fails."""
    program = find_ollama()
    if program is None:
        raise UserError(
            "to",
            "Ollama was not found; install it from https://ollama.com, or export to a folder and run `ollama create` there.",
        )
    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError("to", f"`ollama {arguments[0]}` did not end: {error}.") from None
    if done.returncode:
        # It draws its progress over itself; the last line is the reason.
        said = [line.strip() for line in re.split(r"[\r\n]", done.stderr) if line.strip()]
        raise UserError(
            "to", f"`ollama {arguments[0]}` failed: {(said[-1] if said else 'it gave no reason').rstrip('.')}."
        )
    return done.stdout
