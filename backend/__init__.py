"""GRPO Studio's trainer: headless, and the only one of the two programs that loads mlx."""

__version__ = "0.1.0"
