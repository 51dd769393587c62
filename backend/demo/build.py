"""Makes everything in `resources/demo/` from a seed: tokenizer, warmed-up model and dataset. It measures nothing.

The same seed gives the same bytes on the same machine. Another BLAS rounds differently, so there the weights differ while
tokenizer and dataset stay the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from backend.demo import char_tokenizer as demo_tokenizer
from backend.demo import demo_model as demo_model
from backend.demo import warmup
from backend.demo.sums import Sum, pools


def rebuild(
    folder: Path,
    seed: int = 0,
    progress: Callable[[str], None] = lambda sentence: None,
    steps: int = warmup.STEPS,
) -> None:
    """Make `folder`/model and `folder`/data again; what stands there under the same names is replaced.

    `progress` is told now and then, in a sentence, how far it is. Files are written only once training is over.
    """
    pool = pools(seed)
    tokenizer = demo_tokenizer.make()
    model = demo_model.make(seed)
    warmup.train(model, tokenizer, pool.warmup, seed, steps, progress)
    for name in ("model", "data"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    demo_tokenizer.save(tokenizer, folder / "model")
    demo_model.save(model, folder / "model")
    for split in ("train", "valid", "test"):
        _write_rows(folder / "data" / f"{split}.jsonl", getattr(pool, split))
    progress(f"The demo's model and data are in {folder}.")


def _write_rows(path: Path, problems: list[Sum]) -> None:
    path.write_text("".join(json.dumps(problem.row()) + "\n" for problem in problems), encoding="utf-8")
