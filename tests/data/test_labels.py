"""Labelled rows: what is imitated of each, and what is said of rows without labels."""

import json
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.tuner.datasets import ChatDataset, CompletionsDataset

from backend.config.config import Config, parse
from backend.data.labels import LabelledRows, check_prompts, label_of, labelled_group, tokenized
from backend.data.preview import PromptLengths, preview_problem
from backend.data.problems import PromptFormat, TooLong, apply_chat_template, with_opening
from backend.data.prompt_variety import prompt_variety
from backend.data.prompts import TokenizedPrompts
from backend.data.rows import check_columns, read_splits
from backend.serve import dataset_questions
from backend.serve.questions import QUESTIONS, QuestionCall, handler
from backend.tools.host import ToolSchemas
from backend.types import Label
from backend.utils.errors import UserError
from tests.data.test_rows import settings, write
from tests.support.cases import mistake
from tests.support.random_models import CHAT_TEMPLATE
from tests.support.tool_tokenizers import schema, tool_tokenizer

USER, OTHER = {"role": "user", "content": "2 plus 2?"}, {"role": "user", "content": "And 3?"}
FOUR, SIX = {"role": "assistant", "content": "four 4"}, {"role": "assistant", "content": "six 6"}
FOUR_TEXT, SIX_TEXT = "four 4<|im_end|>\n", "six 6<|im_end|>\n"
MARKED = CHAT_TEMPLATE.replace(
    "{{ message.content }}<|im_end|>",
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}"
    "{% else %}{{ message.content }}{% endif %}<|im_end|>",
)
FORGETS = CHAT_TEMPLATE.replace(  # later turns change what an earlier one was, as templates do that drop its thinking
    "{{ message.content }}", "{{ message.content if loop.last or message.role == 'user' else message.content[:3] }}"
)


def label_settings(**raw: Any) -> Config:
    return parse({"model": "m", "data": "d", "train_mode": "sft"} | raw)


def format_of(**raw: Any) -> PromptFormat:
    return PromptFormat.of(label_settings(**raw), labelled=True)


@pytest.fixture(scope="module")
def label_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tool_tokenizer(tmp_path_factory.mktemp("plain"), CHAT_TEMPLATE)


def imitated(tokenizer: Any, label: Label | TooLong) -> list[str]:
    """The runs of tokens with mask 1, as text."""
    assert isinstance(label, Label)
    runs: list[list[int]] = []
    for i, (token, is_own) in enumerate(zip(label.tokens, label.mask, strict=True)):
        if is_own and not label.mask[i - 1]:
            runs.append([])
        if is_own:
            runs[-1].append(token)
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize(
    ("row", "raw", "expected"),
    [
        ({"prompt": "2 plus 2?", "completion": "four 4"}, {}, [FOUR_TEXT]),
        ({"prompt": [USER], "completion": [FOUR]}, {}, [FOUR_TEXT]),
        ({"prompt": [USER, FOUR, OTHER], "completion": [SIX]}, {}, [SIX_TEXT]),
        ({"messages": [USER, FOUR]}, {}, [FOUR_TEXT]),
        ({"messages": [USER, FOUR, OTHER, SIX, OTHER]}, {}, [FOUR_TEXT, SIX_TEXT]),
        ({"q": "2 plus 2?", "a": "four 4"}, {"prompt_feature": "q", "completion_feature": "a"}, [FOUR_TEXT]),
        ({"prompt": "x", "completion": None, "chat": [USER, FOUR]}, {"messages_feature": "chat"}, [FOUR_TEXT]),
        ({"messages": [USER, FOUR | {"content": None, "tool_calls": [{}]}]}, {}, ["<|im_end|>\n"]),
        ({"prompt": [USER, FOUR | {"content": None, "tool_calls": [{}]}], "completion": [SIX]}, {}, [SIX_TEXT]),
    ],
)
def test_the_assistant_s_tokens_are_imitated(label_tokenizer: Any, row: Any, raw: Any, expected: list[str]) -> None:
    _, start, label, last_only = label_of(row, label_tokenizer, format_of(**raw), "row 1")
    assert imitated(label_tokenizer, label) == expected and not last_only
    prompt = label_tokenizer.decode(start)
    assert prompt.endswith("<|im_start|>assistant\n") and label_tokenizer.decode(label.tokens).startswith(prompt)


