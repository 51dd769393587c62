"""A process with torch, transformers and peft, for proofs against them."""

import json
import os
import subprocess
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

REFERENCE = Path(__file__).with_name("torch_reference.py")


class Torch:
    """A process with torch, transformers and peft, started once: importing them takes seconds."""

    def __init__(self, python: str) -> None:
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen([python, str(REFERENCE)], text=True, **pipes)

    def make(self, family: str, folder: Path, shard: str = "5GB") -> None:
        self._call("make", family, str(folder), shard)

    def logits(self, folder: Path, *adapter: Path) -> mx.array:
        return mx.array(self._call("logits", str(folder), *map(str, adapter)))

    def adapt(self, folder: Path, to: Path, **settings: Any) -> mx.array:
        """Write an adapter of peft with random arrays onto the model in `folder`; → the logits of both."""
        return mx.array(self._call("adapt", str(folder), str(to), json.dumps(settings)))

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def _call(self, *call: str) -> Any:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(call) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


def torch_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Torch]:
    """For `pytest.fixture(scope="module")`."""
    python = os.environ.get("TORCH_PYTHON") or _with_torch(tmp_path_factory.mktemp("torch"))
    process = Torch(python)
    yield process
    process.end()


def _with_torch(folder: Path) -> str:
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    packages = ["torch", "transformers>=5", "peft"]
    installed = subprocess.run([python, "-m", "pip", "install", "-q", *packages], capture_output=True, text=True)
    if installed.returncode:
        pytest.skip(f"torch cannot be installed here: {installed.stderr.strip().splitlines()[-1]}")
    return python
