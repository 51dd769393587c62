"""Benchmarks for maintainers: ours, other trainers, and techniques switched off. `python -m benchmarks --help`."""
