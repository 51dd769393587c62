"""Whole steps of a run that two machines share, over links of a given rate: what the diary says of its sums and its waiting."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from backend.bench.network.links import NamedMachine, machines_on_a_switch
from backend.spec.events import read_events
from backend.spec.places import demo_config
from backend.spec.run_folder import RunFolder

ROOT = Path(__file__).resolve().parents[3]
STEPS, WARM_UP = 12, 4
TIMEOUT_S = 300.0
RATES = (8e6, 1e8, 1e9)
METRICS = ("time/step", "time/gradient_sum", "waiting_share")

SSH = """#!/bin/sh
# In place of ssh: options, a name of a machine, a command.
while :; do case "$1" in -T) shift;; -o) shift 2;; *) break;; esac; done
namespace=$1; shift
exec ip netns exec "$namespace" sh -c "$*"
"""


def measure_steps(bits_per_second: float) -> dict[str, Any]:
    """Medians of a step of the demo on two machines, with the rate of their link. Raises RuntimeError where the run fails."""
    with machines_on_a_switch(2, bits_per_second) as machines, tempfile.TemporaryDirectory() as folder:
        run = _train(machines, Path(folder))
        steps = [event["metrics"] for event in read_events(run.events) if event["kind"] == "step"][WARM_UP:]
    found = {name: float(f"{statistics.median(step[name] for step in steps):.4g}") for name in METRICS}
    return {
        "bits_per_second": bits_per_second,
        "steps": len(steps),
        "least/gradient_sum": min(step["time/gradient_sum"] for step in steps),
    } | found


def _train(machines: Sequence[NamedMachine], folder: Path) -> RunFolder:
    (folder / "bin").mkdir()
    ssh = folder / "bin" / "ssh"
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    hosts = folder / "hosts.json"
    hosts.write_text(json.dumps([{"ssh": machine.namespace, "ips": [machine.address]} for machine in machines]))
    changes = ("iters", STEPS), ("save_every", 1000), ("steps_per_eval", 0), ("fuse", "false")
    words = [word for key, value in changes for word in ("--set", f"{key}={value}")]
    command = [sys.executable, "-P", "-m", "backend", "train", str(demo_config()), "--hosts", str(hosts)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": f"{ssh.parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        machines[0].command([*command, "--runs-dir", str(folder), "--name", "run", *words]),
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"The run ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
    return RunFolder(folder / "run")
