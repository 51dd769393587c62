"""Folders of strangers: opening one ends in a model or in one sentence, and runs nothing of theirs."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from backend.models import inventory
from backend.models.loading import check_opens, load_model
from backend.models.model_folder import check_adapter
from backend.trainer.memory.model_shape import shape_of
from backend.utils.errors import UserError
from backend.utils.safetensors import BrokenFile, read_header
from tests.support.random_models import tiny_model


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("sound") / "model")


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    return shutil.copytree(sound, tmp_path / "model")


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def refused(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        check_opens(folder, str(folder), "model")
    (fault,) = caught.value.faults
    assert fault.setting == "model" and len(fault.sentence) <= 200 and fault.sentence.isprintable()
    return fault.sentence


@pytest.mark.parametrize(
    ("file", "values"),
    [
        ("config.json", {"model_file": "evil.py"}),
        ("config.json", {"auto_map": {"AutoConfig": "evil.Evil"}}),
        *(
            ("tokenizer_config.json", values)
            for values in (
                {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"},
                {"auto_map": ["evil.Evil", None]},
                {"tool_parser_type": "..evil"},
            )
        ),
    ],
)
def test_foreign_code_never_runs(folder: Path, monkeypatch: pytest.MonkeyPatch, file: str, values: dict[str, Any]):
    mark = folder.parent / "was-run"
    (folder / "evil.py").write_text(f"open({str(mark)!r}, 'w')\nclass Evil: pass\nModel = ModelArgs = Evil\n")
    change(folder / file, **values)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr("builtins.input", lambda *words: pytest.fail("asked on stdin"))
    try:
        check_opens(folder, str(folder), "model")
    except UserError as mistake:
        assert len(mistake.faults[0].sentence) <= 200
    assert not mark.exists()


def test_a_pickle_is_never_opened(folder: Path) -> None:
    mark = folder.parent / "was-run"
    (folder / "pytorch_model.bin").write_bytes(f"cbuiltins\nopen\n(V{mark}\nVw\ntR.".encode())
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert refused(folder).endswith("model*.safetensors is missing or empty.")
    (folder / "pytorch_model.bin").rename(folder / "model.safetensors")
    assert "no safetensors file" in refused(folder)
    assert not mark.exists()


def rewrite(file: Path, edit: Callable[[dict[str, Any]], None], cut: int = 0, claim: int = 0) -> None:
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    data = content[8 + length :]
    file.write_bytes(struct.pack("<Q", claim or len(text)) + text + data[: len(data) - cut])


NORM = "model.norm.weight"
HEADERS: list[tuple[str, Callable[[dict[str, Any]], Any], dict[str, int], str]] = [
    ("truncated", lambda header: None, {"cut": 100}, "was cut off: 100 bytes of its arrays are missing"),
    ("a header of 1 GB", lambda header: None, {"claim": 2**30}, "was cut off, or is no safetensors file"),
    ("the largest header", lambda header: None, {"claim": 2**64 - 1}, "was cut off, or is no safetensors file"),
    ("a shape beyond", lambda header: header[NORM].update(shape=[2**62]), {}, f"{NORM} is not as large as its shape"),
    ("a negative shape", lambda header: header[NORM].update(shape=[-1]), {}, "without the type, shape and place"),
    ("an unknown type", lambda header: header[NORM].update(dtype="F4"), {}, f"stores {NORM} as F4"),
    ("no array", lambda header: header.update({NORM: None}), {}, "without the type, shape and place"),
    ("overlapping", lambda header: header[NORM].update(data_offsets=[0, 128]), {}, "overlaps another array"),
    ("a gap", lambda header: header.pop(NORM), {}, "lies behind a gap"),
    ("odd metadata", lambda header: header.update(__metadata__={"a": 3}), {}, "__metadata__ is not text"),
]


@pytest.mark.parametrize(("edit", "more", "says"), [case[1:] for case in HEADERS], ids=[case[0] for case in HEADERS])
def test_a_broken_header(folder: Path, edit: Callable[[dict[str, Any]], None], more: dict[str, int], says: str) -> None:
    rewrite(folder / "model.safetensors", edit, **more)
    with pytest.raises(BrokenFile, match=says.replace("(", r"\(")):
        read_header(folder / "model.safetensors")
    assert says in refused(folder)
    assert shape_of(folder) is not None, "the estimate goes by config.json alone"


def test_an_index_that_names_other_folders_opens_nothing(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../../secret.safetensors", "b": "model.safetensors"}}))
    assert refused(folder).endswith("names 1 weight files that are missing, ../../secret.safetensors among them.")
    index.write_text('{"weight_map": [1]}')
    assert refused(folder).endswith("names no weights.")


@pytest.mark.parametrize("content", ["null", "[" * 100_000, "1" * 5000, "{", '{"model_type": null}', "\0"])
def test_a_config_of_any_content_is_refused_and_listed(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    assert refused(folder)
    assert inventory.model_at(folder).refusal and shape_of(folder) is None


def test_an_adapter_of_any_shape(tmp_path: Path) -> None:
    rank = {"num_layers": 2, "lora_parameters": {"rank": 2}}
    for about, says in (
        ({}, "num_layers is missing"),
        ({"num_layers": 2}, "lora_parameters is missing"),
        ({"fine_tune_type": ["x"]}, "fine_tune_type is"),
        (rank | {"lora_parameters": {"rank": 10**9}}, "lora_parameters.rank is 1000000000"),
        (rank | {"lora_parameters": {"rank": 2, "scale": "1"}}, "lora_parameters.scale is 1"),
        (rank, "cannot be read"),
    ):
        (tmp_path / "adapter_config.json").write_text(json.dumps(about))
        with pytest.raises(UserError, match=says):
            check_adapter(tmp_path, "reference_model_path")


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize(
    ("arch", "flat", "nested"),
    [
        ("llama", {"rope_theta": 5e5}, {"rope_theta": 5e5, "rope_type": "default"}),
        ("llama", {"rope_theta": 5e5, "rope_scaling": LLAMA3}, LLAMA3 | {"rope_theta": 5e5}),
        ("qwen2", {"rope_theta": 777.0}, {"rope_theta": 777.0, "rope_type": "default"}),
        ("qwen3", {"rope_theta": 777.0}, {"rope_theta": 777.0, "rope_type": "default"}),
        (
            "gemma3_text",
            {"rope_theta": 777.0, "rope_local_base_freq": 99.0, "sliding_window_pattern": 3},
            {"full_attention": {"rope_theta": 777.0}, "sliding_attention": {"rope_theta": 99.0}},
        ),
    ],
)
def test_rotary_settings_are_read_as_transformers_5_writes_them(
    tmp_path: Path, arch: str, flat: dict[str, Any], nested: dict[str, Any]
) -> None:
    folder, logits = tiny_model(tmp_path / "model", arch, layers=3, own=flat, noise=0.3), list[mx.array]()
    about = json.loads((folder / "config.json").read_text())
    theirs = {key: value for key, value in about.items() if key not in {*flat, "rope_theta", "rope_scaling"}}
    theirs |= {"rope_parameters": nested, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
    for config in (about, theirs):
        (folder / "config.json").write_text(json.dumps(config))
        model, _, read = load_model(str(folder), "model")
        assert read["rope_theta"] == flat["rope_theta"], "exports are read by mlx-lm too"
        logits.append(model(mx.array([[*range(2, 60)]])))
    assert mx.array_equal(*logits)
