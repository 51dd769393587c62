"""Hugging Face: what is there, and bringing it here. Its own library keeps the cache and the token; we never write one."""
