"""The words of other programs (TRL, mlx-lm and mlx-lm-lora, mlx-grpo), and what each is read as here."""
