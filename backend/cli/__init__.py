"""The command line: one function a verb. Each imports what it needs when it runs, so that `--help` stays quick."""
