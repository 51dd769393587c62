"""The verbs `hub login`, `hub logout` and `hub whoami`, with the token in the system keychain."""

from __future__ import annotations

import getpass
import sys
from dataclasses import asdict
from typing import Annotated

import typer

from backend.cli.common import AsJson, tell, tell_error, tell_json, verb

hub = typer.Typer(no_args_is_help=True, help="Your account at Hugging Face.")


@hub.command()
@verb
def login(
    from_stdin: Annotated[bool, typer.Option("--from-stdin", help="Read the token from standard input.")] = False,
) -> None:
    """Store a token with write access in the system keychain; the prompt does not echo it."""
    from backend.export.hub_upload import TOKENS_PAGE, log_in

    if from_stdin:
        token = sys.stdin.readline()
    else:
        tell_error(f"Make a token with write access at {TOKENS_PAGE}.")
        token = getpass.getpass("Token: ")
    account = log_in(token)
    tell(f"Logged in as {account.name}; the token is in the keychain.")
    if not account.can_write:
        tell_error("It may only read, so uploads will be refused.")


@hub.command()
@verb
def logout() -> None:
    """Delete the token from the keychain. A token stored by `hf auth login` stays."""
    from backend.export.hub_upload import find_token, log_out

    tell("Logged out." if log_out() else "There was no token in the keychain.")
    if left := find_token():
        tell_error(f"A token of {left.source} is still found.")


@hub.command()
@verb
def whoami(as_json: AsJson = False) -> None:
    """Show the account that uploads use, and the source of its token."""
    from backend.export.hub_upload import need_token, whose

    account = whose(need_token())
    if as_json:
        tell_json(asdict(account))
        return
    also = f", also of {', '.join(account.organisations)}" if account.organisations else ""
    tell(f"{account.name}{also} (token from {account.source}{'' if account.can_write else ', may only read'})")
