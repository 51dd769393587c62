"""A dataset much larger than memory trains in the memory of a small one. The proof makes a file of GRPO_STREAM_GB
gigabytes (2)."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

from backend.data.problems import PromptFormat
from backend.data.prompts import PromptStream, TokenizedPrompts
from backend.data.rows import read_splits
from backend.models.tokenizers import load_tokenizer
from tests.data.test_rows import settings
from tests.support.random_models import tiny_tokenizer

FILLER = "a prompt of the usual length " * 32
"""About a kilobyte."""


def write_large(path: Path, size: int) -> int:
    """Rows of about a kilobyte, up to `size` bytes. → how many."""
    count = 0
    with path.open("w") as file:
        while file.tell() < size:
            file.write(
                "".join(
                    json.dumps({"prompt": f"{n} {FILLER}"[-900:], "answer": str(n)}) + "\n"
                    for n in range(count, count + 1000)
                )
            )
            count += 1000
    return count


def test_rows_stay_on_the_disk_while_a_run_takes_them(tmp_path: Path) -> None:
    rows = write_large(tmp_path / "rows.jsonl", 12_000_000)
    tokenizer = load_tokenizer(tiny_tokenizer(tmp_path / "tokenizer"))
    config = settings(tmp_path / "rows.jsonl", streaming=True, max_seq_length=2000)
    tracemalloc.start()
    try:
        train = read_splits(config).train
        prompts = TokenizedPrompts(train, tokenizer, PromptFormat.of(config), "rows.jsonl")
        PromptStream(prompts, 0).take(3)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(train) == rows and peak < 6_000_000, "the text alone is 12 MB, and three times as much as rows in memory"
