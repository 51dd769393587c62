"""TRL's reward functions by their names there."""

from backend.rewards.functions.answers import accuracy_reward as accuracy_reward
from backend.rewards.functions.formats import think_format_reward as think_format_reward

reasoning_accuracy_reward = "accuracy_reward(after_thoughts=true, name=reasoning_accuracy_reward)"


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> str:
    """The entry of DAPO's penalty for completions beyond `max_completion_len` − `soft_punish_cache` tokens."""
    limits = f"max_completion_length={max_completion_len}, cache={soft_punish_cache}"
    return f"soft_overlong_punishment_reward({limits})"


def get_repetition_penalty_reward(ngram_size: int = 3, max_penalty: float = -1.0) -> str:
    """The entry of a penalty for n-grams of tokens that repeat an earlier one."""
    return f"repetition_penalty_reward(ngram_size={ngram_size}, max_penalty={max_penalty})"


def get_cosine_scaled_reward(max_len: int, *values: float, **named: float) -> str:
    """The entry of math accuracy that falls with the length. `values`, by place or name: `min_value_wrong` and the
    others of `cosine_scaled_reward`, in its order."""
    names = ("min_value_wrong", "max_value_wrong", "min_value_correct", "max_value_correct")
    limits = {"max_completion_length": max_len, **dict(zip(names, values, strict=False)), **named}
    return f"cosine_scaled_reward({', '.join(f'{name}={value}' for name, value in limits.items())})"
