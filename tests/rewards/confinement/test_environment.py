"""The environment of confined code: what it needs, no tokens, and folders of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from backend.rewards.confinement.confine import confined_environment

SECRETS = (
    *("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "GITHUB_TOKEN", "GH_TOKEN", "NPM_TOKEN", "MY_PASSWORD"),
    *("AWS_SECRET_ACCESS_KEY", "GRPO_STUDIO_LOCK", "GRPO_API_TOKEN", "SSH_AUTH_SOCK", "DBUS_SESSION_BUS_ADDRESS"),
    *("XDG_RUNTIME_DIR", "DISPLAY"),
)
NEEDED = (
    *("PATH", "LANG", "LC_ALL", "TZ", "PYTHONPATH", "PYTHONHASHSEED", "GRPO_STUDIO_RUNS", "HF_HOME"),
    *("OMP_NUM_THREADS",),
)


@pytest.fixture
def users(tmp_path: Path) -> dict[str, str]:
    """The environment of somebody who has everything set."""
    home = tmp_path / "user"
    (home / ".cache").mkdir(parents=True)
    names = (*SECRETS, *NEEDED, "OPENAI_API_KEY", "EDITOR", "TOKENIZERS_PARALLELISM")
    return {name: f"value of {name}" for name in names} | {"HOME": str(home)}


@pytest.mark.parametrize("network", [False, True])
def test_no_token_is_passed_on(tmp_path: Path, users: dict[str, str], network: bool) -> None:
    environment = confined_environment(tmp_path / "own", network, users)
    assert not set(SECRETS) & set(environment)
    assert set(NEEDED) | {"TOKENIZERS_PARALLELISM"} <= set(environment)


def test_a_judge_keeps_the_key_of_its_api_and_others_have_none(tmp_path: Path, users: dict[str, str]) -> None:
    with_network = confined_environment(tmp_path / "a", True, users)
    without = confined_environment(tmp_path / "b", False, users)
    assert with_network["OPENAI_API_KEY"] == users["OPENAI_API_KEY"] and "EDITOR" in with_network
    assert "OPENAI_API_KEY" not in without and "EDITOR" not in without
    assert without["HF_HUB_OFFLINE"] == "1" and "HF_HUB_OFFLINE" not in with_network


def test_home_and_temporary_files_lie_in_its_folder_and_caches_are_found(tmp_path: Path, users: dict[str, str]) -> None:
    own = tmp_path / "own"
    (tmp_path / "user" / ".cache" / "model").write_text("weights")
    for _ in range(2):  # a second child of the same folder
        environment = confined_environment(own, False, users)
    assert Path(environment["HOME"]) == own / "home" and Path(environment["TMPDIR"]) == own / "tmp"
    assert Path(environment["HOME"], ".cache", "model").read_text() == "weights"
    assert Path(environment["TMPDIR"]).is_dir()
