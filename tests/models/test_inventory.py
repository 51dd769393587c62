"""Models and datasets on this machine, and whether mlx-lm can load them, from names, sizes and config.json."""

import json
import os
import runpy
from pathlib import Path
from typing import Any

import pytest

from backend.models import architectures, inventory
from backend.utils.errors import UserError
from backend.utils.hub_cache import hub_cache, is_dataset_cached, local_folder, require_hub_address
from tests.support.cases import cases

PLAIN = ("model.safetensors", "tokenizer.json", "tokenizer_config.json")
COMMIT = "a" * 40


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home folder and Hugging Face cache."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


def model(folder: Path, config: dict[str, Any] | None = None, *names: str) -> Path:
    """A folder with a model's files, ten bytes each."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or PLAIN:
        (folder / name).write_bytes(b"x" * 10)
    (folder / "tokenizer_config.json").write_text('{"chat_template": "t"}')
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def cached(home: Path, id_: str, *names: str, config: dict[str, Any] | None = None) -> Path:
    repo = home / "hub" / f"models--{id_.replace('/', '--')}"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    return model(repo / "snapshots" / COMMIT, config or {"model_type": "qwen3"}, *names)


def quantised(**how: str) -> dict[str, Any]:
    return {"model_type": "qwen3", "quantization_config": how}


QWEN = {"model_type": "qwen3"}
REFUSED: list[tuple[dict[str, Any] | None, tuple[str, ...], str]] = [
    (QWEN, PLAIN, ""),
    ({"model_type": "mistral"}, PLAIN, ""),  # an alias, which mlx-lm remaps
    ({"model_type": "lfm2-vl"}, PLAIN, ""),  # a module whose name is no identifier
    ({"model_type": "bailing_hybrid", "architectures": ["BailingMoeV3ForCausalLM"]}, PLAIN, ""),
    ({"model_type": "marvin"}, PLAIN, "no model of the kind marvin"),
    ({"model_type": ["qwen3"]}, PLAIN, "names no model_type"),
    (QWEN | {"model_file": "mine.py"}, PLAIN, "code of its own (mine.py)"),
    (None, PLAIN, "no config.json"),
    (None, ("tiny.Q4.gguf",), "GGUF file"),
    (None, ("adapter_config.json", "adapters.safetensors"), "adapter without its base"),
    (QWEN, ("tiny.gguf", "tokenizer.json"), "GGUF weights only"),
    (QWEN, ("pytorch_model.bin", "tokenizer.json"), "PyTorch's pickled"),
    (QWEN, ("tokenizer.json",), "no model*.safetensors"),
    (QWEN, ("model.safetensors",), "no tokenizer"),
    (quantised(quant_method="bitsandbytes"), PLAIN, "bitsandbytes"),
    (quantised(quant_method="awq"), PLAIN, ""),
    (quantised(quant_method="compressed-tensors", format="float"), PLAIN, "in the format float"),
]


@cases(("config", "names", "words"), REFUSED)
def test_a_model_that_cannot_be_loaded_has_a_reason(config: dict[str, Any] | None, names: tuple[str, ...], words: str):
    sentence = architectures.refusal(config, names)
    assert words in sentence and bool(sentence) == bool(words) and (not sentence or sentence.endswith("."))


def test_models_are_listed_from_the_cache_lm_studio_folders_and_runs(home: Path, monkeypatch: pytest.MonkeyPatch):
    cached(home, "someone/tiny")
    model(home / ".lmstudio" / "models" / "them" / "theirs", {"model_type": "llama"})
    model(home / "mine", {"model_type": "llama", "torch_dtype": "float32"})
    run = home / "runs" / "first"
    model(run / "fused", {"model_type": "qwen3"})
    (run / "config.yaml").write_text("")
    by_place = {entry.where: entry for entry in inventory.models([str(home / "mine"), "~/mine", str(home / "gone")])}
    assert {where: (entry.id, entry.name) for where, entry in by_place.items()} == {
        "cache": ("someone/tiny", "someone/tiny"),
        "lmstudio": (str(home / ".lmstudio/models/them/theirs"), "them/theirs"),
        "folder": (str(home / "mine"), "mine"),
        "run": (str(run / "fused"), "first"),
    }
    assert not any(entry.refusal or entry.remarks for entry in by_place.values())
    assert (folder := by_place["folder"]).precision == "fp32" and folder.kind == "llama" and folder.size > 20


def test_missing_parts_of_a_cached_model_are_noticed(home: Path):
    folder = cached(home, "a/sharded", "model-00001-of-00002.safetensors", "tokenizer.json")
    index = {"weight_map": {"x": "model-00001-of-00002.safetensors", "y": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (cached(home, "b/base") / "tokenizer_config.json").write_text("{}")
    looked_at = cached(home, "c/looked-at")
    for name in PLAIN:
        (looked_at / name).unlink()
    found = {model.name: model for model in inventory.models()}
    assert found["a/sharded"].refusal == "1 of its 2 weight files are missing." and inventory.is_incomplete(folder)
    assert "c/looked-at" not in found, "a config without weights"
    assert not found["b/base"].refusal and "no chat template" in found["b/base"].remarks[0]


def test_broken_cache_entries_do_not_break_the_list(home: Path):
    cached(home, "a/fine")
    broken = home / "hub" / "models--a--broken" / "snapshots" / COMMIT
    broken.mkdir(parents=True)
    (broken / "config.json").write_text("{")
    (broken / "tokenizer.json").write_text("{}")
    (broken / "model.safetensors").symlink_to("nowhere")
    (home / "hub" / "models--").mkdir()
    (home / "hub" / "a file").write_text("")
    assert {model.name: bool(model.refusal) for model in inventory.models()} == {"a/fine": False, "a/broken": True}


def test_datasets_are_recognised_by_their_row_files(home: Path):
    repo = home / "hub" / "datasets--a--sums"
    (repo / "snapshots" / COMMIT / "data").mkdir(parents=True)
    (repo / "snapshots" / COMMIT / "data" / "train.parquet").write_bytes(b"x" * 50)
    (home / "rows.csv").write_text("a,b\n")
    (home / "empty").mkdir()
    by_name = {each.name: each for each in inventory.datasets([str(home / "rows.csv"), str(home / "empty"), "/gone"])}
    assert {
        name: (dataset.id, dataset.kind, dataset.size) for name, dataset in by_name.items() if not dataset.refusal
    } == {"a/sums": ("a/sums", "parquet", 50), "rows.csv": (str(home / "rows.csv"), "csv", 4)}
    assert "holds no rows" in by_name["empty"].refusal


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "home/.cache/huggingface/hub"),
        ({"XDG_CACHE_HOME": "{tmp}/xdg"}, "xdg/huggingface/hub"),
        ({"HF_HOME": "{tmp}/hf", "XDG_CACHE_HOME": "{tmp}/xdg"}, "hf/hub"),
        ({"HF_HOME": "~/hf"}, "home/hf/hub"),
        ({"HUGGINGFACE_HUB_CACHE": "{tmp}/old", "HF_HOME": "{tmp}/hf"}, "old"),
        ({"HF_HUB_CACHE": "$HOME/new", "HUGGINGFACE_HUB_CACHE": "{tmp}/old", "HF_HOME": "{tmp}/hf"}, "home/new"),
    ],
    ids=["default", "XDG_CACHE_HOME", "HF_HOME", "HF_HOME with a tilde", "HUGGINGFACE_HUB_CACHE", "HF_HUB_CACHE"],
)
def test_the_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str):
    """One of two copies of this function ignored XDG_CACHE_HOME: a first launch did not see the models there."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(tmp=tmp_path))
    assert hub_cache() == tmp_path / expected
    # The library reads the variables when it is imported; this runs its module again without touching the imported one.
    assert hub_cache() == Path(runpy.run_module("huggingface_hub.constants")["HF_HUB_CACHE"])


