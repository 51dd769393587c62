"""The verb `demo`: train the bundled model on the bundled sums, and measure accuracy before and after."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from backend.cli.common import Live, NewRunsDir, Stream, ignore_sighup, tell, tell_json, verb
from backend.cli.training import PreparedRun, new_run, train_or_exit
from backend.config.config import load, read
from backend.runs.run_folder import find_run
from backend.trainer.machine import relax_gpu_timeout
from backend.utils.places import demo_config, resources


@verb
@ignore_sighup
def demo(
    runs_dir: NewRunsDir = None,
    iters: Annotated[int | None, typer.Option(help="Steps, in place of the preset's.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed, in place of the preset's.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="End with one line of JSON.")] = False,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Make the bundled model and data again.")] = False,
    run: Annotated[Path | None, typer.Option("--run", hidden=True, help="Go on with this run of the demo.")] = None,
    stream: Stream = False,
    progress: Live = None,
) -> None:
    """Train the bundled model on bundled sums, and measure its accuracy before and after."""
    if rebuild:
        from backend.demo import rebuild as build

        build(resources() / "demo", progress=print)
        return
    start = time.monotonic()
    changes = {key: value for key, value in (("iters", iters), ("seed", seed)) if value is not None}
    if run:  # after a GPU error ended the previous process
        folder = find_run(run)
        demo_run = PreparedRun(folder, load(folder.config))
        relax_gpu_timeout(demo_run.settings)
    else:
        demo_run = new_run(read(demo_config()) | changes, runs_dir, None)
    from backend.demo import test_accuracy

    before = test_accuracy(demo_run.settings, None)
    sentences = sys.stderr if as_json else sys.stdout
    tell(f"Before: {before:.0%} of the test questions are answered right.", file=sentences, flush=True)
    go_on_with = ["demo", "--run", str(demo_run.folder.path), *(["--json"] if as_json else [])]
    train_or_exit(demo_run, stream, progress, quiet=as_json, go_on_with=go_on_with)
    after = test_accuracy(demo_run.settings, demo_run.folder)
    tell(f"After:  {after:.0%}.", file=sentences, flush=True)
    seconds = round(time.monotonic() - start, 1)
    if as_json:
        tell_json({"run": str(demo_run.folder.path), "before": before, "after": after, "seconds": seconds})
