"""How the command line meets a person: its own verb alone, the nearest word, completion in a shell; and text of others
stays text in a terminal, whichever verb prints it and whatever encoding the terminal has."""

import fcntl
import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import pytest
import typer
from rich.table import Table

from backend import selftest
from backend.__main__ import app
from backend.cli import completions, help_page
from backend.cli.common import prepare_streams, tell, tell_file, tell_json
from backend.cli.display import new_console, show_line
from backend.config.config import SETTINGS
from backend.export.exports import FORMATS, TARGETS
from backend.runs.run_folder import make_run_folder
from backend.selftest import CHECKS, Check, CheckResult, CheckSkipped, Workbench, run_checks
from backend.trainer.trackers.targets import TRACKERS
from backend.utils import places
from backend.utils.command import backend_command, backend_environment
from backend.utils.places import demo_config, project_root
from backend.utils.text import visible
from tests.support import made_up_runs
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


def test_settings_are_completed_with_their_defaults() -> None:
    offered = [word for word, _ in completions.changes("temp")]
    assert offered == [f"temperature={SETTINGS['temperature'].default}"]
    assert completions.changes("temperature=") == []


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
    tell(KEPT + HOSTILE, end="")
    assert capsys.readouterr().out == KEPT + ESCAPED


def test_json_is_the_same_value_and_holds_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    value = {HOSTILE: [KEPT, HOSTILE, "\ud800", "\u2066", 1.5, None]}
    tell_json(value)
    line = capsys.readouterr().out.removesuffix("\n")
    assert json.loads(line) == value
    assert visible(line) == line and "\n" not in line and "שלום" in line
    line.encode()


def test_tables_and_lines_of_rich_take_no_markup_and_no_commands() -> None:
    console = new_console(file=io.StringIO(), width=80, force_terminal=True)
    table = Table(HOSTILE)
    table.add_row(f"[/bold] :bomb: {HOSTILE}")
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


@pytest.mark.parametrize("buffering", ["", "1"])
def test_a_closed_pipe_ends_a_verb_quietly(buffering: str) -> None:
    """`… | head -1`: with a text that is written at once, and with one that is written at the end."""
    environment = backend_environment() | {"PYTHONUNBUFFERED": buffering}
    program = shlex.join(backend_command("rewards", "list"))
    done = subprocess.run(["sh", "-c", f"{{ {program}; echo $? >&2; }} | true"], env=environment, capture_output=True)
    assert done.stderr == b"141\n"


