"""The tokens of a step's completions as completions.jsonl keeps them, where a run records them (`record_tokens`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from backend.generation.text_stream import TextStream
from backend.spec.completion_rows import TokenData
from backend.training.batch import token_mask
from backend.training.token_records import TokenRecord
from backend.types import Completion, Group


def token_data_of(
    groups: Sequence[Group], records: Mapping[int, TokenRecord], tokenizer: Any, *, mask_truncated: bool
) -> list[list[TokenData]]:
    """The token data of every completion, group by group. `records` are by row: the completions of all groups counted through,
    as `backend.training.batch.pack` orders them. `mask_truncated`: as the run's `mask_truncated_completions`."""
    rows = iter(range(sum(len(group.completions) for group in groups)))
    return [
        [
            _token_data(completion, records.get(next(rows)), tokenizer, mask_truncated)
            for completion in group.completions
        ]
        for group in groups
    ]


def _token_data(completion: Completion, record: TokenRecord | None, tokenizer: Any, mask_truncated: bool) -> TokenData:
    data = TokenData(text=token_texts(completion.tokens, tokenizer), logp=_figures(completion.logps))
    mask = [int(x) for x in token_mask(completion, mask_truncated)]
    if not all(mask):
        data["mask"] = mask
    if record is None:
        return data
    data["learned_logp"], data["ratio"] = _figures(record.learned_logp), _figures(record.ratio)
    data["clipped"] = [int(is_clipped) for is_clipped in record.clipped]
    own = np.float32(completion.advantage)  # the batch holds it in that type
    if any(x != own for x, is_trained in zip(record.advantage, mask, strict=True) if is_trained):
        data["advantage"] = _figures(record.advantage)
    return data


def token_texts(tokens: Sequence[int], tokenizer: Any) -> list[str]:
    """The text that each token adds. Of a character spread over several tokens, the last one has it and the others nothing."""
    stream = TextStream(lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False))
    texts = [stream.push(token) for token in tokens]
    return [*texts[:-1], texts[-1] + stream.rest()] if texts else []


def _figures(values: Sequence[float]) -> list[float | None]:
    """Nine significant digits, which name a float32 exactly; None for what is not finite."""
    return [float(f"{x:.9g}") if math.isfinite(x) else None for x in values]
