"""Exports under the original names: peft's adapters, and the original weights merged. Without torch: numbers against
mlx-lm's own model.

test_export_transformers.py loads them with transformers and peft.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from backend.config import config as spec_config
from backend.export.export_run import Export, ExportedModel, HeldOutComparison, export_run
from backend.export.originals import find_original
from backend.models import policy
from backend.runs.run_folder import RunFolder
from backend.runs.steering import run_config
from backend.trainer.run_inputs import read_inputs
from backend.utils.errors import UserError
from tests.support import small_run
from tests.support.adapters import save_adapters
from tests.support.random_models import START, tiny_model
from tests.support.random_runs import furthest, logits_of, write_run
from tests.support.verbs import refused, run_ok


def export(run: RunFolder, format_: str, **how: Any) -> ExportedModel:
    return export_run(run, Export("folder", "mine", run.path.parent, format_, **how))


def stored(file: Path) -> dict[str, mx.array]:
    return dict(mx.load(str(file)))  # pyright: ignore


def as_published(folder: Path) -> Path:
    """A mixtral of ours as Hugging Face has it: every expert a tensor of its own, in two files with an index."""
    arrays, published = stored(folder / "model.safetensors"), dict[str, mx.array]()
    letters = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    for name, array in arrays.items():
        before, is_experts, kind = name.partition("switch_mlp.")
        for expert, own in enumerate(array) if is_experts else ():
            published[f"{before}experts.{expert}.{letters[kind.removesuffix('.weight')]}.weight"] = own
        if not is_experts:
            published[name] = array
    (folder / "model.safetensors").unlink()
    index: dict[str, str] = {}
    for number in (1, 2):
        file = f"model-0000{number}-of-00002.safetensors"
        part = {name: array for at, (name, array) in enumerate(published.items()) if at % 2 == number - 1}
        mx.save_safetensors(str(folder / file), part, metadata={"format": "pt"})
        index |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


@pytest.mark.parametrize(("arch", "train_type"), [("llama", "dora"), ("gemma3_text", "full"), ("phi3", "lora")])
def test_merged_weights_have_the_trained_logits_and_their_layout(tmp_path: Path, arch: str, train_type: str) -> None:
    base = tiny_model(tmp_path / "base", arch)
    trained = write_run(tmp_path / "run", base, train_type)
    path = export(RunFolder(tmp_path / "run"), "original").path
    assert furthest(logits_of(path), trained) < 1e-4 and furthest(logits_of(base), trained) > 0.01
    before, after = stored(base / "model.safetensors"), stored(path / "model.safetensors")
    assert {name: (x.shape, x.dtype) for name, x in before.items()} == {
        name: (x.shape, x.dtype) for name, x in after.items()
    }
    assert (path / "config.json").read_bytes() == (base / "config.json").read_bytes()


@pytest.mark.parametrize("train_type", ["lora", "full"])
def test_a_tokenizer_of_the_runs_own_goes_along(tmp_path: Path, train_type: str) -> None:
    base, own = (tiny_model(tmp_path / name, "qwen3") for name in ("base", "own"))
    settings = json.loads((own / "tokenizer_config.json").read_text())
    template = settings["chat_template"].replace("assistant", "model")
    (own / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template, "eos_token": START}))
    (own / "generation_config.json").unlink()
    write_run(tmp_path / "run", base, train_type, tokenizer=str(own))
    path = export(RunFolder(tmp_path / "run"), "original").path
    assert json.loads((path / "tokenizer_config.json").read_text())["chat_template"] == template
    assert json.loads((path / "config.json").read_text())["eos_token_id"] == [2]
    path = export(RunFolder(tmp_path / "run"), "gguf-f16", overwrite=True).path
    assert f'PARAMETER stop """{START}"""' in (path / "Modelfile").read_text()


def test_experts_are_merged_into_their_own_tensors_in_their_own_files(tmp_path: Path) -> None:
    """mlx-lm stacks the experts; transformers and llama.cpp read them one by one."""
    base = as_published(tiny_model(tmp_path / "base", "mixtral"))
    trained = write_run(tmp_path / "run", base)
    path = export(RunFolder(tmp_path / "run"), "original").path
    assert furthest(logits_of(path), trained) < 1e-4
    for file in sorted(base.glob("*.safetensors*")):
        if file.suffix == ".json":
            assert (path / file.name).read_text() == file.read_text()
        else:
            assert list(stored(path / file.name)) == list(stored(file))
    expert = "model.layers.1.block_sparse_moe.experts.2.w1.weight"
    file = json.loads((base / "model.safetensors.index.json").read_text())["weight_map"][expert]
    assert furthest(stored(path / file)[expert], stored(base / file)[expert]) > 0.01


@pytest.mark.parametrize(
    ("train_type", "settings", "scale"),
    [("lora", {}, 4.0), ("dora", {}, 4.0), ("lora", {"lora_alpha": 16, "use_rslora": True}, 8.0)],
    ids=["lora", "dora", "rslora"],
)
def test_a_peft_adapter_is_the_merge(tmp_path: Path, train_type: str, settings: dict[str, Any], scale: float) -> None:
    """base + scale B A in numpy, DoRA at its magnitude, by the names in the files, is what was merged."""
    base = tiny_model(tmp_path / "base", "llama")
    write_run(tmp_path / "run", base, train_type, num_layers=1, **settings)
    run = RunFolder(tmp_path / "run")
    path = export(run, "peft").path
    config = json.loads((path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["use_dora"]) == (4, 16, train_type == "dora")
    assert config["base_model_name_or_path"] == str(base) and config["use_rslora"] == bool(settings)
    adapter = {name: np.array(x) for name, x in stored(path / "adapter_model.safetensors").items()}
    before = stored(base / "model.safetensors")
    shutil.rmtree(path)
    merged = stored(export(run, "original").path / "model.safetensors")
    layers = {name.removesuffix(".weight") for name in before if furthest(before[name], merged[name])}
    assert layers == set(config["target_modules"]) and all("layers.1." in name for name in layers) and len(layers) == 7
    arrays = 2 + config["use_dora"]
    assert len(adapter) == arrays * len(layers)
    for layer in layers:
        a, b = (adapter[f"base_model.model.{layer}.lora_{letter}.weight"] for letter in "AB")
        weight = np.array(before[f"{layer}.weight"])
        assert a.shape == (4, weight.shape[1]) and b.shape == (weight.shape[0], 4)
        weight = weight + scale * b @ a
        if train_type == "dora":
            magnitude = adapter[f"base_model.model.{layer}.lora_magnitude_vector"]
            weight *= (magnitude / np.linalg.norm(weight, axis=1))[:, None]
        assert np.abs(weight - np.array(merged[f"{layer}.weight"])).max() < 1e-5


def test_what_peft_has_no_adapter_for_is_refused(tmp_path: Path) -> None:
    base = as_published(tiny_model(tmp_path / "base", "mixtral", layers=1))
    write_run(tmp_path / "experts", base, lora_keys=["block_sparse_moe.switch_mlp.up_proj"])
    with pytest.raises(UserError, match="no plain linear layer"):
        export(RunFolder(tmp_path / "experts"), "peft")
    write_run(tmp_path / "router", base, lora_keys=["block_sparse_moe.gate"])
    with pytest.raises(UserError, match=r"no linear layer model\.layers\.0\.block_sparse_moe\.gate"):
        export(RunFolder(tmp_path / "router"), "peft")
    mamba = as_published(tiny_model(tmp_path / "mamba", "mamba", layers=1))
    write_run(tmp_path / "mixer", mamba, lora_keys=["mixer.in_proj", "mixer.out_proj"])
    with pytest.raises(UserError, match="peft refuses adapters of Mamba's "):
        export(RunFolder(tmp_path / "mixer"), "peft")
    assert not (tmp_path / "mine").exists()
    write_run(tmp_path / "attention", base, lora_keys=["self_attn.q_proj"])
    assert export(RunFolder(tmp_path / "attention"), "peft").verification.max_error < 1e-4


def hub_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The place of owner/original in a cache of its own."""
    monkeypatch.setenv("HF_HUB_CACHE", str(folder / "hub"))
    return folder / "hub" / "models--owner--original" / "snapshots" / "abc"


