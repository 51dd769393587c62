"""How the command line meets a person: help by groups, a short first line of --version, the nearest word, completion in
a shell."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from backend.__main__ import app
from backend.cli import completions, help_page
from backend.config.config import SETTINGS
from backend.export.exports import FORMATS, TARGETS
from backend.runs.run_folder import make_run_folder
from backend.trainer.trackers.targets import TRACKERS

VERBS = app()


def call(*arguments: str) -> Result:
    return CliRunner().invoke(VERBS, list(arguments), env={"COLUMNS": "120"})


@pytest.fixture(scope="module")
def program() -> Any:
    """What typer makes of the verbs."""
    return typer.main.get_command(VERBS)


def test_a_process_has_its_own_verb_alone() -> None:
    """Half of what starting one cost was importing the others."""
    grouped = [verb for modules in help_page.VERBS.values() for verb in modules]
    for verb in grouped:
        known = typer.main.get_command(app(verb))
        assert list(known.commands) == [verb]  # pyright: ignore[reportAttributeAccessIssue]
    assert sorted(typer.main.get_command(app()).commands) == sorted(grouped)  # pyright: ignore[reportAttributeAccessIssue]


def test_the_help_page_has_groups_and_exit_codes() -> None:
    assert set(help_page.EXAMPLES) - {""} <= {verb for modules in help_page.VERBS.values() for verb in modules}
    page = call("--help").stdout
    for title in help_page.VERBS:
        assert title in page
    for code, meaning in help_page.CODES.items():
        assert f"{code}  {meaning}" in page


@pytest.mark.parametrize("verb", [verb for verb in help_page.EXAMPLES if verb])
def test_examples_stand_on_the_verbs_page(verb: str) -> None:
    page = call(verb, "--help").stdout
    for line in help_page.EXAMPLES[verb]:
        assert line.startswith(verb) and line in page
        words = line.split()
        assert all(word in page for word in words if word.startswith("--")), line
        for option, known in (("--to", {**TARGETS, **TRACKERS}), ("--format", FORMATS)):
            assert option not in words or words[words.index(option) + 1] in known


@pytest.mark.parametrize("line", sorted({line for lines in help_page.EXAMPLES.values() for line in lines}))
def test_examples_are_understood(line: str, program: Any) -> None:
    """Their options and targets exist (one said `--to lm-studio`)."""
    verb, *words = shlex.split(line)
    context = program.make_context("backend", [verb], resilient_parsing=True)
    options = program.get_command(context, verb).make_context(verb, words, parent=context).params
    assert options.get("to", "folder") in (TRACKERS if verb == "track" else TARGETS)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["trian", "x.yaml"], "Did you mean 'train'"), (["export", "x", "--fromat", "4bit"], "--format")],
)
def test_the_nearest_word_is_suggested(arguments: list[str], words: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 2 and words in result.stderr


@pytest.mark.parametrize("verb", [["check", "x.yaml"], ["runs"], ["where"]])
def test_every_verb_refuses_a_hub_without_an_address(verb: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://[::1")
    result = call(*verb)
    assert result.exit_code == 2 and result.stderr.startswith("HF_ENDPOINT: http://[::1 is no web address;")


# ── completion ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_runs_are_completed_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_STUDIO_RUNS", str(tmp_path))
    for name in ("first", "fine", "second"):
        make_run_folder(name).config.write_text("")
    assert sorted(completions.run_names("fi")) == ["fine", "first"]


def test_settings_are_completed_with_their_default() -> None:
    offered = [word for word, _ in completions.changes("temp")]
    assert offered == [f"temperature={SETTINGS['temperature'].default}"]
    assert {word.partition("=")[0] for word, _ in completions.changes("")} <= set(SETTINGS)


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("train_type=d", ["train_type=dora"]),
        ("fuse=t", ["fuse=true"]),
        ("reward_functions=[r1_int", ["reward_functions=[r1_int_reward_func]"]),
        ("reward_functions=[r1_count_xml,r1_int", ["reward_functions=[r1_count_xml,r1_int_reward_func]"]),
        ("no_such_key=", []),
        ("temperature=", []),
    ],
)
def test_values_are_completed_where_they_can_be_listed(typed: str, offered: list[str]) -> None:
    assert [word for word, _ in completions.changes(typed)] == offered


def test_a_shell_gets_its_answer_without_the_engine(tmp_path: Path) -> None:
    (tmp_path / "runs" / "only-one").mkdir(parents=True)
    (tmp_path / "runs" / "only-one" / "config.yaml").write_text("")
    environment = os.environ | {
        completions.COMPLETE_VARIABLE: "complete_bash", "COMP_WORDS": "grpo-studio-backend resume ", "COMP_CWORD": "2",
        "GRPO_STUDIO_RUNS": str(tmp_path / "runs"),
    }  # fmt: skip
    code = "import sys, backend.__main__ as b\ntry: b.main()\nfinally: print([m for m in ('mlx', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["only-one", "[]"], done.stderr
