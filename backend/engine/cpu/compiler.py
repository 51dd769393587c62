"""Whether mlx can compile on this CPU, and the sentence for where it cannot.

On a CPU mlx writes a compiled function (`mx.compile`) as C++ and calls g++. Without g++ it evaluates such functions operation by
operation, with the same results; with a g++ that cannot compile, such as one without C++ headers, their first use raises. `prepare`
therefore tries one and turns compiling off for the process where that fails. A GPU needs no compiler of the system.
"""

from __future__ import annotations

import shutil
from functools import cache

import mlx.core as mx

from backend.engine.device import on_cpu

COMPILER = "g++"
LEFT_NOTHING = ("Could not load C++ shared library", "Failed to execute command with return code")
"""How mlx's errors begin where the compiler has left no library. One that a signal has ended it takes for one that has succeeded
(`JitCompiler::exec` of mlx/backend/cpu/jit_compiler.cpp reads WEXITSTATUS alone), and then finds nothing to load."""
_SLOWER = "so compiled functions run one operation at a time, and sampling takes somewhat longer"


def left_nothing(error: RuntimeError) -> bool:
    """Whether mlx raised this because its compiler failed or was ended. Ctrl-C in a terminal goes to the compiler too."""
    return str(error).startswith(LEFT_NOTHING)


@cache
def prepare() -> str:
    """Try the compiler, and turn compiling off if it fails; one sentence where nothing is compiled, else "".

    The first call on a machine takes up to a second; mlx keeps what was compiled in the temporary folder for later processes.
    """
    if not on_cpu():
        return ""
    if shutil.which(COMPILER) is None:
        return f"{COMPILER} is not installed, {_SLOWER}."
    try:
        mx.eval(mx.compile(lambda x: mx.exp(x) + x)(mx.zeros((2, 2))))
    except RuntimeError:
        mx.disable_compile()
        return f"{COMPILER} is installed but cannot compile (are the C++ headers missing?), {_SLOWER}."
    return ""
