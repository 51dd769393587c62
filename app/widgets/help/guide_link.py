"""Which place of the guide is about a widget: F1 in it, and in what it contains, leads there."""

from __future__ import annotations

from PySide6.QtWidgets import QWidget

PROPERTY = "guide"


def explain_at(widget: QWidget, place: str) -> None:
    """Say that the guide explains this widget there."""
    widget.setProperty(PROPERTY, place)


def place_about(widget: QWidget | None) -> str:
    """The place about the widget, or about the nearest one that it is in; "" where there is none."""
    while widget is not None:
        if place := widget.property(PROPERTY):
            return str(place)
        widget = widget.parentWidget()
    return ""
