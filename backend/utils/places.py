"""Folders of this machine: our resources, the runs, the preferences, and LM Studio's models. Opens and makes none."""

import json
import os
import sys
from pathlib import Path

from backend.utils.files import possible_path, user_path

RUNS_VARIABLE = "GRPO_STUDIO_RUNS"  # environment variable that moves the runs folder
PREFS_VARIABLE = "GRPO_STUDIO_PREFS"  # environment variable that moves the window's preferences
BUNDLED = "Bundled "  # beginning of a path inside our resources where it is shown
_CHECKOUT = Path(__file__).resolve().parents[2]


def project_root() -> Path:
    """The folder that holds `backend/` and `resources/`; in a bundled app, where PyInstaller unpacked them."""
    bundled = getattr(sys, "_MEIPASS", None)
    return Path(bundled) if bundled else _CHECKOUT


def resources() -> Path:
    """The folder of files that are not code."""
    return project_root() / "resources"


def demo_folder(part: str) -> Path:
    """The bundled demo's model or data."""
    return resources() / "demo" / part


def demo_config(name: str = "demo") -> Path:
    """The preset of a bundled demo; "demo" is the one that the first launch shows."""
    return resources() / "presets" / f"{name}.yaml"


def path_text(path: str) -> str:
    """A path or an id as it is shown; a path inside our resources begins with BUNDLED."""
    ours = f"{resources()}/"
    return BUNDLED + path.removeprefix(ours) if path.startswith(ours) else path


def runs_folder() -> Path:
    """The default folder of runs: $GRPO_STUDIO_RUNS, else in the application data. Raises UserError for no path."""
    return _named_by(RUNS_VARIABLE) or _data_folder() / "runs"


def preferences_folder() -> Path:
    """The folder of preferences: $GRPO_STUDIO_PREFS, else the application data. Raises UserError for no path."""
    return _named_by(PREFS_VARIABLE) or _data_folder()


def _named_by(variable: str) -> Path | None:
    named = os.environ.get(variable)
    return user_path(named, variable).absolute() if named else None


def _data_folder() -> Path:
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "GRPO Studio"
    return (_named_by("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "grpo-studio"


def lm_studio_home() -> Path:
    """LM Studio's home: the path in its pointer file, else its old cache folder if present, else ~/.lmstudio."""
    try:
        pointer = (Path.home() / ".lmstudio-home-pointer").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        pointer = ""
    if pointer and (named := possible_path(pointer)) is not None:
        return named
    old = Path.home() / ".cache" / "lm-studio"
    return old if old.is_dir() else Path.home() / ".lmstudio"


def lm_studio_models() -> Path:
    """The folder in which LM Studio looks for <publisher>/<model>/files."""
    home = lm_studio_home()
    try:
        settings = json.loads((home / "settings.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        settings = {}
    folder = settings.get("downloadsFolder") if isinstance(settings, dict) else None
    named = possible_path(folder) if isinstance(folder, str) and folder else None
    return home / "models" if named is None else named
