"""What the verb `check` says of a dataset's prompts: how varied they are, and how long."""

from __future__ import annotations

from typing import Any

from backend.config.config import Config
from backend.data.prompt_preview import SAMPLE, PromptLengths, preview_order, tokenizer_for
from backend.data.prompt_variety import prompt_variety
from backend.data.row_views import Rows
from backend.utils.errors import UserError

PERCENTILES = (5, 50, 95)


def prompt_report(rows: Rows, config: Config, source: str, *, with_lengths: bool) -> dict[str, Any]:
    """`PromptVariety.to_dict`, and with `with_lengths` also `tokens` as (name, value, help): lengths of SAMPLE prompts."""
    report = prompt_variety(rows, config, source).to_dict()
    return report | ({"tokens": _lengths(rows, config, source)} if with_lengths else {})


def report_lines(report: dict[str, Any]) -> list[str]:
    """The report as it is printed, the verdict last."""
    rows, total = report["rows"], report["total"]
    compared = f"Prompts: {rows:,} rows" if rows == total else f"Prompts: {rows:,} rows, drawn from {total:,}"
    figures = [("Repeated", f"{report['repeated']:,}", ""), *report["figures"], report["tokens"]]
    return [compared, *(f"  {name:<14} {value}" for name, value, _ in figures), report["verdict"]]


def _lengths(rows: Rows, config: Config, source: str) -> tuple[str, str, str]:
    from itertools import islice

    name, meaning = "Tokens", f"Lengths of up to {SAMPLE:,} prompts: percentiles, and the longest."
    try:
        tokenizer = tokenizer_for(config)
    except UserError as mistake:
        return name, mistake.faults[0].sentence, meaning
    lengths = PromptLengths(rows, config, source)
    lengths.measure(list(islice(preview_order(len(rows)), SAMPLE)), tokenizer)
    if not lengths.by_length:
        return name, "–", meaning
    shares = ", ".join(f"{percent}% up to {_percentile(lengths, percent):,}" for percent in PERCENTILES)
    return name, f"{shares}, longest {max(lengths.by_length):,} (of {lengths.measured:,} rows)", meaning


def _percentile(lengths: PromptLengths, percent: float) -> int:
    """The least length that so many percent of the prompts do not exceed."""
    wanted, passed = lengths.by_length.total() * percent / 100, 0
    for tokens, count in sorted(lengths.by_length.items()):
        passed += count
        if passed >= wanted:
            return tokens
    return 0
