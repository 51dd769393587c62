"""The setting Relax GPU timeout, as the environment variable that Apple's driver reads."""

from __future__ import annotations

import os
import sys

from backend.config.config import Config

VARIABLE = "AGX_RELAX_CDM_CTXSTORE_TIMEOUT"
"""Makes macOS wait longer before it stops the GPU's work in favour of the display (mlx#3267). Apple documents it nowhere."""


def relax_gpu_timeout(config: Config) -> None:
    """Set the variable on a Mac if the settings ask for it. To be called before mlx is imported: the driver reads it as Metal starts."""
    if sys.platform == "darwin" and config.relax_gpu_timeout:
        os.environ.setdefault(VARIABLE, "1")
