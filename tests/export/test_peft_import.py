"""Adapters of peft carried onto a model of mlx-lm, without torch."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from safetensors.mlx import save_file

from backend.export.export_run import Export, export_run
from backend.export.originals import LowRank, RowRun
from backend.export.peft_files import Origin, PeftAdapter, carried_adapter, import_adapter, read_settings
from backend.export.trained_weights import AdapterFiles, TrainedWeights
from backend.runs.run_folder import RunFolder
from backend.serve.hub_questions import import_adapter as import_question
from backend.serve.questions import Cancelled, QuestionCall
from backend.utils.errors import UserError
from tests.export.test_export_original import as_published, stored
from tests.support import small_run
from tests.support.random_models import tiny_model
from tests.support.random_runs import PROMPT, furthest, write_run
from tests.support.small_run import check
from tests.support.verbs import refused, run_ok

ARRAYS = "adapter_model.safetensors"
PREFIX = "base_model.model."
Q, UP = "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.up_proj"
HIDDEN, INNER = 32, 64


def about(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "adapter_config.json").read_text())


def write_peft(
    folder: Path, layers: Mapping[str, tuple[int, int, int]], base: Path | str = "", **settings: Any
) -> Path:
    """An adapter of peft with random arrays: layer → (out, in, rank)."""
    folder.mkdir(parents=True, exist_ok=True)
    mx.random.seed(3)
    arrays: dict[str, mx.array] = {}
    for name, (rows, width, rank) in layers.items():
        arrays[f"{PREFIX}{name}.lora_A.weight"] = 0.3 * mx.random.normal((rank, width))
        arrays[f"{PREFIX}{name}.lora_B.weight"] = 0.3 * mx.random.normal((rows, rank))
    mx.save_safetensors(str(folder / ARRAYS), arrays, metadata={"format": "pt"})
    usual = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
    (folder / "adapter_config.json").write_text(json.dumps(usual | {"base_model_name_or_path": str(base)} | settings))
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("base") / "llama", "llama")


SOME = {"num_layers": 1, "lora_keys": ["mlp.up_proj", "self_attn.q_proj"], "rank": 5, "lora_alpha": 9}
NORMS = {"use_rslora": True, "modules_to_save": ["post_attention_layernorm", "model.norm"]}
TRIPS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "lora": ("llama", "lora", {}),
    "dora of fused layers": ("phi3", "dora", {}),
    "rslora of some layers, whole norms": ("llama", "lora", SOME | NORMS),
    "a tied embedding": ("llama", "lora", {"num_layers": 1, "modules_to_save": ["embed_tokens"]}),
    "a scale that is no binary fraction": ("llama", "lora", {"scale": 0.1, "rank": 3, "num_layers": 1}),
}


def normalised(config: dict[str, Any]) -> dict[str, Any]:
    """The order of modules means nothing."""
    return config | {"modules_to_save": sorted(config.get("modules_to_save", []))}


@pytest.mark.parametrize("trip", TRIPS)
def test_what_is_exported_to_peft_comes_back_bit_by_bit(tmp_path: Path, trip: str) -> None:
    arch, train_type, settings = TRIPS[trip]
    rope = {"rope_parameters": {"rope_theta": 77.0, "rope_type": "default"}}  # as transformers 5 writes it
    model = tiny_model(tmp_path / "base", arch, own=rope)
    write_run(tmp_path / "run", model, train_type, **settings)
    run = RunFolder(tmp_path / "run")
    there = export_run(run, Export("folder", "mine", tmp_path, "peft")).path
    back = import_adapter(there, "", tmp_path / "back")
    before, after = stored(run.adapters / "adapters.safetensors"), stored(back.path / "adapters.safetensors")
    assert before.keys() == after.keys()
    assert all(mx.array_equal(before[name], after[name]).item() for name in before)
    assert normalised(about(run.adapters)) == normalised(about(back.path))
    assert back.verification is not None and back.verification.max_error < 1e-4


def changes(folder: Path) -> dict[str, np.ndarray]:
    """What an imported adapter adds to each weight, in numpy from the files alone."""
    arrays, scale = stored(folder / "adapters.safetensors"), about(folder)["lora_parameters"]["scale"]
    names = {name.removesuffix(".lora_a") for name in arrays if name.endswith(".lora_a")}
    return {name: scale * (np.array(arrays[f"{name}.lora_a"]) @ np.array(arrays[f"{name}.lora_b"])).T for name in names}


def test_ranks_and_alphas_by_pattern_become_one_rank_and_one_scale(tmp_path: Path, base: Path) -> None:
    other = "model.layers.0.self_attn.q_proj"
    folder = write_peft(
        tmp_path / "peft",
        {Q: (HIDDEN, HIDDEN, 4), UP: (INNER, HIDDEN, 2), other: (HIDDEN, HIDDEN, 4)},
        rank_pattern={"up_proj": 2},
        alpha_pattern={r"layers\.1\..*_proj": 6, other: 8},
        bias="none",
    )
    imported = import_adapter(folder, str(base), tmp_path / "mlx")
    peft = {name: np.array(array) for name, array in stored(folder / ARRAYS).items()}
    scales = {Q: 6 / 4, UP: 6 / 2, other: 8 / 4}
    for name, change in changes(imported.path).items():
        a, b = (peft[f"{PREFIX}{name}.lora_{letter}.weight"] for letter in "AB")
        assert np.abs(change - scales[name] * b @ a).max() < 1e-5
    config = about(imported.path)
    # up_proj has an adapter in the last layer alone and q_proj in both: no count of layers says that.
    assert config["num_layers"] == 2 and config["lora_parameters"]["keys"] == sorted(scales)
    assert config["lora_parameters"]["rank"] == 4 and len(imported.sentences) == 3
    filled = stored(imported.path / "adapters.safetensors")[f"{UP}.lora_a"][:, 2:]
    assert mx.all(mx.any(filled != 0, axis=0)).item()  # zeros in A and B could never learn
    assert imported.verification is not None and imported.verification.max_error < 1e-4


def test_adapters_of_experts_are_stacked(tmp_path: Path) -> None:
    published = as_published(tiny_model(tmp_path / "base", "mixtral"))
    layers = {
        f"model.layers.{layer}.block_sparse_moe.experts.{expert}.w1": (INNER, HIDDEN, 4)
        for layer, expert in ((0, 0), (0, 3), (1, 2))
    }
    folder = write_peft(tmp_path / "peft", layers)
    imported = import_adapter(folder, str(published), tmp_path / "mlx")
    assert imported.sentences[0].startswith("2 layers")
    assert imported.verification is not None and imported.verification.max_error < 1e-4
    with pytest.raises(UserError, match=r"experts\.0\.w1 belongs to experts, for which mlx-lm has no DoRA"):
        magnitudes = {f"{PREFIX}{name}.lora_magnitude_vector": mx.ones(INNER) for name in layers}
        arrays = stored(folder / ARRAYS) | magnitudes
        mx.save_safetensors(str(folder / ARRAYS), arrays)
        (folder / "adapter_config.json").write_text(json.dumps(about(folder) | {"use_dora": True}))
        import_adapter(folder, str(published), tmp_path / "dora")


class Fused(nn.Module):
    """A layer of mlx-lm's that two originals are joined in, and two that one original is split into."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.q, self.k = (nn.Linear(4, rows, bias=False) for rows in (5, 3, 2))


