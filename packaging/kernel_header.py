#!/usr/bin/env python3
"""Precompile the C++ header that mlx includes in every CPU kernel it compiles at run time. Linux only; does nothing
elsewhere.

On a CPU, mlx writes each fused elementwise kernel as a C++ file and calls g++ on it. Nine tenths of that time go into
parsing one header: 0.73 CPU seconds a kernel without a precompiled header, 0.17 with it. g++ uses
`compiled_preamble.h.gch` by itself when it lies beside the header and was made by the same compiler with the same
flags, and ignores it silently otherwise, so it can be left out.

    python packaging/kernel_header.py        with the interpreter of the environment that mlx is installed in
"""

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

FLAGS = ("-std=c++17", "-O3", "-Wall", "-fPIC")
"""As mlx calls g++ (mlx/backend/cpu/compiled.cpp); a precompiled header serves only calls with the same flags."""


def main() -> None:
    spec = find_spec("mlx")
    if sys.platform != "linux" or shutil.which("g++") is None or spec is None or not spec.submodule_search_locations:
        return
    include = Path(next(iter(spec.submodule_search_locations))) / "include"
    header = include / "mlx" / "backend" / "cpu" / "compiled_preamble.h"
    precompiled = header.with_name(header.name + ".gch")
    # g++ does not compare a precompiled header with the header it was made from: one of an earlier mlx must not stay
    # behind.
    precompiled.unlink(missing_ok=True)
    if header.exists():
        command = ["g++", *FLAGS, f"-I{include}", "-x", "c++-header", str(header), "-o", str(precompiled)]
        subprocess.run(command, check=False, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
