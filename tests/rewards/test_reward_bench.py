"""Scoring outside a run: the bench process, kept cases, the window's questions, the command line."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from backend.config.config import Config, read
from backend.rewards.allowed_code import allow_named
from backend.rewards.bench import (
    RewardBench,
    cases_file,
    group_of,
    line_of,
    new_case,
    read_cases,
    rerun,
    score_groups,
    write_cases,
)
from backend.runs.run_folder import RunFolder
from backend.serve import reward_questions as handlers
from backend.serve.questions import Cancelled, QuestionCall
from backend.training.advantages import advantages
from backend.types import Group
from backend.utils.errors import UserError
from backend.utils.places import project_root
from tests.support import small_run
from tests.support.verbs import call, refused, run_ok

HEAD = "import ctypes, os\nfrom backend.rewards import register_reward_function\n"
LENGTH = """@register_reward_function("length")
def length(completions, **kw):
    return [float(len(c)) for c in completions]
"""
BROKEN = """@register_reward_function("broken")
def broken(completions, **kw):
    return [share(c) for c in completions]

def share(c):
    return 1 / 0
"""
GONE = '@register_reward_function("gone")\ndef gone(completions, **kw):\n    os._exit(3)\n'
HANGS = '@register_reward_function("hangs")\ndef hangs(completions, **kw):\n    ctypes.PyDLL(None).sleep(1000)\n'
"""`hangs` keeps the interpreter's lock, and no processor busy."""
GAME = '''class Game:
    def reset(self, **row):
        self.calls = 0

    def calculate(self, expression: str) -> str:
        """Evaluate.

        Args:
            expression: Numbers.
        """
        self.calls += 1
        return str(eval(expression))

    def get_reward(self):
        return float(self.calls)
'''


@pytest.fixture
def bench():
    client = RewardBench()
    yield client
    client.close()


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(HEAD + LENGTH)
    return file


def line(*texts: str, **about: Any) -> dict[str, Any]:
    return {"prompt": "p", "answer": "4", "completions": [{"text": text} for text in texts], **about}


def group(*texts: str) -> Group:
    return group_of(line(*texts), 0, "Row 1")


def scores(bench: RewardBench, names: list[str], file: Path | None, timeout: float = 20.0) -> dict[str, Any]:
    config = Config(reward_functions=names, reward_functions_file=str(file or ""), reward_timeout=timeout)
    return {result.name: result for result in bench.score(config, [group("a", "bbb")])}


