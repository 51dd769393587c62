"""Prompts of runs with tools and environments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from backend.data.preview import PromptLengths, preview_problem
from backend.data.problems import PromptFormat, apply_chat_template, with_opening
from backend.data.prompt_variety import prompt_variety
from backend.data.prompts import TokenizedPrompts
from backend.data.rows import check_columns, read_splits
from backend.serve import dataset_questions
from backend.serve.questions import QUESTIONS, QuestionCall
from backend.tools.host import ToolSchemas
from backend.utils.errors import UserError
from tests.data.test_rows import settings, write
from tests.support.tool_tokenizers import schema, tool_tokenizer

ADD, FIND, MOVE = schema("add", a="integer", b="integer"), schema("find", text="string"), schema("move", to="string")
TOOLS = ToolSchemas([ADD], {"quiz": [FIND], "maze": [MOVE] * 3})
ENVIRONMENTS = {"environment": {"quiz": "e.py::Quiz", "maze": "e.py::Maze"}, "max_seq_length": 4000}
ENVIRONMENTS |= {"reward_functions": ["r1_count_xml"], "reward_weights": []}
QUIZ = {"environment": "e.py::Quiz", "reward_functions": ["r1_count_xml"], "reward_weights": []}
ROWS = [
    {"prompt": "Where is Rome?", "environment": "quiz"},
    {"prompt": "Find the exit.", "environment": "maze"},
    {"prompt": None, "environment": "quiz"},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tool_tokenizer(tmp_path_factory.mktemp("qwen3"))


def refusal(row: dict[str, Any], **raw: Any) -> tuple[str, str]:
    with pytest.raises(UserError) as caught:
        TokenizedPrompts([row], None, PromptFormat.of(settings(**raw), TOOLS), "rows.jsonl")
    return caught.value.faults[0].setting, caught.value.faults[0].sentence


def test_a_prompt_shows_the_tools_of_its_environment(tokenizer: Any) -> None:
    made = PromptFormat.of(settings(**ENVIRONMENTS), TOOLS)
    prompts = TokenizedPrompts(ROWS, tokenizer, made, "rows.jsonl")
    assert not prompts.slow_paths
    for problem, own in zip(prompts.first(-1), ([ADD, FIND], [ADD, MOVE, MOVE, MOVE], [ADD, FIND]), strict=True):
        assert problem.tokens == apply_chat_template(problem.messages, tokenizer, {"tools": own})
        row = prompts[problem.index]  # alone, not in a batch
        shown, _ = preview_problem(problem.index, problem.row, tokenizer, made, "rows.jsonl")
        assert row is not None and row.tokens == shown.tokens == problem.tokens
    assert prompts.longest_texts(1) == [1], "its tools are the longest text"
    lengths = PromptLengths(ROWS, made, "rows.jsonl")
    lengths.measure([1], tokenizer)
    assert lengths.lengths[1] == prompts.longest


def test_without_tools_the_template_is_told_of_none(tokenizer: Any) -> None:
    bare, empty = (PromptFormat.of(settings(), tools) for tools in (ToolSchemas(), ToolSchemas([], {"": []})))
    assert bare.variables_of(ROWS[0]) is bare.template_variables and empty.variables_of(ROWS[0]) == {}


def test_rows_of_an_environment_need_no_prompt(tokenizer: Any) -> None:
    made = PromptFormat.of(settings(**QUIZ), ToolSchemas([], {"": [FIND]}))
    prompts = TokenizedPrompts([{}, {"prompt": []}], tokenizer, made, "rows.jsonl").first(-1)
    for problem in prompts:
        assert problem.messages == [{"role": "user", "content": ""}] and problem.prompt == ""
    assert not check_columns([{"n": 1}], settings(**QUIZ), "rows.jsonl")
    assert refusal({})[0] == "prompt_feature"
    assert prompt_variety([{}, {}], settings(**QUIZ), "rows.jsonl").to_dict()["level"] == "good"


def test_without_a_dataset_a_step_has_rows_of_its_environment() -> None:
    splits = read_splits(settings("", **QUIZ, batch_size=2, gradient_accumulation_steps=3))
    assert splits.train == [{}] * 6 and splits.source == {"train": "e.py::Quiz"} and not splits.valid


def test_a_row_that_names_no_environment_is_refused() -> None:
    key, sentence = refusal({"prompt": "a", "environment": "chess"}, **ENVIRONMENTS)
    assert (key, sentence) == (
        "environment",
        "environment='chess' in row 1 of rows.jsonl is not among the environments: quiz, maze.",
    )
    assert "environment='' in row" in refusal({"prompt": "a"}, **ENVIRONMENTS)[1]
    (fault,) = check_columns([{"prompt": "a"}], settings(**ENVIRONMENTS), "rows.jsonl")
    assert fault.setting == "environment_column" and "There is no column environment" in fault.sentence


def test_the_text_of_reset_ends_the_last_user_message(tokenizer: Any) -> None:
    made = PromptFormat.of(settings(**ENVIRONMENTS, system_prompt="Be brief."), TOOLS)
    for problem in TokenizedPrompts(ROWS, tokenizer, made, "rows.jsonl").first(-1):
        before = [dict(message) for message in problem.messages]
        opened = with_opening(problem, " You are at the start.", tokenizer, made)
        assert opened.prompt == problem.prompt + " You are at the start." == opened.messages[-1]["content"]
        assert problem.messages == before and opened.messages[0] == before[0]
        assert opened.tokens == apply_chat_template(opened.messages, tokenizer, made.variables_of(problem.row))
    with pytest.raises(UserError, match="With what the environment's reset wrote, the prompt of row 1 is longer than"):
        with_opening(TokenizedPrompts(ROWS, tokenizer, made, "rows.jsonl").first(1)[0], "a " * 9000, tokenizer, made)


def test_the_dataset_page_shows_the_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tool_tokenizer(tmp_path / "model")
    file = write(tmp_path / "rows.jsonl", ROWS[:2])
    about = {"model": str(tmp_path / "model"), "data": str(file), **ENVIRONMENTS}
    trained = TokenizedPrompts(ROWS[:2], tokenizer, PromptFormat.of(settings(**ENVIRONMENTS), TOOLS), "rows").first(-1)

    def ask(question: str, **more: Any) -> Any:
        return QUESTIONS[question].handler()({"settings": about, "split": "train"} | more, QuestionCall())

    monkeypatch.setattr(dataset_questions, "shown_tools", lambda config: (TOOLS, ""))
    for index, problem in enumerate(trained):
        row = ask("preview_row", index=index)
        assert [token for piece in row["pieces"] for token in piece["ids"]] == problem.tokens and not row["faults"]
    assert ask("preview_rows", start=0, count=2)["tokens"] == [len(problem.tokens) for problem in trained]
    monkeypatch.undo()
    about |= {"environment": "", "mcp_servers": {"clock": {"command": "clock-server"}}}
    row = ask("preview_row", index=0)
    assert "never allowed to run" in row["faults"][0]["sentence"] and row["tokens"] < len(trained[0].tokens)
