"""Going back within a run to one of its checkpoints: what came after it is taken back, so that the next resume begins there.

The later checkpoints are deleted, newest first; the diary and the completions are cut back when the run is opened, as after a kill. A
process that is killed between leaves a run whose newest checkpoint is an older one, with its diary whole. Changes of settings at later
steps stay in changes.json, and hold at their steps again.
"""

from __future__ import annotations

import os

from backend.run.checkpoints.checkpoint_integrity import examine
from backend.spec.diary_ends import first_and_last_events
from backend.spec.faults import Mistake
from backend.spec.run_folder import RunFolder
from backend.spec.run_lock import hold_lock
from backend.spec.runs.saved_weights import find_checkpoint, saved_weights
from backend.spec.whole_file import remove_folder


def last_step(run: RunFolder) -> int:
    """The newest step that the diary or a checkpoint has; 0 before the first."""
    _, last = first_and_last_events(run.events)
    steps = [event.get("step") or 0 for event in last if event["kind"] == "step"]
    return max([0, *steps, *(saved.step for saved in saved_weights(run))])


def go_back(run: RunFolder, which: str) -> str:
    """Take back every step after the checkpoint `which` ("best", "last" or a step). → a sentence for the diary. Raises Mistake where there
    is no such checkpoint, it is damaged, or another process trains the run."""
    lock = hold_lock(run)
    try:
        chosen, last = find_checkpoint(run, which), last_step(run)
        if why := examine(run, chosen.path):
            raise Mistake("step", f"The checkpoint of step {chosen.step} cannot be used: {why}.")
        for saved in reversed(saved_weights(run)):
            if saved.step > chosen.step:
                remove_folder(saved.path)
    finally:
        os.close(lock)
    return f"The run was taken back from step {last} to its checkpoint of step {chosen.step}, and goes on from there."
