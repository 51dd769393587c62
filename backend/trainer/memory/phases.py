"""Peak memory of each phase of a step in bytes, as a sum over the arrays that are alive at the same time.

Nothing is fitted to a machine. Each term is an array of the engine; its factor is how many arrays of that size are
alive together, counted in the graphs that autodiff makes of mlx-lm's layers: a change in `backend.engine` that keeps
another array alive has to be counted here. `tests/trainer/test_memory_plan.py` compares the sums with measured peaks.
Axes: B rows, K prompt tokens, T completion tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import bisect
from collections import Counter
from dataclasses import dataclass

from backend.config.config import Config
from backend.engine.chunk_sizes import PREFILL_TOKENS, attention_block, capacity
from backend.models.adapter_types import ALL_LINEAR, is_named
from backend.runs.saved_weights import WeightChoice
from backend.sampling.row_costs import RowCosts, row_costs
from backend.trainer.memory.model_shape import LayerKind, Linear, ModelShape, is_usual, packed_width
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
    "adamw": 2,
    "adam": 2,
    "adamax": 2,
    "adadelta": 2,
    "muon": 1,
    "sgd": 1,
    "lion": 1,
    "rmsprop": 1,
    "adagrad": 1,
    "own": 2,
}
"""State arrays of a weight's size per optimizer; of a program's, which may be anything, as many as of AdamW.
Adafactor keeps row and column statistics only (arXiv:1804.04235)."""

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
    """The sizes into which a step is split. Every choice trades time for memory and changes no result beyond
    rounding."""

    rows: int
    """Completions decoded together."""
    prefill_chunk: int
    """Tokens per prompt in one forward pass of prefill."""
    merge: bool
    """True if decoding uses a copy of the adapted weights with the adapters merged in."""
    micro_batch_tokens: int
    """Tokens, padding included, of one forward and backward pass."""
    chunk: int
    """Completion tokens whose logits exist at the same time."""
    recompute: bool
    """Gradient checkpointing: whether layers' activations are recomputed in the backward pass."""


