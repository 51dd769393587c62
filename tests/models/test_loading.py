"""Folders of strangers: opening one ends in a model or in one sentence, and runs nothing of theirs."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
import transformers
from mlx.utils import tree_flatten
from mlx_lm import load
from mlx_lm.tuner.utils import load_adapters

from backend.config.config import Config, parse
from backend.export.export_run import Export, export_run
from backend.export.writer import adapter_config
from backend.models import inventory
from backend.models.architectures import architecture_refusal
from backend.models.loading import check_opens, load_model
from backend.models.model_folder import check_adapter
from backend.models.policy import load_policy
from backend.models.tokenizers import load_tokenizer
from backend.runs.run_folder import RunFolder
from backend.trainer.memory.model_shape import shape_of
from backend.training.algorithms import build_learner
from backend.training.batch import pack
from backend.utils.errors import UserError
from backend.utils.safetensors import BrokenFile, read_header
from tests.support import random_models
from tests.support.adapters import save_adapters
from tests.support.architectures.tiny_configs import tiny_config
from tests.support.cases import mistake
from tests.support.random_models import tiny_model
from tests.support.random_runs import PROMPT, furthest, logits_of, write_run
from tests.support.reference_forward import sampled_groups
from tests.support.vision_models import FAMILIES, TRANSFORMERS, rename_as_transformers, tiny_vision_model


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("sound") / "model")


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    return shutil.copytree(sound, tmp_path / "model")


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_a_text_beyond_the_tokenizers_length_is_encoded_without_a_warning(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers announces indexing errors, and the rows that are too long are left out and counted."""
    told: list[str] = []
    monkeypatch.setattr(transformers.tokenization_utils_base.logger, "warning", told.append)
    change(folder / "tokenizer_config.json", model_max_length=4)
    assert len(load_tokenizer(folder).encode("a b c d e f")) > 4 and not told


