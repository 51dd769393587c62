"""Export: what is written answers like what was trained, stands where LM Studio looks, and is never half there."""

from __future__ import annotations

import fcntl
import gc
import json
import os
import shutil
from collections import namedtuple
from pathlib import Path

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


def trained_run(
    folder: Path, *, arch: str = "qwen3", train_type: str = "lora", quantization: str = "none", **base: object
) -> tuple[RunFolder, mx.array]:
    """A run folder as the trainer leaves it, its weights moved at random, and what its model says [9, V]."""
    model = tiny_model(folder / "base", arch, **base)  # pyright: ignore
    run = RunFolder(folder / "runs" / "first")
    run.path.mkdir(parents=True)
    settings = {"model": str(model), "data": "any.jsonl", "train_type": train_type, "quantization": quantization}
    config = spec_config.parse(settings | {"num_layers": -1, "rank": 4, "scale": 4.0, "dropout": 0.1})
    run.config.write_text(spec_config.dump(config), encoding="utf-8")
    trained = policy.load_policy(config)
    mx.random.seed(7)
    trained.assign({name: one + 0.1 * mx.random.normal(one.shape) for name, one in trained.trainable().items()})
    if train_type == "full":
        policy.save_model(trained, config.model, run.model)
    else:
        save_adapters(trained, config, run.adapters)
    trained.model.eval()
    return run, trained.model(PROMPT)[0]  # pyright: ignore


def says(folder: Path) -> mx.array:
    model = mlx_lm.load(str(folder))[0]
    return model(PROMPT)[0]  # pyright: ignore


def furthest(one: mx.array, other: mx.array) -> float:
    return mx.abs(one.astype(mx.float32) - other.astype(mx.float32)).max().item()  # pyright: ignore


def listing(folder: Path) -> set[str]:
    """Every path below `folder`, hidden ones included."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A person's home with an LM Studio that has been started once."""
    there = tmp_path / "home"
    (there / ".lmstudio" / "models").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(there))
    return there


# ── it answers like what was trained ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("arch", "train_type"),
    [("qwen3", "lora"), ("qwen3", "dora"), ("qwen3", "full"), ("gemma3_text", "lora"), ("qwen3_moe", "lora"), ("mamba", "lora")],
)  # fmt: skip
def test_a_fused_model_says_what_the_trained_one_said(tmp_path: Path, arch: str, train_type: str) -> None:
    run, trained = trained_run(tmp_path, arch=arch, train_type=train_type, tie=arch != "qwen3")
    fused = export.fuse_run(run)
    assert fused == run.fused
    assert furthest(says(fused), trained) < 1e-4
    assert furthest(says(tmp_path / "base"), trained) > 0.01  # or the line above shows nothing


def test_a_fused_model_is_found_good_and_says_how_good(tmp_path: Path) -> None:
    run, _ = trained_run(tmp_path)
    told: list[str] = []
    made = export.export(run, "folder", "mine", folder=tmp_path / "out", progress=told.append)
    assert made.path == tmp_path / "out" / "mine"
    assert made.bytes == sum(file.stat().st_size for file in made.path.iterdir())
    assert made.max_error < 1e-4 and made.agreement == 1 and made.lost is not None and made.lost < 1e-3
    assert told[0] == "Loading the model." and not [sentence for sentence in told if "off by" in sentence]


@pytest.mark.parametrize("train_type", ["lora", "dora"])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_base_is_written_in_full_precision_and_exactly(tmp_path: Path, train_type: str, bits: int) -> None:
    run, trained = trained_run(tmp_path, train_type=train_type, bits=bits)
    written = export.fuse_run(run)
    assert furthest(says(written), trained) < 1e-4
    assert "quantization" not in (written / "config.json").read_text()
    assert not [name for name in mx.load(str(written / "model.safetensors")) if name.endswith((".scales", ".biases"))]


@pytest.mark.parametrize("quantization", ["4", "mxfp4"])
def test_a_base_that_the_trainer_quantised_is_the_one_that_is_fused(tmp_path: Path, quantization: str) -> None:
    """The adapters were trained on the quantised weights; on the weights as they lie on disk they mean another model."""
    run, trained = trained_run(tmp_path, quantization=quantization, hidden=64)
    assert furthest(says(export.fuse_run(run)), trained) < 1e-4