@pytest.mark.parametrize("columns", ["40", "80"])
def test_the_state_of_a_run_stays_in_a_narrow_terminal(
    columns: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_up_runs.make_run(tmp_path / "Qwen3-0.6B-lora-grpo-2026-11-22-101112", steps=4)
    monkeypatch.setenv("COLUMNS", columns)
    shown = call("runs", "--runs-dir", tmp_path).stdout
    assert "finished" in shown and "4/60" in shown and (len(shown.splitlines()) == 2) == (columns == "80")
    assert ("Qwen3-0.6B-lora-grpo-2026-11-22-101112" in shown) == (columns == "80")


def test_a_relative_folder_of_runs_is_one_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs of `queue run` looked for it below their own folders, where their processes work, and failed."""
    monkeypatch.chdir(tmp_path)
    all_runs = Mock(return_value=[])
    monkeypatch.setattr("backend.cli.runs.all_runs", all_runs)
    call("runs", "--runs-dir", "mine")
    monkeypatch.setenv(places.RUNS_VARIABLE, "others")
    assert all_runs.call_args.args == (tmp_path / "mine",) and places.runs_folder() == tmp_path / "others"
    monkeypatch.setenv(places.RUNS_VARIABLE, str(tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr(os, "getcwd", Mock(side_effect=FileNotFoundError))  # a working directory that was deleted
        assert places.runs_folder() == tmp_path and call("runs", "--runs-dir", tmp_path).exit_code == 0


def test_a_line_of_progress_has_its_units_after_the_numbers() -> None:
    console = new_console(file=io.StringIO(), width=80)
    metrics = {"reward": 1.5, "reward_std": 0.2, "time/step": 0.2234, "peak_memory_gb": 3.0}
    metrics["rollout_tokens_per_second"] = 1234.0
    for step in (4, 5):
        show_line(console, 5, {"kind": "step", "step": step, "metrics": metrics})
    held_out = {"reward": 0.5, "rewards/a/mean": 1.0, "mine/reward": 0.25, "mine/rewards/a/mean": 1.0}
    show_line(console, 5, {"kind": "eval", "step": 5, "split": "valid", "metrics": held_out})
    imitated = {"loss": 0.2, "train_tokens_per_second": 652.0, "time/step": 0.1, "peak_memory_gb": 1.0}
    show_line(console, 5, {"kind": "step", "step": 5, "metrics": imitated})
    lines = console.file.getvalue().splitlines()  # pyright: ignore
    assert lines == [
        "step 5  reward 1.5  ± std 0.2  KL –  clipped –  length –  1,234 tokens/s  0.223 s/step  3 GB",
        "step 5  held-out reward 0.5 (valid), 0.25 (mine)",
        "step 5  loss 0.2  length –  652 tokens/s  0.1 s/step  1 GB",
    ]


BY_NAME = {check.name: check for check in CHECKS}
ENGINE = CHECKS[:4]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    """A workbench on which every check of the engine has passed."""
    workbench = Workbench(tmp_path_factory.mktemp("selftest"))
    results = list(run_checks(ENGINE, workbench))
    assert [result.state for result in results] == ["ok"] * len(ENGINE), results
    return workbench


def alone(name: str, bench: Workbench) -> CheckResult:
    """One check on a workbench that has what it needs."""
    (result,) = run_checks([replace(BY_NAME[name], needs=())], bench)
    return result


@pytest.mark.parametrize("name", ["warm process", "reward sandbox"])
def test_processes_answer(bench: Workbench, name: str) -> None:
    result = alone(name, bench)
    assert result.state == "ok", result


def _cut_short(bench: Workbench) -> dict[str, Any]:
    settings = Workbench.settings(bench)
    broken = shutil.copytree(settings["model"], bench.folder / "broken")
    os.truncate(broken / "model.safetensors", 100_000)
    return settings | {"model": str(broken)}


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("compiler", "A compiled function gives wrong numbers."),
        ("model", "model.safetensors was cut off"),
        ("rounding", "Sampler and learner disagree"),
    ],
)
def test_a_broken_part_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: str, words: str) -> None:
    bench = Workbench(tmp_path)
    if fault == "compiler":
        monkeypatch.setattr(mx, "compile", lambda function: lambda x: function(x) + 1)
    elif fault == "model":
        raw = _cut_short(bench)
        monkeypatch.setattr(Workbench, "settings", lambda self: raw)
    else:
        monkeypatch.setattr(selftest, "LOGP_TOLERANCE", 0)
    result = alone("device" if fault == "compiler" else "training", bench)
    assert result.state == "failed" and words in result.sentence, result


def test_a_failure_ends_only_what_needs_it_and_the_report_names_neither_user_nor_home_nor_token(tmp_path: Path) -> None:
    private = f"in {Path.home()}/secret of token=hf_abcdefghijklmnop at {tmp_path}/x"
    checks = [
        Check("one", Mock(side_effect=ValueError(private))),
        Check("two", lambda bench: "fine", ("one",)),
        Check("three", lambda bench: "fine"),
        Check("four", Mock(side_effect=CheckSkipped("Not here."))),
    ]
    results = list(run_checks(checks, Workbench(tmp_path)))
    assert [result.state for result in results] == ["failed", "skipped", "ok", "skipped"]
    assert "one" in results[1].sentence
    text = selftest.write_report(results, tmp_path / "report.json")
    for content in (text.read_text("utf-8"), (tmp_path / "report.json").read_text("utf-8")):
        assert "ValueError: in ~/secret of token=…" in content and "hf_abc" not in content
        assert str(Path.home()) not in content and str(tmp_path) not in content
    report = json.loads((tmp_path / "report.json").read_text("utf-8"))
    assert not report["passed"] and report["summary"].startswith("1 of 4 checks failed") and report["about"]["mlx"]


def test_options_that_make_no_sense_are_refused() -> None:
    for arguments, words in (
        ("--report x.json", "--report belongs to --selftest"),
        ("--selftest --report /no/such/folder/x.json", "in a folder"),
        ("--selftest --report x.txt", "name a .json file"),
        ("--selftest runs", "stands alone"),
    ):
        result = call(*arguments.split())
        assert result.exit_code == 2 and words in result.stderr


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Preferences and runs in one folder, as they are by default, with a file in it that is not ours."""
    hub = ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME")
    for name in ("GRPO_STUDIO_RUNS", "GRPO_STUDIO_PREFS", *hub):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    folder = places.preferences_folder()
    ours = "prefs.ini draft.yaml draft-2.yaml draft-1.lock trusted.json native-crash-1.txt"
    for name in (*ours.split(), "mine.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("12345")
    run = make_run_folder("trained")
    run.config.write_text("iters: 1\n")
    for file in (run.about, run.changes, run.parent, run.launch_lock, places.runs_folder() / "queue.json"):
        file.write_text("1")
    (places.runs_folder() / "sweeps" / "rates").mkdir(parents=True)
    (places.runs_folder() / "sweeps" / "rates" / "results.json").write_text("{}")
    (folder / "runs-cache.jsonl").write_text("12345")
    (tmp_path / "temporary" / "mlx" / "cpu").mkdir(parents=True)
    (tmp_path / "temporary" / "mlx" / "cpu" / "kernel.so").write_bytes(b"x" * 100)
    return folder


def test_everything_stored_is_listed_with_its_size(home: Path) -> None:
    rows = {row["key"]: row for row in json.loads(call("where", "--json").stdout)}
    assert (rows["settings"]["files"], rows["settings"]["bytes"]) == (7, 35)
    assert (rows["runs"]["files"], rows["runs"]["path"]) == (7, str(home / "runs"))
    assert rows["kernels"]["bytes"] == 100 and rows["kernels"]["is_shared"]
    printed = call("where").stdout
    assert rows["hub"]["files"] == 0 and "nothing yet" in printed
    assert "0.035 kB in 7 files" in printed and "0.1 kB in 1 file," in printed


def test_only_preferences_are_deleted_and_only_with_yes_and_without_a_window(home: Path) -> None:
    before, remove = sorted(home.rglob("*")), ("where", "--remove", "settings")
    output = call(*remove).stdout
    assert str(home / "prefs.ini") in output and "--yes" in output
    for key in ("runs", "hub", "lm-studio", "everything"):
        assert "cannot be removed by a command" in refused("where", "--remove", key, "--yes")
    with (home / "draft-1.lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "close it first" in refused(*remove, "--yes")
    assert sorted(home.rglob("*")) == before
    assert call(*remove, "--yes").exit_code == 0
    assert sorted(path.name for path in home.iterdir()) == ["mine.txt", "runs"]
    assert [path for path in before if home / "runs" in path.parents] == sorted((home / "runs").rglob("*"))
    assert "nothing to delete" in call(*remove, "--yes").stdout


def test_an_estimate_needs_rewards_that_can_be_read() -> None:
    """A judge that the run loads would not count."""
    changes = ("--set", "reward_functions=judge(url=local, model=../x)", "--set", "reward_weights=[1]")
    said = refused("estimate", demo_config(), *changes)
    assert "reward_functions: The reward function judge(url=local, model=../x) cannot be read" in said


def test_an_estimate_for_several_machines_says_whose_memory_it_is(tmp_path: Path) -> None:
    file = tmp_path / "hosts.json"
    file.write_text(json.dumps([{"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}] * 2))
    told = call("estimate", demo_config(), "--hosts", file).stdout
    assert "each holds the whole model" in told.replace("\n", " ") and "as it was before" in told
    assert "each holds" not in call("estimate", demo_config(), "--hosts", "none").stdout
    assert "hosts: There is no file" in refused("estimate", demo_config(), "--hosts", tmp_path / "none.json")


@pytest.mark.parametrize("error", [typer.Abort, KeyboardInterrupt])
def test_no_to_a_question_and_ctrl_c_are_not_bugs(monkeypatch: pytest.MonkeyPatch, error: type) -> None:
    """They ended with 1, as a fault of the program does, and with 130, of which the help said nothing."""
    monkeypatch.setattr("backend.cli.runs.all_runs", Mock(side_effect=error))
    assert call("runs").exit_code == 3


@pytest.mark.parametrize(
    ("error", "code", "says"), [("KeyboardInterrupt", -signal.SIGINT, ""), ("OSError", 1, "Error")]
)
def test_ctrl_c_while_modules_load_prints_nothing(error: str, code: int, says: str) -> None:
    command = [sys.executable, "-c", f"import backend.__main__; raise {error}"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == code and ended.stderr.rstrip().endswith(says) and bool(ended.stderr) == bool(says)
