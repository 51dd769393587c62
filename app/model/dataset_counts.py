"""Token counts of a dataset's prompts, and its summary in one line of text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_LINES = {
    "none": "",
    "reading": "Reading the dataset…",
    "absent": "This dataset is not on this machine yet",
    "fetching": "Fetching the dataset…",
}


@dataclass(frozen=True, slots=True)
class Counts:
    """Prompt lengths in tokens, counted over `seen` of `rows` rows, of which training would refuse `refused`.

    `lengths` is a histogram of (tokens, rows), ascending; where it is empty, `no_tokens` says why. `done`: counting has ended.
    """

    rows: int
    seen: int = 0
    refused: int = 0
    lengths: tuple[tuple[int, int], ...] = ()
    no_tokens: str = ""
    done: bool = False

    @property
    def has_tokens(self) -> bool:
        return bool(self.lengths) and not self.no_tokens

    @property
    def longest(self) -> int:
        return self.lengths[-1][0] if self.lengths else 0

    @property
    def median(self) -> int:
        """The median length."""
        return self.percentile(50)

    def percentile(self, percent: float) -> int:
        """The least length that so many percent of the prompts do not exceed; 0 where none is known."""
        wanted = sum(rows for _, rows in self.lengths) * percent / 100
        passed = 0
        for tokens, rows in self.lengths:
            passed += rows
            if passed >= wanted:
                return tokens
        return 0

    def too_long(self, limit: int) -> tuple[int, bool]:
        """(rows whose prompt has more than `limit` tokens, whether that is exact: from a sample it is extrapolated)."""
        counted = sum(rows for tokens, rows in self.lengths if tokens > limit)
        is_exact = self.seen >= self.rows
        return (counted if is_exact else round(counted * self.rows / max(1, self.seen))), is_exact


def summary_line(
    state: str, splits: Mapping[str, Mapping[str, Any]], uses: Mapping[str, str], counts: Counts | None, limit: int
) -> str:
    """“2,048 rows · question → prompt, answer → answer · 3 too long”. `uses` maps a column to its
    role, `counts` are those of the training split, `limit` is how many tokens a prompt may have."""
    if state in _LINES or "train" not in splits:
        return _LINES.get(state, "")
    held = "".join(f" + {about['rows']:,} {split}" for split, about in splits.items() if split != "train")
    mapped = ", ".join(f"{column} → {use}" for column, use in uses.items())
    missing = splits["train"]["unanswered"]
    parts = [f"{splits['train']['rows']:,} rows{held}", mapped, _too_long(counts, limit)]
    return " · ".join(part for part in [*parts, f"{missing:,} without an answer" if missing else ""] if part)


def _too_long(counts: Counts | None, limit: int) -> str:
    if counts is None or not counts.has_tokens:
        return ""
    rows, is_exact = counts.too_long(limit)
    return f"{'' if is_exact else 'about '}{rows:,} too long" if rows else ""
