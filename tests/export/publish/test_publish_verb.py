"""`export --to hub` and `hub login`: preview, upload, what is kept between tries, where the token is not."""

import json
import logging
import random
import shutil
import time
from pathlib import Path
from typing import Any

import keyring
import numpy as np
import pytest
from huggingface_hub import constants
from keyring.backend import KeyringBackend
from keyring.backends import chainer, fail
from safetensors.numpy import save
from typer.testing import Result

from backend.export import export_run, hub_upload, verify
from backend.export.exports import ExportFormat
from backend.export.hub_upload import HubToken, files_of, find_token, log_in, log_out, upload
from backend.models import hub_client
from backend.runs.run_folder import RunFolder
from backend.runs.run_record import Parent, change_notes, write_parent
from backend.utils.errors import UserError
from backend.utils.keychain import SERVICE
from tests.support import made_up_runs
from tests.support.hub_server import NEW_FILES, TOKEN, Fault, HubStandIn, Repo
from tests.support.keychain import Keychain
from tests.support.upload_process import start_upload
from tests.support.verbs import call

REPO = "someone/sums"
FILES = {"README.md", "adapter_config.json", "adapters.safetensors", "curves.png", "training.yaml"}


def sentence_of(result: Result) -> str:
    assert result.exit_code == 2, (result.output, result.exception)
    return result.stderr.splitlines()[-1]


def publish(run: RunFolder, *more: object) -> Result:
    return call("export", run.path, "--to", "hub", "--repo", REPO, "--format", "adapter", *more)