class MemoryModel:
    """Sizes of the arrays of one run, from its settings and its model's shape.

    `prompt`: tokens of the longest prompt. `gpu`: whether MLX runs on one, where its fused norms save less for
    backward.
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
        """True if the output layer's weights may learn: it is the embedding in many models."""
        every_layer = self.full or trains_embedding or config.num_layers < 0
        trainable_layers = count if every_layer else min(config.num_layers, count)
        self.layers = shape.layers[count - trainable_layers :]
        self.kinds = shape.kinds[count - trainable_layers :]
        """The trainable layers, which are the last. Earlier layers save nothing for the backward pass."""

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
        """The weights as trained: in the type that the settings give, quantised after loading if they say so. Under
        full fine-tuning float32, and beside it the copies in 16 bits that the model computes with, if it does."""
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
        """Bytes of the trainable arrays that are not the model's own: adapters, and the float32 of whole modules in
        16 bits."""
        in_place = self.weight_width == FLOAT_BYTES
        return self.trainable() - (FLOAT_BYTES * self._in_whole_modules() if in_place else 0)

    def _adapter(self, linear: Linear) -> int:
        """Numbers of an adapter: LoRA's A [in, rank] and B [rank, out] per expert (arXiv:2106.09685), and with DoRA the
        magnitude of each output row (arXiv:2402.09353)."""
        magnitudes = linear.outputs if self.config.train_type == "dora" else 0
        return linear.experts * self.config.rank * (linear.inputs + linear.outputs) + magnitudes

    def adapted_linears(self) -> list[Linear]:
        named = [linear for linear in self.shape.outside if is_named(linear.name, self.config.lora_keys)]
        # A trained embedding makes every layer save for the backward pass, and adapters are in the last ones all the
        # same.
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
        # What remains is Adafactor: row and column sums of a matrix, full-size state for vectors such as those of the
        # norms.
        if self.full:
            vectors = self.weights() - FLOAT_BYTES * sum(linear.numbers for linear in self.shape.matrices)
            return vectors + FLOAT_BYTES * sum(
                linear.experts * (linear.inputs + linear.outputs) for linear in self.shape.matrices
            )
        # Adafactor on A [in, rank] and B [rank, out]: in + rank and rank + out. DoRA's magnitude is a vector, kept
        # full-size.
        rank, dora = self.config.rank, self.config.train_type == "dora"
        numbers = [
            linear.experts * (linear.inputs + linear.outputs + 2 * rank) + dora * linear.outputs
            for linear in self.adapted_linears()
        ]
        return FLOAT_BYTES * sum(numbers)

    def _reference_weights(self, weights: int) -> int:
        """Bytes of the reference policy. It shares the frozen weights; only full fine-tuning and a reference that
        follows the policy need a second copy of the trainable ones."""
        if not self.config.needs_reference:
            return 0
        if self.config.reference_model_path:
            return weights
        if self.full or self.config.sync_ref_model:
            return self.trainable()
        return round(self._in_whole_modules() * self.weight_width)  # the modules as they were

    def kept(self) -> int:
        """Bytes of what a run on several machines keeps of a step's beginning, to take the step back where one is
        lost between updates (`backend.distributed.weights`): trained arrays, optimizer state, and a reference that
        follows. Rank 0 keeps it; it is counted for all."""
        if not self.config.hosts:
            return 0
        return (
            self.trainable() * (2 if self.config.needs_reference and self.config.sync_ref_model else 1)
            + self._optimizer()
        )

    def rollout(self, plan: MemoryPlan) -> Phase:
        """The peak of sampling: prefill, copying the prompts' cache into rows, or the last tokens of the longest
        rows."""
        rows = min(plan.rows, self.rows)
        prefilled = self._prompts_prefilled(rows)
        prompt_cache = self.cache(prefilled, _rounded(self.prompt, PREFILL_BUCKET))
        columns = capacity(self.prompt + self.completion)
        # Where not all are decoded together, the prefilled prompts stay beside the rows until the last one has started.
        waiting = prompt_cache if rows < self.completions else 0
        cache = self.cache(rows, columns) + waiting
        # Five arrays [B, V]: logits, logits minus their maximum, exponentials, the filtered distribution, its running
        # sum.
        logits = 5 * rows * self.shape.vocabulary * FLOAT_BYTES
        # The caches grow layer by layer: one layer exists twice, before and after, and no more.
        layer = self.cache(rows, columns) // max(len(self.shape.layers), 1)
        # Adapters are merged one matrix at a time, so the largest one counts.
        # (KV cache alive, temporaries) at each moment that can be the peak. They are never alive together, so the phase
        # needs their maximum, not their sum.
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
        """One layer's temporaries on a chunk of the prompts: attention scores [B, heads, chunk, K] before the mask,
        after it and after softmax, or the four arrays of the gated MLP. On a CPU its exponential is computed with
        plain operations (`backend.engine.cpu`) in five or six arrays, and two layers' are allocated
        ahead."""
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
        """Intermediate size of the gated MLP, summed over the experts that a token is routed to, shared ones
        included."""
        return sum(linear.inputs * self.uses_per_token(linear) for linear in layer if linear.name.endswith("down_proj"))


def row_costs_of(config: Config, shape: ModelShape, *, gpu: bool) -> RowCosts:
    """What decoding steps of this run cost by their rows."""
    return row_costs(gpu, shape.quantised or config.quantization != "none", chip())


def in_flight(work: int) -> Allocation:
    """Arrays that MLX has allocated ahead of the device, where `backend.trainer.memory.plan` holds it to the
    estimate."""
    return Allocation(IN_FLIGHT_NAME, round(IN_FLIGHT_SHARE * work))