def test_weights_keep_the_types_they_came_in(tmp_path: Path) -> None:
    """mlx-lm's DoRA gives float32 weights on a bfloat16 base, which would double the model."""
    run, _ = trained_run(tmp_path, train_type="dora", dtype="bfloat16")
    weights = mx.load(str(export.fuse_run(run) / "model.safetensors"))
    assert {one.dtype for one in weights.values()} == {mx.bfloat16}  # pyright: ignore


def test_one_float32_tensor_of_a_bfloat16_model_stays_float32(tmp_path: Path) -> None:
    run, _ = trained_run(tmp_path, dtype="bfloat16")
    file, name = tmp_path / "base" / "model.safetensors", "model.norm.weight"
    weights = dict(mx.load(str(file)))  # pyright: ignore
    weights[name] = weights[name].astype(mx.float32)
    mx.save_safetensors(str(file), weights, metadata={"format": "mlx"})
    written = mx.load(str(export.fuse_run(run) / "model.safetensors"))
    assert written[name].dtype == mx.float32  # pyright: ignore
    assert written["model.layers.0.mlp.up_proj.weight"].dtype == mx.bfloat16  # pyright: ignore


def test_fusing_can_keep_a_base_quantised(tmp_path: Path) -> None:
    run, _ = trained_run(tmp_path, bits=4)
    reference = export.fuse(str(tmp_path / "base"), run.adapters, tmp_path / "out", dequantize=False)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]["bits"] == 4
    assert verify.verify(tmp_path / "out", reference).lost is not None


@pytest.mark.parametrize("bits", [4, 8])
def test_quantising_on_the_way_out_says_what_it_costs(tmp_path: Path, bits: int) -> None:
    run, _ = trained_run(tmp_path, hidden=64)
    told: list[str] = []
    made = export.export(run, "folder", "small", folder=tmp_path, quantize=bits, progress=told.append)  # pyright: ignore
    assert json.loads((made.path / "config.json").read_text())["quantization"]["bits"] == bits
    assert says(made.path).shape == (9, 320)
    assert made.lost is not None and (made.lost > 0.1) == any("off by" in sentence for sentence in told)
    assert (made.lost > 0.1) == (bits == 4)


def test_adapters_with_a_tensor_missing_are_refused(tmp_path: Path) -> None:
    """mlx-lm loads what there is and leaves the rest at random: a model nobody trained."""
    run, _ = trained_run(tmp_path)
    file = run.adapters / "adapters.safetensors"
    weights = dict(mx.load(str(file)))  # pyright: ignore
    gone = sorted(name for name in weights if name.endswith("lora_b"))[0]
    del weights[gone]
    mx.save_safetensors(str(file), weights, metadata={"format": "mlx"})
    with pytest.raises(ValueError, match=gone):
        export.fuse_run(run)
    assert not run.fused.exists()


def test_models_are_compared_on_the_run_s_own_completions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = trained_run(tmp_path)
    line = {"prompt": "How many?", "completions": [{"text": "Nine."}, {"text": "Ten."}]}
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


def test_the_folder_holds_a_model_and_nothing_else(tmp_path: Path) -> None:
    run, _ = trained_run(tmp_path)
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


def test_a_full_run_keeps_the_base_model_s_tokenizer_files(tmp_path: Path) -> None:
    run, _ = trained_run(tmp_path, train_type="full")
    written = export.export(run, "folder", "mine", folder=tmp_path).path
    assert (written / "tokenizer_config.json").read_bytes() == (
        tmp_path / "base" / "tokenizer_config.json"
    ).read_bytes()


