"""Tables of text cells, for a terminal or as Markdown; `number` formats to three significant digits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextTable:
    """The first `words` columns hold words, aligned left; the others hold numbers, aligned right."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1

    def show(self) -> None:
        from rich.console import Console
        from rich.table import Table as Rich

        table = Rich(title=self.title, title_justify="left")
        for i, name in enumerate(self.columns):
            table.add_column(name, justify="left" if i < self.words else "right", min_width=12 if i < self.words else 6)
        for row in self.rows:
            table.add_row(*row)
        narrow = Console()
        (narrow if narrow.is_terminal else Console(width=160)).print(table)

    def markdown(self) -> str:
        rule = ["---" if i < self.words else "---:" for i in range(len(self.columns))]
        lines = [_line(self.columns), _line(rule), *map(_line, self.rows)]
        return f"**{self.title}**\n\n" + "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def number(x: float | None) -> str:
    """Three significant digits and no exponent; a dash for None."""
    if x is None:
        return "–"
    if abs(x) >= 100:
        return f"{x:.0f}"
    return f"{x:.3g}"