def _rounded(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


CHAT_PROCESS_BYTES = 250_000_000
"""Memory of the chat's process beside its arrays: 125 MB on Linux with the demo, and as much again for a large
vocabulary's tokenizer and the rows of a dataset. It imports less than a trainer
(`backend.utils.machine.PROCESS_BYTES`)."""

CONTEXT = 4096
"""Tokens of a conversation that are reckoned with, on each side."""


def chat_bytes(config: Config, shape: ModelShape, weights: WeightChoice | None) -> int:
    """Bytes that a process with base and tuned loaded holds; of a plain model (`weights` None) with that alone.

    Full fine-tuning leaves two models of one size, whatever a checkpoint was saved in; adapters are as large as
    their file.
    """
    memory = MemoryModel(
        config.model_copy(update={"train_type": "lora"}), shape, 0, gpu=has_gpu() and config.device != "cpu"
    )
    base, has_two = memory.weights(), weights is not None and config.train_type == "full"
    trained = 0 if weights is None else base if has_two else weights.bytes
    sides = 1 if weights is None else 2
    return base + trained + sides * memory.cache(1, CONTEXT) + CHAT_PROCESS_BYTES


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """One forward pass with gradient: `rows` completions, and `prompts` that are computed once for their group."""

    rows: int
    prompts: int


class BackwardMemory:
    """Memory of the training phase of a run, for any `MemoryPlan`."""

    def __init__(self, memory: MemoryModel) -> None:
        self.memory, self.shape = memory, memory.shape
        self.width, self.layers = memory.width, memory.layers
        self.group, self.prompt, self.completion = memory.group, memory.prompt, memory.completion
        self.most_rows = memory.config.batch_size * self.group
        self.prompts = memory.config.batch_size * memory.config.gradient_accumulation_steps
        self.shares_prompts = memory.shape.has_full_attention and not memory.config.neftune_noise_alpha
        """True if rows of a prompt read it together; with noise on the embeddings each reads its own."""
        self.may_share_prefixes = self.shares_prompts and not memory.config.dropout
        """True if a prompt's keys and values may be shared by its group's micro-batches
        (`backend.training.shared_prefix`)."""

    def phase(self, plan: MemoryPlan) -> Phase:
        """The peak of training: in the backward pass of the largest micro-batch, in that of the prompts where they
        are shared between micro-batches, or in the optimizer update."""
        batches = self.micro_batches(plan.micro_batch_tokens)
        trainable = self.memory.trainable()
        is_shared = self._shares_prefixes(batches, plan.micro_batch_tokens)
        largest = max(batches, key=lambda batch: (batch.rows, batch.prompts))
        shared = self._shared_prefix_bytes() if is_shared else 0
        peaks = [self._peak(ForwardPass(largest.rows, 0) if is_shared else largest, plan)]
        if is_shared:
            prompts = max(1, min(self.prompts, plan.micro_batch_tokens // self.prompt))
            peaks.append(self._peak(ForwardPass(0, prompts), plan))
        activations, logits = max(peaks, key=sum)
        # The sum of earlier gradients is alive beside a backward pass only where another pass came before it.
        gradients = trainable if batches.total() > 1 or is_shared else 0
        # Until the first update has made new arrays, what is kept of the step's beginning are the arrays in use.
        kept = self.memory.kept() if self.memory.config.updates_per_step > 1 else 0
        # The update begins when the last backward pass has freed its arrays: the peak is one or the other.
        if activations + logits + gradients + shared + kept < self._update_bytes() + self.memory.kept():
            activations, logits, gradients, shared, kept = 0, 0, self._update_bytes(), 0, self.memory.kept()
        sizes = [
            ("gradients", gradients),
            ("activations", activations),
            ("logits", logits),
            ("prompts", shared),
            ("kept", kept),
        ]
        work = in_flight(gradients + activations + logits + shared)
        return Phase((*self.memory.persistent(), *(Allocation(name, size) for name, size in sizes if size), work))

    def _update_bytes(self) -> int:
        """Gradients before and after clipping, and about a third of the new weights before the old ones are freed."""
        return round(2.3 * self.memory.trainable())

    def micro_batches(self, token_budget: int) -> Counter[ForwardPass]:
        """The micro-batches of a step whose rows all have full length, each with its number, as
        `backend.training.microbatch` forms them: group after group; a row larger than the budget is a micro-batch of
        its own.

        A step may have a million rows. Micro-batches within a group are alike, and once one begins as far into its
        group as an earlier one the sequence repeats, so a few thousand are looked at.
        """
        passes, done, total = Counter[ForwardPass](), 0, self.prompts * self.group
        begun: dict[int, tuple[int, Counter[ForwardPass]]] = {}  # rows into a group → (rows before it, their passes)
        while done < total:
            offset = done % self.group
            if offset in begun:
                before, passes_before = begun[offset]
                repeats = (total - done) // (done - before)
                for batch, count in (passes - passes_before).items():
                    passes[batch] += repeats * count
                done += repeats * (done - before)
                begun = {}
                continue
            begun[offset] = (done, passes.copy())
            rows = min(self._most_rows(offset, token_budget), total - done)
            alike = max(1, (self.group - offset) // rows)
            # Without full attention no prompt is shared: each row is computed with its own (see `_tokens`).
            prompts = self._prompts_of(offset, rows) if self.shares_prompts else 0
            passes[ForwardPass(rows, prompts)] += alike
            done += alike * rows
        return passes

    def _prompts_of(self, offset: int, rows: int) -> int:
        """Groups that have a part in `rows` rows, the first of which is `offset` rows into its group."""
        return (offset + rows - 1) // self.group + 1

    def _most_rows(self, offset: int, token_budget: int) -> int:
        """The most rows from there that go together; one in any case."""
        fits = bisect.bisect_right(range(self.most_rows), token_budget, key=lambda n: self._budgeted(offset, n + 1))
        return max(1, fits)

    def _budgeted(self, offset: int, rows: int) -> int:
        prompts = 0 if self.may_share_prefixes else self._prompts_of(offset, rows) if self.shares_prompts else rows
        return rows * self.completion + prompts * self.prompt

    def _shares_prefixes(self, batches: Counter[ForwardPass], token_budget: int) -> bool:
        """True if every prompt is prefilled once before the micro-batches and backpropagated once after them: the
        rule of `backend.training.shared_prefix.SharedPrefix`."""
        read = sum(batch.prompts * count for batch, count in batches.items())
        # The extra prefill has no gradient and so costs a third of a pass with one: sharing pays where it saves more
        # prompts.
        too_large = any(self._tokens(batch) > token_budget for batch in batches)
        return self.may_share_prefixes and (too_large or 3 * (read - self.prompts) > self.prompts)

    def _shared_prefix_bytes(self) -> int:
        """Keys and values of all prompts and the gradients dL/dK, dL/dV in them, and both again while a micro-batch
        adds to the gradients."""
        return 4 * self.memory.cache(self.prompts, self.prompt)

    def _peak(self, batch: ForwardPass, plan: MemoryPlan) -> tuple[int, int]:
        """(activations, logits) at the peak: what all layers save, and the temporaries of the output layer or of one
        layer."""
        logits, layer = self._logits(plan, batch.rows), self._layer_work(batch, plan)
        if not plan.recompute:
            return sum(self._saved_by_layers(batch)) + max(layer - logits, 0), logits
        # With gradient checkpointing no layer's activations are alive beside the logits. Under full fine-tuning the
        # next layer is recomputed before the last one's weight gradients are done.
        layers = 1.75 if self.memory.full and len(self.layers) > 2 else 1
        saved = max(self._saved_by_layers(batch), default=0)
        # The output layer is done before a layer is recomputed: of the two the larger counts (the caller adds
        # `logits`).
        return self._inputs(batch) + max(round(layers * saved) + layer - logits, 0), logits

    def _tokens(self, batch: ForwardPass) -> int:
        alone = self.prompt if not self.shares_prompts else 0
        return batch.rows * (self.completion + alone) + batch.prompts * self.prompt

    def _inputs(self, batch: ForwardPass) -> int:
        """What recomputed layers save: their input, float32 in most models of 16 bits too
        (`backend.engine.residual_stream`), and the prompts' keys and values."""
        keys_and_values = batch.prompts * self.prompt * 2 * self.shape.keys * self.width
        return len(self.layers) * (self._tokens(batch) * self.shape.hidden * FLOAT_BYTES + keys_and_values)

    def _saved_by_layers(self, batch: ForwardPass) -> list[int]:
        return [self._saved_by_layer(*layer, batch) for layer in zip(self.layers, self.memory.kinds, strict=True)]

    def _saved_by_layer(self, layer: tuple[Linear, ...], kind: LayerKind, batch: ForwardPass) -> int:
        """What autodiff saves of a layer until its backward pass: arrays per token, and the keys and values attended
        to."""
        saved = self._tokens(batch) * self._saved_per_token(layer) + self._keys_and_values(batch)
        if kind == "window":
            saved += self._scores(batch)
        if self.memory.config.train_type == "dora" and (
            self.shape.quantised or self.memory.config.quantization != "none"
        ):
            # mlx-lm's DoRA dequantises the weight in every call, and the gradient of its input needs it.
            calls = bool(batch.rows) + bool(batch.prompts)
            saved += calls * self.width * sum(linear.numbers for linear in self.memory.adapted_in_layer(layer))
        return saved

    def _scores(self, batch: ForwardPass) -> int:
        """[B, heads, K + T, K + T], which `backend.engine.attention` avoids; layers with a sliding window do not use
        it, unless the rows fit into the window."""
        if self.prompt + self.completion <= self.shape.window:
            return 0
        return batch.rows * self.shape.heads * (self.prompt + self.completion) ** 2 * self.width

    def _attention_scores(self, batch: ForwardPass) -> int:
        """Bytes of one block of attention scores: of completions with their prompts, or of prompts alone."""
        rows, queries, keys = batch.rows, self.completion, self.prompt + self.completion
        if not rows:
            rows, queries, keys = batch.prompts, self.prompt, self.prompt
        heads = rows * self.shape.heads
        return FLOAT_BYTES * heads * keys * attention_block(heads, queries, keys, self.memory.gpu)

    def _keys_and_values(self, batch: ForwardPass) -> int:
        """Bytes of the keys and values: each token's own, and the prompt's again per row where prompts have several
        rows."""
        columns = self._tokens(batch) + (batch.rows * self.prompt if batch.prompts > 1 else 0)
        return 2 * self.shape.keys * self.width * columns

    def _saved_per_token(self, layer: tuple[Linear, ...]) -> int:
        """Bytes that a layer saves per token.

        Norms save their input (float32 on a CPU, where they are composed of plain operations), attention its
        queries, the gated MLP gate, sigmoid, silu and up. Adapters save their input, with dropout the dropped input
        of each too. DoRA saves the product before scaling. A trainable weight saves its input, a trainable norm its
        normalised input.
        """
        memory, shape = self.memory, self.shape
        adapted = memory.adapted_in_layer(layer)
        if not (shape.heads and is_usual(layer)):
            return round(1.2 * self.width * sum(linear.inputs + linear.outputs for linear in layer))
        norm_width = self.width if memory.gpu else FLOAT_BYTES
        # Numbers that a layer's norms read: of attention and MLP, and in some models of queries and keys.
        norm_inputs = 2 * shape.hidden + (shape.queries + shape.keys if shape.has_qk_norm else 0)
        saved = norm_inputs * norm_width * (2 if memory.full and not memory.gpu else 1)
        saved += (
            (shape.queries + 2 * memory.mlp_width(layer)) * self.width
            + self._gate_bytes(layer)
            + self._expert_bytes(layer)
        )
        # One float32 per head: the log-sum-exp of its attention scores.
        saved += FLOAT_BYTES * shape.heads + self._adapter_inputs(adapted)
        if not memory.full:
            saved += FLOAT_BYTES * memory.config.rank * sum(memory.uses_per_token(linear) for linear in adapted)
        if memory.config.train_type == "dora":
            saved += self.width * sum(linear.outputs for linear in adapted)
        return saved

    def _adapter_inputs(self, adapted: list[Linear]) -> int:
        has_dropout = not self.memory.full and self.memory.config.dropout > 0
        # mlx-lm's adapters of experts copy their input to float32; ours (`backend.engine.sixteen_bits`) read it as
        # it is.
        widths = [FLOAT_BYTES if linear.experts > 1 else self.width for linear in adapted]
        sizes = [
            (_input_of(linear), width * linear.inputs * self.memory.uses_per_token(linear))
            for linear, width in zip(adapted, widths, strict=True)
        ]
        if not has_dropout:  # q, k and v share an input, and so do gate and up
            return sum(dict(sizes).values())
        return 2 * sum(size for _, size in sizes)

    def _expert_bytes(self, layer: tuple[Linear, ...]) -> int:
        """The experts' outputs before they are weighted, and the router's probabilities."""
        experts = [linear for linear in layer if linear.experts > 1 and linear.name.endswith("down_proj")]
        return sum(
            self.width * linear.outputs * self.memory.uses_per_token(linear) + 3 * FLOAT_BYTES * linear.experts
            for linear in experts
        )

    def _gate_bytes(self, layer: tuple[Linear, ...]) -> int:
        """The gate's sigmoid, and on a GPU, where mlx's own SwiGLU is used, its silu."""
        mlp_width = self.memory.mlp_width(layer)
        return 2 * mlp_width * self.width if self.memory.gpu else mlp_width * FLOAT_BYTES

    def _layer_work(self, batch: ForwardPass, plan: MemoryPlan) -> int:
        """Temporaries of one layer's backward pass: arrays like one block of scores and the gradients of the keys
        and values attended to, or the gradients inside the gated MLP: three of its intermediate size, five where it
        is recomputed. In a 16-bit model the adapters' share is computed in float32."""
        tokens = batch.rows * self.completion or batch.prompts * self.prompt
        scores = 5 * self._attention_scores(batch) if "full" in self.memory.kinds else 0
        scores = max(scores, 3 * self._scores(batch) if "window" in self.memory.kinds else 0)
        mlp = FLOAT_BYTES * self.memory.mlp_width(self.layers[-1]) if self.layers else 0
        hidden = FLOAT_BYTES * self.shape.hidden
        mlp_gradients = tokens * (5 * mlp + 12 * hidden if plan.recompute else 3 * mlp + hidden)
        # A layer's attention and MLP are differentiated one after the other: the larger of the two is the peak.
        return max(scores + self._keys_and_values(batch), mlp_gradients) + self._adapted_weight()

    def _adapted_weight(self) -> int:
        """DoRA materialises its adapted weights to take their row norms."""
        return 3 * FLOAT_BYTES * self.memory.largest_adapted() if self.memory.config.train_type == "dora" else 0

    def _logits(self, plan: MemoryPlan, rows: int) -> int:
        """Memory of the output layer on `chunk` tokens: five arrays [chunk, V] (logits, logits minus their maximum,
        exponentials, the gradient before and after the target's entry is subtracted) and the first or second of the
        next chunk. The hidden states [N, H] of all chunks and their gradients stay. A trainable output layer holds
        its weight gradient three times: of this chunk, of those before, and their sum."""
        tokens = rows * self.completion
        arrays = 5.5 if plan.chunk < tokens else 5
        # The tokens' counts, and the penalised logits beside the plain ones.
        arrays += 2 if self.memory.config.penalises else 0
        logits = round(arrays * min(plan.chunk, tokens) * self.shape.vocabulary * FLOAT_BYTES)
        head_gradients = (
            3 * self.shape.vocabulary * self.shape.hidden * FLOAT_BYTES
            if self.memory.trains_head and plan.chunk < tokens
            else 0
        )
        return logits + head_gradients + 2 * tokens * self.shape.hidden * FLOAT_BYTES


def _input_of(linear: Linear) -> str:
    """A name for the input of a matrix: equal for matrices of a layer that share it."""
    part, _, name = linear.name.rpartition(".")
    return linear.name if name in ("o_proj", "down_proj") else part
