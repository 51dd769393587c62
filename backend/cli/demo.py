"""The verb `demo`: train the bundled model on the bundled sums, and measure accuracy before and after."""

from __future__ import annotations

import json
import sys
import time
from typing import Annotated

import typer

from backend.cli.exit_codes import verb
from backend.cli.new_run import new_run
from backend.cli.options import Live, NewRunsDir, Stream
from backend.cli.run_session import train_or_exit
from backend.spec.config import read
from backend.spec.places import demo_config, resources


@verb
def demo(
    runs_dir: NewRunsDir = None,
    iters: Annotated[int | None, typer.Option(help="Steps, in place of the preset's.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed, in place of the preset's.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="End with one line of JSON.")] = False,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Make the bundled model and data again, then stop.")
    ] = False,
    stream: Stream = False,
    progress: Live = None,
) -> None:
    """Train the bundled model on the bundled sums, and say how many it gets right before and after."""
    from backend.demo.accuracy import test_accuracy

    if rebuild:
        from backend.demo.build import rebuild as build

        build(resources() / "demo", progress=print)
        return
    start = time.monotonic()
    changes = {key: value for key, value in (("iters", iters), ("seed", seed)) if value is not None}
    run = new_run(read(demo_config()) | changes, runs_dir, None)
    before = test_accuracy(run.settings, None)
    sentences = sys.stderr if as_json else sys.stdout
    print(f"Before: {before:.0%} of the test questions are answered right.", file=sentences, flush=True)
    train_or_exit(run, stream, progress, quiet=as_json)
    after = test_accuracy(run.settings, run.folder)
    print(f"After:  {after:.0%}.", file=sentences, flush=True)
    seconds = round(time.monotonic() - start, 1)
    if as_json:
        print(json.dumps({"run": str(run.folder.path), "before": before, "after": after, "seconds": seconds}))
