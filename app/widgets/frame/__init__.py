"""The parts of the main window around the pages: sidebar and status strip."""
