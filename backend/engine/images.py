"""Pictures of prompts in a forward pass of the text model. A vision tower has turned them into embeddings beforehand;
they matter only while a prompt is read, and are constants.

In a prompt every image token's embedding is replaced by a feature. Some families (Qwen3-VL) add further features after
each of the first layers (DeepStack, arXiv:2406.04334), and rotate queries and keys by three positions a token (M-RoPE,
arXiv:2409.12191), which the cache hands to the layers in place of its offset: nothing is kept on the model. The text
after a prompt has plain positions, `shift` more than its tokens before.

Letters: P prompts, K tokens with padding, n image tokens, H hidden, d rotated size of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import ArraysCache

from backend.engine.layers import Rotation, scatter_unique
from backend.engine.output_layer import SplitModel

Rotary = Callable[[mx.array], tuple[mx.array, mx.array]]  # positions [3, P, K] → cosines and sines [P, K, d]


@dataclass(frozen=True, slots=True, eq=False)
class PromptImages:
    """The pictures of one prompt. `column_n`: the places of its image tokens; `position_3K`: of M-RoPE, where the
    model has it, with the `rotary` that turns positions into angles. `placeholders`: ids that are never sampled."""

    column_n: np.ndarray
    feature_nH: mx.array
    deepstack: tuple[mx.array, ...] = ()  # [n, H] for each of the first layers
    position_3K: np.ndarray | None = None
    rotary: Rotary | None = None
    shift: int = 0  # the position after the prompt, less the number of its tokens
    placeholders: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PaddedImages:
    """The pictures of several prompts, padded as their tokens are."""

    is_image_PK1: mx.array
    feature_PKH: mx.array  # 0 elsewhere, as `deepstack`
    deepstack: tuple[mx.array, ...]
    rotation: Rotation | None

    def columns(self, start: int, end: int) -> PaddedImages:
        cut = (slice(None), slice(start, end))
        deepstack = tuple(x[cut] for x in self.deepstack)
        rotation = self.rotation and Rotation(*(x[:, :, start:end] for x in self.rotation))
        return PaddedImages(self.is_image_PK1[cut], self.feature_PKH[cut], deepstack, rotation)


def padded_images(images: Sequence[PromptImages | None], K: int, pads: Sequence[int] | None = None) -> PaddedImages:
    """The pictures of prompts of K columns, `pads` of them padding on the left (None: on the right). Columns after a
    prompt's tokens are text that follows it."""
    pads = pads or [0] * len(images)
    present = [(p, own) for p, own in enumerate(images) if own is not None]
    places = [p * K + pads[p] + own.column_n for p, own in present]
    index_n = mx.array(np.concatenate(places).astype(np.int32))

    def dense(parts: Sequence[mx.array]) -> mx.array:
        features = mx.concatenate(list(parts))
        return scatter_unique((len(images) * K, features.shape[-1]), index_n, features).reshape(len(images), K, -1)

    is_image = np.zeros(len(images) * K, bool)
    is_image[np.concatenate(places)] = True
    deepstack = zip(*(own.deepstack for _, own in present), strict=True)
    return PaddedImages(
        mx.array(is_image.reshape(len(images), K, 1)),
        dense([own.feature_nH for _, own in present]),
        tuple(dense(parts) for parts in deepstack),
        _rotation(images, K, pads),
    )


def _rotation(images: Sequence[PromptImages | None], K: int, pads: Sequence[int]) -> Rotation | None:
    rotary = next((own.rotary for own in images if own is not None), None)
    if rotary is None:
        return None
    position_3PK = np.tile(np.arange(K) - np.array(pads)[:, None], (3, 1, 1))
    for p, own in enumerate(images):
        if own is not None and own.position_3K is not None:
            end = pads[p] + own.position_3K.shape[1]
            position_3PK[:, p, pads[p] : end] = own.position_3K[:, : K - pads[p]]
            position_3PK[:, p, end:] += own.shift
    cos_PKd, sin_PKd = rotary(mx.array(position_3PK))
    first, second = mx.split(sin_PKd[:, None], 2, axis=-1)
    return Rotation(cos_PKd[:, None], mx.concatenate([-first, second], axis=-1))


def shifts(images: Sequence[PromptImages | None]) -> np.ndarray | None:
    """[P]; None where all are 0."""
    shift_P = np.array([0 if own is None else own.shift for own in images], np.int32)
    return shift_P if shift_P.any() else None


def hidden_with_images(
    split_model: SplitModel, tokens_PK: mx.array, images: PaddedImages, cache: Sequence[Any]
) -> mx.array:
    """`split_model.hidden` of prompts with pictures. The caches have the pictures' rotation as offset (`Positioned`,
    `PrefixRecorder`); None: a layer without one."""
    body: Any = split_model.body
    x_PKH = body.embed_tokens(tokens_PK)
    x_PKH = mx.where(images.is_image_PK1, images.feature_PKH.astype(x_PKH.dtype), x_PKH)
    if not images.deepstack:
        return body(tokens_PK, cache=cache, input_embeddings=x_PKH)
    # As the body of mlx-lm's qwen3 and qwen3_moe, which takes nothing between its layers.
    mask = create_attention_mask(x_PKH, cache[0])
    for i, (layer, of_layer) in enumerate(zip(body.layers, cache, strict=True)):
        x_PKH = layer(x_PKH, mask, of_layer)
        if i < len(images.deepstack):
            x_PKH = x_PKH + images.deepstack[i].astype(x_PKH.dtype)
    return body.norm(x_PKH)


def read_prompt(
    split_model: SplitModel,
    tokens_PK: mx.array,
    cache: Sequence[Any],
    columns: tuple[int, int],
    images: PaddedImages | None,
) -> mx.array:
    """The hidden states of some columns of prompts, without gradient; `cache` is mlx-lm's."""
    part_PK = tokens_PK[:, slice(*columns)]
    if images is None:
        return split_model.hidden(part_PK, cache)
    part = images.columns(*columns)
    return hidden_with_images(split_model, part_PK, part, positioned(cache, part.rotation) if part.rotation else cache)


class Positioned:
    """A cache of mlx-lm whose layer rotates by `offset`, and not by the tokens that it holds."""

    def __init__(self, cache: Any, offset: Any) -> None:
        self._cache, self.offset = cache, offset

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


def positioned(cache: Sequence[Any], offset: Rotation | None = None, shift: Any = 0) -> list[Any]:
    """The caches with another offset: the pictures' rotation, or their own and `shift`. States have no positions."""
    return [
        each if isinstance(each, ArraysCache) else Positioned(each, each.offset + shift if offset is None else offset)
        for each in cache
    ]
