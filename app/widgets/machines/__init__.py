"""The machines of a run: the list in the form, and what a check found about each."""
