"""Calls GRPO Studio's reward functions, and those of the user's files, as GRPO Studio does, from functions that TRL can
call.

TRL passes chats and the columns of dataset.py. Functions of GRPO Studio take texts: the prompt's last user message, the
completion with its special tokens, the answer, and every column of the dataset's row. The text is decoded from the
token ids, because TRL's own leaves special tokens such as <think> of some models out.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from backend.data.problems import problem_of
from backend.rewards.catalogue import find_call
from backend.rewards.resolve import RewardFile, RewardFunction, resolve
from backend.rewards.scoring import TrainerState, inputs_for
from backend.rewards.calls import read_scores
from backend.types import Completion
from dataset import HERE, prompt_format, settings

TrlReward = Callable[..., Any] | str
EXECUTED: dict[Path, RewardFile] = {}
"""Files of the user that have run: an environment has the same class for the reward functions of its file."""


def reward_functions() -> list[TrlReward]:
    """One for each entry of the setting `reward_functions`: reward models, which TRL loads by their names, then
    functions under the names that their scores have in GRPO Studio."""
    file = HERE / settings().reward_functions_file if settings().reward_functions_file else None
    names = settings().reward_functions  # none where an environment scores
    models = [name for name in names if (call := find_call(name)) and call.is_model]
    functions = resolve(names[len(models) :], file, HERE, EXECUTED) if len(names) > len(models) else []
    return [*models, *map(_as_trl_calls_it, functions)]


def _as_trl_calls_it(function: RewardFunction) -> Callable[..., Any]:
    def score(prompts: list[Any], completions: list[Any], **given: Any) -> list[float | None]:
        return read_scores(function.call(**_arguments(function, prompts, completions, given)), len(completions))

    async def score_concurrently(prompts: list[Any], completions: list[Any], **given: Any) -> list[float | None]:
        returned = function.call(**_arguments(function, prompts, completions, given))
        return read_scores(await returned if inspect.isawaitable(returned) else returned, len(completions))

    calls = (function.call, getattr(function.call, "__call__", None))  # noqa: B004 - an object with async __call__
    chosen = score_concurrently if any(map(inspect.iscoroutinefunction, calls)) else score
    chosen.__name__ = chosen.__qualname__ = function.about.name
    chosen.__doc__ = inspect.getdoc(function.call)
    return chosen


def _arguments(
    function: RewardFunction, prompts: list[Any], completions: list[Any], given: dict[str, Any]
) -> dict[str, Any]:
    """The keyword arguments of a call, from what TRL gives: prompts [B] and completions [B] as chats, and columns
    [B]."""
    form = prompt_format()
    rows = [json.loads(text) for text in given["row"]]
    ids = given.get("completion_ids") or [[] for _ in completions]
    pairs = enumerate(zip(rows, prompts, strict=True))
    problems = [problem_of(index, row, messages, [], form) for index, (row, messages) in pairs]
    texts = [_text(tokens, completion) for tokens, completion in zip(ids, completions, strict=True)]
    sampled = [Completion(list(tokens), [], text, "eos") for tokens, text in zip(ids, texts, strict=True)]
    inputs = inputs_for(list(zip(problems, sampled, strict=True)), _state(given.get("trainer_state")), function.dialect)
    inputs |= {name: given[name] for name in ("log_extra", "log_metric", "environments") if name in given}
    if function.dialect == "trl" and (settings().tools_file or settings().environment):
        inputs |= {"prompts": prompts, "completions": completions}  # conversations with calls and results
    return function.call_kwargs(inputs)


def _state(state: Any) -> TrainerState:
    """How far the run is, counted in steps as GRPO Studio counts: TRL counts updates of the weights."""
    updates = settings().num_iterations * settings().steps_per_generation
    return TrainerState(
        step=getattr(state, "global_step", 0) // updates,
        max_steps=max(1, getattr(state, "max_steps", 1) // updates),
        epoch=float(getattr(state, "epoch", 0) or 0),
        max_completion_length=settings().max_completion_length,
        reward_timeout=settings().reward_timeout,
    )


def _text(tokens: list[int], completion: Any) -> str:
    """A completion as text, with special tokens and without the end of sequence; the last turn of a conversation."""
    if len(completion) > 1 and not isinstance(completion, str):
        return next(each.get("content") or "" for each in reversed(completion) if each["role"] == "assistant")
    if not tokens:
        return completion if isinstance(completion, str) else "".join(message["content"] for message in completion)
    tokenizer, ends = _tokenizer()
    return tokenizer.decode(tokens[:-1] if tokens[-1] in ends else tokens, skip_special_tokens=False)


@cache
def _tokenizer() -> tuple[Any, set[int]]:
    """The run's tokenizer, and the ids that end a completion."""
    import yaml
    from transformers import AutoTokenizer, GenerationConfig

    model = yaml.safe_load((HERE / "grpo_config.yaml").read_text(encoding="utf-8"))["model_name_or_path"]
    tokenizer = AutoTokenizer.from_pretrained(settings().tokenizer or model)
    ends = {tokenizer.eos_token_id}
    try:
        declared = GenerationConfig.from_pretrained(model).eos_token_id
    except OSError:  # a model without a generation_config.json
        declared = None
    return tokenizer, ends | set(declared if isinstance(declared, list) else [declared])
