"""Where a run goes on from a checkpoint, its event log and completions end with that checkpoint's step, although
somebody has edited them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from backend.runs.checkpoint import TrainingState
from backend.runs.events import TAIL_BYTES, read_events
from backend.runs.run_folder import RunFolder
from backend.trainer.run_process import cut_back


def lines_of_step(step: int) -> bytes:
    """A step and what follows it: far more than is read of an event log's end at once."""
    phase = b'{"kind": "phase", "phase": "rollout", "done": 1, "of": 2}\n'
    return b'{"kind": "step", "step": %d, "metrics": {}}\n' % step + phase * (2 * TAIL_BYTES // len(phase))


@pytest.mark.parametrize("step, edit, is_by_lines", [
    (2, lambda event_log: event_log, False),
    (3, lambda event_log: event_log[:-1] + b"x", True),  # as long as before, but no line ends there
    # moved up, so that step 3 lies at the recorded length
    (2, lambda event_log: event_log.replace(lines_of_step(1), b""), True),
], ids=["unchanged", "as long as before", "an earlier step is missing"])  # fmt: skip
def test_a_event_log_is_cut_by_its_lines_where_the_recorded_length_no_longer_fits(
    step: int, edit: Callable[[bytes], bytes], is_by_lines: bool, tmp_path: Path
) -> None:
    run, event_log = RunFolder(tmp_path), b"".join(map(lines_of_step, (1, 2, 3)))
    run.events.write_bytes(edit(event_log))
    sentence = cut_back(run, TrainingState(step=step, events_bytes=step * len(lines_of_step(1))))
    assert bool(sentence) == is_by_lines
    steps = [event["step"] for event in read_events(run.events) if event["kind"] == "step"]
    assert steps[-1] == step and run.events.read_bytes().endswith(b"\n")


def test_what_follows_a_step_stays_with_it_up_to_its_saving(tmp_path: Path) -> None:
    """An evaluation belongs to the step before it; the sampling after its checkpoint to the next one, which comes
    again."""
    kept = [
        '"kind": "step", "step": 2',
        '"kind": "eval", "step": 2',
        '"kind": "note"',
        '"kind": "phase", "phase": "saving"',
    ]
    later = ['"kind": "phase", "phase": "sampling"', '"kind": "checkpoint", "step": 2', '"kind": "step", "step": 3']
    run, (head, tail) = RunFolder(tmp_path), ("".join(f"{{{line}}}\n" for line in lines) for lines in (kept, later))
    run.events.write_text(head + tail)
    assert cut_back(run, TrainingState(step=2, events_bytes=len(head) + 5))
    assert run.events.read_text() == head


@pytest.mark.parametrize(
    "steps, kept", [([1, 1, 2, 2, 3], 5), ([3, 3], 0)], ids=["up to the step", "later steps alone"]
)
def test_completions_are_cut_after_the_last_row_of_the_step(steps: list[int], kept: int, tmp_path: Path) -> None:
    """The second line is no row."""
    run, lines = RunFolder(tmp_path), [json.dumps({"step": step, "completions": []}) + "\n" for step in steps]
    lines.insert(1, "edited by hand\n")
    run.events.write_text('{"kind": "step", "step": 2}\n')
    run.completions.write_text("".join(lines))
    state = TrainingState(step=2, events_bytes=len(run.events.read_bytes()), completions_bytes=len(lines[0]) + 3)
    assert "by their lines" in cut_back(run, state)
    assert run.completions.read_text() == "".join(lines[:kept])
