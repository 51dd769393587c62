"""What each phase of a step holds in memory, in bytes: a sum over arrays that are alive at the same time.

Nothing is fitted to a machine. A term is an array that the engine keeps, and its factor is how many of its size are alive
at once, counted in the graphs that autodiff makes of mlx-lm's layers; `tests/run/test_memory_plan.py` holds the sums against
measured peaks. Letters: B rows, K prompt tokens, T completion tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from backend.spec.config import Config
from backend.spec.memory.chunking import PREFILL_TOKENS, capacity
from backend.spec.memory.model_shape import Linear, ModelShape, packed_width

FLOAT_BYTES = 4
"""Bytes of a number of an adapter, of a gradient, of a log-probability."""

PREFILL_CHUNK = 2048
PREFILL_BUCKET = 256
"""Columns by which the caches grow that mlx-lm fills with prompts."""

IN_FLIGHT_NAME, IN_FLIGHT_SHARE = "in flight", 0.05
"""Of what a phase works on, beside what has to be there."""

OPTIMIZER_COPIES = {
    "adamw": 2, "adam": 2, "adamax": 2, "adadelta": 2, "muon": 1, "sgd": 1, "lion": 1, "rmsprop": 1, "adagrad": 1,
}  # fmt: skip
"""Arrays of a weight's size that an optimizer remembers for it; Adafactor keeps its rows and columns only."""

QUANTIZED = {"4": (4, 64, "affine"), "6": (6, 64, "affine"), "8": (8, 64, "affine"), "mxfp4": (4, 32, "mxfp4")}


@dataclass(frozen=True, slots=True)
class Allocation:
    """One use of memory."""

    name: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Phase:
    """What is held at the moment of a phase that needs most."""

    allocations: tuple[Allocation, ...]

    @property
    def total(self) -> int:
        return sum(allocation.bytes for allocation in self.allocations)

    @property
    def needed(self) -> int:
        """Without what MLX prepares ahead of the device."""
        return sum(allocation.bytes for allocation in self.allocations if allocation.name != IN_FLIGHT_NAME)

    def to_dict(self) -> dict[str, int]:
        return {allocation.name: allocation.bytes for allocation in self.allocations} | {"total": self.total}


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How a step is cut up. Every choice trades time for memory and changes no number beyond rounding."""

    rows: int
    """Completions decoded together."""
    prefill_chunk: int
    """Prompt tokens read in one pass, of each prompt."""
    merge: bool
    """Whether decoding has a second copy of the weights that adapters change, with the adapters inside."""
    micro_batch_tokens: int
    """Tokens, padding counted, of one forward and backward pass."""
    chunk: int
    """Completion tokens whose logits are worked on at once."""
    recompute: bool
    """Whether layers' activations are worked out again in the backward pass."""


