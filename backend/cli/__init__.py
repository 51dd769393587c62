"""The command line: one function a verb. Each imports its modules when it runs, so that `--help` stays quick."""
