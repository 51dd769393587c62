"""Rich's tables and bars, with text of others as text (`backend.cli.common` is about plain lines): no markup, and no commands to a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook
from rich.segment import Segment

from backend.utils.text import visible


def new_console(**options: Any) -> Console:
    """A console that shows control characters escaped and takes no text for markup or for the name of an emoji; `options` are rich's."""
    console = Console(**{"markup": False, "emoji": False, **options})
    console.push_render_hook(_VisibleText())
    return console


class _VisibleText(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Shown(renderable) for renderable in renderables]


class _Shown:
    """What rich renders, with its texts made visible; rich's own commands to the terminal are segments that say so."""

    def __init__(self, renderable: ConsoleRenderable) -> None:
        self._renderable = renderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for text, style, control in console.render(self._renderable, options):
            yield Segment(text if control else visible(text), style, control)
