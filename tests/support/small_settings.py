"""Settings that tests of learning share: a small adapter, and an optimizer whose step is the gradient."""

from typing import Any

SMALL_LORA: dict[str, Any] = {"data": "none", "num_layers": -1, "rank": 4, "scale": 2.0}
PLAIN_SGD: dict[str, Any] = {"optimizer": "sgd", "weight_decay": 0.0, "max_grad_norm": 0.0}
"""The change of a weight is the rate times its gradient; AdamW, which divides by its size, would show rounding."""
UNFILTERED: dict[str, Any] = {"top_p": 1.0, "top_k": 0}
