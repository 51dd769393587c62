"""The model, its adapters and their precision."""

from __future__ import annotations

from functools import partial

from pydantic import BaseModel

from backend.config.form import LORA, WEIGHTS
from backend.config.setting import setting

_algorithm = partial(setting, section="algorithm")
_model_data = partial(setting, section="model_data")
_fine_tune = partial(setting, section="fine_tune")
_lora = partial(setting, section="fine_tune", group=LORA)
_advanced_lora = partial(_lora, advanced=True)
_weights = partial(setting, section="fine_tune", group=WEIGHTS)
_ADAPTERS = ("train_type", ("lora", "dora"))


class ModelFields(BaseModel):
    """The model, its adapters and their precision."""

    train_mode: str = _algorithm(
        "grpo", "Mode", choices=[("grpo", "GRPO", "Learns from reward functions, no labelled answers to imitate.")]
    )
    """GRPO samples a group of answers for each prompt, scores them with your reward functions, and reinforces the
    better ones."""
    model: str = _model_data(
        "", "Base model", kind="model", known_as=("Model or Hugging Face repo",), used_by=("task", "row_view")
    )
    """A folder with an MLX or Hugging Face model, or a Hugging Face id such as mlx-community/Qwen3-0.6B-4bit."""
    adapter: str = _model_data("", "Adapter", kind="adapter", used_by=("task",))
    """LoRA or DoRA adapters to start from: a folder or file in mlx-lm's format, or a run (name, name@best,
    name@100). They set Rank, Scale and the layers. Empty: start from the base model."""
    data: str = _model_data(
        "", "Dataset", kind="dataset", known_as=("Dataset path or local data folder",), used_by=("task", "rows")
    )
    """A jsonl, json, csv or parquet file, a folder with train, valid and test files, or a Hugging Face id."""
    lm_studio_name: str = _model_data("", "LM Studio export name", used_by=("task",))
    """Copies the finished model into LM Studio's models folder under this name. Needs Fuse."""
    train_type: str = _fine_tune(
        "lora",
        "Fine-tune",
        choices=[
            ("lora", "LoRA", "Small matrices beside the frozen weights: little memory, the usual choice."),
            ("dora", "DoRA", "LoRA that learns the length of weight rows separately: slower, often better."),
            ("full", "Full", "Every weight. Several times the memory; the model must not be quantised."),
        ],
        used_by=("duration",),
    )
    """Which weights change."""
    num_layers: int = _lora(16, "Layers", within=(-1, 10_000, "layers"), when=_ADAPTERS, used_by=("duration",))
    """Number of last layers that get adapters. −1: all."""
    rank: int = _lora(8, "Rank", within=(1, 4_096), when=_ADAPTERS)
    """Width of the adapter matrices. Larger learns more and needs more memory."""
    scale: float = _lora(20.0, "Scale", above=(0, 1_000_000), when=_ADAPTERS)
    """Factor on the adapter's output."""
    lora_alpha: float | None = _advanced_lora(None, "LoRA alpha", above=(0, 1_000_000), when=_ADAPTERS)
    """Scale as PEFT and TRL write it: alpha divided by the rank. Replaces Scale."""
    use_rslora: bool = _advanced_lora(False, "rsLoRA", when=_ADAPTERS)
    """Divides LoRA alpha by the root of the rank, so large ranks learn as fast as small ones (arXiv:2312.03732)."""
    dropout: float = _lora(0.0, "Dropout", below=(0, 1), when=_ADAPTERS)
    """Share of adapter inputs set to zero while learning."""
    lora_keys: list[str] = _advanced_lora([], "Target modules", when=_ADAPTERS)
    """Layers that get adapters, by full name or ending: self_attn.q_proj, q_proj, or all-linear. Empty: every layer
    that can."""
    modules_to_save: list[str] = _advanced_lora([], "Modules to save", when=_ADAPTERS)
    """Modules trained in full beside the adapters, by name or ending: lm_head, embed_tokens, norm. mlx-lm does not
    load them with the adapters; the fused model has them."""
    quantization: str = _weights(
        "none",
        "Quantization",
        choices=[
            ("none", "None", "As the model comes."),
            ("4", "4-bit", "A quarter of 16-bit memory; some loss."),
            ("6", "6-bit", ""),
            ("8", "8-bit", "Half of 16-bit memory; hardly any loss."),
            ("mxfp4", "MXFP4", "4-bit floating point with shared exponents."),
        ],
    )
    """Stores the frozen base weights in fewer bits. Quantisation-aware training (QAT) does not apply to GRPO."""
    dtype: str = _weights(
        "auto",
        "Precision",
        choices=[
            ("auto", "Automatic", "As the model comes; 32 bits under full fine-tuning."),
            ("float32", "float32", "Sampling and learning agree exactly. Twice the memory of 16 bits."),
            (
                "bfloat16",
                "bfloat16",
                "What most models come in: wide range, coarse steps. Full fine-tuning keeps 32-bit weights beside it.",
            ),
            ("float16", "float16", "Eight times finer than bfloat16, with a smaller range."),
        ],
    )
    """Floating-point type of the computation. Saved weights keep the model's own precision."""