def answer_of(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, (result.output, result.exception)
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture
def run(tmp_path: Path, hub: HubStandIn, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run whose export writes small files in no time; how a model is exported is tested elsewhere."""
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text("{}")
    run = made_up_runs.make_run(tmp_path / "runs" / "sums", steps=12, model=str(base), train_type="lora")
    run.adapters.mkdir()
    (run.adapters / "adapters.safetensors").write_bytes(save({"a": np.zeros(9_000, np.uint8)}))
    about = {"model": str(base), "num_layers": 1, "lora_parameters": {}}
    (run.adapters / "adapter_config.json").write_text(json.dumps(about))

    def write(trained: Any, format_: ExportFormat, original: Any, to: Path, progress: Any) -> tuple:
        to.mkdir()
        names = ("adapters.safetensors", "adapter_config.json") if format_.kind == "adapter" else ("config.json",)
        for name in names:
            shutil.copyfile(run.adapters / name if name != "config.json" else base / name, to / name)
        return (), None

    monkeypatch.setattr(export_run, "write_in_format", write)
    for name in ("load_tokenizer", "_tolerance"):
        monkeypatch.setattr(export_run, name, lambda *_: None)
    monkeypatch.setattr(verify, "make_reference", lambda *_: None)
    for name in ("verify_folder", "compare"):
        monkeypatch.setattr(verify, name, lambda *_: verify.Verification(0.0, 0.0, 1.0, None))
    monkeypatch.setattr(export_run.lm_studio_rules, "warnings", lambda _: [])
    return run


@pytest.fixture
def logged_in(keychain: Keychain) -> None:
    keychain.entries[SERVICE, hub_upload.ENTRY] = TOKEN


@pytest.mark.usefixtures("logged_in")
def test_a_preview_sends_nothing_and_shows_all(run: RunFolder, hub: HubStandIn):
    shown = answer_of(publish(run, "--preview", "--json"))["preview"]
    assert {file["name"] for file in shown["files"]} == FILES and shown["private"]
    assert shown["bytes"] == sum(path.stat().st_size for path in Path(shown["folder"]).iterdir())
    assert shown["card"].startswith("---\n") and "\nlibrary_name: mlx\n" in shown["card"]
    assert shown["account"]["name"] == "someone"
    words = publish(run, "--preview", "--public").stdout
    assert "adapters.safetensors" in words and f"would go to {REPO}, public. Nothing has been sent." in words
    # The library itself asks for a list of names, by which it words its User-Agent.
    assert set(hub.asked) <= {"GET /api/whoami-v2", "GET /api/agent-harnesses"} and not hub.received


def test_without_a_login_a_preview_is_shown_and_an_upload_refused(run: RunFolder, keychain: Keychain):
    shown = answer_of(publish(run, "--preview", "--json"))["preview"]
    assert shown["account"] is None and shown["account_problem"] == "You are not logged in to Hugging Face."
    assert "log in with a token with write access" in sentence_of(publish(run))
    assert "your-account/x, private" in call("export", run.path, "--to", "hub", "--preview", "--repo", "x").output
    assert "cannot be the name" in sentence_of(publish(run, "--preview", "--repo", "a/b/c"))


@pytest.mark.usefixtures("logged_in")
def test_what_was_previewed_is_sent_with_the_card_as_it_was_edited(run: RunFolder, hub: HubStandIn):
    folder = Path(answer_of(publish(run, "--preview", "--json"))["preview"]["folder"])
    card = folder / "README.md"
    card.write_text(card.read_text() + "\nBy hand.\n")
    size = sum(path.stat().st_size for path in folder.iterdir())
    result = publish(run, "--json")
    answer = answer_of(result)
    assert (answer["place"], answer["bytes"]) == (f"{hub.url}/{REPO}", size)
    assert answer["sentences"][0].startswith(f"{len(FILES)} files are there as one commit")
    assert hub.repos["models"][REPO].files["README.md"].endswith(b"By hand.\n") and len(hub.commits[REPO]) == 1
    assert set(hub.repos["models"][REPO].files) == FILES | {".gitattributes"}
    assert not folder.exists() and not list(run.uploads.iterdir())
    heard = [json.loads(line) for line in result.stdout.splitlines()[:-1]]
    assert heard[-1]["progress"].startswith("Checking what") and any(row.get("bytes") for row in heard)


@pytest.mark.usefixtures("logged_in")
@pytest.mark.parametrize("warm", [True, False])
def test_what_is_private_or_of_this_machine_alone_is_never_sent(run: RunFolder, hub: HubStandIn, warm: bool):
    """Notes, parents, requests and locks stay here; a change of settings is told, its files are not sent."""
    change_notes(RunFolder(run.path), title="Project Nightjar", note="For the client Quillfeather.", tags=("nightjar",))
    write_parent(run, Parent("nightjar-first-try", run.path.parent / "nightjar-first-try", 7, warm, {}))
    change = {"step": 5, "settings": {"beta": [0.05, 0.0]}}
    run.changes.write_text(json.dumps({"v": 1, "changes": [change]}))
    run.change_request.write_text('{"settings": {"beta": 0.77}}')
    for file in (run.launch_lock, run.control, run.gpu_errors):
        file.write_text("nightjar")
    with run.log.open("a") as log:
        log.write("nightjar\n")
    answer_of(publish(run, "--json"))
    sent = hub.repos["models"][REPO].files
    assert set(sent) == FILES | {".gitattributes"}
    text = b"\n".join(sent[name] for name in ("README.md", "training.yaml", "adapter_config.json")).lower()
    for private in (b"nightjar", b"quillfeather", b"0.77"):
        assert private not in text
    assert b"beta: 0.0\n" in sent["training.yaml"]


@pytest.mark.usefixtures("logged_in")
def test_a_card_with_a_token_is_not_sent_and_an_upload_that_failed_makes_no_model_again(
    run: RunFolder, hub: HubStandIn, monkeypatch: pytest.MonkeyPatch
):
    card = Path(answer_of(publish(run, "--preview", "--json"))["preview"]["folder"]) / "README.md"
    text = card.read_text()
    card.write_text(f"my token is {TOKEN}")
    assert "README.md contains an access token, so nothing is sent" in sentence_of(publish(run))
    assert not hub.received
    card.write_text(text)
    monkeypatch.setattr(export_run, "write_in_format", lambda *_: pytest.fail("the model was made again"))
    hub.faults = [Fault("commit/main", 503)]
    assert "error of its own (503)" in sentence_of(publish(run))
    sent = dict(hub.stored)
    done = publish(run)
    assert done.exit_code == 0
    told = [line for line in done.stderr.splitlines() if line.startswith("Uploading: ")]
    assert 1 < len(told) <= 11, "a line for each tenth of the bytes"
    assert len(set(told[-1].removeprefix("Uploading: ").rstrip(".").split(" of "))) == 1, "all of them"
    assert dict(hub.stored) == sent and set(sent.values()) == {1} and len(hub.commits[REPO]) == 1


def test_the_token_is_in_no_file_log_or_output(
    run: RunFolder, hub: HubStandIn, keychain: Keychain, caplog: pytest.LogCaptureFixture, tmp_path: Path
):
    caplog.set_level(logging.DEBUG)
    # At DEBUG it repeats what a server says, and this server repeats the token.
    caplog.set_level(logging.INFO, "httpcore2")
    outputs = [
        call("hub", "login", "--from-stdin", keys=f"{TOKEN}\n"),
        call("hub", "whoami"),
        call("hub", "whoami", "--json"),
        publish(run, "--preview", "--json"),
    ]
    hub.faults = [Fault("preupload", 403, message=f"token {TOKEN} may not")]
    outputs += [publish(run), publish(run), call("hub", "login", "--from-stdin", keys="hf_wrong\n")]
    assert [result.exit_code for result in outputs] == [0, 0, 0, 0, 2, 0, 2]
    assert outputs[0].stdout == "Logged in as someone; the token is in the keychain.\n"
    assert outputs[1].stdout == "someone, also of a-lab (token from keychain)\n"
    assert list(keychain.entries.values()) == [TOKEN]
    logs = "".join(str(record.__dict__) for record in caplog.records)
    texts = [result.output + result.stderr + str(result.exception) for result in outputs]
    files = [path for top in (run.path.parent.parent, tmp_path) for path in top.rglob("*") if path.is_file()]
    assert len(files) > 10 and "preupload" in logs
    for secret in (TOKEN, "hf_wrong"):
        assert not any(secret in text for text in [*texts, logs])
        assert not [path for path in files if secret.encode() in path.read_bytes()]
    assert call("hub", "logout").stdout == "Logged out.\n" and not keychain.entries


@pytest.mark.usefixtures("hub")
def test_where_a_token_is_found_first(keychain: Keychain, monkeypatch: pytest.MonkeyPatch):
    stored = Path(constants.HF_TOKEN_PATH)
    stored.parent.mkdir(parents=True, exist_ok=True)
    stored.write_text("hf_of_the_library")
    assert find_token() == HubToken("hf_of_the_library", "hf auth login")
    keychain.entries[SERVICE, hub_upload.ENTRY] = "hf_ours"
    assert find_token() == HubToken("hf_ours", "keychain")
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_environment")
    assert find_token() == HubToken("hf_of_the_environment", "HF_TOKEN")


class PlainFile(Keychain):
    """As keyrings.alt has it: a file that everybody can read."""

    priority = 0.5  # type: ignore[assignment]


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    "backend", [fail.Keyring(), PlainFile(), chainer.ChainerBackend()], ids=["none", "file", "chain"]
)
def test_without_a_keychain_nothing_is_kept(backend: KeyringBackend, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chainer.ChainerBackend, "backends", [PlainFile()])
    monkeypatch.setattr(keyring, "get_keyring", lambda: backend)
    with pytest.raises(UserError, match=r"no keychain that could keep the token .*hf auth login"):
        log_in(TOKEN)
    assert find_token() is None and not log_out()


SHARDS = {f"model-0000{number}-of-00002.safetensors" for number in (1, 2)}
UPLOAD_FILES = SHARDS | {"README.md", "config.json", "curves.png"}


def quiet(*_: Any, **__: Any) -> None: ...


def refusal(folder: Path, **how: Any) -> str:
    repo, token = how.pop("repo", REPO), how.pop("token", TOKEN)
    with pytest.raises(UserError) as refused:
        upload(repo, folder, token, quiet, **how)
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

    done = upload(REPO, folder, TOKEN, listen)
    assert {path.name for path in files_of(folder)} == UPLOAD_FILES
    check_one_sound_commit(hub, folder)
    size = sum(path.stat().st_size for path in files_of(folder))
    assert heard == sorted(heard) and heard[-1] == (size, size) and len(set(heard)) >= len(UPLOAD_FILES)
    assert done.url == f"{hub.url}/{REPO}" and done.commit == hub.repos["models"][REPO].head
    assert hub.repos["models"][REPO].private


def test_killed_at_random_moments_and_started_again_it_makes_one_sound_commit(hub: HubStandIn, folder: Path):
    """Six kills by SIGKILL, of which one falls after the commit has arrived."""
    hub.part_size = 60_000
    hub.on_moment = lambda number: None
    upload("someone/rehearsal", folder, TOKEN, quiet)
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
        upload(REPO, folder, TOKEN, quiet)
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
    upload(REPO, folder, TOKEN, quiet)
    check_one_sound_commit(hub, folder)


def test_other_content_is_replaced_only_when_told_to(hub: HubStandIn, folder: Path):
    hub.repos["models"][REPO] = Repo(
        {**NEW_FILES, "model.safetensors": b"old", "LICENSE": b"mine", "config.json": b"{}"}, private=True
    )
    assert "has other content already (model.safetensors, LICENSE and 1 more)" in refusal(folder)
    assert not hub.objects, "bytes were sent before the refusal"
    upload(REPO, folder, TOKEN, quiet, overwrite=True)
    hub.check_sound(REPO)
    assert set(hub.repos["models"][REPO].files) == UPLOAD_FILES | {".gitattributes", "LICENSE"}
    assert hub.commits[REPO][0].deleted == ["model.safetensors"] and len(hub.commits[REPO]) == 1


def test_a_private_model_never_goes_into_a_public_repository_or_buries_a_commit(hub: HubStandIn, folder: Path):
    repo = hub.repos["models"][REPO] = Repo(dict(NEW_FILES), private=False)
    assert "is there and public, and this upload should be private" in refusal(folder)
    assert not hub.objects
    head = repo.head
    hub.on_moment = lambda _: setattr(repo, "head", "f" * 40 if hub.objects else head)
    assert "Someone else has changed someone/sums meanwhile" in refusal(folder, private=False)
    assert not hub.commits
    hub.on_moment = lambda _: None
    upload(REPO, folder, TOKEN, quiet, private=False)
    repo.private = True
    assert "is there and private" in refusal(folder, private=False)
