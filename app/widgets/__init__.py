"""Editors, tables and plots. They know Qt, the theme and backend.spec, and nothing of drafts, runs or pages."""
