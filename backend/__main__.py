"""`python -m backend VERB …`. `help_page.CODES` are its exit codes."""

import importlib
import os
import shutil
import signal
import sys
from pathlib import Path

if (hook := sys.excepthook) is sys.__excepthook__:  # Ctrl-C while the imports below run is no bug
    sys.excepthook = lambda kind, *error: None if kind is KeyboardInterrupt else hook(kind, *error)

import typer

from backend.cli import completions
from backend.cli.common import USER_ERROR, prepare_streams, print_problems
from backend.cli.help_page import MODULES, VERBS, epilog
from backend.engine import cpu_setup
from backend.utils.child_process import CHILD_VERB
from backend.utils.command import BUNDLED_PROGRAM
from backend.utils.errors import UserError

CLOSED_PIPE = 128 + signal.SIGPIPE  # exit code of other programs whose reader has gone, as in `… | head -1`


def version(is_requested: bool) -> None:
    """Print the installed versions and stop."""
    if not is_requested:
        return
    blas_sentence = cpu_setup.load_openblas()
    import mlx.core as mx

    from backend.engine import cpu
    from backend.trainer.telemetry import versions

    numbers = versions()
    print(f"grpo-studio {numbers.pop('grpo-studio')}")
    for name, number in numbers.items():
        print(f"{name} {number}")
    print(f"device {mx.default_device()}")
    print(blas_sentence)
    if compiler_sentence := cpu.check_compiler():
        print(compiler_sentence)
    raise typer.Exit


def app(only: str = "") -> typer.Typer:
    """`only` one of its verbs: the modules of the others take longer to import than most processes need for all."""
    verbs = typer.Typer(
        name="grpo-studio-backend",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        help="GRPO Studio's trainer, without the window.",
        epilog=epilog(),
    )
    for group, names in VERBS.items():
        for name in names:
            if only in ("", name):
                module = importlib.import_module(f"backend.cli.{MODULES.get(name, name)}")
                found = getattr(module, "import_settings" if name == "import" else name)
                if isinstance(found, typer.Typer):
                    verbs.add_typer(found, name=name, rich_help_panel=group)
                else:
                    verbs.command(name, rich_help_panel=group, epilog=epilog(name))(found)

    @verbs.callback(invoke_without_command=True)
    def root(
        context: typer.Context,
        show_version: bool = typer.Option(
            False, "--version", is_eager=True, callback=version, help="Versions, device and BLAS."
        ),
        selftest: bool = typer.Option(False, "--selftest", help="Try everything that training and the window need."),
        report: Path | None = typer.Option(
            None, "--report", metavar="FILE", help="With --selftest: write its report to FILE, as JSON and text."
        ),
    ) -> None:
        """GRPO Studio's trainer, without the window."""
        if selftest or report or context.invoked_subcommand is None:
            from backend.cli.machine import self_test

            raise typer.Exit(self_test(selftest, report, context.invoked_subcommand))

    return verbs


def complete() -> int:
    """Answer a shell, or print or install its script, under the one name that a shell can complete."""
    if completions.COMPLETE_VARIABLE not in os.environ and shutil.which(BUNDLED_PROGRAM) is None:
        needs = f"A shell completes {BUNDLED_PROGRAM}, and no command of that name is on the PATH"
        how = f"install GRPO Studio with pip, or put the folder of the app's own {BUNDLED_PROGRAM} on it"
        print_problems(UserError("completion", f"{needs}: {how}."))
        return USER_ERROR
    return app()(prog_name=BUNDLED_PROGRAM)


def main() -> int | None:
    prepare_streams()
    if sys.argv[1:2] == [CHILD_VERB] and sys.argv[2].startswith("backend."):
        return importlib.import_module(sys.argv[2]).main(sys.argv[3:])
    asks = {"--install-completion", "--show-completion"} & {*sys.argv}
    if asks or completions.COMPLETE_VARIABLE in os.environ:  # before the engine is prepared: a person has pressed Tab
        return complete()
    # mlx binds to the BLAS that is loaded first, so this comes before anything that may import mlx.
    cpu_setup.load_openblas()
    verb = sys.argv[1] if len(sys.argv) > 1 else ""
    try:
        app(verb if any(verb in names for names in VERBS.values()) else "")()
    except SystemExit as end:
        is_pipe_closed = isinstance(end.__context__, BrokenPipeError)  # for which typer ends with 1
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            is_pipe_closed = True
        if not is_pipe_closed:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes once more as it ends
        return CLOSED_PIPE


if __name__ == "__main__":
    sys.exit(main())
