"""Peak memory of each phase of a step in bytes, as a sum over the arrays that are alive at the same time.

Nothing is fitted to a machine. Each term is an array of the engine; its factor is how many arrays of that size are alive
together, counted in the graphs that autodiff makes of mlx-lm's layers. `tests/trainer/test_memory_plan.py` compares the sums with
measured peaks. The backward pass is in `backend.trainer.memory.backward`. Axes: B rows, K prompt tokens, T completion tokens,
H hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from backend.config.config import Config
from backend.engine.chunk_sizes import PREFILL_TOKENS, capacity
from backend.models.adapter_types import ALL_LINEAR, is_named
from backend.runs.weight_choices import WeightChoice
from backend.sampling.row_costs import RowCosts, row_costs
from backend.trainer.memory.model_shape import Linear, ModelShape, packed_width
from backend.utils.machine import chip, has_gpu

FLOAT_BYTES = 4
"""float32: adapters, their gradients, log-probabilities."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a float by the setting `dtype`, but for "auto"."""

PREFILL_CHUNK = 2048
PREFILL_BUCKET = 256
"""Columns by which mlx-lm's KV caches grow during prefill."""

IN_FLIGHT_NAME, IN_FLIGHT_SHARE = "in flight", 0.05
"""Arrays that MLX allocates ahead of the device, as a share of what a phase works on."""

OPTIMIZER_COPIES = {
    "adamw": 2, "adam": 2, "adamax": 2, "adadelta": 2, "muon": 1, "sgd": 1, "lion": 1, "rmsprop": 1, "adagrad": 1,
    "own": 2,
}  # fmt: skip
"""State arrays of a weight's size per optimizer; of a program's, which may be anything, as many as of AdamW. Adafactor keeps row and column statistics only (arXiv:1804.04235)."""

EIGHT_BIT_BYTES = 1 + 4 / 256
"""A number of an optimizer's state in 8 bits: its byte, and its part of the float32 that a block of 256 shares."""

QUANTIZED = {"4": (4, 64, "affine"), "6": (6, 64, "affine"), "8": (8, 64, "affine"), "mxfp4": (4, 32, "mxfp4")}


@dataclass(frozen=True, slots=True)
class Allocation:
    """One use of memory, by the name that the estimate shows."""

    name: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Phase:
    """The allocations at the peak of a phase."""

    allocations: tuple[Allocation, ...]

    @property
    def total(self) -> int:
        return sum(allocation.bytes for allocation in self.allocations)

    @property
    def needed(self) -> int:
        """The total without the arrays in flight."""
        return sum(allocation.bytes for allocation in self.allocations if allocation.name != IN_FLIGHT_NAME)

    def to_dict(self) -> dict[str, int]:
        return {allocation.name: allocation.bytes for allocation in self.allocations} | {"total": self.total}


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The sizes into which a step is split. Every choice trades time for memory and changes no result beyond rounding."""

    rows: int
    """Completions decoded together."""
    prefill_chunk: int
    """Tokens per prompt in one forward pass of prefill."""
    merge: bool
    """Whether decoding uses a copy of the adapted weights with the adapters merged in."""
    micro_batch_tokens: int
    """Tokens, padding included, of one forward and backward pass."""
    chunk: int
    """Completion tokens whose logits exist at the same time."""
    recompute: bool
    """Gradient checkpointing: whether layers' activations are recomputed in the backward pass."""


