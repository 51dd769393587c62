"""GRPO Studio's trainer: headless, and the only one of the two programs that loads mlx.

As a library it is `from backend import Config, train` (docs/library.md). Importing it imports nothing else: each name is loaded when it is
first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from backend.run.library.callbacks import Callback, StopTraining
    from backend.run.library.trained_run import RunFailed, TrainedRun
    from backend.run.library.training import resume, train
    from backend.spec.config import Config
    from backend.spec.faults import Mistake

__version__ = "0.1.0"

__all__ = ["Callback", "Config", "Mistake", "RunFailed", "StopTraining", "TrainedRun", "resume", "train"]

_PLACES = {
    "Callback": "backend.run.library.callbacks",
    "Config": "backend.spec.config",
    "Mistake": "backend.spec.faults",
    "RunFailed": "backend.run.library.trained_run",
    "StopTraining": "backend.run.library.callbacks",
    "TrainedRun": "backend.run.library.trained_run",
    "resume": "backend.run.library.training",
    "train": "backend.run.library.training",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
