"""The app's suggestions before the user has chosen anything: a model, a dataset, and a system prompt."""

MODEL = "mlx-community/Qwen3-0.6B-4bit"  # small enough for every Mac, and good enough to learn something
DATASET = "mlx-community/Dolci-Think-RL-7B-2k"  # of MLX LoRA Studio's guide to GRPO; columns `prompt`, `answer`
DATASET_ABOUT = "about 2,000 reasoning tasks, from Hugging Face"
SYSTEM_PROMPT = (  # the format that the five default rewards check; without it a model never writes the tags
    "Think the question through before you answer. Write your thoughts between <think> and </think>, and after them "
    "only the final answer between <answer> and </answer>."
)


def model_to_begin_with() -> str:
    """MODEL where it was fetched or nothing was, else the smallest model of the Hugging Face cache."""
    from backend.models import inventory

    cached = {item.id: item.size for item in inventory.models() if item.where == "cache" and not item.refusal}
    return MODEL if MODEL in cached or not cached else min(cached, key=lambda name: cached[name])
