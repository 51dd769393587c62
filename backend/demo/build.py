"""Makes the files in `resources/demo/` from a seed: tokenizer, warmed-up model and dataset.

The same seed gives the same bytes on the same machine. Another BLAS rounds differently: the weights differ then, tokenizer
and dataset do not.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from backend.demo import char_tokenizer, demo_model, warmup
from backend.demo.sums import Sum, pools


def rebuild(
    folder: Path,
    seed: int = 0,
    progress: Callable[[str], None] = lambda sentence: None,
    steps: int = warmup.STEPS,
) -> None:
    """Make `folder`/model and `folder`/data again, over files of the same names.

    `progress` is called with a sentence every 50 steps. Files are written only once the warm-up is complete.
    """
    dataset = pools(seed)
    tokenizer = char_tokenizer.make()
    model = demo_model.make(seed)
    warmup.train(model, tokenizer, dataset.warmup, seed, steps, progress)
    for name in ("model", "data"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    char_tokenizer.save(tokenizer, folder / "model")
    demo_model.save(model, folder / "model")
    for split in ("train", "valid", "test"):
        _write_rows(folder / "data" / f"{split}.jsonl", getattr(dataset, split))
    progress(f"The demo's model and data are in {folder}.")


def _write_rows(path: Path, problems: list[Sum]) -> None:
    path.write_text("".join(json.dumps(problem.row()) + "\n" for problem in problems), encoding="utf-8")
