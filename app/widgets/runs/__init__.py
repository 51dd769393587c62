"""A run's header, state, result, log and export, and the table of the archive."""
