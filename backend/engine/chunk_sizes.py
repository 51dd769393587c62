"""Chunk sizes of the engine with enough memory; False is a CPU, True a GPU. The memory estimate reads them too."""

# tokens with padding in one forward and backward pass: enough to keep the device busy
MICRO_BATCH_TOKENS = {False: 512, True: 4096}

CHUNK_BYTES = {False: 1 << 20, True: 64 << 20}  # float32 logits computed together: fit a CPU's cache, keep a GPU busy

SMALLEST_CHUNK = 32  # tokens; below, reading the head's weights dominates

# float32 attention scores of one layer computed together, in training
ATTENTION_BYTES = {False: 1 << 20, True: 128 << 20}

SMALLEST_BLOCK = 32  # queries

# recomputed together in the backward pass of one gated delta net
GATED_DELTA_BYTES = {False: 32 << 20, True: 256 << 20}

GATED_DELTA_FLOATS = 32  # of those, floats per token, head and number of its key and value (18 to 34 measured)

PREFILL_TOKENS = 8192  # prompt tokens in one pass of prefill

JUDGED_TOKENS = 1 << 15  # prompts and replies that a judge model decodes together

REPLY_TOKENS = 256  # of its reply, for each completion or criterion and around them

STORED_WIDTH = 64  # columns of a slice in `cpu.sliced`

BUCKET = 64  # columns by which the KV cache of short rows grows; each capacity is a trace


def head_chunk(vocabulary: int, gpu: bool) -> int:
    """Completion tokens whose logits fit CHUNK_BYTES."""
    return max(SMALLEST_CHUNK, CHUNK_BYTES[gpu] // (4 * max(vocabulary, 1)))


def capacity(columns: int) -> int:
    """Columns to allocate for a KV cache of `columns`: rounded up to a bucket, or to an eighth to a sixteenth of the
    length where that is more."""
    step = max(BUCKET, 1 << columns.bit_length() - 1 >> 3)
    return -(-columns // step) * step


def attention_block(heads: int, queries: int, keys: int, gpu: bool) -> int:
    """Queries per block of attention: equal blocks whose scores fit ATTENTION_BYTES. `heads`: of all rows together."""
    largest = max(SMALLEST_BLOCK, ATTENTION_BYTES[gpu] // (4 * max(heads * keys, 1)))
    blocks = -(-queries // largest)
    return -(-queries // max(blocks, 1))


def gated_delta_span(heads: int, head_size: int, chunk: int, gpu: bool) -> int:
    """Tokens of a gated delta net recomputed together, whole chunks. `heads`: of all rows; `head_size`: key, value."""
    chunk_bytes = 4 * GATED_DELTA_FLOATS * heads * head_size * chunk
    return chunk * max(1, GATED_DELTA_BYTES[gpu] // max(chunk_bytes, 1))
