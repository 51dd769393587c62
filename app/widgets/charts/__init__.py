"""Plots over steps, their grid and legends, and the tiles with single figures."""
