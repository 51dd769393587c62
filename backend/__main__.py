"""`python -m backend VERB …`: the trainer's command line. Exit codes: 0 finished, 2 a mistake to mend, 3 stopped, 1 a bug."""

from __future__ import annotations

import sys

import typer

from backend.engine.cpu import blas
from backend.rewards.functions.math_equality import VERB as EQUALITY_VERB
from backend.rewards.sandbox.server import VERB as SCORER_VERB


def version(asked: bool) -> None:
    """Say what is installed and stop."""
    if not asked:
        return
    said = blas.prepare()
    import mlx.core as mx

    from backend.run.telemetry import versions

    for name, number in versions().items():
        print(f"{name} {number}")
    print(f"device {mx.default_device()}")
    print(said)
    raise typer.Exit


def app() -> typer.Typer:
    """The command line as typer knows it."""
    from backend.cli import estimate, look, run, serve

    verbs = typer.Typer(
        name="grpo-studio-backend", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
        help="GRPO Studio's trainer, without the window.",
    )  # fmt: skip
    for function in (
        run.train,
        run.resume,
        run.demo,
        look.check,
        estimate.estimate,
        look.runs,
        look.export,
        serve.serve,
    ):
        verbs.command()(function)
    verbs.add_typer(look.rewards, name="rewards")

    @verbs.callback()
    def root(
        asked: bool = typer.Option(
            False, "--version", is_eager=True, callback=version, help="Versions, device and BLAS."
        ),
    ) -> None:
        """GRPO Studio's trainer, without the window."""

    return verbs


def main() -> None:
    if sys.argv[1:] == [EQUALITY_VERB]:  # a bundled app's helper process, which needs no mlx and no BLAS
        from backend.rewards.functions import math_verify_process

        return math_verify_process.main()
    if sys.argv[1:] == [SCORER_VERB]:  # likewise
        from backend.rewards.sandbox import server

        return server.main()
    # mlx binds to the BLAS that is loaded first, so this comes before anything that may import it.
    blas.prepare()
    app()()


if __name__ == "__main__":
    sys.exit(main())