def test_a_model_is_local_as_a_folder_or_as_a_cached_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "mine").mkdir()
    snapshots = tmp_path / "hub" / "models--owner--name" / "snapshots"
    for commit in ("older", "main"):
        (snapshots / commit).mkdir(parents=True)
    refs = snapshots.parent / "refs"
    refs.mkdir()
    (refs / "main").write_text("main\n")
    os.utime(snapshots / "older", (2e9, 2e9))
    assert local_folder(str(tmp_path / "mine")) == tmp_path / "mine"
    assert local_folder("owner/name") == snapshots / "main"
    (refs / "main").unlink()
    assert local_folder("owner/name") == snapshots / "older", "without a reference, the newest"
    for name in ("owner/other", "name", str(tmp_path / "gone")):
        assert local_folder(name) is None
    assert local_folder("owner/name", "dataset") is None


def test_a_dataset_is_cached_by_the_hub_or_by_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_DATASETS_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    (tmp_path / "hub" / "datasets--owner--MySums" / "blobs").mkdir(parents=True)
    assert not is_dataset_cached("owner/MySums"), "a download that never ended"
    (tmp_path / "datasets" / "owner___my_sums").mkdir(parents=True)
    assert is_dataset_cached("owner/MySums") and not is_dataset_cached("owner/Sums")
    (tmp_path / "hub" / "datasets--owner--Sums" / "snapshots").mkdir(parents=True)
    assert is_dataset_cached("owner/Sums")


BAD_PORTS = ["http://mirror.test:99999", "https://mirror.test:x", "http://[::1"]
NO_WEB = ["mirror.test", "ftp://mirror.test", "http://", "http://a b.test", "file:///etc", "http://a.test\x1b[2J"]


@pytest.mark.parametrize("address", [*NO_WEB, *BAD_PORTS])
def test_a_hub_without_a_web_address_is_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", address)
    with pytest.raises(UserError) as raised:
        require_hub_address()
    (fault,) = raised.value.faults
    assert fault.setting == "HF_ENDPOINT" and " is no web address; " in fault.sentence and fault.sentence.isprintable()