class MemoryModel:
    """The arrays of one run, by what its settings and its model say. `values` holds all settings, sound.

    `prompt` is the length of the longest prompts, `gpu` whether MLX works on one: its norms keep less.
    """

    def __init__(self, config: Config, shape: ModelShape, prompt: int, *, gpu: bool) -> None:
        self.config, self.shape, self.prompt, self.gpu = config, shape, prompt, gpu
        self.full = config.train_type == "full"
        self.width = FLOAT_BYTES if self.full else shape.width
        """Bytes of a number of the activations: full fine-tuning works in 32 bits."""
        self.group, self.completion = config.group_size, config.max_completion_length
        self.prompts = config.prompts_per_step
        self.rows = self.prompts * self.group
        count = len(shape.layers)
        learning = count if self.full or config.num_layers < 0 else min(config.num_layers, count)
        self.layers = shape.layers[count - learning :]
        """Those that learn. Earlier ones keep nothing for the backward pass."""

    # ── what stays from step to step ─────────────────────────────────────────────────────────────────────────────────

    def persistent(self) -> list[Allocation]:
        """Weights, adapters, what the optimizer remembers, and the reference where it has arrays of its own."""
        weights = self.weights()
        found = [
            ("weights", weights),
            ("adapters", 0 if self.full else self.trainable()),
            ("optimizer", self._optimizer()),
        ]
        return [
            Allocation(name, size) for name, size in [*found, ("reference", self._reference_weights(weights))] if size
        ]

    def weights(self) -> int:
        """As they are trained: quantised after loading where the settings ask for it, in 32 bits where every weight learns."""
        how = QUANTIZED.get(self.config.quantization)
        if self.full and not self.shape.quantised:
            return round(self.shape.weights * FLOAT_BYTES / self.shape.width)
        if how is None or self.shape.quantised:
            return self.shape.weights
        bits, group, mode = how
        each = packed_width(bits, group, mode, self.shape.width)
        fitting = [one for one in self.shape.matrices if one.inputs % group == 0]
        return self.shape.weights - sum(one.bytes - round(one.numbers * each) for one in fitting)

    def trainable(self) -> int:
        """Bytes of all that learns; a gradient is as large."""
        if self.full:
            return self.weights()
        return FLOAT_BYTES * sum(self._adapter(linear) for linear in self.adapted_linears())

    def _adapter(self, one: Linear) -> int:
        """LoRA's A [in, rank] and B [rank, out], for each expert (arXiv:2106.09685); DoRA's length of each row beside them."""
        length = one.outputs if self.config.train_type == "dora" else 0
        return one.experts * self.config.rank * (one.inputs + one.outputs) + length

    def adapted_linears(self) -> list[Linear]:
        named = [one for one in self.shape.outside if one.name in self.config.lora_keys]
        return [one for layer in self.layers for one in self.adapted_in_layer(layer)] + named

    def adapted_in_layer(self, layer: tuple[Linear, ...]) -> list[Linear]:
        keys = self.config.lora_keys
        return [one for one in layer if self.full or not keys or one.name in keys]

    def _optimizer(self) -> int:
        if self.config.optimizer in OPTIMIZER_COPIES:
            return OPTIMIZER_COPIES[self.config.optimizer] * self.trainable()
        if self.full:  # of vectors, such as those of the norms, it keeps all
            vectors = self.weights() - FLOAT_BYTES * sum(one.numbers for one in self.shape.matrices)
            return vectors + FLOAT_BYTES * sum(one.experts * (one.inputs + one.outputs) for one in self.shape.matrices)
        rank, dora = self.config.rank, self.config.train_type == "dora"
        each = [
            one.experts * (one.inputs + one.outputs + 2 * rank) + dora * one.outputs for one in self.adapted_linears()
        ]
        return FLOAT_BYTES * sum(each)

    def _reference_weights(self, weights: int) -> int:
        """It shares the frozen weights; what learns is there twice from the first update on, or the first move of it."""
        if not self.config.needs_reference:
            return 0
        if self.config.reference_model_path:
            return weights
        return self.trainable() if self.full or self.config.sync_ref_model else 0

    # ── sampling ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def rollout(self, plan: MemoryPlan) -> Phase:
        """Sampling at its peak: reading the prompts, laying out the first rows, or the last tokens of the longest rows."""
        rows = min(plan.rows, self.rows)
        read = self._prompts_prefilled(rows)
        source = self.cache(read, _rounded(self.prompt, PREFILL_BUCKET))
        columns = capacity(self.prompt + self.completion)
        waiting = source if rows < self.rows else 0
        cache = self.cache(rows, columns) + waiting
        logits = 5 * rows * self.shape.vocabulary * FLOAT_BYTES
        """Logits, those above the peak, their exponentials, what the filters leave and its sums."""
        layer = self.cache(rows, columns) // max(len(self.shape.layers), 1)
        moments = {
            "folding": (0, 4 * FLOAT_BYTES * self.largest_adapted()),
            "reading": (source, self._prefill_work(read, plan)),
            "laying": (source + self.cache(rows, capacity(self.prompt + 8)), layer // 2),
            "growing": (cache, layer),
            "drawing": (cache, logits),
        }
        held, work = max(moments.values(), key=sum)
        found = [
            Allocation("KV cache", held),
            Allocation("logits" if work == logits else "activations", work),
            in_flight(held + work),
        ]
        merged = self._merged_weights(plan)
        return Phase((*self.persistent(), *([Allocation("decoding weights", merged)] if merged else []), *found))

    def _prompts_prefilled(self, rows: int) -> int:
        return -(-rows // self.group) if self.shape.plain else 1

    def cache(self, rows: int, columns: int) -> int:
        """Keys and values of every layer."""
        return rows * columns * 2 * self.shape.keys * len(self.shape.layers) * self.width

    def _prefill_work(self, prompts: int, plan: MemoryPlan) -> int:
        """One layer at work on a chunk of the prompts: scores before the mask, after it and as shares, [B, heads, chunk, K],
        or the gated unit's four arrays. On a CPU its exponentials are spelled out, in five arrays or six, and two layers' are
        prepared ahead."""
        chunk = min(plan.prefill_chunk, max(1, PREFILL_TOKENS // prompts), self.prompt)
        scores = prompts * self.shape.heads * chunk * self.prompt * self.width
        mlp_width = prompts * chunk * self.mlp_width(self.shape.layers[-1])
        spelled = 0 if self.gpu else mlp_width * FLOAT_BYTES
        return max(3 * scores + 6 * spelled, 4 * mlp_width * self.width + 10 * spelled)

    def _merged_weights(self, plan: MemoryPlan) -> int:
        """Adapted float weights once more with their adapters inside; else the adapters side by side. Where every weight
        learns, those that read one input are put together."""
        if self.full:
            together = [
                one
                for one in self._all_linears()
                if not one.name.endswith(("o_proj", "down_proj")) and one.experts == 1
            ]
            return FLOAT_BYTES * sum(one.numbers for one in together) if plan.merge else 0
        if not plan.merge or self.shape.quantised or self.config.quantization != "none":
            return self.trainable()
        return self.width * sum(one.numbers for one in self.adapted_linears() if one.experts == 1)

    def _all_linears(self) -> list[Linear]:
        return [one for layer in self.shape.layers for one in layer]

    def largest_adapted(self) -> int:
        """Numbers of the largest matrix that has an adapter."""
        return max((one.numbers for one in self.adapted_linears()), default=0)

    def uses_per_token(self, one: Linear) -> int:
        """How often a token goes through it."""
        return self.shape.experts_per_token or 1 if one.experts > 1 else 1

    def mlp_width(self, layer: tuple[Linear, ...]) -> int:
        """Inner numbers of the gated unit, of all experts that a token goes through, shared ones included."""
        return sum(one.inputs * self.uses_per_token(one) for one in layer if one.name.endswith("down_proj"))


def in_flight(work: int) -> Allocation:
    """What MLX has prepared and not yet come to, where `backend.run.memory_plan` holds it to the estimate."""
    return Allocation(IN_FLIGHT_NAME, round(IN_FLIGHT_SHARE * work))


def _rounded(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