def test_a_large_model_is_written_in_shards_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def by_tens(weights: dict) -> list[dict]:
        names = list(weights)
        return [{name: weights[name] for name in names[at : at + 10]} for at in range(0, len(names), 10)]

    run, trained = trained_run(tmp_path)
    monkeypatch.setattr(mlx_lm_utils, "make_shards", by_tens)
    written = export.fuse_run(run)
    shards = sorted(written.glob("*.safetensors"))
    assert len(shards) > 1 and all(header(shard)["__metadata__"] == {"format": "mlx"} for shard in shards)
    index = json.loads((written / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(index.values()) == {shard.name for shard in shards}
    assert furthest(says(written), trained) < 1e-4


def test_fusing_holds_hardly_more_than_the_model(tmp_path: Path) -> None:
    """Evaluated together, the float32 halves of every weight stood beside the model: 2.4 times its size."""
    run, _ = trained_run(tmp_path, hidden=256, layers=4, dtype="bfloat16")
    size = (tmp_path / "base" / "model.safetensors").stat().st_size
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    export.fuse_run(run)
    assert mx.get_peak_memory() - before < 1.75 * size


def test_weights_without_a_metadata_object_are_found_out(tmp_path: Path) -> None:
    """LM Studio refuses "__metadata__": null, which mx.save_safetensors writes when it is given no metadata."""
    run, _ = trained_run(tmp_path)
    reference = export.fuse(str(tmp_path / "base"), run.adapters, tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    mx.save_safetensors(str(file), dict(mx.load(str(file))))  # pyright: ignore
    with pytest.raises(RuntimeError, match="metadata"):
        verify.verify(tmp_path / "out", reference)


def test_a_wrong_tensor_is_found_out(tmp_path: Path) -> None:
    run, _ = trained_run(tmp_path)
    reference = export.fuse(str(tmp_path / "base"), run.adapters, tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    weights = dict(mx.load(str(file)))  # pyright: ignore
    weights["model.layers.1.mlp.down_proj.weight"] = mx.zeros((32, 64))
    mx.save_safetensors(str(file), weights, metadata={"format": "mlx"})
    with pytest.raises(RuntimeError, match="does not answer like the run's"):
        verify.verify(tmp_path / "out", reference)


def test_a_run_that_came_apart_is_not_exported(tmp_path: Path) -> None:
    run, _ = trained_run(tmp_path)
    file = run.adapters / "adapters.safetensors"
    weights = {name: one * float("nan") for name, one in mx.load(str(file)).items()}  # pyright: ignore
    mx.save_safetensors(str(file), weights, metadata={"format": "mlx"})
    with pytest.raises(Mistake, match="no finite numbers"):
        export.fuse_run(run)


# ── it stands where LM Studio looks ──────────────────────────────────────────────────────────────────────────────────


def test_a_model_goes_to_publisher_and_name(tmp_path: Path, home: Path) -> None:
    run, trained = trained_run(tmp_path)
    before = listing(home)
    made = export.export(run, "lmstudio", " my model ")
    assert made.path == home / ".lmstudio" / "models" / "grpo-studio" / "my model"
    assert furthest(says(made.path), trained) < 1e-4
    # Nothing but the model is new: no temporary folder, none of LM Studio's own files.
    new = {path for path in listing(home) - before if not path.startswith(".lmstudio/models/grpo-studio/my model")}
    assert new == {".lmstudio/models/grpo-studio"}


def test_the_models_folder_that_lm_studio_was_told_is_used(tmp_path: Path, home: Path) -> None:
    run, _ = trained_run(tmp_path)
    moved, models = tmp_path / "moved home", tmp_path / "big disk" / "models"
    moved.mkdir()
    models.mkdir(parents=True)
    (home / ".lmstudio-home-pointer").write_text(str(moved) + "\n", encoding="utf-8")
    assert export.lm_studio_root() == moved / "models"  # not there yet, and that is no reason to refuse
    (moved / "settings.json").write_text(json.dumps({"downloadsFolder": str(models)}), encoding="utf-8")
    assert export.export(run, "lmstudio", "mine").path == models / "grpo-studio" / "mine"
    assert not list((home / ".lmstudio" / "models").iterdir()) and not (moved / "models").exists()


@pytest.mark.parametrize("told", [False, True])
def test_lm_studio_that_is_not_there_is_named_and_not_made(tmp_path: Path, home: Path, told: bool) -> None:
    """Neither a home of LM Studio's, nor the mount point of a disk that is not attached."""
    run, _ = trained_run(tmp_path)
    wanted = home / ".lmstudio" / "models"
    shutil.rmtree(home / ".lmstudio")
    if told:
        wanted = tmp_path / "unplugged" / "models"
        (home / ".lmstudio").mkdir()
        (home / ".lmstudio" / "settings.json").write_text(json.dumps({"downloadsFolder": str(wanted)}))
    with pytest.raises(Mistake, match="LM Studio was not found") as caught:
        export.export(run, "lmstudio", "mine")
    assert caught.value.faults[0].setting == "lm_studio" and str(wanted) in caught.value.faults[0].sentence
    assert not wanted.parent.exists()


@pytest.mark.parametrize("name", ["", "  ", "../escape", "a/b", "a\\b", ".hidden", "..", "a\nb", "x" * 121, "C:"])
def test_a_name_that_is_no_folder_name_is_refused(tmp_path: Path, home: Path, name: str) -> None:
    run, before = RunFolder(tmp_path), listing(home)
    with pytest.raises(Mistake) as caught:
        export.export(run, "lmstudio", name)
    assert caught.value.faults[0].setting == "lm_studio_name" and listing(home) == before


# ── it is there whole or not at all ──────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def taken(home: Path) -> Path:
    """Another model of that name, at LM Studio already."""
    there = home / ".lmstudio" / "models" / "grpo-studio" / "mine"
    there.mkdir(parents=True)
    (there / "config.json").write_text("older", encoding="utf-8")
    return there


def test_a_model_that_is_there_is_refused_and_untouched(tmp_path: Path, home: Path, taken: Path) -> None:
    run, _ = trained_run(tmp_path)
    before = listing(home)
    with pytest.raises(Mistake, match="already") as caught:
        export.export(run, "lmstudio", "mine")
    assert caught.value.faults[0].setting == "overwrite"
    assert listing(home) == before and (taken / "config.json").read_text() == "older"


def test_a_model_that_is_there_is_replaced_when_asked(tmp_path: Path, home: Path, taken: Path) -> None:
    run, trained = trained_run(tmp_path)
    (taken / "old-shard.safetensors").write_bytes(b"x")
    assert export.export(run, "lmstudio", "mine", overwrite=True).path == taken
    assert furthest(says(taken), trained) < 1e-4 and not (taken / "old-shard.safetensors").exists()
    assert not [name for name in listing(home) if "studio-" in name and "grpo-studio/mine" not in name]


def test_a_folder_that_is_no_model_is_never_replaced(tmp_path: Path) -> None:
    run, _ = trained_run(tmp_path)
    (tmp_path / "out" / "Documents").mkdir(parents=True)
    with pytest.raises(Mistake, match="holds no model"):
        export.export(run, "folder", "Documents", folder=tmp_path / "out", overwrite=True)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_crash_before_the_last_rename_leaves_everything_as_it_was(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, overwrite: bool
) -> None:
    if overwrite:
        request.getfixturevalue("taken")
    run, _ = trained_run(tmp_path)
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
def test_a_crash_in_the_last_rename_brings_the_older_model_back(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, overwrite: bool
) -> None:
    if overwrite:
        request.getfixturevalue("taken")
    run, _ = trained_run(tmp_path)
    before = listing(tmp_path)
    refuse_to_rename(monkeypatch, "new")
    with pytest.raises(OSError, match="went away"):
        export.export(run, "lmstudio", "mine", overwrite=overwrite)
    assert listing(tmp_path) == before


def test_an_older_model_that_cannot_come_back_is_kept_and_comes_back_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a SIGKILL between the two renames: the only copy lies in the stage, and clearing that would lose it."""
    target = tmp_path / "mine"
    target.mkdir()
    (target / "config.json").write_text("older", encoding="utf-8")
    with monkeypatch.context() as patched, pytest.raises(OSError), atomic_folder.staging_folder(tmp_path, target) as here:
        (here / "new").mkdir()
        target.rename(here / "previous")
        refuse_to_rename(patched, "previous")
    assert not target.exists()
    with atomic_folder.staging_folder(tmp_path, target) as here:
        assert (target / "config.json").read_text() == "older" and not list(here.iterdir())
    assert listing(tmp_path) == {"mine", "mine/config.json"}


def test_two_exports_of_one_model_do_not_meet(tmp_path: Path) -> None:
    run, _ = trained_run(tmp_path)
    stage = run.path / ".grpo-studio-fused"
    stage.mkdir()
    other = os.open(stage, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(Mistake, match="another process"):
        export.fuse_run(run)
    os.close(other)
    assert export.fuse_run(run) == run.fused and not stage.exists()


def test_a_models_folder_on_another_disk_gets_a_copy_and_a_rename(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, trained = trained_run(tmp_path)
    models = home / ".lmstudio" / "models"
    rename = Path.rename

    def within_a_disk(self: Path, target: Path) -> Path:
        assert self.is_relative_to(models) == target.is_relative_to(models), "Invalid cross-device link"
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", within_a_disk)
    monkeypatch.setattr(atomic_folder, "device_of", lambda folder: folder.is_relative_to(models))
    made = export.export(run, "lmstudio", "mine")
    assert furthest(says(made.path), trained) < 1e-4
    assert not [name for name in listing(tmp_path) if ".grpo-studio" in name]


def test_files_that_macos_leaves_by_itself_do_not_come_along(tmp_path: Path) -> None:
    """On a disk without extended attributes every file gets a ._ companion, which LM Studio takes for a weight file."""
    target = tmp_path / "models" / "mine"
    with atomic_folder.staging_folder(tmp_path, target) as here:
        (here / "new").mkdir()
        for name in ("config.json", "._config.json", ".DS_Store"):
            (here / "new" / name).write_bytes(b"x")
        atomic_folder.move_into_place(here / "new", target, overwrite=False)
    assert listing(tmp_path) == {"models", "models/mine", "models/mine/config.json"}


def test_too_little_room_is_said_before_anything_is_written(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = trained_run(tmp_path)
    before = listing(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: namedtuple("usage", "free")(1000))
    monkeypatch.setattr(export, "_write", lambda *_: pytest.fail("written all the same"))
    with pytest.raises(Mistake, match=r"needs 0\.02 GB and the disk of .* has 0\.00 GB free"):
        export.export(run, "lmstudio", "mine")
    assert listing(tmp_path) == before


def test_a_run_without_weights_is_named(tmp_path: Path) -> None:
    run, _ = trained_run(tmp_path)
    shutil.rmtree(run.adapters)
    with pytest.raises(Mistake, match="The run first has no trained weights") as caught:
        export.export(run, "folder", "mine", folder=tmp_path)
    assert caught.value.faults[0].setting == "run"


def test_a_base_model_that_is_gone_is_named(tmp_path: Path) -> None:
    run, _ = trained_run(tmp_path)
    shutil.rmtree(tmp_path / "base")
    with pytest.raises(Mistake, match=str(tmp_path / "base")):
        export.fuse_run(run)


def test_fusing_again_replaces_what_was_fused(tmp_path: Path) -> None:
    run, trained = trained_run(tmp_path)
    export.fuse_run(run)
    file = run.adapters / "adapters.safetensors"
    weights = {name: one * 0.5 for name, one in mx.load(str(file)).items()}  # pyright: ignore
    mx.save_safetensors(str(file), weights, metadata={"format": "mlx"})
    assert furthest(says(export.fuse_run(run)), trained) > 0.01
    with pytest.raises(Mistake, match="already"):
        export.export(run, "folder", "")


def test_hugging_face_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(Mistake, match="not built yet"):
        export.export(RunFolder(tmp_path), "hub", "mine")


@pytest.mark.parametrize("arch", ["qwen3", "llama", "gemma3_text", "mixtral", "qwen3_moe", "mamba"])
@pytest.mark.parametrize("bits", [None, 4])
def test_the_tiny_models_that_tests_use_are_models(tmp_path: Path, arch: str, bits: int | None) -> None:
    model, tokenizer = mlx_lm.load(str(tiny_model(tmp_path, arch, bits=bits, dtype="bfloat16")))[:2]
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 17 plus 25?"}], add_generation_prompt=True
    )
    assert tokenizer.decode(asked) == "<|im_start|>user\nWhat is 17 plus 25?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.eos_token_ids == {1} and tokenizer.pad_token_id == 0 and len(tokenizer.get_vocab()) == 320
    assert model(mx.array(asked)[None]).shape == (1, len(asked), 320)  # pyright: ignore
    assert {one.dtype for _, one in tree_flatten(model.parameters())} <= {mx.bfloat16, mx.uint32}  # pyright: ignore
