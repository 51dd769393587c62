"""How the command line meets a person: help by groups, a short first line of --version, the nearest word, completion in
a shell."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from typing import Any

import pytest
import typer

from backend.__main__ import app
from backend.cli import completions, help_page
from backend.config.config import SETTINGS
from backend.export.exports import FORMATS, TARGETS
from backend.runs.run_folder import make_run_folder
from backend.trainer.trackers.targets import TRACKERS
from tests.support.verbs import VERBS, call, refused


def test_a_process_has_its_own_verb_alone() -> None:
    """Half of what starting one cost was importing the others."""
    grouped = [verb for modules in help_page.VERBS.values() for verb in modules]
    for verb in grouped:
        known = typer.main.get_command(app(verb))
        assert list(known.commands) == [verb]  # pyright: ignore[reportAttributeAccessIssue]
    assert sorted(typer.main.get_command(app()).commands) == sorted(grouped)  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("line", sorted({line for lines in help_page.EXAMPLES.values() for line in lines}))
def test_examples_are_understood(line: str) -> None:
    """Their options and targets exist (one said `--to lm-studio`)."""
    verb, *words = shlex.split(line)
    program: Any = typer.main.get_command(VERBS)
    context = program.make_context("backend", [verb], resilient_parsing=True)
    options = program.get_command(context, verb).make_context(verb, words, parent=context).params
    assert options.get("to", "folder") in (TRACKERS if verb == "track" else TARGETS)
    assert verb == "track" or options.get("format") in (None, *FORMATS)


def test_the_nearest_word_is_suggested() -> None:
    for arguments, words in (("trian x.yaml", "Did you mean 'train'"), ("export x --fromat 4bit", "--format")):
        result = call(*arguments.split())
        assert result.exit_code == 2 and words in result.stderr


@pytest.mark.parametrize("verb", ["check x.yaml", "runs", "where"])
def test_every_verb_refuses_a_hub_without_an_address(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://[::1")
    assert refused(*verb.split()).startswith("HF_ENDPOINT: http://[::1 is no web address;")


# ── completion ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_runs_are_completed_by_name() -> None:
    for name in ("first", "fine", "second"):
        make_run_folder(name).config.write_text("")
    assert sorted(completions.run_names("fi")) == ["fine", "first"]


@pytest.mark.parametrize(
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
    code = (
        "import sys, backend.__main__ as b\n"
        "try: b.main()\n"
        "finally: print([m for m in ('mlx', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["only-one", "[]"], done.stderr
