"""The verbs `check` and `validate`: report problems of a config file or a model folder without loading weights."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from backend.cli.common import USER_ERROR, AsJson, print_problems, tell, tell_error, tell_json, verb
from backend.config.config import Config
from backend.utils.errors import ConfigProblem, UserError
from backend.utils.files import user_path

if TYPE_CHECKING:
    from backend.data.rows import Rows

Prompts = Annotated[bool, typer.Option("--prompts", help="Say also how varied the prompts are, and how long.")]


@verb
def check(
    config: Annotated[Path, typer.Argument(help="The settings, a YAML file.")],
    as_json: AsJson = False,
    prompts: Prompts = False,
) -> None:
    """List problems and unusual values of settings, model, dataset, columns and rewards; loads no weights.

    For a file of TRL, mlx-lm-lora or mlx-grpo, show how each of its keys is converted.
    """
    from backend.config.config import parse, read
    from backend.config.notes import unusual
    from backend.config.other_programs.translation import account, read_words
    from backend.runs.saved_weights import with_adapter

    faults, report = list[ConfigProblem](), dict[str, Any]()
    try:
        raw = with_adapter(read(config))
        for line in account(read_words(raw)):
            tell(line, file=sys.stderr)
        report = _checked(raw, with_lengths=prompts)
    except UserError as error:
        faults = error.faults
    if as_json:
        listed = [fault.to_dict() for fault in faults]
        tell_json({"faults": listed, "prompts": report} if prompts else listed)
    else:
        print_problems(UserError(faults))
    if faults:
        raise typer.Exit(USER_ERROR)
    if as_json:
        return
    tell("Nothing is wrong with these settings.")
    for remark in unusual(parse(with_adapter(read(config)))):
        tell(f"{remark.setting}: {remark.sentence}")
    if prompts:
        rows, total = report["rows"], report["total"]
        tell(f"Prompts: {rows:,} rows" + ("" if rows == total else f", drawn from {total:,}"))
        for name, value, _ in [("Repeated", f"{report['repeated']:,}", ""), *report["figures"], report["tokens"]]:
            tell(f"  {name:<14} {value}")
        tell(report["verdict"])
    elif report["level"] == "poor":
        tell(f"data: {report['verdict']}")


PERCENTILES = (5, 50, 95)


def _checked(raw: Mapping[str, Any], *, with_lengths: bool) -> dict[str, Any]:
    """The report on the training prompts; `with_lengths` adds `tokens` as (name, value, help). Raises UserError."""
    from backend.config.config import parse
    from backend.data.prompt_variety import prompt_variety
    from backend.runs.start_progress import progress_listener
    from backend.trainer import preflight

    with progress_listener(tell_error):
        inputs = preflight.preflight(raw)
    try:
        splits, config = inputs.splits, parse(raw)
        rows, source = splits.train, splits.source.get("train", config.data)
        report = prompt_variety(rows, config, source).to_dict()
        return report | ({"tokens": _lengths(rows, config, source)} if with_lengths else {})
    finally:  # not before: a map function of streamed rows is called there
        inputs.scorer.close()


def _lengths(rows: Rows, config: Config, source: str) -> tuple[str, str, str]:
    from backend.data.preview import SAMPLE, PromptLengths, preview_order, tokenizer_for

    name, meaning = "Tokens", f"Lengths of up to {SAMPLE:,} prompts: percentiles, and the longest."
    try:
        tokenizer = tokenizer_for(config)
    except UserError as error:
        return name, error.faults[0].sentence, meaning
    lengths = PromptLengths(rows, config, source)
    lengths.measure(list(islice(preview_order(len(rows)), SAMPLE)), tokenizer)
    tokens = sorted(lengths.by_length.elements())
    if not tokens:
        return name, "–", meaning
    shares = ", ".join(
        f"{percent}% up to {tokens[max(0, math.ceil(len(tokens) * percent / 100) - 1)]:,}" for percent in PERCENTILES
    )
    return name, f"{shares}, longest {tokens[-1]:,} (of {lengths.measured:,} rows)", meaning


@verb
def validate(
    folder: Annotated[Path, typer.Argument(help="A folder with a model, of any origin.")], as_json: AsJson = False
) -> None:
    """Find what would keep LM Studio or mlx-lm from opening a model folder; loads no weights."""
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
        raise typer.Exit(USER_ERROR)
    if not as_json:
        tell(f"{folder} is a model that LM Studio and mlx-lm open.")
