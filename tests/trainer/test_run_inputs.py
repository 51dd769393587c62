"""A run reads its dataset once and executes its reward files once, from the command line to the first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from backend.__main__ import app
from backend.config.config import parse
from backend.data import rows
from backend.data.prompts import TokenizedPrompts
from backend.runs.run_folder import RunFolder
from backend.trainer.preflight import check, preflight
from backend.trainer.run_inputs import prompt_sets
from backend.utils.errors import UserError
from tests.support import small_run
from tests.support.tool_tokenizers import tool_tokenizer

COUNTS_ITS_EXECUTIONS = """
from pathlib import Path
from backend.rewards import register_reward_function
with Path(__file__).with_suffix(".count").open("a") as file:
    file.write("x")
@register_reward_function("length")
def length(prompts, completions, answer, types=None):
    return [float(len(text)) for text in completions]
def plain(completions, **kwargs):
    return [1.0 for _ in completions]
"""


@pytest.fixture
def reward_file(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(COUNTS_ITS_EXECUTIONS)
    return file


def rewards(reward_file: Path) -> dict[str, Any]:
    return {"reward_functions": ["length"], "reward_weights": [], "reward_functions_file": str(reward_file)}


@pytest.mark.parametrize("prepared", [False, True], ids=["train CONFIG", "train --run"])
def test_inputs_read_once(tmp_path: Path, reward_file: Path, monkeypatch: pytest.MonkeyPatch, prepared: bool) -> None:
    """`check` ran before loading, in the same process, and both read the rows and ran the user's file."""
    files_read: list[Path] = []
    read_file = rows.read_file
    monkeypatch.setattr(rows, "read_file", lambda path: files_read.append(path) or read_file(path))
    raw = small_run.settings_for(tmp_path, iters=1, **rewards(reward_file))
    run = RunFolder(tmp_path / "runs" / "mine")
    if prepared:
        small_run.prepare(run, raw)
        arguments = ["--run", str(run.path)]
    else:
        config = small_run.write_config(tmp_path / "c.yaml", raw)
        arguments = [str(config), "--runs-dir", str(tmp_path / "runs"), "--name", "mine"]
    result = CliRunner().invoke(app(), ["train", *arguments, "--no-progress"])
    assert result.exit_code == 0, result.output
    assert small_run.kinds(run)[-1] == "finished"
    assert reward_file.with_suffix(".count").read_text() == "x" and files_read == [tmp_path / "rows.jsonl"]


def test_preflight_raises_every_fault_that_check_returns(tmp_path: Path) -> None:
    wrong = {"model": "./nowhere", "data": "./no_rows.jsonl", "reward_functions": ["r1_itn", "r1_int"]}
    raw = small_run.settings_for(tmp_path, **wrong)
    faults = check(raw)
    assert [fault.setting for fault in faults] == ["model", "data", "reward_functions"]
    with pytest.raises(UserError) as caught:
        preflight(raw)
    assert caught.value.faults == faults


ADD = '''
def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: One number.
        b: Another.
    """
    return a + b
'''


def test_tools_need_a_chat_template_with_calls(tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(ADD)
    raw = small_run.settings_for(tmp_path, tools_file=str(tmp_path / "tools.py"), max_seq_length=2000)
    (fault,) = check(raw)
    assert fault.setting == "model" and fault.sentence.startswith("The model cannot use tools: mlx-lm knows no parser")
    tokenizer = tool_tokenizer(tmp_path / "model")
    assert not check(raw)
    inputs = preflight(raw)
    inputs.scorer.close()
    (prompts,) = prompt_sets(parse(raw), inputs, [parse(raw)])
    (first,) = prompts.tokenize(tokenizer, TokenizedPrompts, all_rows=True).first(1)
    assert '"name": "add"' in tokenizer.decode(first.tokens)
