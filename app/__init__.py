"""GRPO Studio's window. The modules of the backend that it imports load no engine (tests/house/test_imports.py)."""

from app.crash_catcher import guard_overrides

guard_overrides()
