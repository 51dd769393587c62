"""Rows that are made when they are asked for: some of other rows, or what the steps make of them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, overload

from backend.data.files import Row
from backend.data.row_steps import CHUNK, RowSteps, Where
from backend.runs.start_progress import telling
from backend.utils.errors import UserError

Rows = Sequence[Row]
"""The rows of a split: a list, or lazy rows. What reads them asks for one at a time, or goes through them once in order."""
INDEX = "I"
"""Type code of a row's number: four bytes, which count to four thousand million."""

STEPPING = "Preparing the rows of"


class LazyRows(Sequence[Row]):
    """Rows that are not in memory. `known` keeps what is costly to compute from all of them, by what that depends on."""

    def __init__(self, columns: Iterable[str] | None = None) -> None:
        """`columns`: every name of a column, in order of appearance; None where only reading all rows would tell."""
        self._names = None if columns is None else list(columns)
        self.known: dict[Any, Any] = {}

    @property
    def columns(self) -> list[str]:
        """Every name of a column, in order of appearance."""
        if self._names is None:
            self._names = list(dict.fromkeys(name for row in self for name in row))
        return self._names

    def without(self, names: Iterable[str]) -> list[str]:
        """Those of the names that no row has as a column. Where that is not known, rows are read until all names are found: mostly one."""
        if self._names is not None:
            return [name for name in names if name not in self._names]
        missing = list(names)
        for row in self if missing else ():
            missing = [name for name in missing if name not in row]
            if not missing:
                break
        return missing

    def row(self, index: int) -> Row:
        """The row of an index that exists."""
        raise NotImplementedError

    def sizes(self) -> Sequence[int] | None:
        """About how large each row is, in any unit; None where that is not known without reading them."""
        return None

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self.row(each) for each in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self.row(index % len(self))


class PickedRows(LazyRows):
    """Those of other rows whose numbers are given."""

    def __init__(self, rows: Rows, numbers: Sequence[int]) -> None:
        super().__init__()
        self._rows, self._numbers = rows, array(INDEX, numbers)

    @property
    def columns(self) -> list[str]:
        """Those of all the rows that these were picked from."""
        return column_names(self._rows)

    def without(self, names: Iterable[str]) -> list[str]:
        return missing_columns(self._rows, names)

    def __len__(self) -> int:
        return len(self._numbers)

    def row(self, index: int) -> Row:
        return self._rows[self._numbers[index]]


class SteppedRows(LazyRows):
    """What the steps make of lazy rows, made anew at every access: only the numbers of the rows that are left are kept."""

    def __init__(self, rows: Rows, steps: RowSteps, where: Where, source: str) -> None:
        """Goes through all rows of `source` once. Raises UserError naming the first row that a step refuses."""
        self._rows, self._steps, self._where = rows, steps, where
        self._numbers = array(INDEX)
        columns: dict[str, None] = {}
        made = applied(rows, steps, where)
        for number, row in telling(made, STEPPING, source, lambda done: done / len(rows)):
            if row is not None:
                self._numbers.append(number)
                columns |= dict.fromkeys(row)
        super().__init__(columns)

    def __len__(self) -> int:
        return len(self._numbers)

    def row(self, index: int) -> Row:
        number = self._numbers[index]
        (row,) = self._steps.apply([self._rows[number]], lambda _: self._where(number))
        if row is None:
            raise UserError(
                "map_function",
                f"The map function kept {self._where(number)} at first and left it out now; it must not depend on chance.",
            )
        return row


def applied(rows: Rows, steps: RowSteps, where: Where) -> Iterator[tuple[int, Row | None]]:
    """(number, what the steps make of the row) of every row, in order. Raises UserError."""
    rest, first = iter(rows), 0
    while chunk := list(islice(rest, CHUNK)):
        made = steps.apply(chunk, lambda index, first=first: where(first + index))
        yield from enumerate(made, first)
        first += len(chunk)


def column_names(rows: Rows) -> list[str]:
    """Every column of the rows, in order of appearance."""
    return rows.columns if isinstance(rows, LazyRows) else list(dict.fromkeys(name for row in rows for name in row))


def missing_columns(rows: Rows, names: Iterable[str]) -> list[str]:
    """Those of the names that no row has as a column."""
    if isinstance(rows, LazyRows):
        return rows.without(names)
    columns = column_names(rows)
    return [name for name in names if name not in columns]
