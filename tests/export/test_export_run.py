"""Export: the model computes what the trained one does, LM Studio finds it, and it is whole or not there."""

import errno
import gc
import json
import os
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.models.switch_layers import SwitchLinear
from safetensors.numpy import save

from backend.config import config as spec_config
from backend.export import export_run, trained_weights, verify
from backend.export.export_run import Export, ExportedModel, export_finished, run_weights
from backend.export.exports import FORMATS, Progress, exported_bytes, silent
from backend.runs.run_folder import RunFolder
from backend.utils.errors import UserError
from tests.support.cases import mistake
from tests.support.random_models import tiny_model
from tests.support.random_runs import PROMPT, furthest, logits_of, write_run

TrainedRun = Callable[..., tuple[RunFolder, mx.array]]


def export(run: RunFolder, to: str, name: str, progress: Progress = silent, **how: Any) -> ExportedModel:
    return export_run.export_run(run, Export(to, name, **how), progress)


def fuse_run(run: RunFolder) -> Path:
    return export(run, "folder", run.name, overwrite=True).path


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, mx.array]]:
    """Trained runs that tests copy, and their logits by name."""
    return tmp_path_factory.mktemp("templates"), {}


@pytest.fixture
def trained_run(tmp_path: Path, templates: tuple[Path, dict[str, mx.array]]) -> TrainedRun:
    """Makes a run in `tmp_path` as the trainer leaves it: (run, its model's logits [9, V])."""
    folder, logits = templates

    def make(**how: Any) -> tuple[RunFolder, mx.array]:
        name = "-".join([f"{key}={value}" for key, value in how.items()]) or "plain"
        if name not in logits:
            logits[name] = train(folder / name, **how)
        shutil.copytree(folder / name, tmp_path, dirs_exist_ok=True)
        run = RunFolder(tmp_path / "runs" / "first")
        settings = run.config.read_text(encoding="utf-8").replace(str(folder / name), str(tmp_path))
        run.config.write_text(settings, encoding="utf-8")
        return run, logits[name]

    return make


def train(
    folder: Path, *, arch: str = "qwen3", train_type: str = "lora", quantization: str = "none", **base: Any
) -> mx.array:
    """Write a base model and a run of it into `folder`, and return the trained model's logits."""
    model = tiny_model(folder / "base", arch, **{"layers": 1} | base)
    return write_run(folder / "runs" / "first", model, train_type, quantization)


ADAPTERS = save({"a": np.zeros(1, np.uint8)})


@pytest.fixture
def quick_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run whose export writes two small files in no time: for tests of the destination, not of the content."""
    run = RunFolder(tmp_path / "runs" / "first")
    for folder in (run.adapters, tmp_path / "base"):
        folder.mkdir(parents=True)
    (tmp_path / "base" / "config.json").write_text("{}", encoding="utf-8")
    (run.adapters / "adapters.safetensors").write_bytes(ADAPTERS)
    (run.adapters / "adapter_config.json").write_text('{"num_layers": 1, "lora_parameters": {}}')
    settings = spec_config.parse({"model": str(tmp_path / "base"), "data": "any.jsonl"})
    run.config.write_text(spec_config.dump(settings), encoding="utf-8")

    def write(
        trained: trained_weights.TrainedWeights, format_: object, original: object, to: Path, *_: object
    ) -> tuple:
        to.mkdir()
        (to / "config.json").write_text("new", encoding="utf-8")
        assert trained.adapters
        shutil.copyfile(trained.adapters.arrays, to / "model.safetensors")
        return (), None

    monkeypatch.setattr(export_run, "write_in_format", write)
    for name in ("load_tokenizer", "_tolerance"):
        monkeypatch.setattr(export_run, name, lambda *_: None)
    monkeypatch.setattr(verify, "make_reference", lambda *_: None)
    monkeypatch.setattr(verify, "verify_folder", lambda *_: verify.Verification(0.0, 0.0, 1.0, None))
    return run


def is_new(folder: Path) -> bool:
    return (folder / "config.json").read_text() == "new" and (folder / "model.safetensors").read_bytes() == ADAPTERS


def listing(folder: Path) -> set[str]:
    """Every path below `folder`, hidden ones included."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's home with an LM Studio that has been started once."""
    folder = tmp_path / "home"
    (folder / ".lmstudio" / "models").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(folder))
    return folder


