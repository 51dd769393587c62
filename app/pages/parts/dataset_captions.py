"""The captions below the figures of the Dataset page: how long its prompts are, and how many of them were compared."""

from __future__ import annotations

from app.model.dataset import Dataset


def lengths_caption(dataset: Dataset) -> str:
    """“median 46 · 95% up to 90 · longest 203 · 1,536 fit”, and what else there is to know of the rows that were read."""
    counts, notes = dataset.counts, _notes(dataset)
    if counts is None:
        return " · ".join(["Counting tokens…" if dataset.can_count else "", *notes]).strip(" ·")
    if not counts.has_tokens:
        return " · ".join(notes)
    lengths = (
        f"median {counts.median:,}",
        f"95% up to {counts.percentile(95):,}",
        f"longest {counts.longest:,}",
        f"{max(0, dataset.prompt_limit):,} fit",
    )
    return " · ".join([*lengths, *notes])


def variety_caption(dataset: Dataset) -> str:
    """“of 10,000 rows, drawn from 97,870”. The dataset's variety must be known."""
    rows, total = dataset.variety["rows"], dataset.variety["total"]
    compared = f"of {rows:,} rows" if rows == total else f"of {rows:,} rows, drawn from {total:,}"
    return " · ".join([compared, *_notes(dataset)])


def _notes(dataset: Dataset) -> list[str]:
    about = dataset.splits.get(dataset.split, {})
    first = [f"first {about['rows']:,} rows"] if about.get("about") else []
    return [*first, *dataset.preview.get("notes", ())]
