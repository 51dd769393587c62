"""The verb `doctor`: what the health rules find in a run, from its first step to its newest."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from backend.cli.exit_codes import verb
from backend.cli.options import AsJson, ExistingRunsDir
from backend.cli.output import tell, tell_json

if TYPE_CHECKING:
    from backend.trainer.health.watch import Episode, Examination


@verb
def doctor(
    run: Annotated[str, typer.Argument(help="A run folder, or the name of a run.")],
    runs_dir: ExistingRunsDir = None,
    as_json: AsJson = False,
) -> None:
    """Say what went wrong in a run, at which steps, against which limits, and what to do about it."""
    from backend.runs.run_folder import find_run
    from backend.trainer.health.watch import examine

    examination = examine(find_run(run, runs_dir))
    if as_json:
        tell_json(examination.to_dict())
    else:
        tell(report(examination))


def report(examination: Examination) -> str:
    """The examination as lines of text."""
    from backend.trainer.health.rules import RULES

    counts = f"{examination.steps:,} {'step' if examination.steps == 1 else 'steps'}, {examination.evaluations:,} evaluations"
    lines = [
        f"{examination.run}: {examination.state}, {counts}.",
        *([examination.sentence] if examination.sentence else []),
    ]
    if not examination.steps:
        return "\n".join([*lines, "There is no finished step to look at."])
    for episode in examination.episodes:
        lines += ["", *_lines(episode)]
    if not examination.episodes:
        looked_at = [RULES[code].title for code in examination.looked_at]
        lines += ["", f"Nothing found. Looked at: {'; '.join(looked_at)}." if looked_at else "Nothing found."]
    if examination.too_short:
        waiting = (f"{RULES[code].title} ({needs} steps)" for code, needs in examination.too_short.items())
        lines += ["", f"Not looked at, because the run is too short for it: {'; '.join(waiting)}."]
    if examination.not_measured:
        missing = (f"{RULES[code].title} ({metric})" for code, metric in examination.not_measured.items())
        lines += ["", f"Not looked at, because the run did not measure it: {'; '.join(missing)}."]
    return "\n".join(lines)


def _lines(episode: Episode) -> list[str]:
    when = f"since step {episode.since:,}" if episode.until is None else f"steps {episode.since:,} to {episode.until:,}"
    proposal = " ".join(f"--set {key}={json.dumps(value)}" if not isinstance(value, float) else f"--set {key}={value:g}"
                        for key, value in episode.settings.items() if key != "system_prompt")  # fmt: skip
    return [
        f"{episode.title} ({episode.level}, {when})",
        f"    {episode.sentence}",
        f"    {episode.advice}",
        *([f"    Proposed: {proposal}"] if proposal else []),
    ]
