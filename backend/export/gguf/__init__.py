"""GGUF, the file of llama.cpp and of the programs built on it, and what Ollama needs beside it."""
