"""The verb `sessions`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from backend.cli.common import USER_ERROR, AsJson, tell, tell_error, tell_json, verb


@verb
def sessions(
    folder: Annotated[Path, typer.Argument(help="The folder that endpoint --record has filled.")],
    group_size: Annotated[int | None, typer.Option(min=2, help="Sessions of a row; default: the usual number.")] = None,
    without_reward: Annotated[bool, typer.Option(help="Take sessions without a posted reward too.")] = False,
    as_json: AsJson = False,
) -> None:
    """List recorded sessions, and write them as train.jsonl into their folder, for data: FOLDER."""
    from backend.cli.display import format_number
    from backend.endpoint.sessions import ROWS, write_rows
    from backend.utils.text import quote

    found = write_rows(folder, group_size, without_reward=without_reward)
    if as_json:
        tell_json(found)
    else:
        tell(f"sessions: {found['sessions']:,}, requests: {found['requests']:,}")
        for group in found["groups"]:
            rewards = "  ".join(map(format_number, group["rewards"]))
            tell(
                f"{quote(group['group'], 40)}  {group['model']}  sessions: {len(group['rewards'])}  rewards: {rewards}"
            )
        if found["in_parts"]:
            parts = f"several parts, of which the last is taken: {found['in_parts']:,}"
            tell(f"{parts} (a request that does not continue an earlier one starts a part)")
        for reason, count in found["left_out"].items():
            tell(f"left out: {count:,} ({reason})")
        tell(f"{folder / ROWS}: {found['rows']:,} rows with group_size {found['group_size']}")
    if not found["rows"]:
        tell_error("sessions: No group is whole, so there is nothing to train on.")
        raise typer.Exit(USER_ERROR)