JOINED = {
    "gate_up.weight": [
        RowRun("gate_up.weight", at, f"{of}.weight", 0, 3 - at // 3) for at, of in ((0, "gate"), (3, "up"))
    ],
    "q.weight": [RowRun("q.weight", 0, "qk.weight", 0, 3)],
    "k.weight": [RowRun("k.weight", 0, "qk.weight", 3, 2)],
}
SHAPES = {"gate.weight": (3, 4), "up.weight": (2, 4), "qk.weight": (5, 4)}


def fused(tmp_path: Path, layers: Mapping[str, LowRank]) -> Mapping[str, Any]:
    settings = read_settings(write_peft(tmp_path / "peft", {}) / "adapter_config.json")
    return carried_adapter(PeftAdapter(settings, layers, {}, {}), Origin(SHAPES, JOINED, None, False), Fused()).layers


def random_layer(rows: int, rank: int, scale: float = 2.0) -> LowRank:
    return LowRank(mx.random.normal((1, rank, 4)), mx.random.normal((rows, rank)), None, scale)


def test_adapters_of_originals_that_mlx_lm_joins_or_splits(tmp_path: Path) -> None:
    gate, up, qk = random_layer(3, 2), random_layer(2, 3, scale=4.0), random_layer(5, 2)
    carried = fused(tmp_path, {"gate": gate, "up": up, "qk": qk})
    expected = {
        "gate_up": mx.concatenate([gate.b @ gate.a[0], 2 * up.b @ up.a[0]]),
        "q": (qk.b @ qk.a[0])[:3],
        "k": (qk.b @ qk.a[0])[3:],
    }
    assert {name: layer.rank for name, layer in carried.items()} == {"gate_up": 5, "q": 2, "k": 2}
    assert all(furthest(carried[name].b @ carried[name].a[0], expected[name]) < 1e-5 for name in expected)


def test_a_quantised_model_takes_an_adapter_by_the_names_of_its_layers(tmp_path: Path) -> None:
    packed = tiny_model(tmp_path / "base", "llama", bits=4)
    imported = import_adapter(write_peft(tmp_path / "peft", {Q: (HIDDEN, HIDDEN, 4)}), str(packed), tmp_path / "mlx")
    assert imported.verification is None and "no logits compared" in imported.sentences[-1]
    with pytest.raises(UserError, match="names no base_model"):
        import_adapter(write_peft(tmp_path / "other", {"model.layers.0.qkv": (96, 32, 4)}), str(packed), tmp_path / "x")


def test_a_whole_module_in_32_bits_is_compared_in_the_type_of_its_model(tmp_path: Path) -> None:
    base, head = tiny_model(tmp_path / "base", "llama", tie=False, dtype="bfloat16"), f"{PREFIX}lm_head.weight"
    folder = write_peft(tmp_path / "peft", {Q: (HIDDEN, HIDDEN, 4)}, modules_to_save=["lm_head"])
    arrays(lambda held: held.update({head: mx.random.normal((320, HIDDEN))}))(folder)
    imported = import_adapter(folder, str(base), tmp_path / "mlx")
    assert imported.verification is not None and imported.verification.max_error < 1e-4
    assert mx.array_equal(
        stored(imported.path / "adapters.safetensors")["lm_head.weight"], stored(folder / ARRAYS)[head]
    )


def test_an_output_layer_s_adapter_comes_with_its_weight(tmp_path: Path) -> None:
    base = tiny_model(tmp_path / "base", "llama", tie=False)
    folder = write_peft(tmp_path / "peft", {"lm_head": (320, HIDDEN, 4)})
    own = stored(base / "model.safetensors")["lm_head.weight"].astype(mx.float16)  # as peft saves it
    with_array("lm_head.base_layer.weight", own)(folder)
    imported = import_adapter(folder, str(base), tmp_path / "mlx")
    assert imported.verification is not None and imported.verification.max_error < 1e-4
    assert "lm_head.lora_a" in stored(imported.path / "adapters.safetensors")


def arrays(change: Callable[[dict[str, mx.array]], object]) -> Callable[[Path], object]:
    def changed(folder: Path) -> None:
        held = stored(folder / ARRAYS)
        change(held)
        mx.eval(held)
        save_file(held, str(folder / ARRAYS))

    return changed


def settings(**changed: Any) -> Callable[[Path], object]:
    return lambda folder: (folder / "adapter_config.json").write_text(json.dumps(about(folder) | changed))


def with_array(name: str, array: mx.array) -> Callable[[Path], object]:
    return arrays(lambda held: held.update({PREFIX + name: array}))


def renamed(before: str, after: str) -> Callable[[Path], object]:
    return arrays(lambda held: held.update({name.replace(before, after): held.pop(name) for name in list(held)}))


EMBEDDED, EMBEDDING_PARTS = f"{PREFIX}model.embed_tokens", ("base_layer.weight", "lora_embedding_A")
A, B = (f"{PREFIX}{Q}.lora_{letter}.weight" for letter in "AB")
HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no B": (arrays(lambda held: held.pop(B)), f"{Q} is not whole: its B is missing"),
    "another rank": (settings(r=8), r"its rank is 8"),
    "turned": (arrays(lambda held: held.update({A: held[A].T})), f"{Q} is A \\[32, 4\\] and B"),
    "another width": (arrays(lambda held: held.update({A: held[A][:, :8]})), r"and its adapter is for \[32, 8\]"),
    "not finite": (arrays(lambda held: held.update({A: held[A] * mx.inf})), f"{Q} holds numbers that are not finite"),
    "unknown layer": (renamed("q_proj", "../../q_proj"), r"has no layer model\.layers\.1\.self_attn\.\.\./\.\./q_proj"),
    "no prefix": (renamed(PREFIX, ""), "does not begin with base_model.model."),
    "embedding": (
        arrays(lambda held: held.update({f"{EMBEDDED}.{part}": mx.zeros((320, 4)) for part in EMBEDDING_PARTS})),
        "adapter of model.embed_tokens is of a kind that mlx-lm has nothing for",
    ),
    "whole numbers": (arrays(lambda held: held.update({A: held[A].astype(mx.int32)})), "as I32, which is no float"),
    "another base": (with_array(f"{Q}.base_layer.weight", mx.zeros((32, 32))), f"trained on another {Q}.weight"),
    "bias": (with_array(f"{Q}.base_layer.bias", mx.zeros(32)), f"{Q}.bias was trained beside"),
    "whole module": (with_array("score.weight", mx.zeros(32)), "score.weight was trained as a whole"),
    "half of a tied pair": (with_array("model.embed_tokens.weight", mx.zeros((320, 32))), "both are one array"),
    "dora without magnitude": (settings(use_dora=True), "is not whole: its magnitude is missing"),
    "another kind": (settings(peft_type="LOHA"), "is LOHA; nearest here is LoRA"),
    "pissa": (settings(init_lora_weights="pissa"), "began with pissa, which changed the base's weights"),
    "parameters": (settings(target_parameters=["experts.gate_up_proj"]), "adapts parameters that are no layers"),
    "rank of text": (settings(r="4"), "has r 4"),
    "alpha that is no number": (settings(lora_alpha=float("nan")), "has lora_alpha nan"),
    "pattern without end": (settings(alpha_pattern={"(.|..|...)+(?<!.)": 2}), "cannot be used"),
    "pattern of a billion": (settings(rank_pattern={"a{1000000000}": 2}), "more than 1,000,000 characters long"),
    "broken pattern": (settings(rank_pattern={"(": 2}), "cannot be used"),
    "no config": (lambda folder: (folder / "adapter_config.json").unlink(), "There is no file"),
    "not peft's": (lambda folder: (folder / "adapter_config.json").write_text("{}"), "it has no peft_type"),
    "huge header": (
        lambda folder: (folder / ARRAYS).write_bytes(b"\xff" * 64),
        "was cut off, or is not a valid safetensors",
    ),
    "pickle": (lambda folder: (folder / ARRAYS).rename(folder / "adapter_model.bin"), "is a pickle, which can run"),
    "empty": (lambda folder: shutil.rmtree(folder) or folder.mkdir(), "is no adapter of peft"),
}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    layers = {Q: (HIDDEN, HIDDEN, 4), UP: (INNER, HIDDEN, 4)}
    return write_peft(tmp_path_factory.mktemp("adapter") / "peft", layers, base="../../no-such-folder")


