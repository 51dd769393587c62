"""Test files run in forks of one process that has imported the libraries: a quick file takes half a second instead of three.

    python -m tests.support.warm_tests        in the tree whose tests are meant. Each line of its input is a JSON list of test files;
                                              it answers with a line: pytest's exit status, or minus the signal that ended it

Nothing of the tree is imported before the fork but what prepares mlx, so that a file of the program may change between two lines.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

LIBRARIES = (
    "hypothesis", "mlx.nn", "mlx.optimizers", "pydantic", "pytest", "pytest_timeout", "pytestqt.plugin", "rich.console",
    "tokenizers", "typer", "xdist.plugin", "yaml",
)  # fmt: skip
OUTPUT = "pytest-output.txt"
"""In TMPDIR: what pytest has said of the files that were run last."""
CPU_LIMIT_S = 300
"""CPU seconds, not wall time: on a busy machine a sound test is slow, and is not caught."""


class WarmTests:
    """Such a process, from the side of what uses it."""

    def __init__(self, tree: Path, temporary: Path) -> None:
        """`temporary`: mlx keeps its compiled CPU kernels in TMPDIR, where later calls find them."""
        temporary.mkdir(exist_ok=True)
        self._output = temporary / OUTPUT
        environment = {"QT_QPA_PLATFORM": "offscreen", "TMPDIR": str(temporary), "PYTHONDONTWRITEBYTECODE": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__], cwd=tree, env=os.environ | environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def run(self, files: list[str]) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(files), file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())

    def failures(self) -> str:
        """The tests that failed in the last run, with their errors."""
        lines = self._output.read_text(errors="replace").splitlines()
        return "\n".join(line for line in lines if line.startswith(("E  ", "FAILED", "ERROR")))

    def close(self) -> None:
        self._process.communicate()


def in_a_fork(files: list[str]) -> int:
    """The exit status of pytest over these files, which stops at the first failure."""
    import pytest

    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        output = os.open(Path(tempfile.gettempdir()) / OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT_S, CPU_LIMIT_S + 5))
        status = 1
        try:
            status = int(pytest.main(["-x", "-p", "no:cacheprovider", *files]))
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> None:
    from backend.engine import cpu_setup
    from backend.models import transformers_scan

    cpu_setup.load_openblas()  # before mlx is imported, as in tests/conftest.py
    transformers_scan.prepare()
    for library in LIBRARIES:
        importlib.import_module(library)
    for line in sys.stdin:
        print(in_a_fork(json.loads(line)), flush=True)


if __name__ == "__main__":
    main()
