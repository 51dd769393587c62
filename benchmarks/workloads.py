"""The workloads: cases, which contenders run them, and the bars for ours. Data only; nothing here runs."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

PEERS = (
    *("unsloth-zoo", "unsloth-zoo, no checkpointing", "mlxrl"),
    *("mlx-lm-lora", "mlx-lm-lora, all rows", "mlx-vlm", "mlx-tune"),
)

BEST = "the best peer"  # as a bar's opponent: of all peers the one with the least of the bar's measure

Work = Literal["step", "rollout", "train", "decode"]
"""A whole step; its rollout alone; its training alone, on random completions; or single decoding steps."""


@dataclass(frozen=True, slots=True)
class Case:
    """One workload, the same for every contender: model sizes, prompts, completions, sampler. Lengths are in tokens.

    With `natural` a completion may end before `completion` tokens, with `end_chance` at every token; without it the
    model never samples the end. Both are in the model's weights, so no contender needs to know.
    """

    name: str
    work: Work = "step"
    prompts: int = 1
    group_size: int = 8
    prompt: int = 64
    completion: int = 128
    natural: bool = False
    end_chance: float = 1 / 64
    temperature: float = 1.0
    top_p: float = 1.0
    beta: float = 0.04
    vocab: int = 4096
    hidden: int = 256
    layers: int = 4
    micro_batch: int | None = None
    """Tokens of a micro-batch of ours, for instance enough for all rows in one; None: the default."""
    image: int = 0
    """Side in pixels of the picture that a prompt begins with, whose tokens are among the `prompt`; 0: text alone."""

    @property
    def rows(self) -> int:
        return self.prompts * self.group_size

    @property
    def image_tokens(self) -> int:
        """Those that stand for the picture's features: one for 32 × 32 pixels."""
        return (self.image // 32) ** 2


@dataclass(frozen=True, slots=True)
class Bar:
    """`ours` may take at most `at_most` times `against`'s `measure`; a stretch goal was not reached by the
    prototypes."""

    against: str
    measure: str
    at_most: float
    stretch: bool = False


@dataclass(frozen=True, slots=True)
class Match:
    """A case, the contenders that run it side by side, and the bars for ours."""

    case: Case
    contenders: Sequence[str]
    bars: Sequence[Bar] = field(default_factory=tuple)


STEP, TOKEN, LEARNING_PEAK = "step_s", "token_s", "peak_train"
UNSHARED = "ours, without prompt sharing"

MATCHES = (  # the cases with bars; the section `against` runs them
    Match(Case("1 × G8 × 128"), ("ours", *PEERS), (Bar(BEST, STEP, 0.45), Bar(BEST, LEARNING_PEAK, 1.1))),
    Match(
        Case("1 × G8 × 256", completion=256), ("ours", *PEERS), (Bar(BEST, STEP, 0.45), Bar(BEST, LEARNING_PEAK, 1.0))
    ),
    Match(Case("prompt 256, 1 × G8 × 128", prompt=256), ("ours", *PEERS), (Bar(BEST, STEP, 0.3),)),
    Match(
        Case("1 × G8 × ≤256, natural ends", completion=256, natural=True), ("ours", *PEERS), (Bar(BEST, TOKEN, 0.45),)
    ),
    Match(Case("4 × G8 × 128", prompts=4), ("ours", *PEERS), (Bar(BEST, STEP, 0.45),)),
    Match(
        Case("4 × G8 × ≤128, natural ends, top-p 0.95", prompts=4, natural=True, top_p=0.95),
        ("ours", *PEERS),
        (Bar(BEST, TOKEN, 0.45),),
    ),
    Match(
        Case("2 × G8 × 64, a picture each", prompts=2, prompt=128, completion=64, image=256),
        ("ours", "mlx-vlm"),
        (Bar("mlx-vlm", STEP, 0.33), Bar("mlx-vlm", "peak", 0.6)),
    ),
    Match(
        Case("16 × G8 × ≤128, natural ends, sampling", "rollout", prompts=16, natural=True),
        ("ours", "mlx-lm batch_generate"),
        (Bar("mlx-lm batch_generate", "rollout_s", 0.6),),
    ),
    Match(
        Case("V 150k, 8 × 512, learning", "train", prompt=256, completion=256, vocab=150_000, beta=0.0),
        ("ours", "plain log-softmax"),
        (Bar("plain log-softmax", "train_s", 0.6), Bar("plain log-softmax", "peak_train", 0.12)),
    ),
    Match(
        Case("prompt 256, 1 × G8 × 128, learning", "train", prompt=256, micro_batch=1 << 20),
        ("ours", UNSHARED),
        (Bar(UNSHARED, "train_s", 0.55), Bar(UNSHARED, "peak_train", 0.55)),
    ),
    Match(
        Case("64 rows, V 8k, one decoding step", "decode", prompts=8, completion=65, vocab=8192, layers=6),
        ("ours", "matrix products alone"),
        (Bar("matrix products alone", "decode_s", 3.5, stretch=True),),
    ),
)

SMALL = (  # what `make bench` measures, ours alone
    Case("1 × G8 × 128"),
    Case("4 × G8 × 128", prompts=4),
    Case("4 × G8 × ≤128, natural ends, top-p 0.95", prompts=4, natural=True, top_p=0.95),
    Case("1 × G8 × 128, V 32k", vocab=32_768),
)

ROWS = tuple(  # the cost of a sample by batch size of decoding
    Case(f"{rows} rows", "rollout", prompts=rows // 8, completion=64) for rows in (8, 16, 32, 64, 128, 256, 512)
)

MIDDLE = Case("middle", prompts=2, completion=64)
AXES: dict[str, tuple[str, tuple[int, ...]]] = {
    "group size": ("group_size", (4, 8, 16, 32)),
    "completion length": ("completion", (32, 64, 128, 256)),
    "prompts a step": ("prompts", (1, 2, 4, 8)),
    "vocabulary": ("vocab", (4096, 32_768, 150_000)),
    "depth": ("layers", (2, 4, 8)),
    "prompt length": ("prompt", (16, 64, 256, 512)),
}
SWEEPS = {  # one size varied at a time around a middling step
    axis: tuple(replace(MIDDLE, name=f"{axis} {size}", **{field: size}) for size in sizes)
    for axis, (field, sizes) in AXES.items()
}

ABLATED = (  # steps on which techniques are switched off
    Case("4 × G8 × ≤128, natural ends", prompts=4, natural=True),
    Case("1 × G8 × 128, prompt 256, V 32k", prompt=256, vocab=32_768),
)
