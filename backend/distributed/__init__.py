"""Training on several machines."""

PROBE = "machine-probe"
"""Verb of the process that a check starts on other machines."""
