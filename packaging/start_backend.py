"""The trainer's executable in a frozen app: `python -m backend`. The window starts it, and people in a terminal."""

import sys

import frozen_start

from backend.__main__ import main

if __name__ == "__main__":
    frozen_start.prepare()
    sys.exit(main())
