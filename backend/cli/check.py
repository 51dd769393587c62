"""The verb `check`: every problem with a config file, without training."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from backend.cli.exit_codes import MISTAKE, print_faults, verb
from backend.cli.options import AsJson
from backend.cli.output import tell, tell_json
from backend.utils.errors import ConfigProblem, UserError

Prompts = Annotated[bool, typer.Option("--prompts", help="Say also how varied the prompts are, and how long.")]


@verb
def check(
    config: Annotated[Path, typer.Argument(help="The settings, a YAML file.")],
    as_json: AsJson = False,
    prompts: Prompts = False,
) -> None:
    """Say every problem with settings, model, dataset, columns and rewards, and what is unusual; loads no weights.

    Of a file for TRL, mlx-lm-lora or mlx-grpo, say what was made of each of its words.
    """
    from backend.config.config import parse, read
    from backend.config.other_programs.translation import account, read_words
    from backend.config.unusual import unusual
    from backend.runs.adapter_source import with_adapter

    faults, report = list[ConfigProblem](), dict[str, Any]()
    try:
        raw = with_adapter(read(config))
        for line in account(read_words(raw)):
            tell(line, file=sys.stderr)
        report = _checked(raw, with_lengths=prompts)
    except UserError as mistake:
        faults = mistake.faults
    if as_json:
        listed = [fault.to_dict() for fault in faults]
        tell_json({"faults": listed, "prompts": report} if prompts else listed)
    else:
        print_faults(UserError(faults))
    if faults:
        raise typer.Exit(MISTAKE)
    if as_json:
        return
    tell("Nothing is wrong with these settings.")
    for remark in unusual(parse(with_adapter(read(config)))):
        tell(f"{remark.setting}: {remark.sentence}")
    if prompts:
        from backend.cli.prompt_report import report_lines

        tell(*report_lines(report), sep="\n")
    elif report["level"] == "poor":
        tell(f"data: {report['verdict']}")


def _checked(raw: Mapping[str, Any], *, with_lengths: bool) -> dict[str, Any]:
    """→ the report on the prompts of the training split. Raises UserError with all faults of the settings and of what they point to."""
    from backend.config.config import parse
    from backend.runs.start_progress import progress_listener
    from backend.trainer import preflight

    with progress_listener(lambda sentence: tell(sentence, file=sys.stderr, flush=True)):
        inputs = preflight.preflight(raw)
    try:
        # It imports what counts tokens, which a refusal does not wait for.
        from backend.cli.prompt_report import prompt_report

        splits, config = inputs.splits, parse(raw)
        return prompt_report(splits.train, config, splits.source.get("train", config.data), with_lengths=with_lengths)
    finally:  # not before: a map function of streamed rows is called there
        inputs.scorer.close()
