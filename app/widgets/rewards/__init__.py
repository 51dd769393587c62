"""Reward table, reward bench, code editor, consent to run code."""
