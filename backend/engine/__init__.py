"""mlx-lm's layers computed our way: the same numbers in less time and memory."""
