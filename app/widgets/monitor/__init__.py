"""Widgets of the Monitor page that are no charts."""
