"""Training on several machines."""

PROBE, RECEIVE = "machine-probe", "machine-receive"
"""Verbs of the processes that a check starts on other machines."""
