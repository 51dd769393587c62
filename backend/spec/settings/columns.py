"""How rows of a dataset become prompts."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from backend.spec.checks import MOST_COMPLETIONS
from backend.spec.setting import setting


class DataColumnFields(BaseModel):
    """How rows of a dataset become prompts: the fields of `backend.spec.config.Config` about it."""

    # fmt: off
    prompt_feature: str = setting("prompt", "columns", "Prompt", "Column with the question: text, or a list of chat messages.",
                                  used_by=("task", "row_view", "prompt_text"))
    answer_feature: str = setting("answer", "columns", "Answer", "Column with the right answer, for the rewards that compare.",
                                  used_by=("task", "row_view"))
    type_feature: str = setting("type", "columns", "Type", "Column that reward functions may switch on; may be absent.",
                                used_by=("task", "row_view"))
    system_feature: str = setting("system", "columns", "System", "Column with a system message for each row; may be absent.",
                                  used_by=("task", "row_view", "prompt_text"))
    system_prompt: str = setting("", "columns", "System prompt", "Used for rows without a system message of their own.",
                                 kind="prose", used_by=("row_view", "prompt_text"))
    dataset_config: str = setting("", "columns", "Dataset config", "Which configuration of a Hugging Face dataset.", advanced=True,
                                  used_by=("task", "rows"))
    train_split: str = setting("train", "columns", "Train split", "Split to train on.", advanced=True, used_by=("task", "rows"))
    valid_split: str = setting("valid", "columns", "Valid split", "Split to evaluate on; “validation” is found too.", advanced=True,
                               used_by=("task", "rows"))
    test_split: str = setting("test", "columns", "Test split", "Split for the test at the end.", advanced=True,
                              used_by=("task", "rows"))
    validation_split: float = setting(0.0, "columns", "Validation share", "Share of the training rows held out when there "
                                      "is no valid split. 0 holds none.", ge=0, lt=1, advanced=True, used_by=("rows",))
    chat_template_kwargs: dict[str, Any] = setting({}, "columns", "Chat template options", "Passed to the tokenizer's chat "
                                                   "template, such as enable_thinking: false.", advanced=True,
                                                   used_by=("row_view", "prompt_text"))
    stop: list[str] = setting([], "columns", "Stop strings", "A completion ends once it contains one of these.", advanced=True)
    num_generations_eval: int | None = setting(None, "columns", "Group in evaluation", "Completions per held-out prompt. "
                                               "Empty means the same as Group.", ge=1, le=MOST_COMPLETIONS, advanced=True)
    run_name: str = setting("", "output", "Run folder name", "Empty names the run after model, kind of training and date.",
                            used_by=("task",))
    # fmt: on
