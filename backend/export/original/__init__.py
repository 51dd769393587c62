"""Exports under the names of the original Hugging Face weights, which transformers, peft, vLLM and llama.cpp read; mlx-lm's may differ."""
