"""The command line: one function per verb, with lazy imports so that `--help` stays fast."""
