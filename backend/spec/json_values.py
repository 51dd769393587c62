"""Values as JSON can hold them. Apart from the diary, whose parser takes longer to import than the small helper processes need for all else."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast


def json_safe(value: Any) -> Any:
    """`value` in JSON's types: NaN and infinities become None, tuples lists, paths text."""
    if value is None or isinstance(
        value, (str, int)
    ):  # first: a step's rows hold tens of thousands, and Mapping is an abstract class
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): json_safe(item) for key, item in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(item) for item in cast("list[Any]", value)]
    return str(value) if isinstance(value, Path) else value
