"""The settings form: fields, cards, search, presets, the column with Run and the memory bar."""
