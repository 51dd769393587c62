"""What learning holds in memory: the activations that the backward pass needs, micro-batch by micro-batch.

The rest of `backend.spec.memory.phases`, to whose letters and rules it keeps.
"""

from __future__ import annotations

from dataclasses import dataclass

from backend.spec.memory.chunking import attention_block
from backend.spec.memory.model_shape import Linear
from backend.spec.memory.phases import FLOAT_BYTES, Allocation, MemoryModel, MemoryPlan, Phase, in_flight


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """What goes through the model at once, with gradient: completions, and prompts that are read once for their group."""

    rows: int
    prompts: int


class BackwardMemory:
    """The backward pass of a run, by its costs."""

    def __init__(self, memory: MemoryModel) -> None:
        self.memory, self.shape = memory, memory.shape
        self.width, self.layers = memory.width, memory.layers
        self.group, self.prompt, self.completion = memory.group, memory.prompt, memory.completion
        self.most_rows = memory.config.batch_size * self.group
        self.prompts = memory.config.batch_size * memory.config.gradient_accumulation_steps
        self.may_share_prefixes = memory.shape.plain and not memory.config.dropout
        """Whether prompts may be read apart from their completions."""

    def phase(self, plan: MemoryPlan) -> Phase:
        """Learning at its peak: the last layer of the backward pass of the largest micro-batch, the prompts' own where they
        are gone through apart, or the update."""
        parts = self.micro_batches(plan.micro_batch_tokens)
        learns = self.memory.trainable()
        apart = self._shares_prefixes(parts, plan.micro_batch_tokens)
        first = max(parts, key=lambda part: (part.rows, part.prompts))
        shared = self._shared_prefix_bytes() if apart else 0
        moments = [self._peak(ForwardPass(first.rows, 0) if apart else first, plan)]
        if apart:
            each = max(1, min(self.prompts, plan.micro_batch_tokens // self.prompt))
            moments.append(self._peak(ForwardPass(0, each), plan))
        activations, logits = max(moments, key=sum)
        gradients = learns if len(parts) > 1 or apart else 0
        if activations + logits + gradients + shared < self._update_bytes():
            activations, logits, gradients, shared = 0, 0, self._update_bytes(), 0
        found = [("gradients", gradients), ("activations", activations), ("logits", logits), ("prompts", shared)]
        work = in_flight(gradients + activations + logits + shared)
        return Phase((*self.memory.persistent(), *(Allocation(name, size) for name, size in found if size), work))

    def _update_bytes(self) -> int:
        """Gradients as they came and clipped, and a third of what is being made anew, before the old is dropped."""
        return round(2.3 * self.memory.trainable())

    # ── micro-batches ────────────────────────────────────────────────────────────────────────────────────────────────

    def micro_batches(self, token_budget: int) -> list[ForwardPass]:
        """The micro-batches when all rows are as long as they may be, as `backend.training.microbatch` makes them: group after group; a row
        larger than the budget goes alone."""
        parts: list[list[int]] = [[]]
        for group in range(self.prompts):
            for _ in range(self.group):
                rows = parts[-1]
                if rows and (len(rows) == self.most_rows or self.tokens([*rows, group]) > token_budget):
                    parts.append([])
                parts[-1].append(group)
        return [ForwardPass(len(rows), len(set(rows)) if self.shape.plain else 0) for rows in parts]

    def tokens(self, groups: list[int]) -> int:
        """What counts against the budget for rows of these groups."""
        prompts = 0 if self.may_share_prefixes else len(set(groups)) if self.shape.plain else len(groups)
        return len(groups) * self.completion + prompts * self.prompt

    def _shares_prefixes(self, parts: list[ForwardPass], token_budget: int) -> bool:
        """Whether prompts are read before and gone through after all micro-batches: `backend.training.shared_prefix.SharedPrefix.pays`."""
        read = sum(part.prompts for part in parts)
        too_large = any(self._tokens(part) > token_budget for part in parts)
        return self.may_share_prefixes and (too_large or 3 * (read - self.prompts) > self.prompts)

    def _shared_prefix_bytes(self) -> int:
        """Keys and values of all prompts, the slopes in them, and both again for the micro-batch that adds to these."""
        return 4 * self.memory.cache(self.prompts, self.prompt)

    # ── one passage ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _peak(self, batch: ForwardPass, plan: MemoryPlan) -> tuple[int, int]:
        """(activations, logits) when most is there: what all layers keep, and the output layer or one layer at work."""
        logits, layer = self._logits(plan, batch.rows), self._layer_work(batch, plan)
        if not plan.recompute:
            return sum(self._saved_by_layer(layer, batch) for layer in self.layers) + max(layer - logits, 0), logits
        # The logits come when no layer's activations are there. Where every weight learns, the next layer is worked out
        # before the last one's weights have their gradients.
        layers = 1.75 if self.memory.full and len(self.layers) > 2 else 1
        kept = max((self._saved_by_layer(layer, batch) for layer in self.layers), default=0)
        return self._inputs(batch) + max(round(layers * kept) + layer - logits, 0), logits

    def _tokens(self, batch: ForwardPass) -> int:
        alone = self.prompt if not self.shape.plain else 0
        return batch.rows * (self.completion + alone) + batch.prompts * self.prompt

    def _inputs(self, batch: ForwardPass) -> int:
        """Layers that are worked out again keep what came in, and the prompts' keys and values."""
        keys_and_values = batch.prompts * self.prompt * 2 * self.shape.keys
        return len(self.layers) * (self._tokens(batch) * self.shape.hidden + keys_and_values) * self.width

    def _saved_by_layer(self, layer: tuple[Linear, ...], batch: ForwardPass) -> int:
        """What autodiff keeps of a layer until its backward pass: arrays of the tokens' size, and what attention looked at."""
        kept = self._tokens(batch) * self._saved_per_token(layer) + self._keys_and_values(batch)
        if not self.shape.plain:
            kept += self._scores(batch)
        if self.memory.config.train_type == "dora" and (
            self.shape.quantised or self.memory.config.quantization != "none"
        ):
            # mlx-lm's DoRA unpacks the weight in every call, and the gradient of its input needs it.
            calls = bool(batch.rows) + bool(batch.prompts)
            kept += calls * self.width * sum(one.numbers for one in self.memory.adapted_in_layer(layer))
        return kept

    def _scores(self, batch: ForwardPass) -> int:
        """[B, heads, K + T, K + T], which `backend.engine.attention` does without; layers with a window of their own do not use it."""
        return batch.rows * self.shape.heads * (self.prompt + self.completion) ** 2 * self.width

    def _attention_scores(self, batch: ForwardPass) -> int:
        """Bytes of the scores that attention works on at once: completions' with their prompts', or prompts' alone."""
        rows, queries, keys = batch.rows, self.completion, self.prompt + self.completion
        if not rows:
            rows, queries, keys = batch.prompts, self.prompt, self.prompt
        heads = rows * self.shape.heads
        return FLOAT_BYTES * heads * keys * attention_block(heads, queries, keys, self.memory.gpu)

    def _keys_and_values(self, batch: ForwardPass) -> int:
        """Keys and values: each token's own; the prompt's again for each row where prompts have unequally many rows."""
        columns = self._tokens(batch) + (batch.rows * self.prompt if batch.prompts > 1 else 0)
        return 2 * self.shape.keys * self.width * columns

    def _saved_per_token(self, layer: tuple[Linear, ...]) -> int:
        """Bytes that a layer keeps of every token.

        Norms keep what came in (in 32 bits on a CPU, where they are made of plain operations); attention its queries; the
        gated unit gate, sigmoid, silu and up. An adapter keeps its input: in 16 bits a copy in 32 for each, with dropout what
        was dropped too. DoRA keeps the product before it is scaled. A weight that learns keeps its input, and a norm that
        does what it has scaled.
        """
        memory, shape = self.memory, self.shape
        adapted = memory.adapted_in_layer(layer)
        if not shape.known:
            return round(1.2 * self.width * sum(one.inputs + one.outputs for one in layer))
        norm = self.width if memory.gpu else FLOAT_BYTES
        normed = 2 * shape.hidden + (shape.queries + shape.keys if shape.normed else 0)
        kept = normed * norm * (2 if memory.full and not memory.gpu else 1)
        kept += (
            (shape.queries + 2 * memory.mlp_width(layer)) * self.width
            + self._gate_bytes(layer)
            + self._expert_bytes(layer)
        )
        kept += FLOAT_BYTES * shape.heads + self._adapter_inputs(adapted)
        if not memory.full:
            kept += FLOAT_BYTES * memory.config.rank * sum(memory.uses_per_token(one) for one in adapted)
        if memory.config.train_type == "dora":
            kept += self.width * sum(one.outputs for one in adapted)
        return kept

    def _adapter_inputs(self, adapted: list[Linear]) -> int:
        dropout = 0 if self.memory.full else self.memory.config.dropout
        sizes = [(_input_of(one), one.inputs * self.memory.uses_per_token(one)) for one in adapted]
        if self.width == FLOAT_BYTES and not dropout:  # q, k and v share theirs, and so do gate and up
            return FLOAT_BYTES * sum(dict(sizes).values())
        return FLOAT_BYTES * (2 if dropout else 1) * sum(size for _, size in sizes)

    def _expert_bytes(self, layer: tuple[Linear, ...]) -> int:
        """What comes back from the experts, before it is weighed, and the router's shares."""
        several = [one for one in layer if one.experts > 1 and one.name.endswith("down_proj")]
        return sum(
            self.width * one.outputs * self.memory.uses_per_token(one) + 3 * FLOAT_BYTES * one.experts
            for one in several
        )

    def _gate_bytes(self, layer: tuple[Linear, ...]) -> int:
        """The gate's sigmoid, and where mlx's own unit is used, its silu."""
        unit = self.memory.mlp_width(layer)
        return 2 * unit * self.width if self.memory.gpu else unit * FLOAT_BYTES

    def _layer_work(self, batch: ForwardPass, plan: MemoryPlan) -> int:
        """One layer in its backward pass: arrays like the scores of a block, and the gradients of the keys and values that the
        rows saw; or the gradients in the gated unit, three of its inner size, and five where it is worked out again. In 16
        bits the adapters' part of it is worked out in 32."""
        tokens = batch.rows * self.completion or batch.prompts * self.prompt
        scores = 5 * self._attention_scores(batch) if self.shape.plain else 3 * self._scores(batch)
        unit, hidden = (
            FLOAT_BYTES * self.memory.mlp_width(self.layers[-1]) if self.layers else 0,
            FLOAT_BYTES * self.shape.hidden,
        )
        unit_at_work = tokens * (5 * unit + 12 * hidden if plan.recompute else 3 * unit + hidden)
        return max(scores + self._keys_and_values(batch), unit_at_work) + self._adapted_weight()

    def _adapted_weight(self) -> int:
        """DoRA works out its adapted weights, to measure their rows."""
        return 3 * FLOAT_BYTES * self.memory.largest_adapted() if self.memory.config.train_type == "dora" else 0

    def _logits(self, plan: MemoryPlan, rows: int) -> int:
        """A chunk's logits, those below their peak, exponentials and slopes before and after the target's place: five arrays,
        and the next chunk's first or second. The slopes in the hidden states [N, H] of all chunks stay, and so do the states. An
        output layer that learns has its gradient from this chunk, from those before, and from all of them."""
        tokens = rows * self.completion
        arrays = 5.5 if plan.chunk < tokens else 5
        logits = round(arrays * min(plan.chunk, tokens) * self.shape.vocabulary * FLOAT_BYTES)
        learnt = (
            3 * self.shape.vocabulary * self.shape.hidden * FLOAT_BYTES
            if self.memory.full and plan.chunk < tokens
            else 0
        )
        return logits + learnt + 2 * tokens * self.shape.hidden * FLOAT_BYTES


def _input_of(one: Linear) -> str:
    """What a matrix reads, for those of a layer that read the same."""
    part, _, name = one.name.rpartition(".")
    return one.name if name in ("o_proj", "down_proj") else part
