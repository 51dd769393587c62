"""Labelled rows: what is imitated of each, and what is said of rows without labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mlx_lm.tuner.datasets import ChatDataset, CompletionsDataset

from backend.config.config import Config, parse
from backend.data.labels import LabelledRows, check_labels, label_of, labelled_group, tokenized
from backend.data.problems import PromptFormat, TooLong
from backend.data.rows import check_columns
from backend.types import Label
from backend.utils.errors import UserError
from tests.support.random_models import CHAT_TEMPLATE
from tests.support.tool_tokenizers import tool_tokenizer

USER, OTHER = {"role": "user", "content": "2 plus 2?"}, {"role": "user", "content": "And 3?"}
FOUR, SIX = {"role": "assistant", "content": "four 4"}, {"role": "assistant", "content": "six 6"}
FOUR_TEXT, SIX_TEXT = "four 4<|im_end|>\n", "six 6<|im_end|>\n"
MARKED = CHAT_TEMPLATE.replace(
    "{{ message.content }}<|im_end|>",
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}"
    "{% else %}{{ message.content }}{% endif %}<|im_end|>",
)
FORGETS = CHAT_TEMPLATE.replace(
    "{{ message.content }}",
    "{{ message.content if loop.last or message.role == 'user' else message.content[:3] }}",
)
"""Later turns change what an earlier one was, as templates do that drop its thinking."""


def settings(**raw: Any) -> Config:
    return parse({"model": "m", "data": "d", "train_mode": "sft"} | raw)


def format_of(**raw: Any) -> PromptFormat:
    return PromptFormat.of(settings(**raw), labelled=True)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
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
    ],
)
def test_the_assistant_s_tokens_are_imitated(tokenizer: Any, row: Any, raw: Any, expected: list[str]) -> None:
    _, start, label, last_only = label_of(row, tokenizer, format_of(**raw), "row 1")
    assert imitated(tokenizer, label) == expected and not last_only
    prompt = tokenizer.decode(start)
    assert prompt.endswith("<|im_start|>assistant\n") and tokenizer.decode(label.tokens).startswith(prompt)


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


@pytest.mark.parametrize("mask_prompt", [True, False])
def test_tokens_and_mask_are_mlx_lm_s(tokenizer: Any, mask_prompt: bool) -> None:
    completion = {"prompt": "2 plus 2?", "completion": "four 4"}
    chat = {"messages": [{"role": "system", "content": "Add."}, USER, FOUR]}
    datasets = (
        CompletionsDataset([completion], tokenizer, "prompt", "completion", mask_prompt),
        ChatDataset([chat], tokenizer, mask_prompt=mask_prompt),
    )
    for row, dataset in zip((completion, chat), datasets, strict=True):
        ids, offset = dataset.process(row)
        label = label_of(row, tokenizer, format_of(mask_prompt=mask_prompt), "row 1")[2]
        assert isinstance(label, Label) and label.tokens == list(ids)
        assert label.mask == [0] * max(offset, 1) + [1] * (len(ids) - max(offset, 1))
        group = labelled_group(tokenized([row], tokenizer, format_of(mask_prompt=mask_prompt), "d").first(1)[0])
        assert group.problem.tokens + group.completions[0].tokens == list(ids)


def test_long_rows_are_cut_and_counted(tokenizer: Any) -> None:
    rows = [{"prompt": "1 " * count, "completion": "2 " * 10} for count in (1, 40, 60)]
    made = tokenized(rows, tokenizer, format_of(max_seq_length=60), "d.jsonl")
    assert isinstance(made, LabelledRows)
    whole, cut = made.first(-1)
    assert whole.label is not None and not whole.label.is_cut and whole.label.tokens[-2] == tokenizer.eos_token_id
    assert cut.label is not None and cut.label.is_cut and len(cut.label.tokens) == 60
    assert labelled_group(cut).completions[0].stop == "length"
    assert made.too_long_note("train") == (
        "1 of 3 rows of the train split are longer than Max Seq (60 tokens), and cut at the end. "
        "1 of 3 rows of the train split have nothing to imitate within Max Seq, or images and do not fit it, and are "
        "left out."
    )
    with pytest.raises(UserError, match="No row has anything to imitate in its first 60 tokens"):
        check_labels(rows[2:], tokenizer, format_of(max_seq_length=60), "d.jsonl")


@pytest.mark.parametrize(
    ("row", "setting", "says"),
    [
        ({"prompt": "x", "completion": 3}, "completion_feature", "The column completion of row 2 of d.jsonl must hold"),
        ({"prompt": "", "completion": "y"}, "prompt_feature", "The column prompt of row 2 of d.jsonl must hold"),
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
def test_a_row_without_a_label_is_named(tokenizer: Any, row: dict[str, Any], setting: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        check_labels([{"prompt": "a", "completion": "b"}, row], tokenizer, format_of(), "d.jsonl")
    assert caught.value.faults[0].setting == setting


def test_missing_columns() -> None:
    (fault,) = check_columns([{"prompt": "x", "q": "y"}], settings(), "d.jsonl")
    assert (fault.setting, fault.sentence) == (
        "completion_feature",
        "There is no column completion, and no messages, to learn answers from; d.jsonl has the columns prompt, q.",
    )
    assert check_columns([{"messages": []}], settings(), "d.jsonl") == []
    assert [fault.setting for fault in check_columns([{"completion": "x"}], settings(), "d")] == ["prompt_feature"]
