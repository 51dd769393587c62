"""TRL's reward functions by their names there."""

from backend.rewards.functions.answers import accuracy_reward as accuracy_reward
from backend.rewards.functions.formats import think_format_reward as think_format_reward

reasoning_accuracy_reward = "accuracy_reward(after_thoughts=true, name=reasoning_accuracy_reward)"


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> str:
    """The entry of DAPO's penalty for completions beyond `max_completion_len` − `soft_punish_cache` tokens."""
    limits = f"max_completion_length={max_completion_len}, cache={soft_punish_cache}"
    return f"soft_overlong_punishment_reward({limits})"