def test_a_quantised_bases_adapters_go_to_its_original(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = tiny_model(hub_model(tmp_path, monkeypatch), "llama", layers=1)
    base = tiny_model(tmp_path / "base", "llama", layers=1, bits=4)
    write_run(tmp_path / "run", base)
    run = RunFolder(tmp_path / "run")
    with pytest.raises(UserError, match="names no base_model"):
        export(run, "original")
    (base / "README.md").write_text("---\nlibrary_name: mlx\nbase_model: owner/original\n---\n")
    report = export(run, "original")
    assert report.verification.max_error < 1e-4
    assert "original ones of owner/original" in report.sentences()[-1]
    before, after = stored(original / "model.safetensors"), stored(report.path / "model.safetensors")
    assert before.keys() == after.keys()
    assert furthest(before["model.embed_tokens.weight"], after["model.embed_tokens.weight"]) == 0
    name = "model.layers.0.self_attn.q_proj.weight"
    lora = stored(run.adapters / "adapters.safetensors")
    a, b = (lora[f"model.layers.0.self_attn.q_proj.lora_{letter}"] for letter in "ab")
    assert furthest(after[name], before[name] + 4 * (a @ b).T) < 1e-6
    shutil.rmtree(report.path)
    config = json.loads((export(run, "peft").path / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "owner/original"


def test_the_original_may_be_three_cards_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = hub_model(tmp_path, monkeypatch).parents[2]
    for name, source in {"four": "three", "three": "two", "two": "one", "one": "original", "original": ""}.items():
        folder = tiny_model(cache / f"models--owner--{name}" / "snapshots" / "abc", "llama", layers=1)
        if source:
            (folder / "README.md").write_text(f"---\nlibrary_name: mlx\nbase_model: owner/{source}\n---\n")
    base = {name: cache / f"models--owner--{name}" / "snapshots" / "abc" for name in ("three", "four")}
    assert find_original(base["three"], "owner/three").name == "owner/original"
    with pytest.raises(UserError, match="lead to no original weights"):
        find_original(base["four"], "owner/four")


def test_a_missing_original_is_named_and_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = hub_model(tmp_path, monkeypatch)
    base = tiny_model(tmp_path / "base", "llama", layers=1, bits=4)
    (base / "README.md").write_text("---\nbase_model: [owner/original]\n---\n")
    write_run(tmp_path / "run", base)
    with pytest.raises(UserError, match=r"those of owner/original, which is not on this disk; .* --fetch"):
        export(RunFolder(tmp_path / "run"), "original")
    fetched: list[str] = []

    def download(name: str, kind: str, listener: Any) -> Path:
        fetched.append(name)
        listener.report({"done": 1, "total": 2, "phase": "downloading"})
        return tiny_model(place, "llama", layers=1)

    monkeypatch.setattr("backend.models.hub.download", download)
    assert export(RunFolder(tmp_path / "run"), "original", fetch=True).verification.max_error < 1e-4
    assert fetched == ["owner/original"]


def test_a_card_that_was_not_downloaded_is_named_and_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = hub_model(tmp_path, monkeypatch)
    packed = tiny_model(original.parents[2] / "models--owner--packed" / "snapshots" / "abc", "llama", layers=1, bits=4)
    tiny_model(original, "llama", layers=1)
    write_run(tmp_path / "run", packed)
    file = RunFolder(tmp_path / "run").config
    file.write_text(file.read_text().replace(str(packed), "owner/packed"))
    with pytest.raises(UserError, match=r"card of owner/packed, .* not on this disk; run `hf download owner/packed"):
        export(RunFolder(tmp_path / "run"), "original")

    def download(name: str, kind: str, listener: Any) -> Path:
        assert name == "owner/packed"
        (packed / "README.md").write_text("---\nbase_model: owner/original\n---\n")
        return packed

    monkeypatch.setattr("backend.models.hub.download", download)
    assert export(RunFolder(tmp_path / "run"), "original", fetch=True).original == "owner/original"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run with random adapters, a reward that varies, and a test split of twelve prompts."""
    folder = tmp_path_factory.mktemp("held-out")
    rows = folder / "data"
    for split in ("train", "test"):
        small_run.write_rows(rows / f"{split}.jsonl", 12)
    raw = small_run.settings_for(folder, data=str(rows), scale=4.0) | small_run.low_half(folder)
    made = RunFolder(folder / "runs" / "first")
    made.path.mkdir(parents=True)
    config = spec_config.parse(raw)
    made.config.write_text(spec_config.dump(config), encoding="utf-8")
    trained = policy.load_policy(config)
    mx.random.seed(3)
    trained.assign({name: x + 0.2 * mx.random.normal(x.shape) for name, x in trained.trainable().items()})
    save_adapters(trained, config, made.adapters)
    return made


def exported(run: RunFolder, folder: Path, **how: Any) -> ExportedModel:
    return export_run(run, Export("folder", "mine", folder, **how))


def test_a_model_in_full_precision_earns_the_very_same_rewards_and_one_that_lost_much_others(
    run: RunFolder, tmp_path: Path
) -> None:
    report = exported(run, tmp_path, held_out=10)
    found = report.held_out
    assert found and (found.split, found.prompts) == ("test", 10)
    assert found.trained == found.exported and found.error == 0 and 0 < found.trained < 1
    assert report.sentences()[-1].startswith("On 10 prompts of the test split its reward is 0.")
    assert report.sentences()[-1].endswith(": a difference of 0.")
    found = exported(run, tmp_path, held_out=99, format="mxfp4", overwrite=True).held_out
    assert found and found.prompts == 12 and found.error and found.difference == found.exported - found.trained
    assert found.exported != found.trained


def test_without_held_out_prompts_it_is_refused_before_anything_is_written(run: RunFolder, tmp_path: Path) -> None:
    text = run.config.read_text(encoding="utf-8")
    lonely = RunFolder(tmp_path / "lonely")
    lonely.path.mkdir()
    shutil.copytree(run.adapters, lonely.adapters)
    rows = small_run.write_rows(tmp_path / "rows.jsonl")
    lonely.config.write_text(text.replace(str(run.path.parents[1] / "data"), str(rows)), encoding="utf-8")
    with pytest.raises(UserError, match="no valid or test split") as caught:
        exported(lonely, tmp_path / "out", held_out=4)
    assert caught.value.faults[0].setting == "held_out" and not (tmp_path / "out").exists()
    imitating = run_config(run).model_copy(
        update={"train_mode": "sft", "reward_functions": [], "completion_feature": "answer"}
    )
    with pytest.raises(UserError, match="no reward functions"):
        HeldOutComparison(imitating, read_inputs(imitating), 4)


def test_the_verb_prints_progress_and_figures_as_json(run: RunFolder, tmp_path: Path) -> None:
    arguments = f"export {run.path} --to folder --folder {tmp_path} --quantize 4 --held-out 2 --allow-code".split()
    done = run_ok(*arguments, "--name", "mine", "--json")
    *progress, result = [json.loads(line) for line in done.stdout.splitlines()]
    assert {line["progress"] for line in progress} >= {"Merging the adapters and writing the model."}
    assert {line["done"] for line in progress} >= {None, 0.0, 1.0}
    assert (
        result["path"] == str(tmp_path / "mine") and result["format"] == "4bit" and result["held_out"]["prompts"] == 2
    )
    assert len(result["sentences"]) >= 2 and result["nats"] > 0
    plain = run_ok(*arguments, "--name", "other", "--checkpoint", "")
    assert plain.stdout.splitlines()[-1] == str(tmp_path / "other")
    assert "contradict each other" in refused(*arguments, "--format", "8bit")
