"""The token: where it is found, the keychain, and that it is nowhere else."""

from __future__ import annotations

from pathlib import Path

import keyring
import pytest
from huggingface_hub import constants
from keyring.backend import KeyringBackend
from keyring.backends import chainer, fail

from backend.export import hub_upload
from backend.export.hub_upload import HubToken, find_token, log_in, log_out
from backend.utils.errors import UserError
from tests.support.hub_server import TOKEN
from tests.support.keychain import Keychain

pytestmark = pytest.mark.usefixtures("hub")


def test_where_a_token_is_found_first(keychain: Keychain, monkeypatch: pytest.MonkeyPatch):
    stored = Path(constants.HF_TOKEN_PATH)
    stored.parent.mkdir(parents=True, exist_ok=True)
    stored.write_text("hf_of_the_library")
    assert find_token() == HubToken("hf_of_the_library", "hf auth login")
    keychain.entries[hub_upload.SERVICE, hub_upload.ENTRY] = "hf_ours"
    assert find_token() == HubToken("hf_ours", "keychain")
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_environment")
    assert find_token() == HubToken("hf_of_the_environment", "HF_TOKEN")


class PlainFile(Keychain):
    """As keyrings.alt has it: a file that everybody can read."""

    priority = 0.5  # type: ignore[assignment]


@pytest.mark.parametrize(
    "backend", [fail.Keyring(), PlainFile(), chainer.ChainerBackend()], ids=["none", "file", "chain"]
)
def test_without_a_keychain_nothing_is_kept(backend: KeyringBackend, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chainer.ChainerBackend, "backends", [PlainFile()])
    monkeypatch.setattr(keyring, "get_keyring", lambda: backend)
    with pytest.raises(UserError, match=r"no keychain that could keep the token .*hf auth login"):
        log_in(TOKEN)
    assert find_token() is None and not log_out()
