"""Export: the written model computes what the trained one does, LM Studio finds it, and it is written completely or not at all."""

from __future__ import annotations

import fcntl
import gc
import json
import os
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx.utils import tree_flatten
from mlx_lm import utils as mlx_lm_utils

from backend.models import atomic_folder, export, policy, verify
from backend.spec import config as spec_config
from backend.spec.faults import Mistake
from backend.spec.places import RunFolder
from tests.support.adapters import save_adapters
from tests.support.random_models import tiny_model

PROMPT = mx.array([[2, 40, 41, 42, 100, 200, 7, 300, 5]])


TrainedRun = Callable[..., tuple[RunFolder, mx.array]]


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, mx.array]]:
    """Trained runs that tests copy, and their logits by name."""
    return tmp_path_factory.mktemp("templates"), {}


@pytest.fixture
def trained_run(tmp_path: Path, templates: tuple[Path, dict[str, mx.array]]) -> TrainedRun:
    """Makes a run in `tmp_path` as the trainer leaves it, with random trained weights: (run, its model's logits [9, V])."""
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
    model = tiny_model(folder / "base", arch, **base)
    run = RunFolder(folder / "runs" / "first")
    run.path.mkdir(parents=True)
    settings = {"model": str(model), "data": "any.jsonl", "train_type": train_type, "quantization": quantization}
    config = spec_config.parse(settings | {"num_layers": -1, "rank": 4, "scale": 4.0, "dropout": 0.1})
    run.config.write_text(spec_config.dump(config), encoding="utf-8")
    trained = policy.load_policy(config)
    mx.random.seed(7)
    trained.assign({name: x + 0.1 * mx.random.normal(x.shape) for name, x in trained.trainable().items()})
    if train_type == "full":
        policy.save_model(trained, config.model, run.model)
    else:
        save_adapters(trained, config, run.adapters)
    trained.model.eval()
    logits: Any = trained.model(PROMPT)
    mx.eval(logits)
    return logits[0]