@pytest.mark.parametrize("damage", HOSTILE)
def test_an_adapter_that_cannot_be_carried_is_refused(tmp_path: Path, base: Path, adapter: Path, damage: str) -> None:
    folder = Path(shutil.copytree(adapter, tmp_path / "peft"))
    change, says = HOSTILE[damage]
    change(folder)
    with pytest.raises(UserError, match=says) as caught:
        import_adapter(folder, str(base), tmp_path / "mlx")
    assert all(len(fault.sentence) <= 200 for fault in caught.value.faults)
    assert [path.name for path in tmp_path.iterdir()] == ["peft"]


def test_the_verb_imports_a_folder_and_a_run_starts_from_it(tmp_path: Path, base: Path, adapter: Path) -> None:
    folder = Path(shutil.copytree(adapter, tmp_path / "checkpoint-200"))
    done, imported = run_ok("import", folder, "--model", base), tmp_path / "checkpoint-200-mlx"
    assert done.stdout.strip() == str(imported) and "2 layers have adapters; the model's logits differ" in done.stderr
    assert "was trained on ../../no-such-folder; it is now for" in done.stderr
    raw = small_run.settings_for(tmp_path, **small_run.low_half(tmp_path), model=str(base))
    adapter_of = {"adapter": str(imported), "num_layers": 1, "lora_keys": ["self_attn.q_proj", "mlp.up_proj"]}
    assert not check(raw | adapter_of | {"rank": 4, "scale": 2.0})
    model = TrainedWeights(base, "", base, AdapterFiles.within(imported))
    logits: Any = model.open()(PROMPT)
    untrained: Any = TrainedWeights(base, "", base).open()(PROMPT)
    assert furthest(logits, untrained) > 0.01
    (fault,) = check(raw | {"adapter": str(folder / ARRAYS)})
    assert "is an adapter of peft; import it first" in fault.sentence and len(fault.sentence) <= 200
    again = ("import", folder, "--model", base)
    assert "is there already" in refused(*again)
    run_ok(*again, "--overwrite")
    assert "is no folder of an adapter" in refused(*again, "--output", tmp_path, "--overwrite") and folder.is_dir()
    said = refused("import", folder, "--output", tmp_path / "other")
    assert "is not on this disk; name one that is with --model" in said


def test_the_window_imports_beside_the_folder_and_again(tmp_path: Path, base: Path, adapter: Path) -> None:
    folder = Path(shutil.copytree(adapter, tmp_path / "lora"))
    told: list[str] = []
    call = QuestionCall(lambda progress: told.append(progress["sentence"]))
    for _ in range(2):
        answer = import_question(call, folder=str(folder), model=str(base))
    assert answer["path"] == str(tmp_path / "lora-mlx") and answer["sentences"][0].startswith("2 layers have adapters")
    assert told[-1] == "Loading it back and comparing."
    call.cancel()
    with pytest.raises(Cancelled):
        import_question(call, folder=str(folder), model=str(base))
