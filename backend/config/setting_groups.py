"""Names by which a signature says which part of a `Config` it reads. Any object with these settings will do."""

from __future__ import annotations

from typing import Any

AdapterSettings = Any
"""Which weights learn, and the shape of the adapters."""
ColumnSettings = Any
"""Which columns hold prompt, answer, type and system text, and whether rewards need an answer."""
DatasetSettings = Any
"""Which rows there are."""
ModelSettings = Any
"""Which model is loaded and how, with adapters and reference."""
PromptSettings = Any
"""How a row becomes a prompt, and how long it may be."""
RewardSettings = Any
"""Reward functions of a run and its stages, and where they run."""