class MemoryModel:
    """Sizes of the arrays of one run, from its settings and its model's shape.

    `prompt`: tokens of the longest prompt. `gpu`: whether MLX runs on one, where its fused norms save less for backward.
    """

    def __init__(self, config: Config, shape: ModelShape, prompt: int, *, gpu: bool) -> None:
        self.config, self.shape, self.prompt, self.gpu = config, shape, prompt, gpu
        self.full = config.train_type == "full"
        chosen = DTYPE_BYTES.get(config.dtype)
        self.weight_width = chosen or shape.width
        """Bytes of a float weight that the model computes with."""
        self.width = (chosen or FLOAT_BYTES) if self.full else self.weight_width
        """Bytes per activation: full fine-tuning computes in float32 unless the settings say otherwise."""
        self.group, self.completion = config.group_size, config.max_completion_length
        self.prompts = config.prompts_per_step
        self.completions = self.prompts * self.group
        self.row_costs = row_costs_of(config, shape, gpu=gpu)
        self.rows = self.row_costs.planned(self.completions)
        """Completions decoded together where memory suffices."""
        count = len(shape.layers)
        embeds = [linear.name for linear in shape.outside if not linear.name.endswith("lm_head")]
        trains_embedding = any(is_named(name, config.modules_to_save) for name in embeds) and not self.full
        self.trains_head = self.full or any(is_named(linear.name, config.modules_to_save) for linear in shape.outside)
        """Whether the output layer's weights may learn: it is the embedding in many models."""
        every_layer = self.full or trains_embedding or config.num_layers < 0
        trainable_layers = count if every_layer else min(config.num_layers, count)
        self.layers = shape.layers[count - trainable_layers :]
        self.kinds = shape.kinds[count - trainable_layers :]
        """The trainable layers, which are the last. Earlier layers save nothing for the backward pass."""

    # ── persistent from step to step ────────────────────────────────────────────────────────────────────────────────

    def persistent(self) -> list[Allocation]:
        """Weights, adapters, optimizer state, and the reference policy where it has arrays of its own."""
        weights = self.weights()
        sizes = [
            ("weights", weights),
            ("adapters", 0 if self.full else self._beside_weights()),
            ("optimizer", self._optimizer()),
        ]
        return [
            Allocation(name, size) for name, size in [*sizes, ("reference", self._reference_weights(weights))] if size
        ]

    def weights(self) -> int:
        """The weights as trained: in the type that the settings give, quantised after loading if they say so. Under full fine-tuning
        float32, and beside it the copies in 16 bits that the model computes with, if it does."""
        quantization = QUANTIZED.get(self.config.quantization)
        if self.shape.quantised:
            # Two floats for every 64 numbers, as a rule: scale and bias.
            scales = 2 * sum(linear.numbers for linear in self.shape.matrices) // 64
            return self.shape.weights + scales * (self.weight_width - self.shape.width)
        if self.full:
            return self.trainable() + (0 if self.width == FLOAT_BYTES else self._in_floats(self.width))
        if quantization is None:
            return self._in_floats(self.weight_width)
        bits, group, mode = quantization
        bytes_per_number = packed_width(bits, group, mode, self.weight_width)
        # mlx-lm leaves a matrix in float whose input size is no multiple of the group size.
        fitting = sum(linear.numbers for linear in self.shape.matrices if linear.inputs % group == 0)
        return self._in_floats(self.weight_width) - round(fitting * (self.weight_width - bytes_per_number))

    def _in_floats(self, width: int) -> int:
        """Bytes of all weights of an unquantised model in floats of this width."""
        return round(self.shape.weights * width / self.shape.width)

    def trainable(self) -> int:
        """Bytes of all trainable weights; their gradients are as large."""
        if self.full:
            return self._in_floats(FLOAT_BYTES)
        return FLOAT_BYTES * (
            sum(self._adapter(linear) for linear in self.adapted_linears()) + self._in_whole_modules()
        )

    def _in_whole_modules(self) -> int:
        """Numbers of the matrices that are trained as a whole beside adapters; norms are too small to count."""
        whole = self.config.modules_to_save
        return sum(linear.numbers for linear in self.shape.matrices if is_named(linear.name, whole))

    def _beside_weights(self) -> int:
        """Bytes of the trainable arrays that are not the model's own: adapters, and the float32 of whole modules in 16 bits."""
        in_place = self.weight_width == FLOAT_BYTES
        return self.trainable() - (FLOAT_BYTES * self._in_whole_modules() if in_place else 0)

    def _adapter(self, linear: Linear) -> int:
        """Numbers of an adapter: LoRA's A [in, rank] and B [rank, out] per expert (arXiv:2106.09685), and with DoRA the
        magnitude of each output row (arXiv:2402.09353)."""
        magnitudes = linear.outputs if self.config.train_type == "dora" else 0
        return linear.experts * self.config.rank * (linear.inputs + linear.outputs) + magnitudes

    def adapted_linears(self) -> list[Linear]:
        named = [linear for linear in self.shape.outside if is_named(linear.name, self.config.lora_keys)]
        # A trained embedding makes every layer save for the backward pass, and adapters are in the last ones all the same.
        layers = self.layers if self.full or self.config.num_layers < 0 else self.layers[-self.config.num_layers :]
        return [linear for layer in layers for linear in self.adapted_in_layer(layer)] + named

    def adapted_in_layer(self, layer: tuple[Linear, ...]) -> list[Linear]:
        keys = self.config.lora_keys
        is_all = self.full or not keys or ALL_LINEAR in keys
        named = [linear for linear in layer if is_all or is_named(linear.name, keys)]
        return (
            named
            if self.full
            else [linear for linear in named if not is_named(linear.name, self.config.modules_to_save)]
        )

    def _optimizer(self) -> int:
        if self.config.optimizer in OPTIMIZER_COPIES:
            width = EIGHT_BIT_BYTES if self.config.optimizer_bits == "8" else FLOAT_BYTES
            return round(OPTIMIZER_COPIES[self.config.optimizer] * self.trainable() * width / FLOAT_BYTES)
        # What remains is Adafactor: row and column sums of a matrix, full-size state for vectors such as those of the norms.
        if self.full:
            vectors = self.weights() - FLOAT_BYTES * sum(linear.numbers for linear in self.shape.matrices)
            return vectors + FLOAT_BYTES * sum(
                linear.experts * (linear.inputs + linear.outputs) for linear in self.shape.matrices
            )
        # Adafactor on A [in, rank] and B [rank, out]: in + rank and rank + out. DoRA's magnitude is a vector, kept full-size.
        rank, dora = self.config.rank, self.config.train_type == "dora"
        numbers = [
            linear.experts * (linear.inputs + linear.outputs + 2 * rank) + dora * linear.outputs
            for linear in self.adapted_linears()
        ]
        return FLOAT_BYTES * sum(numbers)

    def _reference_weights(self, weights: int) -> int:
        """Bytes of the reference policy. It shares the frozen weights; only full fine-tuning and a reference that follows the
        policy need a second copy of the trainable ones."""
        if not self.config.needs_reference:
            return 0
        if self.config.reference_model_path:
            return weights
        if self.full or self.config.sync_ref_model:
            return self.trainable()
        return round(self._in_whole_modules() * self.weight_width)  # the modules as they were

    def kept(self) -> int:
        """Bytes of what a run on several machines keeps of a step's beginning, to take the step back where one is lost between updates
        (`backend.distributed.kept_state`): trained arrays, optimizer state, and a reference that follows. Rank 0 keeps it; it is counted for all."""
        if not self.config.hosts:
            return 0
        return (
            self.trainable() * (2 if self.config.needs_reference and self.config.sync_ref_model else 1)
            + self._optimizer()
        )

    # ── sampling ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def rollout(self, plan: MemoryPlan) -> Phase:
        """The peak of sampling: prefill, copying the prompts' cache into rows, or the last tokens of the longest rows."""
        rows = min(plan.rows, self.rows)
        prefilled = self._prompts_prefilled(rows)
        prompt_cache = self.cache(prefilled, _rounded(self.prompt, PREFILL_BUCKET))
        columns = capacity(self.prompt + self.completion)
        # Where not all are decoded together, the prefilled prompts stay beside the rows until the last one has started.
        waiting = prompt_cache if rows < self.completions else 0
        cache = self.cache(rows, columns) + waiting
        # Five arrays [B, V]: logits, logits minus their maximum, exponentials, the filtered distribution, its running sum.
        logits = 5 * rows * self.shape.vocabulary * FLOAT_BYTES
        # The caches grow layer by layer: one layer exists twice, before and after, and no more.
        layer = self.cache(rows, columns) // max(len(self.shape.layers), 1)
        # Adapters are merged one matrix at a time, so the largest one counts.
        # (KV cache alive, temporaries) at each moment that can be the peak. They are never alive together, so the phase needs
        # their maximum, not their sum.
        candidates = {
            "merge adapters": (0, 4 * FLOAT_BYTES * self.largest_adapted()),
            "prefill": (prompt_cache, self._prefill_work(prefilled, plan)),
            "fill rows": (prompt_cache + self.cache(rows, capacity(self.prompt + 8)), layer // 2),
            "grow cache": (cache, layer),
            "sample": (cache, logits),
        }
        held, work = max(candidates.values(), key=sum)
        allocations = [
            Allocation("KV cache", held),
            Allocation("logits" if work == logits else "activations", work),
            in_flight(held + work),
        ]
        merged = self._merged_weights(plan)
        return Phase((*self.persistent(), *([Allocation("decoding weights", merged)] if merged else []), *allocations))

    def _prompts_prefilled(self, rows: int) -> int:
        # Other caches, such as an SSM's state, cannot be cut into rows: there one prompt's group is sampled at a time.
        return -(-rows // self.group) if self.shape.has_full_attention else 1

    def cache(self, rows: int, columns: int) -> int:
        """Bytes of the KV cache: [rows, kv_heads, columns, head_dim] twice per layer that has one."""
        return rows * self.shape.cached_numbers(columns) * self.width

    def _prefill_work(self, prompts: int, plan: MemoryPlan) -> int:
        """One layer's temporaries on a chunk of the prompts: attention scores [B, heads, chunk, K] before the mask, after it
        and after softmax, or the four arrays of the gated MLP. On a CPU its exponential is computed with plain operations
        (`backend.engine.cpu.vector_exp`) in five or six arrays, and two layers' are allocated ahead."""
        chunk = min(plan.prefill_chunk, max(1, PREFILL_TOKENS // prompts), self.prompt)
        # On a CPU attention is composed in float32 whatever the model's type (`backend.engine.patches`).
        scores = prompts * self.shape.heads * chunk * self.prompt * (self.width if self.gpu else FLOAT_BYTES)
        mlp_width = prompts * chunk * self.mlp_width(self.shape.layers[-1])
        exponential = 0 if self.gpu else mlp_width * FLOAT_BYTES
        return max(3 * scores + 6 * exponential, 4 * mlp_width * self.width + 10 * exponential)

    def _merged_weights(self, plan: MemoryPlan) -> int:
        """Bytes of the weights that only decoding uses: float weights with their adapters merged in, else the adapters
        fused side by side; under full fine-tuning the fused matrices that share an input (q, k, v; gate, up)."""
        if self.full:
            fused = [
                linear
                for layer in self.shape.layers
                for linear in layer
                if not linear.name.endswith(("o_proj", "down_proj")) and linear.experts == 1
            ]
            return self.width * sum(linear.numbers for linear in fused) if plan.merge else 0
        # Adapters stay beside quantised and 16-bit weights (`backend.sampling.fused_model`).
        is_quantised = self.shape.quantised or self.config.quantization != "none"
        if not plan.merge or is_quantised or self.weight_width != FLOAT_BYTES:
            return self.trainable()
        return self.width * sum(linear.numbers for linear in self.adapted_linears() if linear.experts == 1)

    def largest_adapted(self) -> int:
        """Numbers of the largest adapted matrix."""
        return max((linear.numbers for linear in self.adapted_linears()), default=0)

    def uses_per_token(self, linear: Linear) -> int:
        """How many of its experts a token is routed to; 1 for a matrix without experts."""
        return self.shape.experts_per_token or 1 if linear.experts > 1 else 1

    def mlp_width(self, layer: tuple[Linear, ...]) -> int:
        """Intermediate size of the gated MLP, summed over the experts that a token is routed to, shared ones included."""
        return sum(linear.inputs * self.uses_per_token(linear) for linear in layer if linear.name.endswith("down_proj"))


def row_costs_of(config: Config, shape: ModelShape, *, gpu: bool) -> RowCosts:
    """What decoding steps of this run cost by their rows."""
    return row_costs(gpu, shape.quantised or config.quantization != "none", chip())


def in_flight(work: int) -> Allocation:
    """Arrays that MLX has allocated ahead of the device, where `backend.trainer.machine.memory_plan` holds it to the estimate."""
    return Allocation(IN_FLIGHT_NAME, round(IN_FLIGHT_SHARE * work))


def _rounded(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


# ── chat memory ──────────────────────────────────────────────────────────────────────────────────────────────────────

# The memory that a chat with a run or a model takes, from file headers: base, what was trained, and keys and values
# of a conversation.

CHAT_PROCESS_BYTES = 250_000_000
"""Memory of the chat's process beside its arrays: 125 MB on Linux with the demo, and as much again for a large vocabulary's tokenizer and
the rows of a dataset. It imports less than a trainer (`backend.utils.machine.PROCESS_BYTES`)."""

CONTEXT = 4096
"""Tokens of a conversation that are reckoned with, on each side."""


def chat_bytes(config: Config, shape: ModelShape, weights: WeightChoice | None) -> int:
    """Bytes that a process with base and tuned loaded holds; of a plain model (`weights` None) with that alone.

    Full fine-tuning leaves two models of one size, whatever a checkpoint was saved in; adapters are as large as their file.
    """
    memory = MemoryModel(
        config.model_copy(update={"train_type": "lora"}), shape, 0, gpu=has_gpu() and config.device != "cpu"
    )
    base, has_two = memory.weights(), weights is not None and config.train_type == "full"
    trained = 0 if weights is None else base if has_two else weights.bytes
    sides = 1 if weights is None else 2
    return base + trained + sides * memory.cache(1, CONTEXT) + CHAT_PROCESS_BYTES
