"""Runs as the window sees them: followed, listed, compared, queued; no widgets."""
