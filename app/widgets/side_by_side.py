"""One prompt with the completions before and after training, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from PySide6.QtWidgets import QFrame

from app import theme
from app.widgets.basic.controls import ElidedLabel
from app.widgets.basic.labels import button, label, plain_tip
from app.widgets.basic.layout import column, row, splitter
from app.widgets.basic.number_format import finite
from app.widgets.completion_detail import CompletionPane
from app.widgets.completion_table import one_line
from app.widgets.pictures import PictureStrip
from backend.runs.completion_rows import images_of

TITLES = {"base": "Base", "tuned": "Tuned", "model": "Model"}


class SideBySide(QFrame):
    def __init__(self) -> None:
        super().__init__()
        self.setProperty("role", "card")
        self._sides: dict[str, Sequence[Mapping[str, Any]]] = {}
        self._number = 0
        self.prompt, self.answer = ElidedLabel(font=theme.mono_font()), label(font=theme.mono_font(), role="muted")
        before, after = "The previous completion", "The next completion"
        self.earlier = button("‹", lambda: self.go(-1), tip=before, name=before)
        self.later = button("›", lambda: self.go(1), tip=after, name=after)
        self.which = label(font=theme.figures_font(), role="muted")
        self.panes, self.pictures = (CompletionPane("Base"), CompletionPane("Tuned")), PictureStrip()
        head = row((self.prompt, 1), self.answer, self.earlier, self.which, self.later)
        body = column(head, (splitter(*self.panes, gap=2 * theme.SPACE, sizes=(1, 1)), 1))
        row(self.pictures, (body, 1), into=self, spacing=12, margins=(12, 10, 12, 12))

    def set_rewards(self, names: Sequence[str], labels: Sequence[str]) -> None:
        for pane in self.panes:
            pane.set_rewards(names, labels)

    def show_row(self, row: Mapping[str, Any] | None, sides: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Show the completions of `row` by side, the pair whose rewards differ most first; None shows nothing."""
        self._sides, self._number = dict(sides), 0
        if len(sides) > 1:
            pairs = zip(*list(sides.values())[:2], strict=False)
            rewards = [(finite(a.get("reward")), finite(b.get("reward"))) for a, b in pairs]
            gaps = [abs(b - a) if a is not None and b is not None else 0.0 for a, b in rewards]
            self._number = gaps.index(max(gaps)) if gaps else 0
        prompt, answer = (str((row or {}).get(key) or "") for key in ("prompt", "answer"))
        self.prompt.setText(one_line(prompt) if prompt else "")
        self.prompt.setToolTip(plain_tip(prompt))
        self.answer.setText(f"answer {one_line(answer)[:60]}" if answer else "")
        self.pictures.show_pictures(images_of(row or {}))
        self._show()

    def go(self, by: int) -> None:
        self._number += by
        self._show()

    def _show(self) -> None:
        count = max(map(len, self._sides.values()), default=0)
        for part in (self.earlier, self.which, self.later):
            part.setVisible(count > 1)
        self.which.setText(f"{self._number + 1} of {count}")
        self.earlier.setEnabled(self._number > 0)
        self.later.setEnabled(self._number < count - 1)
        shown = list(self._sides.items())
        for pane, (side, completions) in zip(self.panes, shown, strict=False):
            pane.set_title(TITLES.get(side, side))
            pane.show_completion(completions[self._number] if self._number < len(completions) else None)
            pane.show()
        for pane in self.panes[len(shown) :]:
            pane.show_completion(None)
            pane.setVisible(not shown)