@pytest.mark.parametrize(
    ("template", "expected", "last_only"),
    [
        (MARKED, ["four 4<|im_end|>", "six 6<|im_end|>"], False),  # the end of the turn is imitated, marked or not
        (FORGETS, [SIX_TEXT], True),
        (CHAT_TEMPLATE.replace("<|im_end|>", ""), ["four 4\n", "six 6\n<|im_end|>"], False),
        (None, ["six 6<|im_end|>"], True),
    ],
)
def test_by_template(tmp_path: Path, template: str | None, expected: list[str], last_only: bool) -> None:
    tokenizer = tool_tokenizer(tmp_path, template or CHAT_TEMPLATE)
    if template is None:
        tokenizer._tokenizer.chat_template, tokenizer.has_chat_template = None, False
    made = label_of({"messages": [USER, FOUR, OTHER, SIX]}, tokenizer, format_of(), "row 1")
    assert imitated(tokenizer, made[2]) == expected and made[3] is last_only


def test_tools_of_a_row_are_shown_also_as_json(tmp_path: Path) -> None:
    tokenizer, row = tool_tokenizer(tmp_path), dict[str, Any](messages=[USER, FOUR])
    tools = [{"type": "function", "function": {"name": "calculate", "description": "Add.", "parameters": {}}}]
    shown, as_json, none = (
        label_of(row | {"tools": each}, tokenizer, format_of(max_seq_length=9000), "row 1")[1]
        for each in (tools, json.dumps(tools), "")
    )
    assert shown == as_json != none and '"name": "calculate"' in tokenizer.decode(shown)
    assert mistake(label_of, row | {"tools": "[{"}, tokenizer, format_of(), "row 1")[1].startswith(
        "The column tools of row 1 is not JSON: "
    )


@pytest.mark.parametrize("mask_prompt", [True, False])
def test_tokens_and_mask_are_mlx_lm_s(label_tokenizer: Any, mask_prompt: bool) -> None:
    completion = {"prompt": "2 plus 2?", "completion": "four 4"}
    chat = {"messages": [{"role": "system", "content": "Add."}, USER, FOUR]}
    datasets = (
        CompletionsDataset([completion], label_tokenizer, "prompt", "completion", mask_prompt),
        ChatDataset([chat], label_tokenizer, mask_prompt=mask_prompt),
    )
    for row, dataset in zip((completion, chat), datasets, strict=True):
        ids, offset = dataset.process(row)
        label = label_of(row, label_tokenizer, format_of(mask_prompt=mask_prompt), "row 1")[2]
        assert isinstance(label, Label) and label.tokens == list(ids)
        assert label.mask == [0] * max(offset, 1) + [1] * (len(ids) - max(offset, 1))
        group = labelled_group(tokenized([row], label_tokenizer, format_of(mask_prompt=mask_prompt), "d").first(1)[0])
        assert group.problem.tokens + group.completions[0].tokens == list(ids)


def test_long_rows_are_cut_and_counted(label_tokenizer: Any) -> None:
    rows = [{"prompt": "1 " * count, "completion": "2 " * 10} for count in (1, 40, 60)]
    made = tokenized(rows, label_tokenizer, format_of(max_seq_length=60), "d.jsonl")
    assert isinstance(made, LabelledRows)
    whole, cut = made.first(-1)
    assert whole.label is not None and not whole.label.is_cut and whole.label.tokens[-2] == label_tokenizer.eos_token_id
    assert cut.label is not None and cut.label.is_cut and len(cut.label.tokens) == 60
    assert labelled_group(cut).completions[0].stop == "length"
    assert made.too_long_note("train") == (
        "1 of 3 rows of the train split are longer than Max Seq (60 tokens), and cut at the end. "
        "1 of 3 rows of the train split have nothing to imitate within Max Seq, or images and do not fit it, and are "
        "left out."
    )
    with pytest.raises(UserError, match="No row has anything to imitate in its first 60 tokens"):
        check_prompts(rows[2:], label_tokenizer, format_of(max_seq_length=60), "d.jsonl")


