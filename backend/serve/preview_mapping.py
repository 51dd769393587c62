"""Map functions for the dataset's preview: called in a confined process, and only where the user has allowed their file to run."""

from __future__ import annotations

import atexit
import threading
from typing import Any

from backend.data.row_steps import MapRows
from backend.rewards.scorer import begin_scorer
from backend.spec.config import Config
from backend.spec.faults import Fault
from backend.spec.rewards.allowed_code import AllowedCode
from backend.spec.rewards.catalog import locate_reward_file
from backend.spec.user_input.text import shown

_lock = threading.Lock()
_open: tuple[Any, Any] | None = None
"""What the process was started for, and its scorer."""


def map_rows_of(config: Config) -> tuple[MapRows | None, list[Fault]]:
    """What calls the map function of these settings, None where there is none or its file may not run; and why it may not."""
    if not config.map_function:
        return None, []
    if not config.reward_functions_file:
        return None, [
            Fault(
                "map_function",
                "There is no reward functions file that has the map function, so rows are shown as they are.",
            )
        ]
    own = config.model_copy(
        update={"reward_isolation": "process", "reward_functions": ["r1_int_reward_func"], "stages": []}
    )
    missing = AllowedCode().missing(
        {"reward_functions_file": own.reward_functions_file, "reward_network": own.reward_network}
    )
    if missing:
        name = shown(missing[0].code.path.name, 40)
        return None, [
            Fault(
                "map_function",
                f"{name} has not been allowed to run yet; allow it above the rows, which are shown as they are.",
            )
        ]
    return _scorer(own).map_rows, []


def _scorer(config: Config) -> Any:
    """A warm process for this file as it is now."""
    global _open
    with _lock:
        path = locate_reward_file(config.reward_functions_file).resolve()
        about = path.stat() if path.exists() else None
        stamp = (str(path), about and (about.st_mtime_ns, about.st_size), config.reward_network, config.reward_timeout)
        if _open is None or _open[0] != stamp:
            close()
            _open = (stamp, begin_scorer(config))
        return _open[1]


def close() -> None:
    """End the process, if there is one."""
    global _open
    before, _open = _open, None
    if before is not None:
        before[1].close()


atexit.register(close)
