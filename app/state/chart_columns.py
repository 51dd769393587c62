"""Names of the columns of a chart's CSV table: the labels of the chart, the names of the metrics in the event log, or TRL's."""

from __future__ import annotations

from typing import Literal

from app.state.charts import Chart, Curve
from backend.runs.metric_names import EVALUATION, prefixed, trl_name

Naming = Literal["labels", "diary", "trl"]
NAMINGS: dict[Naming, str] = {
    "labels": "Labels of the chart",
    "diary": "Names in the event log",
    "trl": "Names in TRL",
}
"""Each with its words in a menu."""


def column_names(chart: Chart, curve: Curve, naming: Naming, scale_rewards: str = "group") -> tuple[str, ...]:
    """Of the curve, and of the lower and upper edge of its band where it has one; () for the labels of the chart.

    `scale_rewards`: the run's, on which it depends what TRL calls reward_std.
    """
    if naming == "labels":
        return ()

    def named(metric: str) -> str:
        if naming == "diary":
            return EVALUATION + metric if chart.held_out else metric
        split = "valid" if chart.held_out else "train"
        return next(iter(prefixed(split, {trl_name(metric, scale_rewards): None})))

    name = named(curve.metric)
    if curve.spread:
        return name, f"{name} - {named(curve.spread)}", f"{name} + {named(curve.spread)}"
    return (name, named(curve.low), named(curve.high)) if curve.low else (name,)
