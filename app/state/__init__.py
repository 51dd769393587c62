"""The window's state without widgets: the draft, the session, runs, the warm service process. Qt signals only."""