@pytest.mark.parametrize(
    ("arch", "train_type"),
    [
        *(("qwen3", train_type) for train_type in ("lora", "dora", "full")),
        *((arch, "lora") for arch in ("gemma3_text", "qwen3_moe", "mamba")),
    ],
)
def test_fused_models_have_trained_logits(trained_run: TrainedRun, tmp_path: Path, arch: str, train_type: str) -> None:
    run, trained = trained_run(arch=arch, train_type=train_type, tie=arch != "qwen3", layers=2)
    fused = fuse_run(run)
    assert fused == run.fused
    assert furthest(logits_of(fused), trained) < 1e-4
    assert furthest(logits_of(tmp_path / "base"), trained) > 0.01  # or the line above shows nothing


@pytest.mark.parametrize("train_type", ["lora", "dora"])
def test_adapters_of_a_tied_embedding_are_merged(tmp_path: Path, train_type: str) -> None:
    base = tiny_model(tmp_path / "base", layers=1)
    trained = write_run(tmp_path / "run", base, train_type, lora_keys=["embed_tokens", "q_proj"])
    assert furthest(logits_of(fuse_run(RunFolder(tmp_path / "run"))), trained) < 1e-4


def stored(folder: Path) -> dict[str, mx.array]:
    return dict(mx.load(str(folder / "model.safetensors")))  # pyright: ignore


@pytest.mark.parametrize(("train_type", "bits"), [("lora", 4), ("dora", 8)])
def test_a_quantised_base_in_full_and_with_its_bits(
    trained_run: TrainedRun, tmp_path: Path, train_type: str, bits: int
) -> None:
    run, trained = trained_run(train_type=train_type, bits=bits)
    written = fuse_run(run)
    assert furthest(logits_of(written), trained) < 1e-4
    assert "quantization" not in (written / "config.json").read_text()
    assert not [name for name in stored(written) if name.endswith((".scales", ".biases"))]
    if bits == 8:
        return
    report = export(run, "folder", "mine", folder=tmp_path, format="fused")
    config = json.loads((report.path / "config.json").read_text())
    assert config["quantization"] == {"group_size": 32, "bits": 4, "mode": "affine"}
    before, after = stored(tmp_path / "base"), stored(report.path)
    assert before.keys() == after.keys() and {x.dtype for x in after.values()} == {mx.uint32, mx.float32}
    same = {name for name in before if name.endswith("weight") and mx.array_equal(before[name], after[name])}
    assert "model.embed_tokens.weight" in same and "model.layers.0.mlp.up_proj.weight" not in same
    assert report.verification.lost is not None and report.verification.lost > 0.01
    assert any("of what training did" in each for each in report.sentences()) == (report.verification.lost > 0.1)


@pytest.mark.parametrize(
    ("format_", "quantization", "types"),
    [
        *((f"{n}bit", {"group_size": 64, "bits": n, "mode": "affine"}, {mx.uint32, mx.bfloat16}) for n in (4, 6, 8)),
        ("mxfp4", {"group_size": 32, "bits": 4, "mode": "mxfp4"}, {mx.uint32, mx.uint8, mx.bfloat16}),
        ("fp16", None, {mx.float16}),
        *((name, None, {mx.bfloat16}) for name in ("bf16", "fused", "full")),
    ],
)
def test_every_format_is_what_it_says_and_about_as_large(
    trained_run: TrainedRun, tmp_path: Path, format_: str, quantization: dict[str, Any] | None, types: set[mx.Dtype]
) -> None:
    run, _ = trained_run(hidden=64, dtype="bfloat16")
    report = export(run, "folder", "mine", folder=tmp_path, format=format_)
    assert json.loads((report.path / "config.json").read_text()).get("quantization") == quantization
    arrays = stored(report.path)
    assert {array.dtype for array in arrays.values()} == types
    size = sum(array.nbytes for array in arrays.values())
    guess = exported_bytes(tmp_path / "base", FORMATS[format_])
    assert guess is not None and abs(guess - size) < 0.03 * size
    assert mlx_lm.load(str(report.path))[0](PROMPT).shape == (1, 9, 320)  # pyright: ignore
    lost = report.verification.lost
    # A random model of 64 columns has little to lose; 4 bits lose much of it, 8 bits little.
    assert lost is not None and (lost > 0.1) == (format_ in ("4bit", "mxfp4"))


