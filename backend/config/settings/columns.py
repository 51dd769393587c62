"""How rows of a dataset become prompts."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from backend.config.setting import setting
from backend.config.settings.headings import ANSWERS, COLUMNS, HELD_OUT, PROMPTS, ROWS
from backend.config.settings.limits import MOST_COMPLETIONS, MOST_TOKENS


class DataColumnFields(BaseModel):
    """How rows of a dataset become prompts: the fields of `backend.config.config.Config` about it."""

    # fmt: off
    prompt_feature: str = setting("prompt", "columns", "Prompt", "Column with the question: text, or a list of chat messages.",
                                  used_by=("task", "row_view", "prompt_text"), group=COLUMNS)
    answer_feature: str = setting("answer", "columns", "Answer", "Column with the right answer, for the rewards that compare.",
                                  used_by=("task", "row_view"), group=COLUMNS)
    type_feature: str = setting("type", "columns", "Type", "Column that reward functions may switch on; may be absent.",
                                used_by=("task", "row_view"), group=COLUMNS)
    system_feature: str = setting("system", "columns", "System", "Column with a system message for each row; may be absent.",
                                  used_by=("task", "row_view", "prompt_text"), group=COLUMNS)
    system_prompt: str = setting("", "columns", "System prompt", "Used for rows without a system message of their own.",
                                 kind="prose", used_by=("row_view", "prompt_text"), group=PROMPTS)
    prompt_template: str = setting("", "columns", "Prompt template", "Text that becomes the prompt of each row; {question} stands for the column "
                                   "of that name, {{ and }} for braces. Empty takes the prompt column as it is.", kind="prose", advanced=True,
                                   used_by=("task", "rows"), group=PROMPTS)
    answer_pattern: str = setting("", "columns", "Answer pattern", "A regular expression with one group, searched in the answer column; what "
                                  "the group matches is the answer, such as #### (.*). Rows without a match are left out, and counted.",
                                  advanced=True, used_by=("task", "rows"), group=ANSWERS)
    map_function: str = setting("", "columns", "Map function", "A function of the reward functions file that @register_map_function names. It "
                                "takes each row and returns the row to train on, or None to leave it out.", advanced=True,
                                used_by=("task", "rows"), group=ANSWERS)
    valid_data: str = setting("", "columns", "Validation dataset", "A file, folder or id on Hugging Face with the rows to evaluate on, in place "
                              "of the dataset's own valid split.", kind="dataset", advanced=True, used_by=("task", "rows"), group=HELD_OUT)
    test_data: str = setting("", "columns", "Test dataset", "A file, folder or id on Hugging Face with the rows of the test at the end, in "
                             "place of the dataset's own test split.", kind="dataset", advanced=True, used_by=("task", "rows"), group=HELD_OUT)
    eval_data: dict[str, Any] = setting({}, "columns", "Evaluation sets", "More datasets to evaluate on, each under a name of its own: gsm8k: "
                                        "openai/gsm8k, or a mapping with data and what differs, such as dataset_config or answer_pattern.",
                                        advanced=True, used_by=("task", "rows"), group=HELD_OUT)
    streaming: bool = setting(False, "columns", "Streaming", "Reads rows from the disk when they are needed, for datasets larger than memory. "
                              "The order and the run are the same. Needs jsonl, csv or parquet files, or a dataset on Hugging Face.",
                              advanced=True, used_by=("task", "rows"), group=ROWS)
    dataset_config: str = setting("", "columns", "Dataset config", "Which configuration of a Hugging Face dataset.", advanced=True,
                                  used_by=("task", "rows"), group=ROWS)
    train_split: str = setting("train", "columns", "Train split", "Split to train on.", advanced=True, used_by=("task", "rows"), group=ROWS)
    valid_split: str = setting("valid", "columns", "Valid split", "Split to evaluate on; “validation” is found too.", advanced=True,
                               used_by=("task", "rows"), group=ROWS)
    test_split: str = setting("test", "columns", "Test split", "Split for the test at the end.", advanced=True,
                              used_by=("task", "rows"), group=ROWS)
    validation_split: float = setting(0.0, "columns", "Validation share", "Share of the training rows held out when there "
                                      "is no valid split. 0 holds none.", ge=0, lt=1, advanced=True, used_by=("rows",), group=ROWS)
    chat_template_kwargs: dict[str, Any] = setting({}, "columns", "Chat template options", "Passed to the tokenizer's chat "
                                                   "template, such as enable_thinking: false.", advanced=True,
                                                   used_by=("row_view", "prompt_text"), group=PROMPTS)
    max_prompt_length: int | None = setting(None, "columns", "Max prompt", "Most tokens of a prompt, where that is less than what Max Seq leaves "
                                            "beside the completion. Empty sets no limit of its own.", ge=1, le=MOST_TOKENS, unit="tokens",
                                            advanced=True, used_by=("prompt_limit",), group=PROMPTS)
    long_prompts: str = setting(
        "leave_out", "columns", "Long prompts", "What becomes of a row whose prompt has too many tokens.", advanced=True,
        choices=[("leave_out", "Leave out", "The row is not trained on, and counted."),
                 ("cut_left", "Cut on the left", "The beginning of the last user message is cut off until the prompt fits; system message and "
                  "chat template stay whole.")],
        used_by=("row_view",), group=PROMPTS,
    )
    tokenizer: str = setting("", "columns", "Tokenizer", "A folder or an id on Hugging Face whose tokenizer and chat template take the place of "
                             "the model's own, in the run and in all that is saved of it.", kind="model", advanced=True,
                             used_by=("task", "row_view", "prompt_text"), group=PROMPTS)
    stop: list[str] = setting([], "columns", "Stop strings", "A completion ends once it contains one of these.", advanced=True, group=ANSWERS)
    num_generations_eval: int | None = setting(None, "columns", "Group in evaluation", "Completions per held-out prompt. "
                                               "Empty means the same as Group.", ge=1, le=MOST_COMPLETIONS, advanced=True, group=HELD_OUT)
    run_name: str = setting("", "output", "Run folder name", "Empty names the run after model, kind of training and date.",
                            used_by=("task",))
    # fmt: on
