"""What a verb says. Text of others stays text in a terminal: a model's answer, a row, the name of a run folder could else move its cursor,
change its title, or turn the order of what stands beside it.
"""

from __future__ import annotations

import json
import re
import sys
from io import TextIOWrapper
from typing import Any, TextIO

from backend.utils.text import visible

_NOT_IN_JSON = re.compile("[\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""What `visible` escapes and JSON does not, and halves of characters, which no terminal or file takes."""


def tell(*values: object, sep: str = " ", end: str = "\n", file: TextIO | None = None, flush: bool = False) -> None:
    """`print`, with control characters and bidirectional controls escaped, as the window shows them."""
    print(visible(sep.join(map(str, values))), end=end, file=file, flush=flush)


def tell_json(value: Any, *, default: Any = None) -> None:
    """One line of JSON on stdout, the same value for whoever parses it and no commands for a terminal."""
    print(json_line(value, default), flush=True)


def json_line(value: Any, default: Any = None) -> str:
    """JSON on one line with the letters of every script as they are. What a terminal would take for a command is escaped, as JSON has it:
    such characters are in JSON inside texts only."""
    text = json.dumps(value, ensure_ascii=False, default=default)
    return _NOT_IN_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def tell_file(text: str) -> None:
    """The content of a file, on stdout: as it is for another program, as `tell` shows it in a terminal."""
    print(visible(text) if sys.stdout.isatty() else text, end="")


def force_utf8() -> None:
    """Have stdout and stderr escape what their encoding has no place for, where they would raise (half a character, an ellipsis in Latin-1), and
    stdin take bytes that are no text."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
    if isinstance(sys.stdin, TextIOWrapper) and sys.stdin.errors == "strict":
        sys.stdin.reconfigure(errors="surrogateescape")  # half characters, which sentences name
