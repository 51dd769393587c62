"""mlx-lm's text model against mlx-vlm's, whose picture features it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import load

from tests.support.vision_models import tiny_vision_model


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "qwen3_5"])
def test_mlx_lm_and_mlx_vlm_agree_on_text(tmp_path: Path, family: str) -> None:
    from mlx_vlm.utils import load_model  # 2 s, which collecting need not take

    folder = tiny_vision_model(tmp_path / family, family)
    ours, theirs = load(str(folder))[0], load_model(folder)
    tokens: Any = mx.array([[*range(2, 40), 5, 250, 33]])
    assert mx.allclose(ours(tokens), theirs.language_model(tokens).logits, atol=2e-5)
