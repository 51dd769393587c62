"""Editors, tables and plots. They know Qt and the theme, and nothing of the session, drafts or pages."""
