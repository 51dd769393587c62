"""Uploads to a Hub on this machine: one sound commit however often one is interrupted, and clear errors."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest

from backend.export.hub_upload import Upload, files_of, upload
from backend.models import hub_client
from backend.utils.errors import UserError
from tests.support.hub_server import NEW_FILES, TOKEN, Fault, HubStandIn, Repo
from tests.support.upload_process import start_upload

REPO = "someone/sums"
SHARDS = {f"model-0000{number}-of-00002.safetensors" for number in (1, 2)}
FILES = SHARDS | {"README.md", "config.json", "curves.png"}


def quiet(*_: Any, **__: Any) -> None: ...


def refusal(folder: Path, **how: Any) -> str:
    repo, token = how.pop("repo", REPO), how.pop("token", TOKEN)
    with pytest.raises(UserError) as refused:
        upload(Upload(repo, folder, **how), token, quiet)
    assert TOKEN not in str(refused.value)
    return refused.value.faults[0].sentence


def check_one_sound_commit(hub: HubStandIn, folder: Path) -> None:
    hub.check_sound(REPO)
    assert {name: data for name, data in hub.repos["models"][REPO].files.items() if name not in NEW_FILES} == {
        path.name: path.read_bytes() for path in files_of(folder)
    }
    assert len(hub.commits[REPO]) == 1, "more than one commit, or none"
    assert set(hub.stored.values()) == {1}, "a file was sent that the server had"
    assert not hub.token_leaks, "the storage, another company's, was given the token"


@pytest.mark.parametrize("part_size", [1 << 30, 40_000], ids=["whole", "in parts"])
def test_a_folder_becomes_one_commit_and_progress_counts_its_bytes(hub: HubStandIn, folder: Path, part_size: int):
    hub.part_size = part_size
    heard: list[tuple[int, int]] = []

    def listen(sentence: str, done: int | None = None, total: int | None = None) -> None:
        if done is not None and total is not None:
            heard.append((done, total))

    done = upload(Upload(REPO, folder), TOKEN, listen)
    assert {path.name for path in files_of(folder)} == FILES
    check_one_sound_commit(hub, folder)
    size = sum(path.stat().st_size for path in files_of(folder))
    assert heard == sorted(heard) and heard[-1] == (size, size) and len(set(heard)) >= len(FILES)
    assert done.url == f"{hub.url}/{REPO}" and done.commit == hub.repos["models"][REPO].head
    assert hub.repos["models"][REPO].private


def test_killed_at_random_moments_and_started_again_it_makes_one_sound_commit(hub: HubStandIn, folder: Path):
    """Six kills by SIGKILL, of which one falls after the commit has arrived."""
    hub.part_size = 60_000
    hub.on_moment = lambda number: None
    upload(Upload("someone/rehearsal", folder), TOKEN, quiet)
    moments, numbers = hub.moments, random.Random(11)
    for kill_at in [*sorted(numbers.sample(range(1, moments), 5)), moments - 2]:
        for content in (hub.repos["models"], hub.commits, hub.objects, hub.stored):
            content.clear()
        hub.moments = 0
        process = start_upload(hub.url, folder, REPO, TOKEN)
        hub.on_moment = lambda number, at=kill_at, victim=process: victim.kill() if number == at else None
        process.join()
        hub.on_moment = lambda number: None
        assert process.exitcode == -9, f"it was not killed at moment {kill_at} of {moments}"
        before = -1
        while before != hub.moments:  # until the server has read what the killed client had sent
            before = hub.moments
            time.sleep(0.05)
        upload(Upload(REPO, folder), TOKEN, quiet)
        check_one_sound_commit(hub, folder)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Fault("repos/create", 401), "does not accept the token; log in again"),
        (Fault("repos/create", 403, message="no rights"), "may not write to someone/sums (no rights)"),
        (Fault("commit/main", 409), "Someone else has changed someone/sums meanwhile"),
        (Fault("PUT /lfs", 413), "too large"),
        (Fault("preupload", 429, times=99), "asked too often; wait some minutes: what has arrived there is kept"),
        (Fault("batch", 503, times=99), "error of its own (503)"),
        (Fault("commit/main", 422, message="odd"), "answers with an error (422): odd"),
        (Fault("commit/main", 0), "does not answer; what has arrived there is kept"),
    ],
    ids=lambda value: f"{value.where} {value.status}" if isinstance(value, Fault) else "",
)
def test_errors_and_retries(hub: HubStandIn, folder: Path, fault: Fault, words: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hub_client, "SILENCE_S", 0.3)
    hub.silence_s = 0.6
    hub.faults = [fault]
    assert words in refusal(folder)
    hub.faults = []
    upload(Upload(REPO, folder), TOKEN, quiet)
    check_one_sound_commit(hub, folder)


def test_other_content_is_replaced_only_when_told_to(hub: HubStandIn, folder: Path):
    hub.repos["models"][REPO] = Repo(
        {**NEW_FILES, "model.safetensors": b"old", "LICENSE": b"mine", "config.json": b"{}"}, private=True
    )
    assert "has other content already (model.safetensors, LICENSE and 1 more)" in refusal(folder)
    assert not hub.objects, "bytes were sent before the refusal"
    upload(Upload(REPO, folder, overwrite=True), TOKEN, quiet)
    hub.check_sound(REPO)
    assert set(hub.repos["models"][REPO].files) == FILES | {".gitattributes", "LICENSE"}
    assert hub.commits[REPO][0].deleted == ["model.safetensors"] and len(hub.commits[REPO]) == 1


def test_a_commit_of_somebody_else_meanwhile_is_not_buried(hub: HubStandIn, folder: Path):
    def commit_after_the_first_file(_: int) -> None:
        if hub.objects:
            hub.repos["models"][REPO].head = "f" * 40

    hub.on_moment = commit_after_the_first_file
    assert "Someone else has changed someone/sums meanwhile" in refusal(folder)
    assert not hub.commits


def test_a_private_model_never_goes_into_a_public_repository(hub: HubStandIn, folder: Path):
    hub.repos["models"][REPO] = Repo(dict(NEW_FILES), private=False)
    assert "is there and public, and this upload should be private" in refusal(folder)
    assert not hub.objects
    upload(Upload(REPO, folder, private=False), TOKEN, quiet)
    hub.repos["models"][REPO].private = True
    assert "is there and private" in refusal(folder, private=False)
