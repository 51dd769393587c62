"""Generation without mlx's compiler, except where a test asks for it.

A compiled function costs g++ runs on a CPU, one for each fused kernel and each layout of its inputs: most of these
tests' time. A decoding step computes the same without it. Tests of the compiled step itself request the fixture
`compiled`.
"""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest


@pytest.fixture
def compiled() -> None:
    """This test runs with mlx's compiler."""


@pytest.fixture(autouse=True)
def compiler(request: pytest.FixtureRequest) -> Iterator[None]:
    if "compiled" in request.fixturenames:
        yield
        return
    mx.disable_compile()
    try:
        yield
    finally:
        mx.enable_compile()
