"""GRPO Studio's window. The modules of the backend that it imports load no engine (tests/house/test_imports.py)."""
