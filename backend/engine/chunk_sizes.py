"""Chunk sizes of the engine when memory is no constraint. The engine and the memory estimate both read them here."""

from __future__ import annotations

MICRO_BATCH_TOKENS = {False: 512, True: 4096}
"""On a CPU and on a GPU: most tokens, padding included, in one forward and backward pass, enough to keep the device
busy. A prompt is computed once however its rows are distributed over micro-batches, so larger ones would only take more
memory."""

CHUNK_BYTES = {False: 2 << 20, True: 64 << 20}
"""On a CPU and on a GPU: bytes of float32 logits computed together. They should fit a CPU's cache; a GPU needs enough
rows to be busy."""

SMALLEST_CHUNK = 32
"""Tokens; with fewer, reading the output layer's weights from memory dominates."""

ATTENTION_BYTES = {False: 2 << 20, True: 128 << 20}
"""On a CPU and on a GPU: bytes of float32 attention scores of one layer computed together, in training."""

SMALLEST_BLOCK = 32
"""Queries."""

GATED_DELTA_BYTES = {False: 32 << 20, True: 256 << 20}
"""On a CPU and on a GPU: bytes that the backward pass of one gated delta net recomputes together."""

GATED_DELTA_FLOATS = 32
"""Of those, float32 numbers a token, head and number of its key and value: decayed copies of keys and queries at every
size of block, and their gradients. Measured: 18 to 24 with a decay a head, 28 to 34 with one a key channel; more the
later mlx's CPU thread runs what frees an array, as on a busy machine, and the smaller the heads are."""

PREFILL_TOKENS = 8192
"""Most prompt tokens in one forward pass of prefill, summed over the prompts."""

BUCKET = 64
"""Columns by which the KV cache of short rows grows; the decoding step is compiled once per capacity."""


def head_chunk(vocabulary: int, gpu: bool) -> int:
    """Completion tokens whose logits fit CHUNK_BYTES."""
    return max(SMALLEST_CHUNK, CHUNK_BYTES[gpu] // (4 * max(vocabulary, 1)))


def capacity(columns: int) -> int:
    """Columns to allocate for a KV cache of `columns`: rounded up to a bucket, or to an eighth to a sixteenth of the
    length where that is more, so that growing to any length copies a row a few times instead of once per bucket."""
    step = max(BUCKET, 1 << columns.bit_length() - 1 >> 3)
    return -(-columns // step) * step


def attention_block(heads: int, queries: int, keys: int, gpu: bool) -> int:
    """Queries per block of attention in one layer: blocks of equal size whose scores fit ATTENTION_BYTES. `heads`: of
    all rows together."""
    largest = max(SMALLEST_BLOCK, ATTENTION_BYTES[gpu] // (4 * max(heads * keys, 1)))
    blocks = -(-queries // largest)
    return -(-queries // max(blocks, 1))


def gated_delta_span(heads: int, head_size: int, chunk: int, gpu: bool) -> int:
    """Tokens of a gated delta net recomputed together: as many whole chunks as fit GATED_DELTA_BYTES. `heads`: of all
    rows together; `head_size`: of a key and a value together."""
    chunk_bytes = 4 * GATED_DELTA_FLOATS * heads * head_size * chunk
    return chunk * max(1, GATED_DELTA_BYTES[gpu] // max(chunk_bytes, 1))
