#!/usr/bin/env python3
"""Says which Debian packages this machine lacks for the window and for a fast trainer. Standard library only.

python3 packaging/system_libraries.py             say what is missing; exit 1 if something required is
python3 packaging/system_libraries.py --packages  print the missing packages on one line (for scripts)
"""

import ctypes
import importlib.util
import shutil
import sys

REQUIRED = {  # library that Qt loads → the package that brings it
    "libEGL.so.1": "libegl1",
    "libGL.so.1": "libgl1",
    "libfontconfig.so.1": "libfontconfig1",
    "libdbus-1.so.3": "libdbus-1-3",
    "libglib-2.0.so.0": "libglib2.0-0",
    "libxkbcommon.so.0": "libxkbcommon0",
    "libxkbcommon-x11.so.0": "libxkbcommon-x11-0",
    "libxcb-cursor.so.0": "libxcb-cursor0",
    "libxcb-icccm.so.4": "libxcb-icccm4",
    "libxcb-image.so.0": "libxcb-image0",
    "libxcb-keysyms.so.1": "libxcb-keysyms1",
    "libxcb-randr.so.0": "libxcb-randr0",
    "libxcb-render-util.so.0": "libxcb-render-util0",
    "libxcb-shape.so.0": "libxcb-shape0",
    "libxcb-sync.so.1": "libxcb-sync1",
    "libxcb-xfixes.so.0": "libxcb-xfixes0",
    "libxcb-xkb.so.1": "libxcb-xkb1",
}

ADVISED = {
    "libopenblas.so.0": ("libopenblas0-pthread", "training on the CPU is several times slower without it"),
    "g++": ("g++", "mlx cannot compile its steps without it, and runs slower"),
}


def loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def missing_for_window() -> str:
    """A sentence with the libraries that Qt cannot be started without and that are not here; "" where none is missing,
    or not on Linux. A frozen app, which brings some of them, says it at its start."""
    if not sys.platform.startswith("linux"):
        return ""
    missing = {library: package for library, package in REQUIRED.items() if not loads(library)}
    if not missing:
        return ""
    return (
        f"The window needs system libraries that this machine lacks: {', '.join(missing)}. "
        f"On Debian and Ubuntu: sudo apt-get install {' '.join(missing.values())}"
    )


def main() -> int:
    if not sys.platform.startswith("linux"):
        return 0
    required = [package for library, package in REQUIRED.items() if not loads(library)]
    if importlib.util.find_spec("ensurepip") is None:
        required.append("python3-venv")
    available = {"libopenblas.so.0": loads("libopenblas.so.0"), "g++": shutil.which("g++") is not None}
    advised = {package: why for name, (package, why) in ADVISED.items() if not available[name]}
    if "--packages" in sys.argv:
        print(" ".join([*required, *advised]))
        return 0
    if required:
        print("The window needs system libraries that this machine lacks. Install them with:", file=sys.stderr)
        print(f"  sudo apt-get update && sudo apt-get install -y {' '.join([*required, *advised])}", file=sys.stderr)
        return 1
    for package, why in advised.items():
        print(f"Advice: sudo apt-get install {package} ({why}).", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
