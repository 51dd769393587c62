"""Confine code that we do not trust to its own folder: no writing elsewhere, no network, no hold on other processes."""
