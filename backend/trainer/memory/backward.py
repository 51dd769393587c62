"""Peak memory of training: what autodiff saves of the forward pass of a micro-batch, logits, gradients, the update.

Axes and rules as in `backend.trainer.memory.phases`. Factors were counted in the graphs of mlx-lm's layers as `backend.engine`
computes them; a change there that keeps another array alive has to be counted here.
"""

from __future__ import annotations

import bisect
from collections import Counter
from dataclasses import dataclass

from backend.engine.chunk_sizes import attention_block
from backend.trainer.memory.config_layers import LayerKind
from backend.trainer.memory.model_shape import Linear, is_usual
from backend.trainer.memory.phases import FLOAT_BYTES, Allocation, MemoryModel, MemoryPlan, Phase, in_flight


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
        """Whether rows of a prompt read it together; with noise on the embeddings each reads its own."""
        self.may_share_prefixes = self.shares_prompts and not memory.config.dropout
        """Whether a prompt's keys and values may be shared by its group's micro-batches (`backend.training.shared_prefix`)."""

    def phase(self, plan: MemoryPlan) -> Phase:
        """The peak of training: in the backward pass of the largest micro-batch, in that of the prompts where they are shared
        between micro-batches, or in the optimizer update."""
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

    # ── micro-batches ────────────────────────────────────────────────────────────────────────────────────────────────

    def micro_batches(self, token_budget: int) -> Counter[ForwardPass]:
        """The micro-batches of a step whose rows all have full length, each with its number, as `backend.training.microbatch` forms
        them: group after group; a row larger than the budget is a micro-batch of its own.

        A step may have a million rows. Micro-batches within a group are alike, and once one begins as far into its group as an earlier
        one the sequence repeats, so a few thousand are looked at.
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
        """Tokens that rows count against the budget."""
        prompts = 0 if self.may_share_prefixes else self._prompts_of(offset, rows) if self.shares_prompts else rows
        return rows * self.completion + prompts * self.prompt

    def _shares_prefixes(self, batches: Counter[ForwardPass], token_budget: int) -> bool:
        """Whether every prompt is prefilled once before the micro-batches and backpropagated once after them: the rule of
        `backend.training.shared_prefix.SharedPrefix`."""
        read = sum(batch.prompts * count for batch, count in batches.items())
        # The extra prefill has no gradient and so costs a third of a pass with one: sharing pays where it saves more prompts.
        too_large = any(self._tokens(batch) > token_budget for batch in batches)
        return self.may_share_prefixes and (too_large or 3 * (read - self.prompts) > self.prompts)

    def _shared_prefix_bytes(self) -> int:
        """Keys and values of all prompts and the gradients dL/dK, dL/dV in them, and both again while a micro-batch adds to
        the gradients."""
        return 4 * self.memory.cache(self.prompts, self.prompt)

    # ── one forward and backward pass ────────────────────────────────────────────────────────────────────────────────

    def _peak(self, batch: ForwardPass, plan: MemoryPlan) -> tuple[int, int]:
        """(activations, logits) at the peak: what all layers save, and the temporaries of the output layer or of one layer."""
        logits, layer = self._logits(plan, batch.rows), self._layer_work(batch, plan)
        if not plan.recompute:
            return sum(self._saved_by_layers(batch)) + max(layer - logits, 0), logits
        # With gradient checkpointing no layer's activations are alive beside the logits. Under full fine-tuning the next
        # layer is recomputed before the last one's weight gradients are done.
        layers = 1.75 if self.memory.full and len(self.layers) > 2 else 1
        saved = max(self._saved_by_layers(batch), default=0)
        # The output layer is done before a layer is recomputed: of the two the larger counts (the caller adds `logits`).
        return self._inputs(batch) + max(round(layers * saved) + layer - logits, 0), logits

    def _tokens(self, batch: ForwardPass) -> int:
        alone = self.prompt if not self.shares_prompts else 0
        return batch.rows * (self.completion + alone) + batch.prompts * self.prompt

    def _inputs(self, batch: ForwardPass) -> int:
        """What recomputed layers save: their input, float32 in most models of 16 bits too (`backend.engine.residual_stream`), and the
        prompts' keys and values."""
        keys_and_values = batch.prompts * self.prompt * 2 * self.shape.keys * self.width
        return len(self.layers) * (self._tokens(batch) * self.shape.hidden * FLOAT_BYTES + keys_and_values)

    def _saved_by_layers(self, batch: ForwardPass) -> list[int]:
        return [self._saved_by_layer(*layer, batch) for layer in zip(self.layers, self.memory.kinds, strict=True)]

    def _saved_by_layer(self, layer: tuple[Linear, ...], kind: LayerKind, batch: ForwardPass) -> int:
        """What autodiff saves of a layer until its backward pass: arrays per token, and the keys and values attended to."""
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
        """[B, heads, K + T, K + T], which `backend.engine.attention` avoids; layers with a sliding window do not use it, unless the rows
        fit into the window."""
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
        """Bytes of the keys and values: each token's own, and the prompt's again per row where prompts have several rows."""
        columns = self._tokens(batch) + (batch.rows * self.prompt if batch.prompts > 1 else 0)
        return 2 * self.shape.keys * self.width * columns

    def _saved_per_token(self, layer: tuple[Linear, ...]) -> int:
        """Bytes that a layer saves per token.

        Norms save their input (float32 on a CPU, where they are composed of plain operations), attention its queries, the
        gated MLP gate, sigmoid, silu and up. Adapters save their input, with dropout the dropped input of each too. DoRA saves the product before scaling. A trainable weight saves its input, a trainable norm
        its normalised input.
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
        # mlx-lm's adapters of experts copy their input to float32; ours (`backend.engine.adapter_product`) read it as it is.
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
        """Temporaries of one layer's backward pass: arrays like one block of scores and the gradients of the keys and values
        attended to, or the gradients inside the gated MLP: three of its intermediate size, five where it is recomputed. In a
        16-bit model the adapters' share is computed in float32."""
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
        exponentials, the gradient before and after the target's entry is subtracted) and the first or second of the next
        chunk. The hidden states [N, H] of all chunks and their gradients stay. A trainable output layer holds its weight
        gradient three times: of this chunk, of those before, and their sum."""
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
