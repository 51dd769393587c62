"""The window's executable in a frozen app: `python -m app`. On Linux it says first which system libraries are
missing."""

import sys

import frozen_start
import system_libraries

from app.__main__ import has_display, main

if __name__ == "__main__":
    frozen_start.prepare()
    # Qt would end the process with a page of text, or, where it cannot even be loaded, with a traceback.
    if has_display() and (sentence := system_libraries.missing_for_window()):
        sys.exit(sentence)
    sys.exit(main())
