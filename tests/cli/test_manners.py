"""How the command line meets a person: its own verb alone, the nearest word, completion in a shell; and text of others
stays text in a terminal, whichever verb prints it and whatever encoding the terminal has."""

from __future__ import annotations

import io
import json
import os
import shlex
import subprocess
import sys
from itertools import chain
from typing import Any

import pytest
import typer
from rich.table import Table

from backend.__main__ import app
from backend.cli import completions, help_page
from backend.cli.common import json_line, prepare_streams, tell, tell_file
from backend.cli.display import new_console, show_line
from backend.config.config import SETTINGS
from backend.export.exports import FORMATS, TARGETS
from backend.runs.run_folder import make_run_folder
from backend.trainer.trackers.targets import TRACKERS
from backend.utils.places import project_root
from backend.utils.text import visible
from tests.support.cases import cases
from tests.support.verbs import VERBS, call, refused


def test_a_process_has_its_own_verb_alone() -> None:
    """Half of what starting one cost was importing the others."""
    grouped = [verb for modules in help_page.VERBS.values() for verb in modules]
    for verb in grouped:
        known = typer.main.get_command(app(verb))
        assert list(known.commands) == [verb]  # pyright: ignore[reportAttributeAccessIssue]
    program: Any = typer.main.get_command(app())
    assert sorted(program.commands) == sorted(grouped)


def test_examples_are_understood() -> None:
    """Their options and targets exist (one said `--to lm-studio`)."""
    program: Any = typer.main.get_command(VERBS)
    for verb, *words in map(shlex.split, chain.from_iterable(help_page.EXAMPLES.values())):
        context = program.make_context("backend", [verb], resilient_parsing=True)
        options = program.get_command(context, verb).make_context(verb, words, parent=context).params
        assert options.get("to", "folder") in (TRACKERS if verb == "track" else TARGETS), words
        assert verb == "track" or options.get("format") in (None, *FORMATS), words


def test_the_nearest_word_is_suggested() -> None:
    for arguments, words in (("trian x.yaml", "Did you mean 'train'"), ("export x --fromat 4bit", "--format")):
        result = call(*arguments.split())
        assert result.exit_code == 2 and words in result.stderr


@pytest.mark.parametrize("verb", ["check x.yaml", "runs", "where"])
def test_every_verb_refuses_a_hub_without_an_address(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://[::1")
    assert refused(*verb.split()).startswith("HF_ENDPOINT: http://[::1 is no web address;")


def test_runs_are_completed_by_name() -> None:
    for name in ("first", "fine", "second"):
        make_run_folder(name).config.write_text("")
    assert sorted(completions.run_names("fi")) == ["fine", "first"]


@cases(
    ("typed", "offered"),
    [
        ("temp", [f"temperature={SETTINGS['temperature'].default}"]),
        ("train_type=d", ["train_type=dora"]),
        ("fuse=t", ["fuse=true"]),
        ("reward_functions=[r1_count_xml,r1_int", ["reward_functions=[r1_count_xml,r1_int_reward_func]"]),
        ("no_such_key=", []),
        ("temperature=", []),
    ],
)
def test_settings_and_values_are_completed(typed: str, offered: list[str]) -> None:
    assert [word for word, _ in completions.changes(typed)] == offered


def test_a_shell_gets_its_answer_without_the_engine() -> None:
    make_run_folder("only-one").config.write_text("")
    words = {"COMP_WORDS": "grpo-studio-backend resume ", "COMP_CWORD": "2"}
    environment = os.environ | words | {completions.COMPLETE_VARIABLE: "complete_bash"}
    show = "print([m for m in ('mlx', 'numpy') if m in sys.modules])"
    code = f"import sys, backend.__main__ as b\ntry: b.main()\nfinally: {show}"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["only-one", "[]"], done.stderr


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


def test_a_file_is_escaped_in_a_terminal_alone(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    tell_file(HOSTILE)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    tell_file(HOSTILE)
    assert capsys.readouterr().out == HOSTILE + ESCAPED


@pytest.mark.parametrize(("encoding", "ellipsis"), [("utf-8", b"\xe2\x80\xa6"), ("latin-1", b"\\u2026")])
def test_no_encoding_ends_a_verb(encoding: str, ellipsis: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    into = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(into, encoding, errors="strict"))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hi\xff"), "utf-8", errors="strict"))
    prepare_streams()
    tell("\ud800…", flush=True)
    assert into.getvalue() == b"\\ud800" + ellipsis + b"\n" and sys.stdin.read() == "hi\udcff"


def test_no_file_takes_the_place_of_a_closed_stream() -> None:
    """`train c.yaml <&-`: mlx gave the model's file descriptor 0, and could not load it."""
    code = "import os; from backend.cli import common; common.prepare_streams(); print(1); exit(os.open('/', 0) < 3)"
    program = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", code]
    assert subprocess.run(program, cwd=project_root()).returncode == 0


def test_a_line_of_progress_has_its_units_after_the_numbers() -> None:
    console = new_console(file=io.StringIO(), width=80)
    metrics = {"reward": 1.5, "reward_std": 0.2, "time/step": 0.2234, "peak_memory_gb": 3.0}
    metrics["rollout_tokens_per_second"] = 1234.0
    for step in (4, 5):
        show_line(console, 5, {"kind": "step", "step": step, "metrics": metrics})
    held_out = {"reward": 0.5, "rewards/a/mean": 1.0, "mine/reward": 0.25, "mine/rewards/a/mean": 1.0}
    show_line(console, 5, {"kind": "eval", "step": 5, "split": "valid", "metrics": held_out})
    lines = console.file.getvalue().splitlines()  # pyright: ignore
    assert lines == [
        "step 5  reward 1.5  ± std 0.2  KL –  clipped –  length –  1,234 tokens/s  0.223 s/step  3 GB",
        "step 5  held-out reward 0.5 (valid), 0.25 (mine)",
    ]
