"""Sizes by which the engine cuts its work up where nothing presses, and from which the estimate is summed up: one place for both."""

from __future__ import annotations

MICRO_BATCH_TOKENS = {False: 512, True: 4096}
"""On a CPU and on a GPU: most tokens (padding counted) in one forward and backward pass, enough to keep the device busy. Since
a prompt is read once however its rows are parted, more of them would only take more memory."""

CHUNK_BYTES = {False: 2 << 20, True: 64 << 20}
"""On a CPU and on a GPU: bytes of float32 logits worked on at once. A CPU wants them in its cache, a GPU enough rows to be
busy."""

SMALLEST_CHUNK = 32
"""Tokens; with fewer, the head's weights are read more often than they are used."""

ATTENTION_BYTES = {False: 2 << 20, True: 128 << 20}
"""On a CPU and on a GPU: bytes of the float32 scores of one layer's attention that learning works on at once."""

SMALLEST_BLOCK = 32
"""Queries."""

PREFILL_TOKENS = 8192
"""Most prompt tokens, of all prompts that are read together, in one forward pass of sampling."""

BUCKET = 64
"""Columns by which short rows grow; the decoding step is traced once for each capacity."""


def head_chunk(vocabulary: int, gpu: bool) -> int:
    """Completion tokens whose logits fit CHUNK_BYTES together."""
    return max(SMALLEST_CHUNK, CHUNK_BYTES[gpu] // (4 * max(vocabulary, 1)))


def capacity(columns: int) -> int:
    """Room for so many columns of a cache: in steps of a bucket, or of an eighth to a sixteenth where that is more, so that
    growing to any length copies a row a few times and not once a bucket."""
    step = max(BUCKET, 1 << columns.bit_length() - 1 >> 3)
    return -(-columns // step) * step


def attention_block(heads: int, queries: int, keys: int, gpu: bool) -> int:
    """Queries that are looked at together in one layer, in blocks of equal size, so that their scores fit ATTENTION_BYTES;
    `heads` of all rows."""
    fitting = max(SMALLEST_BLOCK, ATTENTION_BYTES[gpu] // (4 * max(heads * keys, 1)))
    blocks = -(-queries // fitting)
    return -(-queries // max(blocks, 1))
