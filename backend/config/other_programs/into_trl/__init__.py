"""Our settings in TRL's words: the opposite direction of the tables beside it, which it is read from."""