@pytest.fixture
def quick_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run whose export writes two small files in no time: for tests of the destination, not of the content."""
    run = RunFolder(tmp_path / "runs" / "first")
    run.adapters.mkdir(parents=True)
    for name in ("adapters.safetensors", "adapter_config.json"):
        (run.adapters / name).write_bytes(b"adapters")
    run.config.write_text(spec_config.dump(spec_config.parse({"model": "a/b", "data": "any.jsonl"})), encoding="utf-8")

    def fuse(model: str, adapters: Path, to: Path, **how: Any) -> None:
        to.mkdir()
        (to / "config.json").write_text("new", encoding="utf-8")
        shutil.copyfile(adapters / "adapters.safetensors", to / "model.safetensors")

    monkeypatch.setattr(export, "fuse", fuse)
    monkeypatch.setattr(export, "verify", lambda folder, reference: verify.Verification(0.0, 1.0, None))
    return run


def is_new(folder: Path) -> bool:
    return (folder / "config.json").read_text() == "new" and (folder / "model.safetensors").read_bytes() == b"adapters"


def logits_of(folder: Path) -> mx.array:
    model = mlx_lm.load(str(folder))[0]
    return model(PROMPT)[0]  # pyright: ignore


def furthest(a: mx.array, b: mx.array) -> float:
    return mx.abs(a.astype(mx.float32) - b.astype(mx.float32)).max().item()  # pyright: ignore


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


# ── the written model computes what the trained one did ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("arch", "train_type"),
    [("qwen3", "lora"), ("qwen3", "dora"), ("qwen3", "full"), ("gemma3_text", "lora"), ("qwen3_moe", "lora"), ("mamba", "lora")],
)  # fmt: skip
def test_a_fused_model_has_the_logits_of_the_trained_one(
    trained_run: TrainedRun, tmp_path: Path, arch: str, train_type: str
) -> None:
    run, trained = trained_run(arch=arch, train_type=train_type, tie=arch != "qwen3")
    fused = export.fuse_run(run)
    assert fused == run.fused
    assert furthest(logits_of(fused), trained) < 1e-4
    assert furthest(logits_of(tmp_path / "base"), trained) > 0.01  # or the line above shows nothing


def test_an_export_reports_its_size_and_how_exact_it_is(trained_run: TrainedRun, tmp_path: Path) -> None:
    run, _ = trained_run()
    messages: list[str] = []
    report = export.export(run, "folder", "mine", folder=tmp_path / "out", progress=messages.append)
    assert report.path == tmp_path / "out" / "mine"
    assert report.bytes == sum(file.stat().st_size for file in report.path.iterdir())
    assert report.max_error < 1e-4 and report.agreement == 1 and report.lost is not None and report.lost < 1e-3
    assert messages[0] == "Loading the model." and not [sentence for sentence in messages if "off by" in sentence]


@pytest.mark.parametrize(("train_type", "bits"), [("lora", 4), ("dora", 8)])
def test_a_quantised_base_is_written_in_full_precision_without_loss(
    trained_run: TrainedRun, tmp_path: Path, train_type: str, bits: int
) -> None:
    run, trained = trained_run(train_type=train_type, bits=bits)
    written = export.fuse_run(run)
    assert furthest(logits_of(written), trained) < 1e-4
    assert "quantization" not in (written / "config.json").read_text()
    assert not [name for name in mx.load(str(written / "model.safetensors")) if name.endswith((".scales", ".biases"))]


@pytest.mark.parametrize("quantization", ["mxfp4"])
def test_a_base_that_the_trainer_quantised_is_the_one_that_is_fused(
    trained_run: TrainedRun, tmp_path: Path, quantization: str
) -> None:
    """The adapters were trained on the quantised weights; merged into the weights on disk they would give another model."""
    run, trained = trained_run(quantization=quantization, hidden=64)
    assert furthest(logits_of(export.fuse_run(run)), trained) < 1e-4


def test_bfloat16_weights_stay_bfloat16_under_dora(trained_run: TrainedRun, tmp_path: Path) -> None:
    """mlx-lm's DoRA gives float32 weights on a bfloat16 base, which would double the model."""
    run, _ = trained_run(train_type="dora", dtype="bfloat16")
    weights = mx.load(str(export.fuse_run(run) / "model.safetensors"))
    assert {weight.dtype for weight in weights.values()} == {mx.bfloat16}  # pyright: ignore


def test_one_float32_tensor_of_a_bfloat16_model_stays_float32(trained_run: TrainedRun, tmp_path: Path) -> None:
    run, _ = trained_run(dtype="bfloat16")
    file, name = tmp_path / "base" / "model.safetensors", "model.norm.weight"
    weights = dict(mx.load(str(file)))  # pyright: ignore
    weights[name] = weights[name].astype(mx.float32)
    mx.save_safetensors(str(file), weights, metadata={"format": "mlx"})
    written = mx.load(str(export.fuse_run(run) / "model.safetensors"))
    assert written[name].dtype == mx.float32  # pyright: ignore
    assert written["model.layers.0.mlp.up_proj.weight"].dtype == mx.bfloat16  # pyright: ignore


def test_without_dequantize_a_quantised_base_stays_quantised(trained_run: TrainedRun, tmp_path: Path) -> None:
    run, _ = trained_run(bits=4)
    reference = export.fuse(str(tmp_path / "base"), run.adapters, tmp_path / "out", dequantize=False)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]["bits"] == 4
    assert verify.verify(tmp_path / "out", reference).lost is not None


@pytest.mark.parametrize("bits", [4])
def test_a_quantised_export_reports_the_share_of_training_that_is_lost(
    trained_run: TrainedRun, tmp_path: Path, bits: int
) -> None:
    run, _ = trained_run(hidden=64)
    messages: list[str] = []
    report = export.export(run, "folder", "small", folder=tmp_path, quantize=bits, progress=messages.append)  # pyright: ignore
    assert json.loads((report.path / "config.json").read_text())["quantization"]["bits"] == bits
    assert logits_of(report.path).shape == (9, 320)
    assert report.lost is not None and (report.lost > 0.1) == any("off by" in sentence for sentence in messages)
    assert (report.lost > 0.1) == (bits == 4)


