"""The table of docs/health.md, from the rules: `python -m tests.support.health_page` writes it anew."""

from __future__ import annotations

from pathlib import Path

from backend.trainer.health.rules import RULES

PAGE = Path(__file__).parents[2] / "docs" / "health.md"
BEGIN, END = "<!-- rules: begin -->\n", "<!-- rules: end -->\n"


def table() -> str:
    """One section a rule, in the order in which findings are shown."""
    return "\n".join(
        f"### {rule.title}\n\n"
        f"`{rule.code}`, {rule.level}, from step {rule.needs} on · metric `{rule.metric}` · chart *{rule.chart}*\n\n"
        f"Found when {rule.threshold.means}: **{rule.threshold.value:g}**. Source of the number: {rule.threshold.source}.\n\n"
        f"{rule.advice}\n"
        for rule in RULES.values()
    )


def page(text: str) -> str:
    """The page with the present table."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), encoding="utf-8")