def test_without_a_layer_to_quantise_four_bits_are_refused(trained_run: TrainedRun, tmp_path: Path) -> None:
    run, _ = trained_run(hidden=48)
    with pytest.raises(UserError, match="none is a multiple of 64 wide; choose another format"):
        export(run, "folder", "mine", folder=tmp_path, format="4bit")


def test_experts_that_come_packed(tmp_path: Path) -> None:
    """As those of gpt-oss."""
    base = tiny_model(tmp_path / "base", "qwen3_moe", layers=1)
    model = mlx_lm.load(str(base))[0]
    nn.quantize(model, 32, 4, mode="mxfp4", class_predicate=lambda _, layer: isinstance(layer, SwitchLinear))
    mx.save_safetensors(str(base / "model.safetensors"), dict(tree_flatten(model.parameters())))
    config = json.loads((base / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (base / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="this model is quantised; choose LoRA"):
        write_run(tmp_path / "full", base, "full")
    trained = write_run(tmp_path / "run", base)
    run = RunFolder(tmp_path / "run")
    assert furthest(logits_of(fuse_run(run)), trained) < 1e-4
    report = export(run, "folder", "mine", folder=tmp_path, format="fused")  # rounded to 4 bits again
    assert report.verification.max_error > 0.1


def test_the_adapter_alone_is_what_mlx_lm_loads_and_names_its_base(trained_run: TrainedRun, tmp_path: Path) -> None:
    run, trained = trained_run(train_type="dora")
    report = export(run, "folder", "mine", folder=tmp_path, format="adapter")
    assert listing(report.path) == {"adapters.safetensors", "adapter_config.json", "README.md"}
    model = mlx_lm.load(str(tmp_path / "base"), adapter_path=str(report.path))[0]
    assert furthest(model(PROMPT)[0], trained) < 1e-4  # pyright: ignore
    assert report.verification.max_error == 0 and "exactly" in report.sentences()[0]
    assert f"DoRA adapters for the model {tmp_path / 'base'}," in (report.path / "README.md").read_text()


def test_whole_modules_are_no_part_of_an_adapter_that_mlx_lm_loads(tmp_path: Path) -> None:
    write_run(tmp_path / "run", tiny_model(tmp_path / "base"), "lora", modules_to_save=["model.norm"])
    sentence = "model.norm is trained in full, which mlx-lm does not load with an adapter; export full or peft."
    with pytest.raises(UserError, match=f"^format: {sentence}$"):
        export(RunFolder(tmp_path / "run"), "folder", "mine", folder=tmp_path, format="adapter")


def add_checkpoint(run: RunFolder, step: int, score: float | None, factor: float, train_type: str) -> None:
    """A checkpoint whose trained arrays are the run's end times `factor`."""
    folder = run.checkpoints / f"{step:06d}"
    folder.mkdir(parents=True)
    name = "model" if train_type == "full" else "adapters"
    end = (run.model if train_type == "full" else run.adapters) / f"{name}.safetensors"
    arrays = {name: factor * array.astype(mx.float32) for name, array in mx.load(str(end)).items()}  # pyright: ignore
    mx.save_safetensors(str(folder / f"{name}.safetensors"), arrays, metadata={"format": "mlx"})
    mx.save_safetensors(str(folder / "optimizer.safetensors"), {"step": mx.array(step)})
    state = {"step": step, "updates": step, "cursor": step, "score": score}
    (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")


@pytest.mark.parametrize("train_type", ["lora", "full"])
def test_any_checkpoint_can_be_exported(trained_run: TrainedRun, tmp_path: Path, train_type: str) -> None:
    run, trained = trained_run(train_type=train_type, dtype="bfloat16")
    for step, score, factor in ((10, 0.5, 1.0), (20, 0.9, 0.0), (30, 0.9, 0.5)):
        add_checkpoint(run, step, score, factor, train_type)
    untrained = logits_of(tmp_path / "base")
    first = export(run, "folder", "first", folder=tmp_path, checkpoint="10").path
    assert furthest(logits_of(first), trained) < 0.2 * furthest(trained, untrained)
    assert stored(first)["model.norm.weight"].dtype == mx.bfloat16, "in the type that the base came in"
    best, last, twenty = (run_weights(run, spec_config.load(run.config), which) for which in ("best", "last", "0020"))
    assert best == twenty and best.base == last.base == tmp_path / "base"
    arrays = [weights.arrays or (weights.adapters and weights.adapters.arrays) for weights in (best, last)]
    assert [path and path.parent.name for path in arrays] == ["000020", "000030"]
    with pytest.raises(UserError, match="has no checkpoint 11; there are 10, 20, 30, best and last"):
        export(run, "folder", "x", folder=tmp_path, checkpoint="11")


def test_the_figures_are_those_of_the_models_as_wholes(trained_run: TrainedRun, tmp_path: Path) -> None:
    """max |Δ logit|, mean |Δ log p| of the answers' tokens, and the share lost, computed once more in another way."""
    run, _ = trained_run(hidden=64)
    rows = [("One?", "Uno."), ("Two, as a longer prompt?", "Dos, which is more.")]
    lines = [json.dumps({"step": 1, "prompt": prompt, "completions": [{"text": text}]}) for prompt, text in rows]
    run.completions.write_text("\n".join(lines), encoding="utf-8")
    report = export(run, "folder", "mine", folder=tmp_path, format="4bit")
    trained = mlx_lm.load(str(tmp_path / "base"), adapter_path=str(run.adapters))
    base, written, tokenizer = mlx_lm.load(str(tmp_path / "base"))[0], mlx_lm.load(str(report.path))[0], trained[1]
    errors, effects, nats = [], [], []
    for prompt, text in rows:
        answer = tokenizer.encode(text, add_special_tokens=False)
        ids = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True) + answer
        tokens = mx.array(ids)[None]
        models: Any = (trained[0], written, base)
        expected, actual, untrained = (model(tokens)[0, -len(answer) - 1 : -1] for model in models)
        logp = [x - mx.logsumexp(x, axis=-1, keepdims=True) for x in (expected, actual)]
        nats += [abs((logp[1] - logp[0])[i, token].item()) for i, token in enumerate(answer)]
        centred = [x - mx.mean(x, axis=-1, keepdims=True) for x in (expected, actual, untrained)]
        errors.append(centred[1] - centred[0])
        effects.append(centred[0] - centred[2])
    error, effect = mx.concatenate(errors), mx.concatenate(effects)
    found = report.verification
    assert found.max_error == pytest.approx(mx.abs(error).max().item(), rel=1e-3)
    assert found.nats == pytest.approx(sum(nats) / len(nats), rel=1e-3) and found.nats > 1e-3
    assert found.lost == pytest.approx((mx.square(error).mean() / mx.square(effect).mean()).item() ** 0.5, rel=1e-3)


def header(file: Path) -> dict:
    """Read by hand: 8 bytes of length, then JSON."""
    raw = file.read_bytes()
    return json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])


