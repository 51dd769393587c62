"""Files of ours beside a run that were broken by hand: each reader says which, why, and what to do, in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from backend.runs.events import check_format
from backend.runs.queue import QueueFile
from backend.runs.run_folder import RunFolder
from backend.runs.run_record import read_notes, read_parent
from backend.runs.steering import read_changes
from backend.runs.sweep_results import SweepFolder, read_results
from backend.utils.errors import UserError

READERS: dict[str, tuple[Callable[[Path], Path], Callable[[Path], Any]]] = {
    "about": (lambda folder: RunFolder(folder).about, lambda folder: read_notes(RunFolder(folder))),
    "changes": (lambda folder: RunFolder(folder).changes, lambda folder: read_changes(RunFolder(folder))),
    "parent": (lambda folder: RunFolder(folder).parent, lambda folder: read_parent(RunFolder(folder))),
    "queue": (lambda folder: QueueFile(folder).path, lambda folder: QueueFile(folder).read()),
    "results": (lambda folder: SweepFolder(folder).results, lambda folder: read_results(SweepFolder(folder))),
}
"""Which file of a folder, and what reads it."""
STRANGE = '{"changes": [{"step": 1, "settings": {"' + "x" * 500 + '": [1, 2]}}], "title": 3, "runs": 3}'
BROKEN = ['{"a": [1, 2', "{1: 2}", "[]", STRANGE, "3"]


@pytest.mark.parametrize("broken", BROKEN, ids=range(len(BROKEN)))
@pytest.mark.parametrize("name", READERS)
def test_a_broken_file_is_named_with_what_to_do_however_long_its_path(tmp_path: Path, name: str, broken: str) -> None:
    folder = tmp_path / ("a long name of a folder " * 5).strip() / ("and another one " * 8).strip()
    folder.mkdir(parents=True)
    file, read = READERS[name]
    file(folder).write_text(broken)
    with pytest.raises(UserError) as mistake:
        read(folder)
    (fault,) = mistake.value.faults
    assert file(folder).name in fault.sentence and "fix or delete" in fault.sentence.lower(), fault.sentence
    assert len(fault.sentence) <= 200, fault.sentence


def test_a_file_without_end_is_not_read_to_its_end(tmp_path: Path) -> None:
    """Whether a run is of a newer version is asked before anything of it is checked."""
    run = RunFolder(tmp_path)
    with run.changes.open("wb") as file:
        file.truncate(1 << 40)  # of holes
    check_format(run)
