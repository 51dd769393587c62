"""Benchmarks of whole GRPO steps: CPU seconds beside wall seconds, and peak memory; ours, other trainers', and ablations."""
