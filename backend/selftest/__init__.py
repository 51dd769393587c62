"""The self-test: whether everything that training and the window need works on this machine, tried with the bundled
demo."""
