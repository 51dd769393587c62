"""What is made of each row before it is a prompt: the user's map function, then the prompt template, then the answer pattern.

A step makes a new row and leaves the dataset's own as it was; the map function and the answer pattern may leave a row out. Which rows there are
is `backend.data.rows`'s, how one becomes a chat `backend.data.problems`'s.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from backend.config.row_settings import template_columns
from backend.config.setting_groups import DatasetSettings
from backend.data.files import Row
from backend.utils.errors import UserError
from backend.utils.text import quote

MATCH_S = 1.0
"""Seconds that the answer pattern may take on one answer: some patterns take exponential time."""
CHUNK = 256
"""Rows that are handed to the map function at once."""

MapRows = Callable[[str, Sequence[Row], Callable[[int], str]], Sequence[Row | None]]
"""(name of a map function, rows, what sentences call the i-th of them) → one row for each, None to leave it out. Raises UserError."""
Where = Callable[[int], str]
"""What sentences call the i-th row."""


@dataclass(frozen=True, slots=True)
class RowSteps:
    """The steps of one dataset. False where there are none."""

    map_function: str
    template: str
    pattern: str
    prompt_column: str
    answer_column: str
    map_rows: MapRows | None

    @classmethod
    def of(cls, config: DatasetSettings, map_rows: MapRows | None) -> RowSteps:
        """`map_rows` calls map functions; without it `map_function` is left undone, for previews of code that may not run."""
        return cls(
            map_function=config.map_function if map_rows is not None else "",
            template=config.prompt_template,
            pattern=config.answer_pattern,
            prompt_column=config.prompt_feature,
            answer_column=config.answer_feature,
            map_rows=map_rows,
        )

    def __bool__(self) -> bool:
        return bool(self.map_function or self.template or self.pattern)

    def apply(self, rows: Sequence[Row], where: Where) -> list[Row | None]:
        """One row for each, None for those that are left out. Raises UserError naming the row."""
        mapped: Sequence[Row | None] = rows
        if self.map_function:
            assert self.map_rows is not None
            mapped = self.map_rows(self.map_function, rows, where)
        return [None if row is None else self._with_texts(row, where, index) for index, row in enumerate(mapped)]

    def _with_texts(self, row: Row, where: Where, index: int) -> Row | None:
        # The template sees the row as it was: a pattern that cuts the answer must not change what a prompt says of it.
        changed = dict(row)
        if self.template:
            changed[self.prompt_column] = fill_template(self.template, row, lambda: where(index))
        if self.pattern:
            answer = find_answer(self.pattern, row.get(self.answer_column), lambda: where(index))
            if answer is None:
                return None
            changed[self.answer_column] = answer
        return changed

    def left_out_words(self) -> str:
        """Why rows are left out, as the end of a sentence."""
        reasons = (
            [f"the map function {quote(self.map_function, 40)} returned None for them"] if self.map_function else []
        )
        if self.pattern:
            reasons.append("the answer pattern matches nothing in their answers")
        return ", or ".join(reasons)


def fill_template(template: str, row: Row, where: Callable[[], str]) -> str:
    """The template with the row's cells in its places. Raises UserError for a column that the row lacks, or that is no text or number."""
    cells: dict[str, str] = {}
    for column in template_columns(template):
        if column not in row:
            there = quote(", ".join(row), 50)
            raise UserError(
                "prompt_template",
                f"The prompt template names {quote(column, 24)}, which {where()} does not have; it has {there}.",
            )
        cell = row[column]
        if isinstance(cell, (list, dict, bytes)):
            raise UserError(
                "prompt_template",
                f"The prompt template names {quote(column, 24)}, which is neither text nor a number in {where()}.",
            )
        cells[column] = "" if cell is None else str(cell)
    return _filled(template, cells)


def _filled(template: str, cells: dict[str, str]) -> str:
    parts = string.Formatter().parse(template)
    return "".join(text + (cells[column] if column is not None else "") for text, column, _, _ in parts)


def find_answer(pattern: str, answer: Any, where: Callable[[], str]) -> str | None:
    """What the pattern's group matches in an answer, without white space around it; None where it matches nothing. Raises UserError."""
    import regex

    if answer is None:
        return None
    try:
        found = regex.search(pattern, str(answer), timeout=MATCH_S)
    except TimeoutError:
        raise UserError(
            "answer_pattern",
            f"The answer pattern takes more than {MATCH_S:g} s on the answer of {where()}; write a simpler one.",
        ) from None
    except regex.error as error:  # Python's own re took it, see `backend.config.row_settings`
        raise UserError("answer_pattern", f"The answer pattern is no regular expression: {quote(error, 80)}.") from None
    return None if found is None or found[1] is None else found[1].strip()