def refused(folder: Path) -> str:
    setting, sentence = mistake(check_opens, folder, str(folder), "model")
    assert setting == "model"
    return sentence


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
    assert "not a valid safetensors file" in refused(folder)
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
BROKEN = "was cut off, or is not a valid safetensors file"
HEADERS: list[tuple[str, Callable[[dict[str, Any]], Any], dict[str, int], str]] = [
    ("truncated", lambda header: None, {"cut": 100}, BROKEN),
    ("a header of 1 GB", lambda header: None, {"claim": 2**30}, BROKEN),
    ("the largest header", lambda header: None, {"claim": 2**64 - 1}, BROKEN),
    ("a shape beyond", lambda header: header[NORM].update(shape=[2**62]), {}, BROKEN),
    ("a negative shape", lambda header: header[NORM].update(shape=[-1]), {}, BROKEN),
    (
        "an unknown type",
        lambda header: header[NORM].update(dtype="F4", shape=[8 * header[NORM]["shape"][0]]),
        {},
        "as F4",
    ),
    ("no array", lambda header: header.update({NORM: None}), {}, BROKEN),
    ("overlapping", lambda header: header[NORM].update(data_offsets=[0, 128]), {}, BROKEN),
    ("a gap", lambda header: header.pop(NORM), {}, BROKEN),
    ("odd metadata", lambda header: header.update(__metadata__={"a": 3}), {}, BROKEN),
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


QWEN2_VL = tiny_config("qwen2_vl")["text_config"] | {"tie_word_embeddings": False}
DEFAULT_ROPE = {"rope_theta": 5e5, "rope_type": "default"}


@pytest.mark.parametrize(
    ("arch", "flat", "written"),
    [
        ("qwen3_moe", {"num_experts": 4}, {"num_local_experts": 4}),
        ("glm4_moe", {"rope_scaling": None, "rope_theta": 5e5}, {"rope_parameters": DEFAULT_ROPE}),
        (
            "gpt_neox",
            {"rotary_emb_base": 5e5, "rotary_pct": 0.25, "intermediate_size": 128},
            {"rope_parameters": DEFAULT_ROPE | {"partial_rotary_factor": 0.25}, "intermediate_size": 128},
        ),
        (
            "granitemoehybrid",
            {"layer_types": ["mamba", "attention"]},
            {"layer_types": ["linear_attention", "full_attention"]},
        ),
        (
            "qwen2_vl",
            {"text_config": QWEN2_VL},
            {
                "text_config": {key: value for key, value in QWEN2_VL.items() if key != "tie_word_embeddings"},
                "tie_word_embeddings": False,
            },
        ),
    ],
)
def test_names_of_transformers_5_are_read(tmp_path: Path, arch: str, flat: dict, written: dict) -> None:
    folder = tiny_model(tmp_path / "model", arch, own=tiny_config(arch) | flat, noise=0.3)
    expected = load_model(str(folder), "model")[0](IDS)
    config = json.loads((folder / "config.json").read_text())
    theirs = {key: value for key, value in config.items() if key not in flat} | written
    (folder / "config.json").write_text(json.dumps(theirs))
    model, _, read = load_model(str(folder), "model")
    assert mx.array_equal(model(IDS), expected)
    assert read.items() >= flat.items(), "exports are read by mlx-lm too"


IDS = mx.array([[5, 9, 40, 7, 3, 100, 8]])


@pytest.mark.parametrize(
    ("family", "text", "bits"), [*((family, {}, None) for family in FAMILIES), ("smolvlm", {}, 4), ("lfm2_vl", {}, 8)]
)
def test_the_text_model_computes_what_mlx_vlm_does(tmp_path: Path, family: str, text: dict, bits: int | None) -> None:
    from mlx_vlm.utils import load_model as load_whole  # takes a second, in each worker of the suite

    folder = tiny_vision_model(tmp_path, family, text=text, bits=bits)
    expected = load_whole(folder).language_model(IDS).logits
    own = load_model(str(folder), "model")[0](IDS)
    assert inventory.model_at(folder).remarks == ["It reads images."]
    assert mx.allclose(own, expected, atol=1e-4)
    if family in TRANSFORMERS and bits is None:
        rename_as_transformers(folder, family)
        assert mx.array_equal(load_model(str(folder), "model")[0](IDS), own)


@pytest.mark.parametrize("says", [True, False, None])
def test_the_output_layer_is_the_embedding_without_one(tmp_path: Path, says: bool | None) -> None:
    folder = tiny_vision_model(tmp_path, "smolvlm")
    config = json.loads((folder / "config.json").read_text())
    for part in (config, config["text_config"]):
        part.update(tie_word_embeddings=says) if says is not None else part.pop("tie_word_embeddings")
    (folder / "config.json").write_text(json.dumps(config))
    with_head = load_model(str(folder), "model")[0](IDS)
    arrays = mx.load(str(folder / "model.safetensors"))
    head = arrays.pop("language_model.lm_head.weight")
    mx.save_safetensors(str(folder / "model.safetensors"), arrays)
    without = load_model(str(folder), "model")[0](IDS)
    assert head.size and bool(mx.array_equal(with_head, without)) == (says is True)


def test_other_vision_models_are_refused() -> None:
    text, eyes = {"model_type": "gemma"}, {"vision_config": {}}
    assert "no model of the kind paligemma" in architecture_refusal(
        {"model_type": "paligemma", "text_config": text} | eyes
    )
    assert "no model of the kind odd" in architecture_refusal(
        {"model_type": "odd", "text_config": {"model_type": "odd"}} | eyes
    )
    assert not architecture_refusal({"model_type": "odd", "text_config": text} | eyes)


def config_of(models: Path, arch: str = "qwen3", **settings: Any) -> Config:
    folder = models / arch
    if not folder.exists():
        random_models.tiny_model(folder, arch, tie=False)
    return parse({"model": str(folder), "data": "none", "num_layers": -1, "beta": 0} | settings)


def adapted(config: Config) -> set[str]:
    """The modules that learn, by their names within a layer (or within the model, for what is in no layer)."""
    names = {name.rsplit(".", 1)[0] for name in load_policy(config).trainable()}
    return {name.split("layers.")[1].split(".", 1)[1] if "layers." in name else name for name in names}


@pytest.mark.parametrize(
    ("train_type", "keys"), [("dora", ["self_attn.v_proj", "lm_head"]), ("lora", ["mlp.up_proj", "model.embed_tokens"])]
)
def test_only_the_named_layers_train(models: Path, tmp_path: Path, train_type: str, keys: list[str]) -> None:
    config = config_of(models, lora_keys=keys, train_type=train_type, learning_rate=1e-2)
    assert adapted(config) == set(keys)
    policy = load_policy(config)
    before = {name: np.array(x) for name, x in tree_flatten(policy.model.parameters())}
    learner = build_learner(policy, config, 2)
    for seed in (0, 1):
        learner.learn(pack(sampled_groups(policy.model, seed=seed), pad_id=0))
    moved = {key for key, x in tree_flatten(policy.model.parameters()) if not np.array_equal(np.array(x), before[key])}
    assert moved == set(policy.trainable())
    save_adapters(policy, config, tmp_path)
    policy.model.eval()
    tokens = mx.array([[5, 6, 7]])
    loaded = load(config.model, adapter_path=str(tmp_path))[0](tokens)
    assert mx.array_equal(loaded, policy.model(tokens))
    assert not mx.allclose(loaded, load(config.model)[0](tokens), atol=1e-4)


MEANT = [
    ("qwen3", ["q_proj", "v_proj"], ["self_attn.q_proj", "self_attn.v_proj"]),
    ("qwen3", ["embed_tokens", "mlp.up_proj"], ["model.embed_tokens", "mlp.up_proj"]),
    ("qwen3_moe", ["up_proj"], ["mlp.switch_mlp.up_proj"]),
    ("gemma3_text", ["q_proj", "self_attn.q_proj"], ["self_attn.q_proj"]),
]


@pytest.mark.parametrize(("arch", "keys", "meant"), MEANT, ids=str)
def test_the_end_of_a_name_means_every_such_layer(models: Path, arch: str, keys: list[str], meant: list[str]) -> None:
    assert adapted(config_of(models, arch, lora_keys=keys)) == set(meant)


def test_all_linear_is_every_layer_but_the_output(models: Path, tmp_path: Path) -> None:
    config = config_of(models, lora_keys=["all-linear"])
    assert adapted(config) == adapted(config_of(models)) and "lm_head" not in adapted(config)
    policy = load_policy(config)
    assert "keys" not in adapter_config(policy, config)["lora_parameters"]  # as mlx-lm adapts them without names
    short = config_of(models, lora_keys=["q_proj", "lm_head"])
    saved = adapter_config(load_policy(short), short)
    assert saved["lora_parameters"]["keys"] == ["self_attn.q_proj", "lm_head"]  # mlx-lm knows whole names alone


def test_dora_takes_no_quantised_embedding(tmp_path: Path) -> None:
    base = tiny_model(tmp_path / "base", bits=4)
    dora = {"model": str(base), "data": "none", "lora_keys": ["embed_tokens"], "train_type": "dora"}
    setting, sentence = mistake(load_policy, parse(dora))
    assert setting == "lora_keys" and "no DoRA for model.embed_tokens, a quantised embedding" in sentence


@pytest.mark.parametrize(
    ("keys", "named"),
    [(["w_proj"], "w_proj"), (["self_attn.q_proj", "mlp.w1", "nope"], "mlp.w1, nope"), (["self_attn"], "self_attn")],
    ids=str,
)
def test_an_unknown_layer_name_is_refused_with_the_names_there_are(models: Path, keys: list[str], named: str) -> None:
    """An unknown name beside a known one was once ignored without a message."""
    setting, sentence = mistake(load_policy, config_of(models, lora_keys=keys))
    start, _, listed = sentence.rstrip(".").partition("; there are ")
    assert (setting, start) == ("lora_keys", f"No layer of this model is called {named}")
    layers = ["lm_head", "mlp.down_proj", "mlp.gate_proj", "mlp.up_proj", "model.embed_tokens"]
    # What is meant comes first; the others follow by name.
    assert sorted(listed.split(", ")) == layers + [f"self_attn.{name}_proj" for name in "koqv"]


WHOLE = {"modules_to_save": ["lm_head", "norm"]}


def arrays_of(model: Any) -> dict[str, np.ndarray]:
    return {name: np.array(x.astype(mx.float32)) for name, x in tree_flatten(model.parameters())}


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_whole_modules_learn_beside_adapters_and_the_reference_stays(models: Path, dtype: str) -> None:
    config = config_of(models, **WHOLE, dtype=dtype, learning_rate=1e-4, beta=0.1)
    policy = load_policy(config)
    whole = {"lm_head.weight", "model.norm.weight"}
    assert {name for name in policy.trainable() if "lora_" not in name} == whole
    assert {policy.trainable()[name].dtype for name in whole} == {mx.float32}  # what is small counts in 16 bits too
    before, reference, masters = arrays_of(policy.model), arrays_of(policy.reference_model), policy.trainable()
    learner, sampler = build_learner(policy, config, 2), load_policy(config_of(models, **WHOLE)).model
    for seed in (0, 1):
        learner.learn(pack(sampled_groups(sampler, seed=seed), pad_id=0))
    after = arrays_of(policy.model)
    moved = {name for name in before if not np.array_equal(before[name], after[name])}
    assert all(name in whole or "lora_" in name for name in moved)
    assert not any(mx.array_equal(masters[name], policy.trainable()[name]) for name in whole)
    assert all(np.array_equal(x, reference[name]) for name, x in arrays_of(policy.reference_model).items())
    again = load_policy(config)
    again.assign(policy.trainable())
    assert mx.array_equal(again.model(PROMPT), policy.model(PROMPT))  # pyright: ignore


def test_layers_in_whole_modules_get_no_adapters(models: Path) -> None:
    config = config_of(models, modules_to_save=["mlp", "embed_tokens"])
    names = set(load_policy(config).trainable())
    assert not any("mlp" in name and "lora_" in name for name in names)
    assert {"model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"} <= names
    assert any("self_attn.q_proj.lora_a" in name for name in names)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"modules_to_save": ["head"]}, "No module of this model is called head; there are "),
        ({"modules_to_save": ["lm_head"], "lora_keys": ["lm_head"]}, "lm_head would get an adapter and be trained"),
        ({"modules_to_save": ["down_proj"], "quantization": "4"}, "model.layers."),
    ],
    ids=["unknown", "both", "quantised"],
)
def test_what_cannot_be_trained_as_a_whole_is_refused(models: Path, settings: dict[str, Any], says: str) -> None:
    setting, sentence = mistake(load_policy, config_of(models, **settings))
    assert setting == "modules_to_save" and sentence.startswith(says)


