"""One prefill and one backward pass per prompt, however many micro-batches its completions span.

Prompts are prefilled without gradient; each micro-batch treats K and V as constants, whose gradients accumulate; one
more pass per prompt turns those into parameter gradients. By the chain rule dL/dθ = Σ_micro-batch ∂L/∂θ|_{K,V} +
Σ_prompt (dL/dK · ∂K/∂θ + dL/dV · ∂V/∂θ). Letters: P prompts, K prompt tokens, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map

from backend.engine.forward import PrefilledPrompts, prefill_prompts
from backend.engine.images import PromptImages
from backend.engine.layers import scatter_unique
from backend.engine.output_layer import SplitModel

if TYPE_CHECKING:
    from backend.training.policy_forward import MicroBatch


class SharedPrefix:
    """The prompts of some micro-batches, prefilled at most `token_budget` tokens at a time."""

    def __init__(self, micro_batches: Sequence[MicroBatch], token_budget: int) -> None:
        prompts: dict[int, np.ndarray] = {}
        images: dict[int, PromptImages | None] = {}
        for part in micro_batches:
            prompts |= zip(part.groups, np.array(part.rows.prompt_PK), strict=True)
            images |= zip(part.groups, part.rows.images or [None] * len(part.groups), strict=True)
        # A group whose rows fell into several micro-batches occurs several times; the dict keeps its prompt once.
        longest = max(part.rows.prompt_PK.shape[1] for part in micro_batches)
        self.index_of_group = {group: index for index, group in enumerate(prompts)}
        self.prompt_PK = mx.array(np.stack([np.pad(ids, (0, longest - len(ids))) for ids in prompts.values()]))
        self.images = [*images.values()]
        self._cotangents: Any = None  # of `PrefilledPrompts`
        step = max(1, token_budget // longest)
        self.spans = [slice(start, start + step) for start in range(0, len(prompts), step)]

    @staticmethod
    def pays(micro_batches: Sequence[MicroBatch], token_budget: int) -> bool:
        """True if sharing saves time, or a micro-batch is too large with its prompts."""
        # A backward pass costs two forward passes: reading a prompt with gradient costs 3 units, the extra prefill 1.
        if any(part.rows.completion_BT.size + part.rows.prompt_PK.size > token_budget for part in micro_batches):
            return True
        sizes = [(group, part.rows.prompt_PK.shape[1]) for part in micro_batches for group in part.groups]
        return 3 * (sum(size for _, size in sizes) - sum(dict(sizes).values())) > sum(dict(sizes).values())

    def prefill(self, split_model: SplitModel) -> PrefilledPrompts:
        spans: list[PrefilledPrompts] = []
        for span in self.spans:
            spans.append(prefill_prompts(split_model, self.prompt_PK[span], self.images[span]))
            mx.eval(*spans[-1])  # one span's activations at a time
        return spans[0] if len(spans) == 1 else tree_map(lambda *x: mx.concatenate(list(x)), *spans)

    def select(self, prefilled: PrefilledPrompts, micro_batch: MicroBatch) -> PrefilledPrompts:
        """Keys and values of a micro-batch's prompts, cut to its padded width."""
        index_P, K = self._indices(micro_batch), micro_batch.rows.prompt_PK.shape[1]
        return tree_map(lambda x: x[index_P, :, :K], prefilled)

    def accumulate(self, micro_batch: MicroBatch, cotangents: PrefilledPrompts) -> None:
        """Add a micro-batch's gradients of its prompts' keys and values."""
        index_P, K, P = self._indices(micro_batch), micro_batch.rows.prompt_PK.shape[1], len(self.index_of_group)
        longest = self.prompt_PK.shape[1]

        # The transpose of `select`: prompts without rows in this micro-batch get 0, narrower ones are padded with 0.
        def scatter(x: mx.array) -> mx.array:
            padded = mx.pad(x, [(0, 0), (0, 0), (0, longest - K), (0, 0)])
            return scatter_unique((P, *padded.shape[1:]), index_P, padded)

        scattered = tree_map(scatter, cotangents)
        total = self._cotangents
        self._cotangents = scattered if total is None else tree_map(mx.add, total, scattered)
        mx.eval(self._cotangents)  # or the micro-batch's whole graph would stay in memory

    def backward(self, model: nn.Module, split_model: SplitModel, gradient: Any) -> Any:
        """Add the gradient through the prompts to `gradient`: one vector-Jacobian product per span of prompts."""
        assert self._cotangents is not None
        for span in self.spans:
            cotangents = tree_map(lambda x, span=span: x[span], self._cotangents)

            # ∇θ Σ x(θ) · c with c = dL/dx constant is the vector-Jacobian product cᵀ ∂x/∂θ, through nn.value_and_grad's
            # interface. Padding adds nothing: its cotangents are 0, since no row attends to it.
            def inner_product(span: slice = span, cotangents: PrefilledPrompts = cotangents) -> mx.array:
                prefilled = prefill_prompts(split_model, self.prompt_PK[span], self.images[span])
                products = tree_map(lambda x, d: (x * d).astype(mx.float32).sum(), prefilled, cotangents)
                return mx.array(0.0) + sum(products.keys) + sum(products.values)

            _, prompt_gradient = nn.value_and_grad(model, inner_product)()
            gradient = tree_map(mx.add, gradient, prompt_gradient)
            mx.eval(gradient)
        return gradient

    def _indices(self, micro_batch: MicroBatch) -> mx.array:
        return mx.array([self.index_of_group[group] for group in micro_batch.groups])
