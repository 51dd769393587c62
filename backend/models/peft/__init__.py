"""Adapters in the files of Hugging Face's peft: written from ours, read from anybody's, and carried onto a model of mlx-lm."""
