"""The result of an evaluation: its figures with intervals, its rows, and both sides of one row."""