def test_the_folder_holds_a_model_and_nothing_else(trained_run: TrainedRun, tmp_path: Path) -> None:
    run, _ = trained_run()
    base = tmp_path / "base"
    (base / "chat_template.jinja").write_text("{{ messages[0].content }}", encoding="utf-8")
    for stray in ("._config.json", ".DS_Store", "adapters.safetensors", "notes.txt", "run_me.py"):
        (base / stray).write_bytes(b"x")
    written = fuse_run(run)
    kept = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"}
    assert listing(written) == kept | {"config.json", "model.safetensors"}
    # transformers 5 saves a class that LM Studio's transformers does not know: the tokenizer's files are copied.
    assert all((written / name).read_bytes() == (base / name).read_bytes() for name in kept)
    assert header(written / "model.safetensors")["__metadata__"] == {"format": "mlx"}


def test_large_models_get_shards(trained_run: TrainedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def by_tens(weights: dict) -> list[dict]:
        names = list(weights)
        return [{name: weights[name] for name in names[at : at + 10]} for at in range(0, len(names), 10)]

    run, trained = trained_run()
    monkeypatch.setattr(mlx_lm_utils, "make_shards", by_tens)
    written = fuse_run(run)
    shards = sorted(written.glob("*.safetensors"))
    assert len(shards) > 1 and all(header(shard)["__metadata__"] == {"format": "mlx"} for shard in shards)
    index = json.loads((written / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(index.values()) == {shard.name for shard in shards}
    assert furthest(logits_of(written), trained) < 1e-4


def test_the_model_is_never_in_memory_as_a_whole(trained_run: TrainedRun, tmp_path: Path) -> None:
    run, _ = trained_run(hidden=256, layers=8)
    size = (tmp_path / "base" / "model.safetensors").stat().st_size
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    fuse_run(run)
    assert mx.get_peak_memory() - before < 0.5 * size


def test_verification_refuses_a_wrong_tensor(trained_run: TrainedRun, tmp_path: Path) -> None:
    run, _ = trained_run()
    trained, out = run_weights(run, spec_config.load(run.config)), tmp_path / "out"
    tokenizer = trained_weights.load_tokenizer(trained.tokenizer)
    reference = verify.make_reference(trained, tokenizer, verify.SAMPLES, 1e-3)
    export_run.write_in_format(trained, FORMATS["full"], None, out, silent)
    weights = stored(out) | {"model.layers.0.mlp.down_proj.weight": mx.zeros((32, 64))}
    mx.save_safetensors(str(out / "model.safetensors"), weights, metadata={"format": "mlx"})
    with pytest.raises(RuntimeError, match="does not answer like the run's"):
        verify.verify_folder(out, tokenizer, reference, lambda: trained_weights.open_model(out)[0])


def test_a_shift_of_all_logits_is_no_difference(tmp_path: Path) -> None:
    """Where embeddings share a direction, rounding shifts all logits of a token, by more than their spread."""

    class Fixed(nn.Module):
        def __init__(self, logits_BLV: mx.array) -> None:
            super().__init__()
            self.logits_BLV = logits_BLV

        def __call__(self, tokens_BL: mx.array) -> mx.array:
            return self.logits_BLV

    logits_BLV = mx.random.normal((2, 8, 32), key=mx.random.key(0))
    shift_BL1, noise_BLV = (mx.random.normal((2, 8, size), key=mx.random.key(1)) for size in (1, 32))
    tokens = [([*range(8)], 4)] * 2
    reference = verify.Reference(
        [], tokens, list(verify.answer_logits(lambda: Fixed(logits_BLV), tokens)), None, tolerance=0.1
    )
    assert verify.compare(tmp_path, reference, lambda: Fixed(logits_BLV + 5 * shift_BL1)).max_error < 1e-5
    with pytest.raises(RuntimeError, match="does not answer like the run's"):
        verify.compare(tmp_path, reference, lambda: Fixed(logits_BLV + noise_BLV))


def test_a_finished_run_warns_that_rounding_removed_training(
    quick_run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[dict[str, Any]] = []
    log = SimpleNamespace(write=lambda kind, **fields: found.append(fields))
    for lost in (0.05, 0.4):
        verification = verify.Verification(1.0, 0.1, 1.0, lost)
        monkeypatch.setattr(verify, "verify_folder", lambda *_, verification=verification: verification)
        export_finished(spec_config.load(quick_run.config), quick_run, cast("Any", log))
    assert [note["sentence"] for note in found] == [
        "The model is in fused/. Rounding has moved its logits by 40% of what training did; more bits keep more."
    ]


@pytest.mark.parametrize("has_setting", [False, True])
def test_a_missing_lm_studio_is_not_made(quick_run: RunFolder, tmp_path: Path, home: Path, has_setting: bool) -> None:
    """Neither a home of LM Studio's, nor the mount point of a disk that is not attached."""
    run = quick_run
    models = home / ".lmstudio" / "models"
    shutil.rmtree(home / ".lmstudio")
    if has_setting:
        models = tmp_path / "unplugged" / "models"
        (home / ".lmstudio").mkdir()
        (home / ".lmstudio" / "settings.json").write_text(json.dumps({"downloadsFolder": str(models)}))
    setting, sentence = mistake(export, run, "lmstudio", "mine")
    assert setting == "lm_studio" and sentence.startswith("LM Studio was not found")
    assert f"/{models.parent.name}/models;" in sentence
    assert not models.parent.exists()


@pytest.fixture
def taken(home: Path) -> Path:
    """A model of that name that is in LM Studio's folder already."""
    existing = home / ".lmstudio" / "models" / "grpo-studio" / "mine"
    existing.mkdir(parents=True)
    (existing / "config.json").write_text("older", encoding="utf-8")
    return existing


def test_an_existing_model_is_replaced_only_with_overwrite(quick_run: RunFolder, home: Path, taken: Path) -> None:
    (taken / "old-shard.safetensors").write_bytes(b"x")
    before = listing(home)
    assert mistake(export, quick_run, "lmstudio", "mine")[0] == "overwrite"
    assert listing(home) == before and (taken / "config.json").read_text() == "older"
    assert export(quick_run, "lmstudio", " mine ", overwrite=True).path == taken
    assert is_new(taken) and not (taken / "old-shard.safetensors").exists()
    # Nothing but the model is new: no temporary folder, none of LM Studio's own files.
    assert {name for name in listing(home) - before if "/models/grpo-studio/mine" not in name} == set()


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("moment", ["before the last rename", "in the last rename"])
def test_a_crash_leaves_everything_as_it_was(
    quick_run: RunFolder, tmp_path: Path, home: Path, monkeypatch: Any, request: Any, overwrite: bool, moment: str
) -> None:
    if overwrite:
        request.getfixturevalue("taken")
    before, rename = listing(tmp_path), Path.rename

    def crash(folder: Path, *_: object) -> None:
        assert (folder / "model.safetensors").exists() and not folder.is_relative_to(home / ".lmstudio" / "models")
        raise KeyboardInterrupt

    def broken(self: Path, target: Path) -> Path:
        if self.name == ".mine":
            raise OSError("the disk went away")
        return rename(self, target)

    if moment.startswith("before"):
        monkeypatch.setattr(verify, "verify_folder", crash)
    else:
        monkeypatch.setattr(Path, "rename", broken)
    with pytest.raises((KeyboardInterrupt, UserError), match=r"went away|^$"):
        export(quick_run, "lmstudio", "mine", overwrite=overwrite)
    left = listing(tmp_path)
    assert before <= left and all(path.endswith("models/grpo-studio") for path in left - before)


def test_a_folder_on_another_disk(quick_run: RunFolder, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch):
    run = quick_run
    models, rename = home / ".lmstudio" / "models", os.rename

    def within_a_disk(old: Any, new: Any) -> None:
        if Path(old).is_relative_to(models) != Path(new).is_relative_to(models):
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        rename(old, new)

    monkeypatch.setattr(os, "rename", within_a_disk)
    report = export(run, "lmstudio", "mine")
    assert is_new(report.path)
    assert not [name for name in listing(tmp_path) if ".grpo-studio" in name]


def test_what_does_not_fit_is_refused_and_nothing_is_left(
    trained_run: TrainedRun, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers beyond float16, and a disk without room."""
    run, _ = trained_run(dtype="bfloat16")
    weights = stored(tmp_path / "base")
    weights["model.layers.0.mlp.up_proj.weight"] *= 1e7
    mx.save_safetensors(str(tmp_path / "base" / "model.safetensors"), weights, metadata={"format": "mlx"})
    before = listing(tmp_path)
    with pytest.raises(UserError, match=r"range of float16.*bf16"):
        export(run, "folder", "mine", folder=tmp_path / "out", format="fp16")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: namedtuple("usage", "free")(1000))
    monkeypatch.setattr(export_run, "load_tokenizer", lambda *_: pytest.fail("loaded all the same"))
    with pytest.raises(UserError, match=r"needs [0-9.]+ MB on the disk of .*, which has 1 kB free"):
        export(run, "lmstudio", "mine")
    assert listing(tmp_path) == before


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("adapters.safetensors", b"", "adapters.safetensors was cut off"),
        ("adapter_config.json", b"{", "adapter_config.json is broken"),
    ],
)
def test_damaged_adapters_are_one_message(
    quick_run: RunFolder, tmp_path: Path, file: str, content: bytes, says: str
) -> None:
    (quick_run.adapters / file).write_bytes(content)
    with pytest.raises(UserError, match=says):
        export_run.run_weights(quick_run, spec_config.load(quick_run.config))