def test_adapters_with_a_tensor_missing_are_refused(trained_run: TrainedRun, tmp_path: Path) -> None:
    """mlx-lm loads what there is and leaves the rest at random: a model that was never trained."""
    run, _ = trained_run()
    file = run.adapters / "adapters.safetensors"
    weights = dict(mx.load(str(file)))  # pyright: ignore
    missing = sorted(name for name in weights if name.endswith("lora_b"))[0]
    del weights[missing]
    mx.save_safetensors(str(file), weights, metadata={"format": "mlx"})
    with pytest.raises(ValueError, match=missing):
        export.fuse_run(run)
    assert not run.fused.exists()


def test_models_are_compared_on_the_run_s_own_completions(
    trained_run: TrainedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = trained_run()
    line = {"step": 1, "prompt": "How many?", "completions": [{"text": "Nine."}, {"text": "Ten."}]}
    run.completions.write_text(json.dumps(line) + '\n{"prompt": "cut off', encoding="utf-8")
    seen: list[verify.Reference] = []
    monkeypatch.setattr(
        export, "verify", lambda folder, reference: seen.append(reference) or verify.verify(folder, reference)
    )
    export.fuse_run(run)
    assert seen[0].samples == [("How many?", "Nine.")]
    text = mlx_lm.load(str(run.fused))[1].decode(seen[0].tokens[0])
    assert text.endswith("How many?<|im_end|>\n<|im_start|>assistant\nNine.")


# ── it is a model that LM Studio and mlx-lm can read ─────────────────────────────────────────────────────────────────


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
    written = export.fuse_run(run)
    kept = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"}
    assert listing(written) == kept | {"config.json", "model.safetensors"}
    # transformers 5 saves a class that LM Studio's transformers does not know: the tokenizer's files are copied.
    assert all((written / name).read_bytes() == (base / name).read_bytes() for name in kept)
    assert header(written / "model.safetensors")["__metadata__"] == {"format": "mlx"}


def test_a_full_run_keeps_the_base_model_s_tokenizer_files(trained_run: TrainedRun, tmp_path: Path) -> None:
    run, _ = trained_run(train_type="full")
    written = export.export(run, "folder", "mine", folder=tmp_path).path
    assert (written / "tokenizer_config.json").read_bytes() == (
        tmp_path / "base" / "tokenizer_config.json"
    ).read_bytes()


def test_a_large_model_is_written_in_shards_with_an_index(
    trained_run: TrainedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_tens(weights: dict) -> list[dict]:
        names = list(weights)
        return [{name: weights[name] for name in names[at : at + 10]} for at in range(0, len(names), 10)]

    run, trained = trained_run()
    monkeypatch.setattr(mlx_lm_utils, "make_shards", by_tens)
    written = export.fuse_run(run)
    shards = sorted(written.glob("*.safetensors"))
    assert len(shards) > 1 and all(header(shard)["__metadata__"] == {"format": "mlx"} for shard in shards)
    index = json.loads((written / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(index.values()) == {shard.name for shard in shards}
    assert furthest(logits_of(written), trained) < 1e-4


def test_peak_memory_of_fusing_is_below_twice_the_model(trained_run: TrainedRun, tmp_path: Path) -> None:
    """Evaluated together, the float32 halves of every weight stood beside the model: 2.4 times its size."""
    run, _ = trained_run(hidden=256, layers=4, dtype="bfloat16")
    size = (tmp_path / "base" / "model.safetensors").stat().st_size
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    export.fuse_run(run)
    assert mx.get_peak_memory() - before < 1.75 * size


def test_verify_refuses_weights_without_a_metadata_object(trained_run: TrainedRun, tmp_path: Path) -> None:
    """LM Studio refuses "__metadata__": null, which mx.save_safetensors writes when it is given no metadata."""
    run, _ = trained_run()
    reference = export.fuse(str(tmp_path / "base"), run.adapters, tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    mx.save_safetensors(str(file), dict(mx.load(str(file))))  # pyright: ignore
    with pytest.raises(RuntimeError, match="metadata"):
        verify.verify(tmp_path / "out", reference)


def test_verify_refuses_a_wrong_tensor(trained_run: TrainedRun, tmp_path: Path) -> None:
    run, _ = trained_run()
    reference = export.fuse(str(tmp_path / "base"), run.adapters, tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    weights = dict(mx.load(str(file)))  # pyright: ignore
    weights["model.layers.1.mlp.down_proj.weight"] = mx.zeros((32, 64))
    mx.save_safetensors(str(file), weights, metadata={"format": "mlx"})
    with pytest.raises(RuntimeError, match="does not answer like the run's"):
        verify.verify(tmp_path / "out", reference)


def test_a_run_with_nan_weights_is_not_exported(trained_run: TrainedRun, tmp_path: Path) -> None:
    run, _ = trained_run()
    file = run.adapters / "adapters.safetensors"
    weights = {name: weight * float("nan") for name, weight in mx.load(str(file)).items()}  # pyright: ignore
    mx.save_safetensors(str(file), weights, metadata={"format": "mlx"})
    with pytest.raises(Mistake, match="no finite numbers"):
        export.fuse_run(run)


# ── it is where LM Studio looks ──────────────────────────────────────────────────────────────────────────────────


def test_a_model_goes_to_publisher_and_name(trained_run: TrainedRun, tmp_path: Path, home: Path) -> None:
    run, trained = trained_run()
    before = listing(home)
    report = export.export(run, "lmstudio", " my model ")
    assert report.path == home / ".lmstudio" / "models" / "grpo-studio" / "my model"
    assert furthest(logits_of(report.path), trained) < 1e-4
    # Nothing but the model is new: no temporary folder, none of LM Studio's own files.
    new = {path for path in listing(home) - before if not path.startswith(".lmstudio/models/grpo-studio/my model")}
    assert new == {".lmstudio/models/grpo-studio"}


def test_lm_studio_s_own_models_folder_setting_is_used(quick_run: RunFolder, tmp_path: Path, home: Path) -> None:
    run = quick_run
    moved, models = tmp_path / "moved home", tmp_path / "big disk" / "models"
    moved.mkdir()
    models.mkdir(parents=True)
    (home / ".lmstudio-home-pointer").write_text(str(moved) + "\n", encoding="utf-8")
    assert export.lm_studio_root() == moved / "models"  # not there yet, and that is no reason to refuse
    (moved / "settings.json").write_text(json.dumps({"downloadsFolder": str(models)}), encoding="utf-8")
    assert export.export(run, "lmstudio", "mine").path == models / "grpo-studio" / "mine"
    assert not list((home / ".lmstudio" / "models").iterdir()) and not (moved / "models").exists()


@pytest.mark.parametrize("has_setting", [False, True])
def test_a_missing_lm_studio_is_refused_and_not_created(
    quick_run: RunFolder, tmp_path: Path, home: Path, has_setting: bool
) -> None:
    """Neither a home of LM Studio's, nor the mount point of a disk that is not attached."""
    run = quick_run
    models = home / ".lmstudio" / "models"
    shutil.rmtree(home / ".lmstudio")
    if has_setting:
        models = tmp_path / "unplugged" / "models"
        (home / ".lmstudio").mkdir()
        (home / ".lmstudio" / "settings.json").write_text(json.dumps({"downloadsFolder": str(models)}))
    with pytest.raises(Mistake, match="LM Studio was not found") as caught:
        export.export(run, "lmstudio", "mine")
    assert caught.value.faults[0].setting == "lm_studio" and str(models) in caught.value.faults[0].sentence
    assert not models.parent.exists()


@pytest.mark.parametrize("name", ["", "  ", "../escape", "a/b", "a\\b", ".hidden", "..", "a\nb", "x" * 121, "C:"])
def test_a_name_that_cannot_be_a_folder_is_refused(tmp_path: Path, home: Path, name: str) -> None:
    run, before = RunFolder(tmp_path), listing(home)
    with pytest.raises(Mistake) as caught:
        export.export(run, "lmstudio", name)
    assert caught.value.faults[0].setting == "lm_studio_name" and listing(home) == before


# ── it is written whole or not at all ──────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def taken(home: Path) -> Path:
    """A model of that name that is in LM Studio's folder already."""
    existing = home / ".lmstudio" / "models" / "grpo-studio" / "mine"
    existing.mkdir(parents=True)
    (existing / "config.json").write_text("older", encoding="utf-8")
    return existing


def test_an_existing_model_is_refused_and_unchanged(
    quick_run: RunFolder, tmp_path: Path, home: Path, taken: Path
) -> None:
    run = quick_run
    before = listing(home)
    with pytest.raises(Mistake, match="already") as caught:
        export.export(run, "lmstudio", "mine")
    assert caught.value.faults[0].setting == "overwrite"
    assert listing(home) == before and (taken / "config.json").read_text() == "older"


def test_an_existing_model_is_replaced_with_overwrite(
    quick_run: RunFolder, tmp_path: Path, home: Path, taken: Path
) -> None:
    run = quick_run
    (taken / "old-shard.safetensors").write_bytes(b"x")
    assert export.export(run, "lmstudio", "mine", overwrite=True).path == taken
    assert is_new(taken) and not (taken / "old-shard.safetensors").exists()
    assert not [name for name in listing(home) if "studio-" in name and "grpo-studio/mine" not in name]


def test_overwrite_never_replaces_a_folder_that_is_no_model(quick_run: RunFolder, tmp_path: Path) -> None:
    run = quick_run
    (tmp_path / "out" / "Documents").mkdir(parents=True)
    with pytest.raises(Mistake, match="holds no model"):
        export.export(run, "folder", "Documents", folder=tmp_path / "out", overwrite=True)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_crash_before_the_last_rename_changes_nothing(
    quick_run: RunFolder,
    tmp_path: Path,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    overwrite: bool,
) -> None:
    if overwrite:
        request.getfixturevalue("taken")
    run = quick_run
    before = listing(tmp_path)

    def crash(folder: Path, reference: object) -> None:
        assert (folder / "model.safetensors").exists() and not folder.is_relative_to(home / ".lmstudio" / "models")
        raise KeyboardInterrupt

    monkeypatch.setattr(export, "verify", crash)
    with pytest.raises(KeyboardInterrupt):
        export.export(run, "lmstudio", "mine", overwrite=overwrite)
    assert listing(tmp_path) == before


def refuse_to_rename(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    rename = Path.rename

    def broken(self: Path, target: Path) -> Path:
        if self.name == name:
            raise OSError("the disk went away")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", broken)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_crash_in_the_last_rename_restores_the_old_model(
    quick_run: RunFolder,
    tmp_path: Path,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    overwrite: bool,
) -> None:
    if overwrite:
        request.getfixturevalue("taken")
    run = quick_run
    before = listing(tmp_path)
    refuse_to_rename(monkeypatch, "new")
    with pytest.raises(OSError, match="went away"):
        export.export(run, "lmstudio", "mine", overwrite=overwrite)
    assert listing(tmp_path) == before


def test_an_old_model_left_in_staging_is_restored_by_the_next_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a SIGKILL between the two renames: the only copy lies in the stage, and clearing that would lose it."""
    target = tmp_path / "mine"
    target.mkdir()
    (target / "config.json").write_text("older", encoding="utf-8")
    with (
        monkeypatch.context() as patched,
        pytest.raises(OSError),
        atomic_folder.staging_folder(tmp_path, target) as staging,
    ):
        (staging / "new").mkdir()
        target.rename(staging / "previous")
        refuse_to_rename(patched, "previous")
    assert not target.exists()
    with atomic_folder.staging_folder(tmp_path, target) as staging:
        assert (target / "config.json").read_text() == "older" and not list(staging.iterdir())
    assert listing(tmp_path) == {"mine", "mine/config.json"}


def test_a_second_export_of_the_same_model_is_refused_while_one_runs(quick_run: RunFolder, tmp_path: Path) -> None:
    run = quick_run
    stage = run.path / ".grpo-studio-fused"
    stage.mkdir()
    lock = os.open(stage, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.raises(Mistake, match="another process"):
        export.fuse_run(run)
    os.close(lock)
    assert export.fuse_run(run) == run.fused and not stage.exists()


def test_a_models_folder_on_another_disk_gets_a_copy_then_a_rename(
    quick_run: RunFolder, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = quick_run
    models = home / ".lmstudio" / "models"
    rename = Path.rename

    def within_a_disk(self: Path, target: Path) -> Path:
        assert self.is_relative_to(models) == target.is_relative_to(models), "Invalid cross-device link"
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", within_a_disk)
    monkeypatch.setattr(atomic_folder, "device_of", lambda folder: folder.is_relative_to(models))
    report = export.export(run, "lmstudio", "mine")
    assert is_new(report.path)
    assert not [name for name in listing(tmp_path) if ".grpo-studio" in name]


def test_files_that_macos_adds_are_not_exported(tmp_path: Path) -> None:
    """On a disk without extended attributes every file gets a ._ companion, which LM Studio takes for a weight file."""
    target = tmp_path / "models" / "mine"
    with atomic_folder.staging_folder(tmp_path, target) as staging:
        (staging / "new").mkdir()
        for name in ("config.json", "._config.json", ".DS_Store"):
            (staging / "new" / name).write_bytes(b"x")
        atomic_folder.move_into_place(staging / "new", target, overwrite=False)
    assert listing(tmp_path) == {"models", "models/mine", "models/mine/config.json"}


def test_too_little_disk_space_is_refused_before_anything_is_written(
    trained_run: TrainedRun, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = trained_run()
    before = listing(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: namedtuple("usage", "free")(1000))
    monkeypatch.setattr(export, "_write", lambda *_: pytest.fail("written all the same"))
    with pytest.raises(Mistake, match=r"needs 0\.02 GB and the disk of .* has 0\.00 GB free"):
        export.export(run, "lmstudio", "mine")
    assert listing(tmp_path) == before


def test_a_run_without_weights_is_refused(quick_run: RunFolder, tmp_path: Path) -> None:
    run = quick_run
    shutil.rmtree(run.adapters)
    with pytest.raises(Mistake, match="The run first has no trained weights") as caught:
        export.export(run, "folder", "mine", folder=tmp_path)
    assert caught.value.faults[0].setting == "run"


def test_a_base_model_that_is_gone_is_refused_by_name(trained_run: TrainedRun, tmp_path: Path) -> None:
    run, _ = trained_run()
    shutil.rmtree(tmp_path / "base")
    with pytest.raises(Mistake, match=str(tmp_path / "base")):
        export.fuse_run(run)


def test_fusing_again_replaces_what_was_fused(quick_run: RunFolder) -> None:
    export.fuse_run(quick_run)
    (quick_run.adapters / "adapters.safetensors").write_bytes(b"newer")
    assert (export.fuse_run(quick_run) / "model.safetensors").read_bytes() == b"newer"
    with pytest.raises(Mistake, match="already"):
        export.export(quick_run, "folder", "")


def test_export_to_the_hub_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Mistake, match="not built yet"):
        export.export(RunFolder(tmp_path), "hub", "mine")


@pytest.mark.parametrize(
    ("arch", "bits"),
    [*((arch, None) for arch in ("llama", "gemma3_text", "mixtral", "qwen3_moe", "mamba")), ("qwen3", 4)],
)
def test_the_random_models_of_the_tests_load_and_run(tmp_path: Path, arch: str, bits: int | None) -> None:
    model, tokenizer = mlx_lm.load(str(tiny_model(tmp_path, arch, bits=bits, dtype="bfloat16")))[:2]
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 17 plus 25?"}], add_generation_prompt=True
    )
    assert tokenizer.decode(prompt) == "<|im_start|>user\nWhat is 17 plus 25?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.eos_token_ids == {1} and tokenizer.pad_token_id == 0 and len(tokenizer.get_vocab()) == 320
    assert model(mx.array(prompt)[None]).shape == (1, len(prompt), 320)  # pyright: ignore
    assert {weight.dtype for _, weight in tree_flatten(model.parameters())} <= {mx.bfloat16, mx.uint32}  # pyright: ignore
