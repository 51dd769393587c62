"""Starting the trackers of a run. They are processes of their own that read what the run writes; the run waits for none of them."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence

from backend.child_process import module_command
from backend.run.trackers.process import VERB
from backend.spec.command import backend_environment
from backend.spec.disk_faults import DiskFault, writing
from backend.spec.places import RunFolder
from backend.spec.private_files import make_private_folder
from backend.spec.trackers import TRACKERS, chosen, missing_fault


def start_trackers(run: RunFolder, report_to: Sequence[str], tell: Callable[[str], None]) -> None:
    """Start a process for each tracker that `report_to` chooses. It ends with the run; one that cannot be started is told and no more."""
    for name in chosen(report_to):
        if fault := missing_fault(name):  # a run that is resumed where the package is no more
            tell(f"{fault.sentence} The run goes on without it.")
            continue
        try:
            _start(run, name)
        except DiskFault as fault:
            tell(f"{name} is not started: {fault.faults[0].sentence}")
        else:
            tell(f"What {name} writes of this run is in {TRACKERS[name].place}.")


def _start(run: RunFolder, name: str) -> None:
    """Raises DiskFault."""
    command = [*module_command("backend.run.trackers.process", VERB), name, str(run.path)]
    with writing(run.trackers):
        make_private_folder(run.trackers)
        with (run.trackers / f"{name}.log").open("ab") as log:
            # A session of its own: neither Ctrl-C in the run's terminal nor the run's end reaches it.
            subprocess.Popen(
                command, cwd=run.trackers, env=backend_environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
