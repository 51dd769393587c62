"""CPU kernels that mlx compiles, shared between the worker processes of one test run."""

import os
import shutil
from pathlib import Path

COMPILER = """#!/bin/sh
# mlx calls: g++ -std=… -O3 -Wall -fPIC -shared FLAGS "SOURCE.cpp" -o "LIBRARY.so"
case " $* " in *" -shared "*) ;; *) exec '{gxx}' "$@" ;; esac
for word do
  case $word in *.cpp) source=$word ;; esac
  library=$word
done
key=$(sha1sum < "$source") && key='{folder}'/${{key%% *}}.so
[ -e "$key" ] && exec cp "$key" "$library"
# The last -O counts: compiling takes a third less time than with mlx's -O3, and the kernels compute the same.
'{gxx}' "$@" -O1 || exit
# Renamed when it is whole: another worker may look at any moment.
cp "$library" "$key.$$" && mv "$key.$$" "$key"
"""


def use(temporary: Path) -> None:
    """Let this process and its children find the sharing compiler, if there is a g++."""
    gxx = shutil.which("g++")
    if gxx is None:
        return
    folder = temporary / f"grpo-studio-kernels-{os.environ['PYTEST_XDIST_TESTRUNUID']}"
    programs = folder / os.environ["PYTEST_XDIST_WORKER"]
    programs.mkdir(parents=True)
    compiler = programs / "g++"
    compiler.write_text(COMPILER.format(gxx=gxx, folder=folder))
    compiler.chmod(0o755)
    os.environ["PATH"] = f"{programs}{os.pathsep}{os.environ['PATH']}"
