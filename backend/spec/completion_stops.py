"""Why a completion ended."""

from __future__ import annotations

from typing import Literal

Stop = Literal["eos", "length", "string"]
"""An end-of-sequence token, the length limit, or one of the `stop` strings."""
