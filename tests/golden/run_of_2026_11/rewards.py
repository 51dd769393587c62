"""Reward functions of a user, as their file stood when the run beside it was trained."""

from backend.rewards import register_reward_function


@register_reward_function("low_half")
def low_half(prompts, completions, answer, types=None, completion_ids=None):
    """Share of tokens from the low half of the vocabulary."""
    return [sum(token < 160 for token in ids) / len(ids) if ids else None for ids in completion_ids]


@register_reward_function()
def short(prompts, completions, answer, types=None):
    """1 for an empty completion, less for every character."""
    return [1.0 / (1 + len(text)) for text in completions]


def has_digit(completions, type, log_extra=None, **kwargs):
    """A plain function, called as TRL calls it: 1 where a digit was written."""
    found = [float(any(char.isdigit() for char in text)) for text in completions]
    if log_extra is not None:
        log_extra("digits", [sum(char.isdigit() for char in text) for text in completions])
    return found
