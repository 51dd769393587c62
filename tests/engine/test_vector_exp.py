"""The kernels of exp on x86: vectorised alone and in front of any other operation. Its numbers:
tests/sampling/test_sampler.py."""

from __future__ import annotations

import io
import re
import shutil

import mlx.core as mx
import pytest

from backend.engine import cpu
from backend.engine.graph import compiled_by_shape

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="without a compiler mlx fuses nothing")


def operations(*results: mx.array) -> list[str]:
    """The names of the operations behind arrays that are not evaluated yet; fused ones begin with Compiled."""
    graph = io.StringIO()
    mx.export_to_dot(graph, *results)
    return re.findall(r'label ="([^"]*)", shape=rectangle', graph.getvalue())


def sigmoid_chain(x: mx.array) -> mx.array:
    """Many operations after exp: fused with it, they would push its constants out of the kernel."""
    y = cpu.exp_nonpositive(x)
    for scale in (0.5, 0.6, 0.7, 0.8):
        y = y / (1 + y * scale)
    return y


@pytest.mark.parametrize(
    "results",
    [
        lambda x: [cpu._exp(x)],
        lambda x: cpu._forward(x, x),
        lambda x: [compiled_by_shape(sigmoid_chain)(x)],
    ],
    ids=["exp", "swiglu", "in front of others"],
)
def test_no_operand_of_its_kernels_is_repeated_along_the_array(results, monkeypatch: pytest.MonkeyPatch) -> None:
    """A constant outside of a kernel is a Broadcast of its own. Two were, unseen for months, and exp took 2.5 times as
    long."""
    monkeypatch.setattr(cpu, "exp_is_scalar", lambda: True)
    x = -mx.ones((8, 512))
    mx.eval(x)
    names = operations(*results(x))
    assert "Broadcast" not in names
    kernels = [name for name in names[: names.index("Contiguous")] if name.startswith("Compiled")]
    assert len(kernels) == 3
