"""Names that say which part of a `Config` a function reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from backend.config.config import Config

    AdapterSettings = ColumnSettings = DatasetSettings = ModelSettings = PromptSettings = RewardSettings = Config
else:
    AdapterSettings = ColumnSettings = DatasetSettings = ModelSettings = PromptSettings = RewardSettings = Any
