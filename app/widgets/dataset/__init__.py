"""The Dataset page: rows, columns, splits, prompt lengths."""
