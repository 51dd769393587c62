"""Contrast by WCAG 2.1, computed from the theme: every text role on every background that it is used on ≥ 4.5, parts
without which a control cannot be seen ≥ 3, lines of charts ≥ 3; light and dark."""

from __future__ import annotations

import pytest
from PySide6.QtGui import QColor

from app import theme

TEXT, PART = 4.5, 3.0
PAGES = ("window", "card", "field")
"""What is behind the content of a page: the page itself, a card, an editor."""
TEXT_USES = {
    "text": (*PAGES, "sidebar", "hover", "selection", "hairline"),
    "muted": (*PAGES, "sidebar", "hover", "selection"),
    "placeholder": ("card", "field"),
    "accent": (*PAGES, "selection"),
    "accent_text": ("accent", "accent_hover"),
    "good": (*PAGES, "selection"),
    "warning": (*PAGES, "selection"),
    "bad": (*PAGES, "selection"),
    "kl": PAGES,
    "clip": PAGES,
    "length": PAGES,
    "advantage_above": (*PAGES, "selection"),
    "advantage_below": (*PAGES, "selection"),
}
"""Role of a text → the backgrounds it stands on; `selection` is a selected row and a banner."""
PART_USES = {
    "outline": PAGES,  # the edge of a field, the track of a switch that is off
    "muted": (*PAGES, "sidebar", "selection"),  # icons, the edge of a check box
    "accent": (*PAGES, "selection"),  # the ring of the focus, a check box that is ticked
    "accent_text": ("accent",),  # the tick in it
    "placeholder": ("window", "card", "selection"),  # a star that is not lit, the dot of no run
    "advantage_above": ("plot_background", "card"),
    "advantage_below": ("plot_background", "card"),
    "kl": ("plot_background",),
    "clip": ("plot_background", "selection"),  # also a star that is lit
    "length": ("plot_background",),
}


def contrast(first: QColor, second: QColor) -> float:
    """WCAG 2.1's ratio, 1 to 21."""
    high, low = sorted((_luminance(first), _luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: QColor) -> float:
    parts = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colour.getRgbF()[:3]]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def too_low(colours: theme.Palette, uses: dict[str, tuple[str, ...]], least: float) -> list[str]:
    return [
        f"{role} on {ground}: {ratio:.2f}"
        for role, grounds in uses.items()
        for ground in grounds
        if (ratio := contrast(getattr(colours, role), getattr(colours, ground))) < least
    ]


@pytest.mark.parametrize("colours", [theme.LIGHT, theme.DARK], ids=["light", "dark"])
def test_contrast(colours: theme.Palette) -> None:
    assert not too_low(colours, TEXT_USES, TEXT) and not too_low(colours, PART_USES, PART)
