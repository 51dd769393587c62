"""About this program: what it consists of, its releases, what it stores on a machine, and the text of a problem report."""
