"""A Hub on this machine that takes uploads, and a folder to upload."""

import random
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import keyring
import pytest
from huggingface_hub import constants
from huggingface_hub.utils import _http

from tests.support.hub_server import HubStandIn
from tests.support.keychain import Keychain

CARD = "---\nlibrary_name: mlx\n---\n# A model\n"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStandIn]:
    """In place of Hugging Face; waits between retries take no time."""
    with HubStandIn() as stand_in:
        monkeypatch.setattr(constants, "ENDPOINT", stand_in.url)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "hf" / "token"))
        monkeypatch.setattr(constants, "HF_STORED_TOKENS_PATH", str(tmp_path / "hf" / "stored_tokens"))
        monkeypatch.setattr(_http, "time", SimpleNamespace(sleep=lambda _: None, time=time.time))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield stand_in
    _http.close_session()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model in two shards with its small files."""
    folder = tmp_path / "model"
    folder.mkdir()
    numbers = random.Random(3)
    for number in (1, 2):
        (folder / f"model-0000{number}-of-00002.safetensors").write_bytes(numbers.randbytes(150_000 + number))
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    (folder / "README.md").write_text(CARD)
    (folder / "curves.png").write_bytes(numbers.randbytes(9_000))
    (folder / ".DS_Store").write_bytes(b"not a file of ours")
    return folder


@pytest.fixture
def keychain(monkeypatch: pytest.MonkeyPatch) -> Keychain:
    """An empty one, in place of the system's."""
    chain = Keychain()
    monkeypatch.setattr(keyring, "get_keyring", lambda: chain)
    return chain
