"""What the Sweeps page is made of: the rows of settings that vary, and the table of results."""
