"""`export RUN --to trl`: the settings of a run, or of a file, as a folder that trains with TRL."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from backend.cli.output import tell, tell_json
from backend.config.config import Config, load, read
from backend.export.export_choices import settings_of
from backend.rewards.catalogue.allowed_code import require_allowed
from backend.runs.run_folder import find_run
from backend.utils.errors import UserError
from backend.utils.files import is_file, user_path


def export_settings(
    run: str,
    runs_dir: Path | None,
    name: str | None,
    folder: Path | None,
    about_weights: Mapping[str, Any],
    *,
    overwrite: bool,
    allow_code: bool,
    as_json: bool,
    report: Callable[[str], None],
) -> None:
    """Write the folder; what is not carried over goes to stderr, its place to stdout. `about_weights`: options that have no use here, with
    what was given. Raises UserError for one that was given, and for a run's reward file that was never allowed here: the folder carries it to a
    machine on which nothing confines it."""
    from backend.export.trl.folder import export_trl

    if given := next((option for option, value in about_weights.items() if value), ""):
        raise UserError(given, f"--{given} is about weights, and --to trl takes the settings of a run; leave it out.")
    config, own_name = _settings(run, runs_dir, allow_code=allow_code)
    exported = export_trl(config, name or f"{own_name}-trl", folder, overwrite=overwrite, tell=report)
    if as_json:
        tell_json(exported.to_dict())
        return
    for sentence in exported.sentences() or ["Every setting is carried over."]:
        tell(sentence, file=sys.stderr)
    if exported.by_files:
        tell("README.md there lists what its files do beside TRL's arguments.", file=sys.stderr)
    tell(exported.path)


def _settings(run: str, runs_dir: Path | None, *, allow_code: bool) -> tuple[Config, str]:
    """(the settings of a run, or of a YAML file, and what it is called). To name a file is a choice; a run may be somebody else's."""
    path = user_path(run, "run")
    if path.suffix.lower() in (".yaml", ".yml", ".json") and is_file(path):
        return load(path), path.stem
    folder = find_run(run, runs_dir)
    require_allowed(read(folder.config), allow=allow_code)
    return settings_of(folder), folder.name
