"""Sizes by which the engine cuts its work up where nothing presses, and from which the estimate is summed up: one place for both."""

from __future__ import annotations

MICRO_BATCH_TOKENS = {False: 512, True: 4096}
"""On a CPU and on a GPU: most tokens (padding counted) in one forward and backward pass, enough to keep the device busy. Since
a prompt is read once however its rows are parted, more of them would only take more memory."""

CHUNK_BYTES = {False: 8 << 20, True: 64 << 20}
"""On a CPU and on a GPU: bytes of float32 logits worked on at once. A CPU wants them in its cache, a GPU enough rows to be
busy."""

SMALLEST_CHUNK = 32
"""Tokens; with fewer, the head's weights are read more often than they are used."""

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
