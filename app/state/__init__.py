"""The window's state, without widgets."""
