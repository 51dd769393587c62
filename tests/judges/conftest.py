"""Judges decode without mlx's compiler, as in tests/sampling."""

from __future__ import annotations

from tests.sampling.conftest import compiled, compiler

__all__ = ["compiled", "compiler"]
