"""The parts of the main window around the pages: sidebar, status strip, preferences."""