@pytest.mark.parametrize(
    ("row", "setting", "says"),
    [
        ({"prompt": "x", "completion": 3}, "completion_feature", "The column completion of row 2 of d.jsonl must hold"),
        ({"prompt": "", "completion": "y"}, "prompt_feature", "The column prompt of row 2 of d.jsonl is missing"),
        ({"messages": [USER]}, "messages_feature", "The column messages of row 2 of d.jsonl has no message of the"),
        ({"messages": [FOUR]}, "messages_feature", "has no message of the assistant that answers"),
        ({"prompt": "x"}, "completion_feature", "no message to imitate in row 2 of d.jsonl."),
        (
            {"messages": [USER, FOUR], "image": "x.png"},
            "data",
            "The column image of row 2 of d.jsonl: There is no picture",
        ),
    ],
)
def test_a_row_without_a_label_is_named(label_tokenizer: Any, row: dict[str, Any], setting: str, says: str) -> None:
    rows = [{"prompt": "a", "completion": "b"}, row]
    found, sentence = mistake(check_prompts, rows, label_tokenizer, format_of(), "d.jsonl")
    assert found == setting and says in sentence


def test_missing_columns() -> None:
    (fault,) = check_columns([{"prompt": "x", "q": "y"}], label_settings(), "d.jsonl")
    assert (fault.setting, fault.sentence) == (
        "completion_feature",
        "There is no column completion, and no messages, to learn answers from; d.jsonl has the columns prompt, q.",
    )
    assert check_columns([{"messages": []}], label_settings(), "d.jsonl") == []
    assert [fault.setting for fault in check_columns([{"completion": "x"}], label_settings(), "d")] == [
        "prompt_feature"
    ]


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
    return mistake(TokenizedPrompts, [row], None, PromptFormat.of(settings(**raw), TOOLS), "rows.jsonl")


def test_a_prompt_shows_the_tools_of_its_environment(tokenizer: Any) -> None:
    made = PromptFormat.of(settings(**ENVIRONMENTS), TOOLS)
    prompts = TokenizedPrompts(ROWS, tokenizer, made, "rows.jsonl")
    for problem, own in zip(prompts.first(-1), ([ADD, FIND], [ADD, MOVE, MOVE, MOVE], [ADD, FIND]), strict=True):
        assert problem.tokens == apply_chat_template(problem.messages, tokenizer, {"tools": own})
        row = prompts[problem.index]  # alone, not in a batch
        shown, _ = preview_problem(problem.index, problem.row, tokenizer, made, "rows.jsonl")
        assert row is not None and row.tokens == shown.tokens == problem.tokens
    assert prompts.longest_texts()[0] == 1, "its tools are the longest text"
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
        return handler(question, *QUESTIONS[question])(QuestionCall(), settings=about, split="train", **more)

    monkeypatch.setattr(dataset_questions, "shown_tools", lambda config: (TOOLS, ""))
    for index, problem in enumerate(trained):
        row = ask("preview_row", index=index)
        assert [token for piece in row["pieces"] for token in piece["ids"]] == problem.tokens and not row["faults"]
    assert [row["tokens"] for row in ask("preview_rows", numbers=range(2))] == [
        len(problem.tokens) for problem in trained
    ]
    monkeypatch.undo()
    about |= {"environment": "", "mcp_servers": {"clock": {"command": "clock-server"}}}
    row = ask("preview_row", index=0)
    assert "never allowed to run" in row["faults"][0]["sentence"] and row["tokens"] < len(trained[0].tokens)
