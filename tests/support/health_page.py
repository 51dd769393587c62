"""The table of health rules in docs/guide/charts.md: `python -m tests.support.health_page` writes it."""

from pathlib import Path

from backend.trainer.health.rules import RULES

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "charts.md"
BEGIN, END = "<!-- rules: begin -->\n", "<!-- rules: end -->\n"


def table() -> str:
    """One row per rule, in the order in which findings are shown."""
    rows = (f"| `{rule.code}` | {rule.threshold:g} | {rule.needs} | {rule.when} |\n" for rule in RULES.values())
    return "| rule | limit | from step | found when |\n|---|---|---|---|\n" + "".join(rows)


def page(text: str) -> str:
    """The page with the present table."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), encoding="utf-8")
