"""What is trained, on which data."""

from __future__ import annotations

from pydantic import BaseModel

from backend.config.setting import setting


class ModelAndDataFields(BaseModel):
    """What is trained, on which data: the fields of `backend.config.config.Config` about it."""

    # fmt: off
    train_mode: str = setting(
        "grpo", "algorithm", "Mode", "How the model learns. GRPO samples a group of answers to each prompt, scores them "
        "with your reward functions, and makes the better ones of each group more likely.",
        choices=[("grpo", "GRPO", "Learns from reward functions, no labelled answers to imitate.")],
    )
    model: str = setting("", "model_data", "Base model", "A folder that holds an MLX or Hugging Face model, or the id of "
                         "one on Hugging Face, such as mlx-community/Qwen3-0.6B-4bit.", kind="model", used_by=("task", "row_view"),
                         known_as=("Model or Hugging Face repo",))
    adapter: str = setting("", "model_data", "Adapter", "Trained LoRA or DoRA matrices to start from: a folder or file in mlx-lm's format, or a run of "
                           "yours, at its end or at a checkpoint (name, name@best, name@100). They decide Rank, Scale and the layers. The KL "
                           "term still stays near the base model, unless Reference model path names the adapter too. Empty starts from the base "
                           "model.", kind="adapter", used_by=("task",))
    data: str = setting("", "model_data", "Dataset", "A jsonl, json, csv or parquet file, a folder with train, valid and "
                        "test files, or the id of a dataset on Hugging Face.", kind="dataset", used_by=("task", "rows"),
                        known_as=("Dataset path or local data folder",))
    lm_studio_name: str = setting("", "model_data", "LM Studio export name", "When set, the finished model is also put "
                                  "into LM Studio's models folder under this name. Needs Fuse.", used_by=("task",))
    # fmt: on
