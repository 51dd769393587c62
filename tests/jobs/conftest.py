"""A Hub on this machine that runs jobs, with a token for it, and settings of a tiny run."""

from pathlib import Path

import pytest

from tests.export.publish.conftest import hub as hub
from tests.support.hub_server import TOKEN, HubStandIn
from tests.support.small_run import LOW_HALF, settings_for, write_config


@pytest.fixture
def config(hub: HubStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A YAML file of four steps; whoever trains it is logged in."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    (tmp_path / "low.py").write_text(LOW_HALF.replace('"low_half"', '"low-half"'))  # TRL's name has no hyphen
    rewards = {
        "reward_functions": ["low-half", "length_target(target=6)"],
        "reward_functions_file": str(tmp_path / "low.py"),
    }
    changes = {"iters": 4, "num_iterations": 2, "group_size": 2} | rewards
    return write_config(tmp_path / "four.yaml", settings_for(tmp_path, **changes))
