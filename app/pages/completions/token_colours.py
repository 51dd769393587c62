"""Tokens coloured by a number: how strong a colour each gets, and what the legend says.

A colour is a role of the palette laid over the field, never so thick that the text on it falls below a contrast of 4.5.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from PySide6.QtGui import QColor

from app import theme
from app.widgets.basic.number_format import finite, signed
from backend.utils.text import visible

THICKEST = 0.45
"""Share of the role's colour in the strongest background."""


@dataclass(frozen=True, slots=True)
class TokenMeasure:
    """One way to colour tokens: `key` of the token data, `unit` in the legend, roles for values below and above `middle`. `scale` maps a
    value to what is proportional to the strength, so that a ratio of ½ is as strong as one of 2."""

    key: str
    label: str
    unit: str
    below: str
    above: str
    middle: float = 0.0
    scale: Callable[[float], float] = float
    sentence: str = ""


def _log(ratio: float) -> float:
    return math.log(max(ratio, 1e-12))


MEASURES: tuple[TokenMeasure, ...] = (
    TokenMeasure("logp", "Log-probability when sampled", "nats", "advantage_below", "good",
                 sentence="How likely the policy held each token when it sampled it, at the run's temperature and before top-p, top-k "
                 "and min-p. The stronger, the less likely."),
    TokenMeasure("learned_logp", "Log-probability when learned", "nats", "advantage_below", "good",
                 sentence="How likely the policy held each token before the step's last update."),
    TokenMeasure("ratio", "Ratio", "π new / π old", "advantage_below", "advantage_above", 1.0, _log,
                 "Before the step's last update: how much likelier a token had become than when it was sampled. With one update a step "
                 "it is 1 throughout."),
    TokenMeasure("clipped", "Clipped", "1: clipped", "clip", "clip",
                 sentence="Tokens whose ratio was beyond the limits in the step's last update, so that they had no gradient."),
    TokenMeasure("advantage", "Advantage", "", "advantage_below", "advantage_above",
                 sentence="What each token was learned with: the completion's advantage, times the importance correction, and 0 where a "
                 "token carried no policy term."),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ColouredTokens:
    """`texts` with a strength each, −1 to 1, None for a token without a value; `low` and `high` are the values of −1 and 1."""

    measure: TokenMeasure
    texts: Sequence[str]
    values: Sequence[float | None]
    strengths: Sequence[float | None]
    trained: Sequence[bool]
    extreme: float
    """The scaled distance from the middle that is drawn strongest."""

    @property
    def ends(self) -> tuple[str, str]:
        """The values at both ends of the legend, written out."""
        if self.measure.scale is _log:
            return f"{math.exp(-self.extreme):.4g}", f"{math.exp(self.extreme):.4g}"
        return signed(-self.extreme), signed(self.extreme)


def coloured(measure: TokenMeasure, data: Mapping[str, Any], advantage: Any) -> ColouredTokens | None:
    """The tokens by this measure; None where the data does not have it. `advantage` is the completion's own, which holds for every
    token where the data has no others."""
    texts = [visible(text) if isinstance(text, str) else "" for text in data["text"]]
    listed = data.get(measure.key)
    if measure.key == "advantage" and listed is None and "ratio" in data:
        listed = [advantage] * len(texts)
    if not isinstance(listed, list):
        return None
    mask = data.get("mask")
    trained = [bool(x) for x in mask] if isinstance(mask, list) else [True] * len(texts)
    values = [finite(value) for value in listed]
    distances = [None if x is None else measure.scale(x) - measure.scale(measure.middle) for x in values]
    known = [abs(x) for x, counts in zip(distances, trained, strict=False) if x is not None and counts]
    extreme = max(known, default=0.0)
    strengths = [None if x is None else max(-1.0, min(1.0, x / extreme)) if extreme else 0.0 for x in distances]
    return ColouredTokens(measure, texts, values, strengths, trained, extreme)


def background(measure: TokenMeasure, strength: float) -> QColor:
    """The background of a token of this strength, −1 to 1."""
    colours = theme.palette()
    role: QColor = getattr(colours, measure.below if strength < 0 else measure.above)
    return blend(colours.field, role, THICKEST * abs(strength))


def blend(under: QColor, over: QColor, share: float) -> QColor:
    """`over` laid on `under` with this opacity."""
    parts = ((under.redF(), over.redF()), (under.greenF(), over.greenF()), (under.blueF(), over.blueF()))
    return QColor.fromRgbF(*(a + (b - a) * share for a, b in parts))
