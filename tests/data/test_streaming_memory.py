"""A dataset much larger than memory trains in the memory of a small one. The proof makes a file of GRPO_STREAM_GB gigabytes (2)."""

from __future__ import annotations

import json
import os
import resource
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from backend.data.problems import PromptFormat
from backend.data.prompts import PromptStream, TokenizedPrompts
from backend.data.rows import read_splits
from backend.models.tokenizers import load_tokenizer
from backend.utils.command import backend_command, backend_environment
from tests.data.test_rows import settings
from tests.support import small_run
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


def peak_mb(raw: dict[str, Any], folder: Path, name: str) -> float:
    """The most memory that a run's process had, in MB."""
    run = folder / name
    config = small_run.write_config(folder / f"{name}.yaml", raw)
    log = os.open(folder / f"{name}.txt", os.O_WRONLY | os.O_CREAT)
    command = backend_command("train", str(config), "--runs-dir", str(folder), "--name", name, "--no-progress")
    child = os.posix_spawn(
        command[0], command, {**os.environ, **backend_environment()},
        file_actions=[(os.POSIX_SPAWN_DUP2, log, 1), (os.POSIX_SPAWN_DUP2, log, 2)],
    )  # fmt: skip
    _, status, used = os.wait4(child, 0)
    assert status == 0, (folder / f"{name}.txt").read_text()[-2000:]
    assert run.is_dir()
    return used.ru_maxrss / (1 << 10 if resource.getpagesize() == 4096 and os.uname().sysname == "Linux" else 1 << 20)


@pytest.mark.proof
@pytest.mark.timeout(1800)
def test_two_gigabytes_train_within_300_mb_of_a_thousand_rows(tmp_path: Path) -> None:
    size = float(os.environ.get("GRPO_STREAM_GB", "2"))
    small, large = tmp_path / "small.jsonl", tmp_path / "large.jsonl"
    write_large(small, 1_000_000)
    count = write_large(large, int(size * 1e9))
    raw = small_run.settings_for(tmp_path, iters=3, max_seq_length=2000) | {"batch_size": 2}
    below = peak_mb(raw | {"data": str(small)}, tmp_path, "small")
    began = time.monotonic()
    try:
        above = peak_mb(raw | {"data": str(large), "streaming": True}, tmp_path, "large")
    finally:
        large.unlink()
    print(
        f"{size:g} GB, {count:,} rows: {above:.0f} MB, {above - below:+.0f} MB beside {below:.0f} MB, in {time.monotonic() - began:.0f} s"
    )
    assert above - below < 300
