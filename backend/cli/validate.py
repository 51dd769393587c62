"""The verb `validate`: whether LM Studio and mlx-lm open a model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from backend.cli.exit_codes import MISTAKE, verb
from backend.cli.options import AsJson
from backend.cli.output import tell, tell_json
from backend.utils.files import user_path


@verb
def validate(
    folder: Annotated[Path, typer.Argument(help="A folder with a model, of any origin.")], as_json: AsJson = False
) -> None:
    """Say what keeps LM Studio or mlx-lm from opening a model folder; reads headers, loads no weights."""
    from backend.export import lm_studio_rules

    folder = user_path(str(folder), "folder")
    faults, warnings = lm_studio_rules.faults(folder), lm_studio_rules.warnings(folder)
    if as_json:
        found = {"faults": faults, "warnings": warnings}
        tell_json({key: [fault.to_dict() for fault in rows] for key, rows in found.items()})
    else:
        for fault in [*faults, *warnings]:
            tell(fault)
    if faults:
        raise typer.Exit(MISTAKE)
    if not as_json:
        tell(f"{folder} is a model that LM Studio and mlx-lm open.")
