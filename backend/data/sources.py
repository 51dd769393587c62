"""From the name of a dataset (a file, a folder, an id of the Hub) to its rows by split.

What is made of the rows, and which of them a run uses for what, is `backend.data.rows`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from backend.data.files import HEAD_ROWS, Row, first_line, kind_of_path, read_file, read_head
from backend.data.row_views import LazyRows, Rows
from backend.data.streamed_files import stream_file
from backend.spec.faults import Mistake
from backend.spec.model_and_data_names import DATA_SUFFIXES as SUFFIXES
from backend.spec.model_and_data_names import check_data
from backend.spec.user_input.paths import user_path
from backend.spec.user_input.text import shown


@dataclass(frozen=True, slots=True)
class Found:
    """Rows of one split, the file or split that they come from, and about how many there are where only the first were read."""

    rows: Rows
    source: str
    about: int | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """How rows are read: into memory, or left on the disk (`streamed`); of large files, the first rows alone (`head`), as a preview does."""

    streamed: bool = False
    head: bool = False

    def file(self, path: Path) -> Found:
        """The rows of a file. Raises Mistake."""
        if self.head and (part := read_head(path, self.streamed)) is not None:
            return Found(part.rows, str(path), part.about)
        return Found(stream_file(path) if self.streamed else read_file(path), str(path))

    def split(self, dataset: Any, source: str) -> Found:
        """The rows of a split as `datasets` has it, mapped into memory from its files. Raises what `datasets` raises."""
        if self.head and (self.streamed or len(dataset) > HEAD_OF_HUB):
            return Found([dict(row) for row in islice(dataset, HEAD_ROWS)], source, len(dataset))
        return Found(HubRows(dataset) if self.streamed else [dict(row) for row in dataset], source)


HEAD_OF_HUB = 200_000
"""Rows of a split of the Hub that a preview reads in full."""


class HubRows(LazyRows):
    """Rows of a split of the Hub. `datasets` keeps them in a file that is mapped into memory, so that any row is at hand and none is held."""

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset.column_names)
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def row(self, index: int) -> Row:
        """Raises Mistake for a row that `datasets` cannot read."""
        try:
            return dict(self._dataset[index])
        except Exception as error:  # `datasets` raises anything at all
            raise Mistake("data", f"Row {index + 1:,} of the dataset cannot be read: {first_line(error)}") from error


Names = Mapping[str, Sequence[str]]
"""Split → the names that it may have in the dataset, the likeliest first."""
Check = Callable[[Mapping[str, Any], str], None]
"""Called with what there is by split (None where there is none), and the splits that a dataset of the Hub has, "" for a folder. Raises Mistake
for what must be there."""


def find_splits(
    name: str, config_name: str, setting: str, names: Names, reading: Reading, check: Check
) -> dict[str, Found]:
    """The splits of a dataset. A file has one, the first of `names`. Raises Mistake, on `setting` where the dataset cannot be read."""
    path = user_path(name, setting)
    kind = kind_of_path(path, setting)
    if kind == "file":
        return {next(iter(names)): reading.file(path)}
    if kind == "folder":
        return _of_folder(path, names, reading, check)
    return _of_hub(name, config_name, setting, names, reading, check)


def _of_folder(folder: Path, names: Names, reading: Reading, check: Check) -> dict[str, Found]:
    files = {split: split_file(folder, each) for split, each in names.items()}
    check(files, "")
    return {split: reading.file(file) for split, file in files.items() if file}


def split_file(folder: Path, names: Sequence[str]) -> Path | None:
    """The file of a split in a folder, by the first of these names that is there."""
    for name in names:
        for suffix in SUFFIXES:
            path = user_path(name + suffix, "data", folder)
            if kind_of_path(path) == "file":
                return path
    return None


def _of_hub(
    repo: str, config_name: str, setting: str, names: Names, reading: Reading, check: Check
) -> dict[str, Found]:
    """A dataset on Hugging Face through `datasets`. Raises Mistake where it cannot be reached or does not exist."""
    check_data(repo, setting)
    from backend.data import hub_rows

    try:
        dataset = hub_rows.load(repo, config_name or None, setting)
        available = {str(split): split for split in dataset}
        chosen = {split: next((name for name in each if name in available), None) for split, each in names.items()}
        check(chosen, shown(", ".join(available), 60))
        return {
            split: reading.split(dataset[available[name]], f"{repo}, {name}") for split, name in chosen.items() if name
        }
    except Mistake:
        raise
    except Exception as error:  # `datasets` raises anything at all for rows it cannot read
        raise Mistake(setting, f"There is no file or folder {shown(repo, 50)}, and Hugging Face's dataset of that name "
                      f"cannot be loaded: {shown(first_line(error).rstrip('.'), 60)}.") from error  # fmt: skip
