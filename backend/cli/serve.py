"""The verb `serve`: the warm process that answers the window's questions."""

from __future__ import annotations

from backend.cli.exit_codes import verb


@verb
def serve() -> None:
    """Answer the window's questions, JSON lines on stdin and stdout, until stdin ends."""
    from backend.serve.loop import run

    run()
