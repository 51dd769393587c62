"""Several runs side by side: their legend, and the tables of settings and results."""
