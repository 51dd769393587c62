"""Reward functions for the format of DeepSeek-R1 (arXiv 2501.12948): thoughts in `<think>`, the answer in `<answer>`. A
completion may be huge and hostile: every scan passes over it a fixed number of times, and no pattern can backtrack."""

import re

from backend.rewards.registry import Scores, Texts, Types, register_reward_function

_ANSWER, _END_OF_ANSWER = "<answer>", "</answer>"
_THOUGHT_TAG = re.compile(r"</?(think|reasoning)>")
# ASCII on purpose: str.isdigit takes "²" for a digit and refuses "-3".
_INTEGER = re.compile(r"-?[0-9]+")


@register_reward_function("r1_accuracy_reward_func", label="Accuracy")
def r1_accuracy_reward_func(prompts: Texts, completions: Texts, answer: Texts, types: Types = None) -> Scores:
    """2.0 when the text in the last `<answer>` equals the dataset's answer. Both are stripped of white space. 0 without
    a closed `<answer>` and for an empty one, even where the dataset's answer is empty too."""
    extracted = [extract_answer(text) for text in completions]
    return [2.0 if text and text == right.strip() else 0.0 for text, right in zip(extracted, answer, strict=True)]


@register_reward_function("r1_int_reward_func", label="Integer Answer")
def r1_int_reward_func(
    prompts: Texts, completions: Texts, answer: Texts, types: Types = None, *, sign: bool = True
) -> Scores:
    """0.5 when the text in the last `<answer>` is digits only, after a minus sign or not. `sign=False` gives −3 a 0, as
    mlx-lm-lora does."""
    answers = [extract_answer(text) for text in completions]
    return [0.5 if _INTEGER.fullmatch(text) and (sign or text[0] != "-") else 0.0 for text in answers]


@register_reward_function("r1_strict_format_reward_func", label="Strict Format")
def r1_strict_format_reward_func(prompts: Texts, completions: Texts, answer: Texts, types: Types = None) -> Scores:
    """0.5 for `<think>…</think><answer>…</answer>` and nothing else. Each tag stands once and both parts have content.
    White space is free; `<reasoning>` is taken for `<think>`."""
    scores: list[float | None] = []
    for text in map(str.strip, completions):
        tags = thought, end_of_thought, opening, end_of_answer = _tags(text)
        is_strict = all(text.count(tag) == 1 for tag in tags) and _in_order(text)
        if is_strict:
            between = text[text.index(end_of_thought) + len(end_of_thought) : text.index(opening)]
            is_strict = text.startswith(thought) and text.endswith(end_of_answer) and not between.strip()
        scores.append(0.5 if is_strict else 0.0)
    return scores


@register_reward_function("r1_soft_format_reward_func", label="Soft Format")
def r1_soft_format_reward_func(prompts: Texts, completions: Texts, answer: Texts, types: Types = None) -> Scores:
    """0.5 when the tags stand in the right order, each with content. The first thought must be closed before the last
    `<answer>` opens; other text may stand anywhere, and `<reasoning>` is taken for `<think>`."""
    return [0.5 if _in_order(text) else 0.0 for text in completions]


@register_reward_function("r1_count_xml", label="XML Count")
def r1_count_xml(prompts: Texts, completions: Texts, answer: Texts, types: Types = None) -> Scores:
    """0.125 for each of the four tags that stands exactly once, minus 0.001 per trailing character, never below 0.
    Trailing is what follows the last `</answer>`. `<reasoning>` is taken for `<think>`."""
    scores: list[float | None] = []
    for text in completions:
        count = sum(text.count(tag) == 1 for tag in _tags(text))
        _, closed, rest = text.rpartition(_END_OF_ANSWER)
        trailing = len(rest.rstrip()) if closed else 0
        scores.append(max(0.0, 0.125 * count - 0.001 * trailing))
    return scores


def extract_answer(text: str) -> str:
    """The text in the last `<answer>` that is closed again, stripped; empty where there is none."""
    start = _last_answer(text)
    if start < 0:
        return ""
    start += len(_ANSWER)
    return text[start : text.index(_END_OF_ANSWER, start)].strip()


def _last_answer(text: str) -> int:
    return text.rfind(_ANSWER, 0, max(text.rfind(_END_OF_ANSWER), 0))


def _tags(text: str) -> tuple[str, str, str, str]:
    first = _THOUGHT_TAG.search(text)
    word = first[1] if first else "think"
    return f"<{word}>", f"</{word}>", _ANSWER, _END_OF_ANSWER


def _in_order(text: str) -> bool:
    thought, end_of_thought, _, _ = _tags(text)
    start = text.find(thought)
    end = text.find(end_of_thought, start)
    if not 0 <= start < end < _last_answer(text):
        return False
    return bool(text[start + len(thought) : end].strip() and extract_answer(text))
