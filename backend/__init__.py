"""GRPO Studio's trainer: headless, and the only one of the two programs that loads mlx. As a library it is `from
backend import Config, train` (docs/library.md); each name is loaded when it is first used."""

import resource
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from backend.config.config import Config
    from backend.trainer.library.training import Callback, RunFailed, StopTraining, TrainedRun, resume, train
    from backend.utils.errors import UserError

__version__ = "0.1.0"

_setrlimit = resource.setrlimit
if 0 <= (_most := resource.getrlimit(resource.RLIMIT_NOFILE)[1]) < 4096:
    # mlx-lm's import sets the limit of open files to 4096, which raises where no more than these are allowed.
    resource.setrlimit = lambda kind, limits: _setrlimit(
        kind, (min(limits[0], _most), min(limits[1], _most)) if kind == resource.RLIMIT_NOFILE else limits
    )

__all__ = ["Callback", "Config", "RunFailed", "StopTraining", "TrainedRun", "UserError", "resume", "train"]

_PLACES = {"Config": "backend.config.config", "UserError": "backend.utils.errors"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES.get(name, "backend.trainer.library.training")), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
