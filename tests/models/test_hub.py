"""Search, download and resume against a Hub on 127.0.0.1; every failure leaves the cache valid."""

import errno
import gzip
import json
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants, snapshot_download, try_to_load_from_cache
from huggingface_hub.utils import _http

from backend.config.config import Config
from backend.data.rows import read_splits
from backend.export.hub_upload import HubToken, upload, whose
from backend.export.model_card import base_licence
from backend.models import hub as our_hub
from backend.models import hub_client, inventory
from backend.models.loading import fetch, open_model
from backend.models.tokenizers import tokenizer_folder
from backend.runs import start_progress
from backend.runs.start_progress import StartProgress, progress_listener, with_stop_check
from backend.serve.questions import Cancelled, QuestionCall
from backend.trainer.control import StopPending
from backend.trainer.preflight import check_model
from backend.utils.errors import UserError
from backend.utils.hub_cache import local_folder
from tests.support.hub_server import COMMIT, TOKEN, HubHandler, HubStandIn, Repo

BIG = random.Random(7).randbytes(400_000)
FILES = {
    "config.json": json.dumps({"model_type": "qwen3", "quantization": {"bits": 4, "group_size": 64}}).encode(),
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b'{"chat_template": "x"}',
    "model.safetensors": BIG,
    "README.md": b"---\nbase_model: someone/tiny\n---\n",
    "picture.png": b"not wanted by mlx-lm",
}
QWEN, SAFE = {"config": {"model_type": "qwen3"}}, {"tags": ["safetensors"]}
MLX = QWEN | {"downloads": 7000, "tags": ["mlx", "safetensors", "4-bit"], "lastModified": "2026-03-01T10:00:00.000Z"}
MLX |= {"safetensors": {"parameters": {"U32": 1000, "BF16": 10}, "total": 1010}}
GGUF = {"tags": ["gguf"], "downloads": 6}
MODELS = {
    "tiny-4bit": Repo(FILES, MLX),
    "tiny": Repo(FILES, QWEN | SAFE | {"downloads": 90_000}),
    "tiny-strange": Repo(FILES, SAFE | {"downloads": 5, "config": {"model_type": "marvin"}}),
    "tiny-gguf": Repo({"tiny.gguf": BIG}, GGUF),
    "tiny-reward": Repo(FILES, SAFE | {"config": {"architectures": ["ModernBertForSequenceClassification"]}}),
    "gated": Repo(FILES, gated=True),
    "private": Repo(FILES, private=True),
}
SUMS = Repo({"train.jsonl": b'{"prompt": "1+1", "answer": "2"}\n', "README.md": b""}, {"mainSize": 33})


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStandIn]:
    """A Hub on this machine in place of Hugging Face, and an empty cache."""
    stand_in = HubStandIn({f"someone/{name}": repo for name, repo in MODELS.items()}, {"someone/sums": SUMS})
    point_at(stand_in.url, tmp_path / "cache", monkeypatch)
    monkeypatch.setattr(our_hub, "RETRY_S", 0.01)
    with stand_in:
        yield stand_in
    _http.close_session()


