"""Widgets of the Monitor page."""