def test_a_function_that_exits_or_hangs_leaves_the_others(bench: RewardBench, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(HEAD + GONE + HANGS + LENGTH)
    results = scores(bench, ["gone", "hangs", "length"], file, timeout=0.4)
    assert results["gone"].error["sentence"] == (
        "The reward function gone of mine.py, line 3, ended the process it ran in (exit code 3)."
    )
    assert "hangs of mine.py, line 6, was still running after 0.4 s (" in results["hangs"].error["sentence"]
    assert (results["gone"].error["line"], results["hangs"].error["line"]) == (3, 6)
    assert results["length"].given == [1.0, 3.0] and results["length"].error is None


def test_an_error_has_the_lines_of_the_users_file_and_no_others(bench: RewardBench, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(HEAD + BROKEN + LENGTH)
    results = scores(bench, ["broken", "length", "r1_int"], file)
    error = results["broken"].error
    assert [(frame["line"], frame["function"]) for frame in error["frames"]] == [(5, "broken"), (8, "share")]
    assert (error["line"], error["frames"][-1]["code"], error["file"]) == (8, "return 1 / 0", str(file))
    assert results["length"].given == [1.0, 3.0], "one that fails hides none of the others"


CANNOT_BE_LOADED = (
    ("x = 1\ndef f(:\n", "mine.py has a syntax error on line 2", 2),
    ("import json\nraise ValueError('no')\n", "mine.py cannot be loaded: ValueError: no (mine.py, line 2).", 2),
    ("import os\nos._exit(1)\n", "mine.py ended the process it ran in (exit code 1) while it was being loaded.", None),
    ("import time\ntime.sleep(99)\n", "mine.py was still running after 0.5 s (reward_timeout) while it was being", 0),
)


def test_files_that_cannot_be_loaded_and_the_next_is_scored(bench: RewardBench, mine: Path) -> None:
    for text, sentence, at in CANNOT_BE_LOADED:
        mine.write_text(text)
        with pytest.raises(UserError) as caught:
            scores(bench, ["length"], mine, timeout=0.5)
        assert caught.value.faults[0].sentence.startswith(sentence)
        assert at is None or caught.value.place["line"] == at  # type: ignore[attr-defined]
    mine.write_text(HEAD + LENGTH)
    assert scores(bench, ["length"], mine)["length"].given == [1.0, 3.0]


def test_a_changed_file_is_read_by_a_fresh_process(bench: RewardBench, mine: Path) -> None:
    assert scores(bench, ["length"], mine)["length"].given == [1.0, 3.0]
    first = bench.worker._child
    assert scores(bench, ["length"], mine) and bench.worker._child is first, "kept warm while nothing changes"
    mine.write_text(HEAD + LENGTH.replace("len(c)", "-len(c)"))
    assert scores(bench, ["length"], mine)["length"].given == [-1.0, -3.0]
    assert bench.worker._child is not first


def test_what_a_function_prints_comes_back_and_never_reaches_the_protocol(bench: RewardBench, mine: Path) -> None:
    mine.write_text(
        HEAD + LENGTH.replace("    return", '    print("seen", len(completions)); os.write(1, b"raw")\n    return')
    )
    result = scores(bench, ["length"], mine)["length"]
    assert (result.printed, result.given) == ("seen 2\n", [1.0, 3.0])


def test_cancelling_kills_the_process_at_once(bench: RewardBench, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(HEAD + HANGS)
    until = time.monotonic() + 0.6

    def poll() -> None:
        if time.monotonic() > until:
            raise Cancelled

    with pytest.raises(Cancelled):
        bench.score(Config(reward_functions=["hangs"], reward_functions_file=str(file)), [group("a")], poll)
    assert bench.worker._child is None and time.monotonic() < until + 2


def test_rewards_and_advantages_equal_those_of_a_training_step(bench: RewardBench, mine: Path) -> None:
    groups = [group("a", "bbb", "cc", "dddd"), group("aa", "a", "a", "aaaaa")]
    about = {"reward_functions": ["length", "r1_int", "keyword(word=bb)"], "reward_weights": [2.0, 1.0, -9.0]}
    report = score_groups(bench, groups, Config(**about, reward_functions_file=str(mine)))
    completions = [completion for group in report["scored"] for completion in group]
    assert [completion["reward"] for completion in completions] == [2.0, -3.0, 4.0, 8.0, 4.0, 2.0, 2.0, 10.0]
    expected, _ = advantages([[completion["reward"]] for completion in completions], 4)
    assert [each["advantage"] for each in completions] == expected.tolist(), "to the bit: float32, as in a step"
    assert [function["name"] for function in report["functions"]] == ["length", "r1_int_reward_func", "keyword"]
    assert "Integer Answer never fires: the model writes no <answer>." in [
        verdict["sentence"] for verdict in report["findings"]
    ]


@pytest.mark.parametrize(("answer", "text"), [(None, ""), (3.0, "3"), (2.5, "2.5"), (7, "7"), ("x", "x")])
def test_answers_are_those_of_a_run_s_prompts(answer: Any, text: str) -> None:
    assert group_of({"prompt": "1+2=", "completion": "3", "answer": answer}, 0, "Row 1").problem.answer == text


def test_lines_keep_columns_messages_and_token_ids() -> None:
    row: dict[str, Any] = {"prompt": "p", "answer": "1", "columns": {"kind": 3}}
    row |= {"messages": [{"role": "user", "content": "p"}]}
    row |= {"completions": [{"text": "t", "tokens": [5, 6], "stop": "length"}]}
    read = group_of(row, 0, "Row 1")
    (completion,) = read.completions
    assert (read.problem.row, completion.tokens, completion.stop) == ({"kind": 3}, [5, 6], "length")
    assert line_of(read)["completions"] == row["completions"] and line_of(read)["columns"] == {"kind": 3}


def test_cases_pass_until_the_function_changes(bench: RewardBench, mine: Path) -> None:
    case = new_case(line("bbb"), "bbb", {"length": 3.0})
    write_cases(mine, [case])
    assert cases_file(mine).name == "mine.cases.jsonl" and read_cases(mine) == [case]
    assert not rerun(bench, mine, read_cases(mine), 20.0)[0]["failures"]
    mine.write_text(HEAD + LENGTH.replace("len(c)", "len(c) / 2"))
    assert rerun(bench, mine, read_cases(mine), 20.0)[0]["failures"] == ["length gave 1.5; 3 is expected."]
    mine.write_text(HEAD + LENGTH.replace("length", "size"))
    assert rerun(bench, mine, read_cases(mine), 20.0)[0]["failures"] == ["length gave no score; 3 is expected."]
    write_cases(mine, [])
    assert not cases_file(mine).exists()


def test_code_runs_only_if_the_user_allowed_its_content(
    mine: Path, apart: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    mine.write_text(HEAD + "print('it ran')\n" + LENGTH)
    settings = {"reward_functions": ["length"], "reward_functions_file": str(mine), "reward_timeout": 20.0}
    asked: dict[str, Any] = {"settings": settings, "groups": [line("a", "bbb")]}
    with pytest.raises(UserError, match=r"mine\.py has not been allowed to run as it is now"):
        handlers.score(QuestionCall(), **asked)
    allow_named(settings)
    for changed in (settings | {"reward_network": True}, settings):
        with pytest.raises(UserError, match="has not been allowed"):
            handlers.score(QuestionCall(), **asked | {"settings": changed})
        mine.write_text(mine.read_text() + "# changed\n")
    assert "it ran" not in capfd.readouterr().err
    allow_named(settings)
    assert handlers.score(QuestionCall(), **asked)["scored"][0][1]["reward"] == 3.0
    handlers._bench.close()  # waits for what it has printed
    assert "it ran" in capfd.readouterr().err


def test_completions_of_a_run_are_read_by_step(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    completion = {"text": "t", "tokens": 7, "stop": "length"}
    about = {"answer": "1", "type": None, "completions": [completion]}
    rows = [{"step": step, "prompt": f"p{step}"} | about for step in (1, 3)]
    run.completions.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 4, "unfin')
    newest = handlers.run_completions(QuestionCall(), run=str(tmp_path))
    assert (newest["steps"], newest["step"], newest["groups"][0]["prompt"]) == ([1, 3], 3, "p3")
    assert newest["groups"][0]["completions"] == [completion]
    assert handlers.run_completions(QuestionCall(), run=str(tmp_path), step=2)["step"] == 1
    with pytest.raises(UserError, match="has no completions yet"):
        handlers.run_completions(QuestionCall(), run=str(tmp_path / "none"))


def test_pasted_text_is_lines_or_one_completion() -> None:
    assert handlers.read_completions(QuestionCall(), text="just text")[0]["completions"][0]["text"] == "just text"
    (group,) = handlers.read_completions(QuestionCall(), text='{"completion": "a"}\n{"completion": "b"}')
    assert len(group["completions"]) == 2
    with pytest.raises(UserError, match="Line 1 of what was pasted"):
        handlers.read_completions(QuestionCall(), text="{broken")


def test_sampled_completions_that_were_kept_get_the_same_scores_again(tmp_path: Path) -> None:
    raw = small_run.settings_for(tmp_path, group_size=2, max_completion_length=6) | small_run.low_half(tmp_path)
    config = small_run.write_config(tmp_path / "config.yaml", raw)
    nowhere = refused("rewards", "sample", config, "--out", tmp_path / "none" / "kept.jsonl")
    assert nowhere == f"out: There is no folder {tmp_path / 'none'}."  # before it samples
    result = run_ok("rewards", "sample", config, "-n", 3, "--out", tmp_path / "kept.jsonl", "--json")
    rows = json.loads(result.stdout.splitlines()[-1])["rows"]
    assert len(rows) == 6 and {"scores", "reward", "advantage", "completion"} <= set(rows[0])
    assert "6 of 6 completions ran into the length limit." in result.stderr, "the verdict"
    again = run_ok("rewards", "score", config, "--completions", tmp_path / "kept.jsonl", "--json")
    expected = [{"scores": row["scores"], "reward": row["reward"]} for row in rows]
    assert json.loads(again.stdout.splitlines()[-1])["rows"] == expected, "token ids were kept"


def test_a_function_that_fails_is_shown_with_its_traceback(tmp_path: Path) -> None:
    raw = small_run.settings_for(tmp_path, group_size=2, max_completion_length=6) | small_run.low_half(tmp_path)
    config, mine = small_run.write_config(tmp_path / "config.yaml", raw), tmp_path / "mine.py"
    mine.write_text(HEAD + BROKEN)
    changes = [f"reward_functions_file={mine}", "reward_functions=broken", "reward_weights=[1]"]
    result = call("rewards", "sample", config, "-n", 1, *(word for each in changes for word in ("--set", each)))
    assert result.exit_code == 2 and "line 8, in share" in result.stderr and "ZeroDivisionError" in result.stderr
    last = result.stderr.splitlines()[-1]
    assert (
        last == "reward_functions: The reward function broken of mine.py raised ZeroDivisionError: division by zero "
        "(mine.py, line 8)."
    )
    mine.write_text(HEAD + "def load():\n    raise ValueError('BEGIN' + 'x' * 10**6 + 'END')\nload()\n")
    said = refused("check", config, "--set", changes[0])
    assert "BEGINx" in said and len(said) < 1_000
    mine.write_text(HEAD + BROKEN)
    said = refused("check", config, "--set", "reward_functions=brokn", "--set", changes[0])
    assert "There is no reward function brokn; the nearest is broken" in said


def test_rewards_cases_exits_with_2_while_a_case_fails(mine: Path) -> None:
    assert "No cases are kept in" in call("rewards", "cases", mine).stderr
    assert "file: There is no file" in refused("rewards", "cases", mine.with_name("none.py"))
    write_cases(mine, [new_case(line("bbb"), "bbb", {"length": 3.0}), new_case(line("a"), "a", {"length": 2.0})])
    result = call("rewards", "cases", mine)
    assert (result.exit_code, result.stdout) == (2, "1 of 2 cases pass.\n")
    assert result.stderr == "case 2: length gave 1; 2 is expected.\n"
    write_cases(mine, [new_case(line("bbb"), "bbb", {"length": 3.0})])
    run_ok("rewards", "cases", mine)
    mine.write_text(mine.read_text().replace("return ", "return 1 / 0, "))
    result = call("rewards", "cases", mine)
    assert result.exit_code == 2 and "length gave no score; 3 is expected. The reward function length" in result.stderr
    assert "return 1 / 0" in result.stderr and "ZeroDivisionError: division by zero (mine.py, line" in result.stderr


@pytest.mark.proof
def test_a_sample_calls_tools_and_an_environment_scores_it(tmp_path: Path, apart: Path) -> None:
    (tmp_path / "game.py").write_text(GAME)
    resources = project_root() / "resources"
    settings = read(resources / "presets" / "calculator.yaml") | {"tools_file": "", "tools": []}
    settings["environment"] = f"{tmp_path / 'game.py'}::Game"
    request = {"settings": settings, "how": "first", "count": 4, "group_size": 4, "seed": 3}
    with pytest.raises(UserError, match=r"game\.py has not been allowed"):
        handlers.sample(QuestionCall(), **request)
    allow_named(settings)
    lines = handlers.sample(QuestionCall(), **request)
    scored = handlers.score(QuestionCall(), settings, groups=lines)
    assert [each["name"] for each in scored["functions"]] == ["r1_accuracy_reward_func", "Game"]
    rows = [row for line in lines for row in line["completions"]]
    calls = [sum(len(turn["calls"]) for turn in row["turns"]) for row in rows]
    assert any(calls) and [row["rewards"]["Game"] for group in scored["scored"] for row in group] == calls
    handlers._bench.close()
