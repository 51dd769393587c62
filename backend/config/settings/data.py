"""How rows become prompts, and where metrics are reported."""

from __future__ import annotations

from functools import partial
from typing import Any

from pydantic import BaseModel

from backend.config.form import ANSWERS, COLUMNS, HELD_OUT, PROMPTS, ROWS
from backend.config.setting import MOST_COMPLETIONS, MOST_TOKENS, setting

_columns = partial(setting, section="columns", group=COLUMNS, used_by=("task", "row_view"))
_prompts = partial(setting, section="columns", group=PROMPTS)
_advanced_prompts = partial(_prompts, advanced=True)
_answers = partial(setting, section="columns", group=ANSWERS, advanced=True)
_held_out = partial(setting, section="columns", group=HELD_OUT, advanced=True)
_rows = partial(setting, section="columns", group=ROWS, advanced=True, used_by=("task", "rows"))
_output = partial(setting, section="output")
_advanced_output = partial(_output, advanced=True)


class DataFields(BaseModel):
    """How rows become prompts, and where metrics are reported."""

    prompt_feature: str = _columns("prompt", "Prompt", used_by=("task", "row_view", "prompt_text"))
    """Column with the question: text, or a list of chat messages."""
    answer_feature: str = _columns("answer", "Answer")
    """Column with the right answer, for rewards that compare."""
    type_feature: str = _columns("type", "Type")
    """Optional column that reward functions may read."""
    system_feature: str = _columns("system", "System", used_by=("task", "row_view", "prompt_text"))
    """Optional column with a system message per row."""
    system_prompt: str = _prompts("", "System prompt", kind="prose", used_by=("row_view", "prompt_text"))
    """Used for rows without their own system message."""
    prompt_template: str = _advanced_prompts("", "Prompt template", kind="prose", used_by=("task", "rows"))
    """Text of each prompt; {question} inserts that column, {{ and }} are braces. Empty: the prompt column."""
    answer_pattern: str = _answers("", "Answer pattern", used_by=("task", "rows"))
    """A regular expression with one group that extracts the answer from the answer column, such as #### (.*). Rows
    without a match are skipped and counted."""
    map_function: str = _answers("", "Map function", used_by=("task", "rows"))
    """A function registered with @register_map_function. It gets each row and returns the row to train on, or None
    to skip it."""
    valid_data: str = _held_out("", "Validation dataset", kind="dataset", used_by=("task", "rows"))
    """A file, folder or Hugging Face id to evaluate on, instead of the dataset's valid split."""
    test_data: str = _held_out("", "Test dataset", kind="dataset", used_by=("task", "rows"))
    """A file, folder or Hugging Face id for the final test, instead of the dataset's test split."""
    eval_data: dict[str, Any] = _held_out({}, "Evaluation sets", used_by=("task", "rows"))
    """More datasets to evaluate on, by name: gsm8k: openai/gsm8k, or a mapping with data and what differs, such as
    answer_pattern."""
    streaming: bool = _rows(False, "Streaming")
    """Reads rows from disk when they are needed, for datasets larger than memory. Needs jsonl, csv, parquet or
    Hugging Face."""
    dataset_config: str = _rows("", "Dataset config")
    """Configuration of a Hugging Face dataset."""
    train_split: str = _rows("train", "Train split")
    """Split to train on."""
    valid_split: str = _rows("valid", "Valid split")
    """Split for evaluations; “validation” works too."""
    test_split: str = _rows("test", "Test split")
    """Split for the test at the end."""
    validation_split: float = _rows(0.0, "Validation share", below=(0, 1), used_by=("rows",))
    """Share of the training rows held out if there is no valid split."""
    chat_template_kwargs: dict[str, Any] = _advanced_prompts(
        {}, "Chat template options", used_by=("row_view", "prompt_text")
    )
    """Passed to the tokenizer's chat template, such as enable_thinking: false."""
    max_prompt_length: int | None = _advanced_prompts(
        None, "Max prompt", within=(1, MOST_TOKENS, "tokens"), used_by=("prompt_limit",)
    )
    """Maximum prompt tokens. Empty: whatever Max Seq leaves."""
    long_prompts: str = _advanced_prompts(
        "leave_out",
        "Long prompts",
        choices=[
            ("leave_out", "Leave out", "The row is skipped and counted."),
            ("cut_left", "Cut on the left", "Cuts the beginning of the last user message until the prompt fits."),
        ],
        used_by=("row_view",),
    )
    """What to do with a row whose prompt is too long."""
    tokenizer: str = _advanced_prompts("", "Tokenizer", kind="model", used_by=("task", "row_view", "prompt_text"))
    """A folder or Hugging Face id whose tokenizer and chat template replace the model's own."""
    stop: list[str] = _answers([], "Stop strings")
    """A completion ends when it contains one of these."""
    num_generations_eval: int | None = _held_out(None, "Group in evaluation", within=(1, MOST_COMPLETIONS))
    """Completions per held-out prompt. Empty: as Group."""
    run_name: str = _output("", "Run folder name", used_by=("task",))
    """Empty: named after model, fine-tuning and date."""
    report_to: list[str] = _advanced_output([], "Report to")
    """Trackers: csv, tensorboard, trackio, wandb, none, or all that are installed. wandb stays offline unless
    WANDB_MODE is online."""
    tracker_project: str = _advanced_output("", "Tracker project")
    """Project in trackio and wandb. Empty: grpo-studio."""
    tracker_run_name: str = _advanced_output("", "Tracker run name")
    """Name of the run in trackers. Empty: its folder name."""
