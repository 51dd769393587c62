"""Which weights change, and how they are stored."""

from __future__ import annotations

from pydantic import BaseModel

from backend.config.setting import setting
from backend.config.settings.headings import LORA, WEIGHTS

_ADAPTERS = ("train_type", ("lora", "dora"))


class FineTuneFields(BaseModel):
    """Which weights change, and how they are stored: the fields of `backend.config.config.Config` about it."""

    # fmt: off
    train_type: str = setting(
        "lora", "fine_tune", "Fine-tune", "Which weights change.",
        choices=[("lora", "LoRA", "Small matrices beside the frozen weights: little memory, and the usual choice."),
                 ("dora", "DoRA", "LoRA with the size of each weight row learned apart: a little slower, often a little better."),
                 ("full", "Full", "Every weight. Needs several times the memory, and cannot start from a quantised model.")],
        used_by=("duration",),
    )
    num_layers: int = setting(16, "fine_tune", "Layers", "How many of the last layers get adapters. −1 means all of them.",
                              ge=-1, le=10_000, unit="layers", when=_ADAPTERS, group=LORA, used_by=("duration",))
    rank: int = setting(8, "fine_tune", "Rank", "Width of the adapter matrices. More can learn more and costs more memory.",
                        ge=1, le=4096, when=_ADAPTERS, group=LORA)
    scale: float = setting(20.0, "fine_tune", "Scale", "Factor on what the adapter adds to the frozen weight.",
                           gt=0, le=1_000_000, when=_ADAPTERS, group=LORA)
    lora_alpha: float | None = setting(None, "fine_tune", "LoRA alpha", "Scale by another name, as peft and TRL have it: it is alpha divided by "
                                       "the rank, and takes the place of Scale.", gt=0, le=1_000_000, advanced=True, when=_ADAPTERS, group=LORA)
    use_rslora: bool = setting(False, "fine_tune", "rsLoRA", "Divides LoRA alpha by the root of the rank, so that large ranks learn as "
                               "fast as small ones (arXiv:2312.03732).", advanced=True, when=_ADAPTERS, group=LORA)
    dropout: float = setting(0.0, "fine_tune", "Dropout", "Share of adapter inputs set to zero while learning.",
                             ge=0, lt=1, when=_ADAPTERS, group=LORA)
    lora_keys: list[str] = setting([], "fine_tune", "Target modules", "Names of the layers that get adapters, whole or their end: "
                                   "self_attn.q_proj or q_proj; all-linear means every linear one. Empty means all that can.",
                                   advanced=True, when=_ADAPTERS, group=LORA)
    modules_to_save: list[str] = setting([], "fine_tune", "Modules to save", "Modules that are trained as a whole beside the adapters, by name "
                                         "or its end: lm_head, embed_tokens, norm. They are saved with the adapters, which mlx-lm then does "
                                         "not load by itself; the fused model has them.", advanced=True, when=_ADAPTERS, group=LORA)
    quantization: str = setting(
        "none", "fine_tune", "Quantization", "Stores the frozen base weights in fewer bits, after loading. Quantisation-aware training (QAT) does "
        "not apply to GRPO.",
        choices=[("none", "None", "As the model comes."), ("4", "4-bit", "A quarter of 16-bit memory; some loss."),
                 ("6", "6-bit", ""), ("8", "8-bit", "Half of 16-bit memory; hardly any loss."),
                 ("mxfp4", "MXFP4", "4-bit floating point with shared exponents.")], group=WEIGHTS,
    )
    dtype: str = setting(
        "auto", "fine_tune", "Precision", "The floating-point type that the model computes in, and that its float weights have while it "
        "learns. What is saved has the precision that the model came with.",
        choices=[("auto", "Automatic", "As the model comes; 32 bits where every weight is trained."),
                 ("float32", "float32", "Sampling and learning agree exactly. Twice the memory of 16 bits; with 4-bit weights only the "
                  "activations grow."),
                 ("bfloat16", "bfloat16", "What most models come in. The widest range and the coarsest steps; under full fine-tuning "
                  "the weights that learn stay in 32 bits beside it."),
                 ("float16", "float16", "Eight times finer than bfloat16, so sampling and learning agree better; a smaller range.")], group=WEIGHTS,
    )
    # fmt: on
