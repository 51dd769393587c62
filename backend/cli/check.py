"""The verb `check`: every problem with a config file, without training."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from backend.cli.exit_codes import MISTAKE, print_faults, verb
from backend.cli.options import AsJson
from backend.spec.faults import Mistake


@verb
def check(config: Annotated[Path, typer.Argument(help="The settings, a YAML file.")], as_json: AsJson = False) -> None:
    """Say every problem with settings, model, dataset, columns and rewards, and what is unusual; loads no weights.

    Of a file for TRL, mlx-lm-lora or mlx-grpo, say what was made of each of its words.
    """
    from backend.run import preflight
    from backend.spec.config import parse, read
    from backend.spec.other_programs.account import account
    from backend.spec.other_programs.translation import read_words
    from backend.spec.runs.adapter_source import with_adapter
    from backend.spec.unusual import unusual

    try:
        raw = with_adapter(read(config))
        for line in account(read_words(raw)):
            print(line, file=sys.stderr)
        faults = preflight.check(raw)
    except Mistake as mistake:
        faults = mistake.faults
    if as_json:
        print(json.dumps([fault.to_dict() for fault in faults], ensure_ascii=False))
    else:
        print_faults(Mistake(faults))
    if faults:
        raise typer.Exit(MISTAKE)
    if not as_json:
        print("Nothing is wrong with these settings.")
        for remark in unusual(parse(with_adapter(read(config)))):
            print(f"{remark.setting}: {remark.sentence}")