def point_at(url: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Point huggingface_hub, which reads its environment at import, at this URL and this cache."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", cache.parent / "datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(cache.parent / "datasets"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache.parent / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)


def sentence_of(mistake: Any) -> str:
    return mistake.value.faults[0].sentence


class Listener(QuestionCall):
    """Records progress, and cancels the question once `until` bytes have arrived."""

    def __init__(self, until: float = float("inf")) -> None:
        self.heard: list[dict[str, Any]] = []
        self.until = until
        super().__init__(self._hear)

    def _hear(self, progress: dict[str, Any]) -> None:
        self.heard.append(progress)
        if progress["done"] >= self.until:
            self.cancel()


def test_a_search_returns_size_kind_precision_and_downloads(hub: HubStandIn):
    hits = {hit["id"]: hit for hit in our_hub.search("tiny", "model")}
    assert next(iter(hits)) == "someone/tiny-4bit", "models in MLX form come first, however many download another"
    first = hits["someone/tiny-4bit"]
    assert (first["size"], first["kind"], first["precision"], first["downloads"]) == (4020, "qwen3", "4-bit", 7000)
    assert first["changed"] == 1772359200 and not first["refusal"] and not hits["someone/tiny"]["refusal"]
    assert "no model of the kind marvin" in hits["someone/tiny-strange"]["refusal"]
    assert "GGUF" in hits["someone/tiny-gguf"]["refusal"]


def test_a_search_for_reward_models_returns_classifiers(hub: HubStandIn):
    (found,) = our_hub.search("tiny", "model", is_reward=True)
    assert found["id"] == "someone/tiny-reward" and not found["refusal"], "what cannot be trained can score"


def test_a_downloaded_model_is_listed_from_the_cache(hub: HubStandIn, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(our_hub, "PROGRESS_S", 0.0)
    listener = Listener()
    folder = our_hub.download("someone/tiny", "model", listener)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        name: data for name, data in FILES.items() if name != "picture.png"
    }
    done = [progress["done"] for progress in listener.heard]
    assert done == sorted(done) and done[-1] == listener.heard[-1]["total"] == sum(map(len, FILES.values())) - 20
    assert len(set(done)) > 10, "progress, not only a beginning and an end"
    hub.down = True  # all files that mlx-lm loads are in the cache: no request is needed
    assert (
        Path(snapshot_download("someone/tiny", allow_patterns=list(our_hub.DOWNLOADED["model"]), local_files_only=True))
        == folder
    )
    (model,) = inventory.models()
    assert (model.id, model.where, model.kind, model.precision) == ("someone/tiny", "cache", "qwen3", "4-bit")
    assert not model.refusal
    assert model.size == done[-1]


@pytest.mark.parametrize("how", ["broken off", "cancelled"])
def test_a_download_resumes_from_its_bytes(hub: HubStandIn, monkeypatch: pytest.MonkeyPatch, how: str):
    monkeypatch.setattr(our_hub, "PROGRESS_S", 0.0)
    hub.down_after = 150_000 if how == "broken off" else 0
    with pytest.raises(UserError if hub.down_after else Cancelled) as mistake:
        our_hub.download("someone/tiny", "model", Listener(until=200_000))
    if hub.down_after:
        assert "broke off" in sentence_of(mistake) and "what has arrived is kept" in sentence_of(mistake)
    assert_unfinished("someone/tiny")
    hub.down, hub.down_after, again = False, 0, Listener()
    folder = our_hub.download("someone/tiny", "model", again)
    began = next(progress["done"] for progress in again.heard if progress["phase"] == "downloading")
    assert began >= 140_000, "progress continues from the kept bytes"
    assert (folder / "model.safetensors").read_bytes() == BIG
    if how == "broken off":
        assert hub.sent["model.safetensors"] == len(BIG), "what had arrived was fetched again"
    assert not list(folder.parents[1].rglob("*.incomplete"))


@pytest.mark.parametrize("kind", ["qwen3", "modernbert"])
def test_a_stop_ends_the_download_of_a_run_s_model(hub: HubStandIn, kind: str):
    """And of a reward model, which need not be one that can be trained."""
    lines: list[str] = []
    files = FILES | {"config.json": json.dumps({"model_type": kind}).encode()}
    hub.repos["models"]["someone/tiny"] = replace(MODELS["tiny"], files=files)

    def look() -> None:
        with suppress(FileNotFoundError):  # a small file that has arrived
            if any(file.stat().st_size > 50_000 for file in Path(constants.HF_HUB_CACHE).rglob("*.incomplete")):
                raise StopPending

    our_hub.config_file("someone/tiny")  # as the check before a run
    with progress_listener(lines.append):
        with with_stop_check(look), pytest.raises(StopPending):
            fetch("someone/tiny", "model")
        assert_unfinished("someone/tiny")
        assert (fetch("someone/tiny", "model") / "model.safetensors").read_bytes() == BIG
    assert lines == ["Fetching the model someone/tiny…"] * 2


def test_a_stop_ends_the_download_of_a_newer_revision(hub: HubStandIn):
    older = fetch("someone/tiny", "model")
    files = FILES | {"model.safetensors": BIG[::-1]}
    hub.repos["models"]["someone/tiny"] = replace(MODELS["tiny"], files=files, head="2" * 40)

    def look() -> None:
        if hub.sent["model.safetensors"] > len(BIG) + 50_000:
            raise StopPending

    with with_stop_check(look), pytest.raises(StopPending):
        fetch("someone/tiny", "model")
    newer = fetch("someone/tiny", "model")
    assert newer != older and (newer / "model.safetensors").read_bytes() == BIG[::-1]
    (newer / "tokenizer_config.json").unlink()  # as where another program has loaded a part
    assert fetch("someone/tiny", "model") == newer and (newer / "tokenizer_config.json").exists()
    sent = hub.sent.copy()
    assert fetch("someone/tiny", "model") == newer and hub.sent == sent
    hub.down = True
    assert fetch("someone/tiny", "model") == newer


def test_the_download_of_a_run_s_model_says_how_far_it_is(hub: HubStandIn, monkeypatch: pytest.MonkeyPatch):
    lines: list[str] = []
    monkeypatch.setattr(our_hub, "PROGRESS_S", 0.0)
    monkeypatch.setattr(start_progress, "EVERY_S", 0.0)
    with progress_listener(lines.append):
        fetch("someone/tiny", "model")
    shares = [progress.share for progress in map(StartProgress.read, lines) if progress is not None]
    assert len(shares) == len(lines) > 5 and shares[0] is None and shares[-1] == 1.0
    assert lines[-1].startswith("Fetching the model someone/tiny: 100%, 0.4 MB, ")


def test_ctrl_c_ends_a_download(hub: HubStandIn, monkeypatch: pytest.MonkeyPatch):
    signals = [signal.SIGINT]

    def interrupt(progress: dict[str, Any]) -> None:
        time.sleep(0.02)
        if progress["done"] > 50_000 and signals:
            signal.pthread_kill(threading.main_thread().ident or 0, signals.pop())

    monkeypatch.setattr(our_hub, "PROGRESS_S", 0.0)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background process ignores it
    with pytest.raises(KeyboardInterrupt):
        our_hub.download("someone/tiny", "model", QuestionCall(interrupt))
    signal.signal(signal.SIGINT, handler)
    time.sleep(0.5)  # in which the rest would arrive; an interrupted join takes its thread for one that has ended
    assert_unfinished("someone/tiny")


def test_a_run_waits_for_another_download_of_its_model(hub: HubStandIn, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(our_hub, "PROGRESS_S", 0.0)
    monkeypatch.setattr(our_hub, "LOCK_TIMEOUT_S", 0.1)
    with ThreadPoolExecutor() as pool:
        slow = QuestionCall(lambda _: time.sleep(0.04))
        first = pool.submit(our_hub.download, "someone/tiny", "model", slow)
        while hub.sent["model.safetensors"] < 20_000:
            time.sleep(0.01)
        with pytest.raises(UserError, match="downloaded already"):
            our_hub.download("someone/tiny", "model", QuestionCall())
        assert fetch("someone/tiny", "model") == first.result()
    assert hub.sent["model.safetensors"] == len(BIG)


def assert_unfinished(id_: str) -> None:
    """The cache is valid: neither we nor the library take the model for complete; the bytes that arrived are kept."""
    (model,) = inventory.models()
    assert model.id == id_ and model.partial > 0 and "unfinished" in model.refusal
    assert not isinstance(try_to_load_from_cache(id_, "model.safetensors"), str)


def test_a_damaged_download_is_deleted(hub: HubStandIn):
    hub.damage = True
    with pytest.raises(UserError) as mistake:
        our_hub.download("someone/tiny", "model", QuestionCall())
    assert "arrived damaged" in sentence_of(mistake)
    assert not list(Path(constants.HF_HUB_CACHE).rglob("model.safetensors"))
    assert not [
        path for path in Path(constants.HF_HUB_CACHE).rglob("*") if path.is_file() and path.stat().st_size > 9999
    ]
    hub.damage = False
    assert (our_hub.download("someone/tiny", "model", QuestionCall()) / "model.safetensors").read_bytes() == BIG


def test_discarding_deletes_unfinished_files_and_keeps_whole_ones(hub: HubStandIn):
    hub.down_after = 150_000
    with pytest.raises(UserError):
        our_hub.download("someone/tiny", "model", QuestionCall())
    assert our_hub.discard("someone/tiny", "model") > 100_000
    assert not list(Path(constants.HF_HUB_CACHE).rglob("*.incomplete"))
    hub.down, hub.down_after = False, 0
    our_hub.download("someone/tiny", "model", QuestionCall())
    assert our_hub.discard("someone/tiny", "model") == 0 and inventory.models()[0].refusal == "", "whole files stay"


def refused(id_: str) -> str:
    with pytest.raises(UserError) as mistake:
        our_hub.download(id_, "model", QuestionCall())
    (fault,) = mistake.value.faults
    assert fault.setting in ("model", "disk") and fault.sentence.endswith(".") and fault.sentence.count(". ") == 0
    assert inventory.models() == [], "an unusable folder is listed as a model"
    return fault.sentence


def test_a_gated_model_needs_a_token(hub: HubStandIn, monkeypatch: pytest.MonkeyPatch):
    sentence = refused("someone/gated")
    assert "is gated: accept its conditions at" in sentence and f"{hub.url}/someone/gated" in sentence
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert our_hub.download("someone/gated", "model", QuestionCall()).is_dir()


def test_a_wrong_token_or_name_is_refused(hub: HubStandIn, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "does not accept the token" in refused("someone/tiny")
    monkeypatch.delenv("HF_TOKEN")
    assert "has no model someone/nothing" in refused("someone/nothing")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(UserError, match="does not accept the token"):
        our_hub.search("tiny", "model")


def test_too_little_disk_space_is_refused_before_anything_is_fetched(hub: HubStandIn, monkeypatch: pytest.MonkeyPatch):
    usage = shutil.disk_usage(".")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=our_hub.SPARE + 1000))
    sentence = refused("someone/tiny")
    assert "someone/tiny needs 67.5 MB on the disk" in sentence and "has 67.1 MB free" in sentence
    assert hub.sent["model.safetensors"] == 0


def test_a_disk_that_fills_up_during_a_download_is_one_sentence(hub: HubStandIn, monkeypatch: pytest.MonkeyPatch):
    def full(download: Any, phase: str, **_: Any) -> None:
        if sum(download._arrived.values()) > 100_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(our_hub._Download, "_report", full)
        with pytest.raises(UserError) as mistake:
            our_hub.download("someone/tiny", "model", QuestionCall())
    assert "is full" in sentence_of(mistake)
    assert_unfinished("someone/tiny")
    assert (our_hub.download("someone/tiny", "model", QuestionCall()) / "model.safetensors").read_bytes() == BIG


def test_without_a_network_every_question_is_refused_within_5_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The library alone retries for some twenty seconds."""
    point_at("http://127.0.0.1:9", tmp_path / "cache", monkeypatch)
    for ask in (
        lambda: our_hub.search("tiny", "model"),
        lambda: our_hub.plan("someone/tiny", "model"),
        lambda: our_hub.config_file("someone/tiny"),
        lambda: check_model("someone/tiny", "model"),
    ):
        began = time.monotonic()
        with pytest.raises(UserError) as mistake:
            ask()
        assert "cannot be reached" in sentence_of(mistake) and time.monotonic() - began < 5


def test_a_revision_is_downloaded_and_read_without_a_network(hub: HubStandIn, monkeypatch: pytest.MonkeyPatch):
    """Where only v2 is here, the newest is not; a commit of which v2 is the name is the same snapshot."""
    older = {name: Repo(repo.files | {"new.json": b"{}"}, head="2" * 40) for name, repo in MODELS.items()}
    hub.repos["models"]["someone/tiny"] = replace(MODELS["tiny"], revisions={"v2": older["tiny"]})
    rows = {"train.jsonl": b'{"prompt": "2+2", "answer": "4"}\n'}
    hub.repos["datasets"]["someone/sums"] = replace(SUMS, revisions={"old-1": Repo(rows, head="3" * 40)})
    folder = our_hub.download("someone/tiny@v2", "model", QuestionCall())
    assert folder.name == "2" * 40 and (folder / "new.json").exists() and local_folder("someone/tiny@v2") == folder
    assert check_model("someone/tiny@v2", "model") == tokenizer_folder("someone/tiny@v2") == folder
    assert local_folder("someone/tiny") is None and local_folder("someone/tiny@" + "2" * 40) == folder
    assert fetch("someone/tiny@v2", "model") == folder != (newest := fetch("someone/tiny", "model"))
    assert (newest / "README.md").exists(), "a converted model's card names its original"
    for check in (check_model, fetch):
        with pytest.raises(UserError) as refused:
            check("someone/tiny@v9", "model")
        assert sentence_of(refused).endswith("has no such file or revision of the model someone/tiny@v9.")
    with pytest.raises(UserError, match=r"no such file or revision of the dataset someone/sums@v9\."):
        read_splits(Config(model="-", data="someone/sums@v9"))
    of_old = Config(model="-", data="someone/sums@old-1")
    assert read_splits(of_old).train == [{"prompt": "2+2", "answer": "4"}]
    our_hub.download("someone/sums", "dataset", QuestionCall())
    hub.down = True
    assert read_splits(Config(model="-", data="someone/sums")).train == [{"prompt": "1+1", "answer": "2"}]
    assert read_splits(of_old).train == [{"prompt": "2+2", "answer": "4"}]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch("someone/tiny@v2", "model") == folder
    with pytest.raises(UserError, match="neither a folder nor an owner/name id"):
        check_model("someone/tiny@../../main", "model")


def answering(
    body: bytes = b"", status: int = 200, *, length: int | None = None, is_endless: bool = False, **headers: str
) -> Any:
    """A HubHandler's answer to everything; headers with _ for -."""

    def answer(self: HubHandler, *_: object) -> None:
        self.send_response(status)
        if not is_endless:
            self.send_header("Content-Length", str(len(body) if length is None else length))
        for name, value in ({"X-Repo-Commit": COMMIT, "ETag": "0" * 40, "Connection": "close"} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.close_connection = True
        with suppress(OSError):
            while self.command == "GET":
                self.wfile.write(body)
                if not is_endless:
                    break

    return answer


def hostile_json(**changes: Any) -> bytes:
    return json.dumps({"id": "someone/tiny", "sha": COMMIT, "siblings": [], "tags": []} | changes).encode()


BOMB = {"body": gzip.compress(bytes(3 << 20)), "Content_Encoding": "gzip"}
NOT_THE_HUB = {
    **{str(body): {"body": body} for body in (b"<html>Log in to the hotel</html>", b"", b"null", b'"x"', b"[1, [2]]")},
    "deep": {"body": b"[" * 200_000},
    "types": {"body": hostile_json(sha=4, siblings=[3], tags=3)},
    "commit": {"body": hostile_json(sha="../../../evil")},
    "hash": {"body": hostile_json(siblings=[{"rfilename": "config.json", "size": 2, "blobId": "../../../evil"}])},
    "header": {"body": hostile_json(), "ETag": '"../../../evil"'},
    "endless": {"body": bytes(1 << 20), "is_endless": True},
    "bomb": BOMB,
}
BROKEN = {
    "no gzip": {"body": b"no gzip at all", "Content_Encoding": "gzip"},
    "short": {"body": b"[", "length": 99},
    "to a file": {"status": 302, "Location": "file:///etc/passwd"},
    "to nowhere": {"status": 302, "Location": "http://[::bad"},
    **{str(status): {"body": b"<html>", "status": status} for status in (404, 429, 500)},
}


@pytest.mark.parametrize("case", [*NOT_THE_HUB, *BROKEN])
def test_a_hostile_hub_is_one_message(hub: HubStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str):
    (tmp_path / "upload").mkdir()
    (tmp_path / "upload" / "config.json").write_text("{}")
    before = {path for path in tmp_path.rglob("*") if not path.is_relative_to(constants.HF_HUB_CACHE)}
    monkeypatch.setattr(hub_client, "MOST_BYTES", 2 << 20)
    for method in ("_answer", "_take"):
        monkeypatch.setattr(HubHandler, method, answering(**(NOT_THE_HUB | BROKEN)[case]))
    for ask in (
        lambda: our_hub.search("tiny", "model"),
        lambda: our_hub.download("someone/tiny", "model", QuestionCall()),
        lambda: our_hub.config_file("someone/tiny"),
        lambda: open_model("someone/tiny", "model"),
        lambda: tokenizer_folder("someone/tiny"),
        lambda: read_splits(Config(model="-", data="someone/sums")),
        lambda: whose(HubToken(TOKEN, "HF_TOKEN")),
        lambda: upload("someone/tiny", tmp_path / "upload", TOKEN, lambda *_: None),
    ):
        with pytest.raises(UserError) as error:
            ask()
        assert ("login page" in sentence_of(error)) == (case in NOT_THE_HUB) and TOKEN not in sentence_of(error)
    assert base_licence("someone/tiny", "someone/tiny") == {}
    assert before == {path for path in tmp_path.rglob("*") if not path.is_relative_to(constants.HF_HUB_CACHE)}


HOSTILE_FILES = {
    "page": {"body": b"<html>"},
    "endless": {"body": bytes(1 << 20), "is_endless": True},
    "too long": {"body": bytes(1 << 20)},
    "bomb": BOMB,
    "other bytes": {"body": FILES["config.json"][7:], "status": 206, "Content_Range": "bytes 7-"},
    "hash": {"body": FILES["config.json"], "ETag": '"../../../evil"'},
    "commit": {"body": FILES["config.json"], "X_Repo_Commit": "../../../evil"},
    "to a file": {"status": 302, "Location": "file:///etc/passwd"},
}


@pytest.mark.parametrize("case", HOSTILE_FILES)
def test_a_hostile_file_stays_out_of_the_cache(hub: HubStandIn, tmp_path: Path, monkeypatch, case: str):
    monkeypatch.setattr(hub_client, "MOST_BYTES", 2 << 20)
    monkeypatch.setattr(HubHandler, "_file", answering(**HOSTILE_FILES[case]))
    for ask in (
        lambda: our_hub.download("someone/tiny", "model", QuestionCall()),
        *([lambda: our_hub.config_file("someone/tiny")] * (case not in ("page", "too long"))),
    ):
        with pytest.raises(UserError):
            ask()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in files if "evil" in path.name or path.stat().st_size > 1 << 20]


@pytest.mark.parametrize("name", ["a/../../../evil.json", "x\0y.json", "a" * 300 + ".json", "a\\..\\evil.json"])
def test_a_hostile_file_name_is_one_message(hub: HubStandIn, tmp_path: Path, name: str):
    hub.repos["models"]["someone/names"] = Repo({**FILES, name: b"{}"})
    with pytest.raises(UserError):
        our_hub.download("someone/names", "model", QuestionCall())
    assert not list(tmp_path.rglob("*evil*"))


def test_a_small_file_behind_the_hub_s_own_redirect_is_no_answer_of_the_api() -> None:
    """Whoever asks for README.md at /resolve/ is sent to /api/resolve-cache/, where files have keys of their own."""
    for body in (b"# A model", b'{"sha": "a/b"}'):
        url = f"https://hub.example/api/resolve-cache/models/owner/name/{'0' * 40}/README.md"
        response = _http.httpx2.Response(200, content=body, request=_http.httpx2.Request("GET", url))
        hub_client._check_response(response)
        assert b"".join(response.iter_bytes()) == body


def test_a_connection_that_hf_xet_loses_is_not_a_login_page(hub: HubStandIn) -> None:
    lost = ConnectionError("network error")
    assert "broke the connection off" in hub_client.explain(lost, "someone/tiny", "model", is_upload=True)
    assert "cannot be reached" in hub_client.explain(lost, "someone/tiny", "model", is_upload=False)