def test_a_tied_output_layer_is_named_as_the_embedding(tmp_path: Path) -> None:
    tiny_model(tmp_path / "qwen3", tie=True)
    with pytest.raises(UserError, match="its output layer is its embedding"):
        load_policy(config_of(tmp_path, **WHOLE))
    assert "model.embed_tokens.weight" in load_policy(config_of(tmp_path, modules_to_save=["embed_tokens"])).trainable()


def test_whole_modules_are_saved_fused_and_exported(models: Path, tmp_path: Path) -> None:
    base = Path(config_of(models).model)
    trained = write_run(tmp_path / "run", base, **WHOLE, dropout=0.0)
    run = RunFolder(tmp_path / "run")
    about = json.loads((run.adapters / "adapter_config.json").read_text())
    assert set(about["modules_to_save"]) == {"model.norm", "lm_head"}
    for format_ in ("full", "original", "peft"):
        path = export_run(run, Export("folder", format_, tmp_path, format_)).path
        if format_ in ("full", "original"):
            assert furthest(logits_of(path), trained) < 1e-4, format_
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert config["modules_to_save"] == ["lm_head", "model.norm"]
    saved: Any = mx.load(str(tmp_path / "peft" / "adapter_model.safetensors"))
    assert "base_model.model.lm_head.weight" in saved
    with pytest.raises(ValueError, match="not an adapter parameter"):  # mlx-lm refuses by name what it has no place for
        load_adapters(mlx_lm.load(str(base))[0], str(run.adapters))
