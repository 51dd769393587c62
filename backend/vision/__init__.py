"""Prompts with images: what the tokenizer and the frozen vision tower of mlx-vlm add to a text model."""
