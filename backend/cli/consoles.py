"""Rich tables and progress bars that show user text literally, without markup or control sequences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook
from rich.segment import Segment

from backend.utils.text import visible


def new_console(**options: Any) -> Console:
    """A console without markup and emoji codes that escapes control characters; passes `options` to rich."""
    console = Console(**{"markup": False, "emoji": False, **options})
    console.push_render_hook(_VisibleText())
    return console


class _VisibleText(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Shown(renderable) for renderable in renderables]


class _Shown:
    """Escapes the texts of a renderable and keeps rich's own control segments."""

    def __init__(self, renderable: ConsoleRenderable) -> None:
        self._renderable = renderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for text, style, control in console.render(self._renderable, options):
            yield Segment(text if control else visible(text), style, control)
