"""The verb `where`: what is stored where, how large it is, and how to be rid of it."""

from __future__ import annotations

from typing import Annotated

import typer

from backend.cli.exit_codes import verb
from backend.cli.options import AsJson
from backend.cli.output import tell, tell_json
from backend.utils.errors import UserError


@verb
def where(
    remove: Annotated[
        str, typer.Option("--remove", metavar="<settings|kernels>", help="Delete these; without --yes only list them.")
    ] = "",
    yes: Annotated[bool, typer.Option("--yes", help="With --remove: delete, and do not only list.")] = False,
    as_json: AsJson = False,
) -> None:
    """List every folder that GRPO Studio writes to, with sizes; nothing is deleted unless asked for twice."""
    from backend.utils import stored

    if yes and not remove:
        raise UserError("yes", "--yes goes with --remove settings or --remove kernels.")
    if remove:
        files = stored.remove(remove) if yes else stored.removable_files(remove)
        if as_json:
            tell_json({"deleted": yes, "files": [str(path) for path in files]})
            return
        for path in files:
            tell(path)
        done = "Deleted." if yes else f"Would be deleted by: where --remove {remove} --yes"
        tell(done if files else "There is nothing to delete.")
        return
    rows = stored.stored_places()
    if as_json:
        tell_json([row.to_dict() for row in rows])
        return
    for row in rows:
        size = f"{row.bytes / 1e6:,.1f} MB in {row.files:,} files" if row.files else "nothing yet"
        shared = ", shared with other programs" if row.is_shared else ""
        tell(f"{row.title}: {size}{shared}\n    {row.path}\n    {row.remedy}")
