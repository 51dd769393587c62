"""Shell completions: names of runs, checkpoints, and changes for `--set`. Loads no engine."""

from typing import Annotated

import typer

COMPLETE_VARIABLE = "_GRPO_STUDIO_BACKEND_COMPLETE"  # typer derives it from the program's name


def run_names(incomplete: str) -> list[str]:
    """Names of the runs in the default folder, newest first."""
    from backend.runs.run_folder import all_runs

    return [run.name for run in all_runs() if run.name.startswith(incomplete)]


def checkpoints(incomplete: str) -> list[str]:
    """Named checkpoints; steps are not completed, since the run is unknown here."""
    return [word for word in ("best", "last") if word.startswith(incomplete)]


def changes(incomplete: str) -> list[tuple[str, str]]:
    """(`key=default`, help text that zsh and fish show) of every setting."""
    from backend.config.config import SETTINGS

    def default(value: object) -> str:
        """As `--set` reads it; empty for None and for texts with spaces."""
        text = "" if value is None or isinstance(value, (list, dict, tuple)) else str(value)
        text = text.lower() if isinstance(value, bool) else text
        return "" if any(character.isspace() for character in text) else text

    named = ((name, about) for name, about in SETTINGS.items() if name.startswith(incomplete))
    return [(f"{name}={default(about.default)}", about.label) for name, about in named]


RunName = Annotated[str, typer.Argument(help="A run folder, or the name of a run.", autocompletion=run_names)]
RunOrModel = Annotated[
    str, typer.Argument(metavar="RUN|MODEL", help="A run, or a model's folder or id.", autocompletion=run_names)
]
Changes = Annotated[
    list[str] | None, typer.Option("--set", help="key=value, over the other settings.", autocompletion=changes)
]
