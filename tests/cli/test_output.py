"""What verbs say: text of others stays text in a terminal, whichever verb prints it and whatever encoding the terminal
has."""

from __future__ import annotations

import io
import json
import sys

import pytest
from rich.table import Table

from backend.cli.common import force_utf8, json_line, tell, tell_file
from backend.cli.display import new_console, show_line
from backend.utils.text import visible

HOSTILE = "a\x1b]0;title\x07\x9b31m\u202eb\r\x7f"
"""It would name the terminal's window, colour what follows, turn its order, and overwrite its line."""
ESCAPED = r"a\x1b]0;title\x07\x9b31m\u202eb\r\x7f"
KEPT = "naïve\tשלום\u200d🙂\n"
"""The modules of backend/cli that this is about themselves, and two streams that take what others print."""


def test_plain_lines_show_commands_to_a_terminal_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    tell(KEPT, HOSTILE, sep="", end="")
    assert capsys.readouterr().out == KEPT + ESCAPED


def test_json_is_the_same_value_and_holds_no_command() -> None:
    value = {HOSTILE: [KEPT, HOSTILE, "\ud800", "\u2066", 1.5, None]}
    line = json_line(value)
    assert json.loads(line) == value
    assert visible(line) == line and "\n" not in line and "שלום" in line
    line.encode()


def test_tables_and_lines_of_rich_take_no_markup_and_no_commands() -> None:
    console = new_console(file=io.StringIO(), width=80, force_terminal=True)
    table = Table(HOSTILE)
    table.add_row(f"[/bold]{HOSTILE} :bomb:")
    console.print(table)
    console.print(f"[/red]{HOSTILE}", style="bold", highlight=False)
    written = console.file.getvalue()  # pyright: ignore
    assert written.count("]0;title") == 3 == written.count(r"\x1b]0;title"), "the title's command is text each time"
    assert "[/bold]" in written and "[/red]" in written and ":bomb:" in written
    assert "\x1b[1m" in written, "rich's own style"
    assert not {"\x07", "\x9b", "\u202e", "\x7f"} & set(written)


def test_a_file_is_escaped_in_a_terminal_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tell_file(HOSTILE)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    tell_file(HOSTILE)
    assert capsys.readouterr().out == HOSTILE + ESCAPED


@pytest.mark.parametrize(("encoding", "ellipsis"), [("utf-8", b"\xe2\x80\xa6"), ("latin-1", b"\\u2026")])
def test_no_encoding_ends_a_verb(encoding: str, ellipsis: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    into = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(into, encoding, errors="strict"))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hi\xff"), "utf-8", errors="strict"))
    force_utf8()
    tell("\ud800…", flush=True)
    assert into.getvalue() == b"\\ud800" + ellipsis + b"\n" and sys.stdin.read() == "hi\udcff"


def test_a_line_of_progress_has_its_units_after_the_numbers() -> None:
    console = new_console(file=io.StringIO(), width=80)
    metrics = {"reward": 1.5, "reward_std": 0.2, "time/step": 0.2234, "peak_memory_gb": 3.0}
    metrics["rollout_tokens_per_second"] = 1234.0
    for step in (4, 5):
        show_line(console, 5, {"kind": "step", "step": step, "metrics": metrics})
    line = console.file.getvalue()  # pyright: ignore
    assert line == "step 5  reward 1.5  ± std 0.2  KL –  clipped –  length –  1,234 tokens/s  0.223 s/step  3 GB\n"
