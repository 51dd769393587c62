"""The original Hugging Face weights of a base model that mlx converted: find them, and merge trained weights into them,
keeping tensors, names, types and order.

The family's own `sanitize`, run on numbered arrays, shows which original rows each mlx-lm array consists of: it may
rename, split, join or stack tensors. A row is everything along the last axis; a vector has rows of one number.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from huggingface_hub import ModelCard
from mlx.utils import tree_flatten
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.tuner.dora import DoRAEmbedding, DoRALinear
from mlx_lm.tuner.lora import LoRAEmbedding, LoRALinear, LoRASwitchLinear

from backend.export.exports import Progress
from backend.export.trained_weights import TrainedWeights
from backend.export.writer import SAFETENSORS_TYPES, Done, counter, kept_files, write_safetensors
from backend.models import hub
from backend.models.adapters import array_names
from backend.models.architectures import mlx_lm_settings
from backend.models.inventory import is_incomplete
from backend.models.loading import loading, model_classes
from backend.models.model_folder import header_of, read_object
from backend.models.tokenizers import load_tokenizer, with_end_tokens
from backend.utils.errors import UserError
from backend.utils.hub_cache import local_folder, split_revision

FURTHEST = 3  # model cards to follow to the original
COPIED = ("config.json", "*.safetensors.index.json", "LICENSE*", "*processor*.json")
"""Files of the original to copy unchanged, beside those of the tokenizer."""
LARGEST = 1 << 24  # largest exact integer in float32
_WRITABLE = frozenset(SAFETENSORS_TYPES.values())

Shape = tuple[int, ...]
Fetch = Callable[[str], Path]  # downloads a repository; returns its folder


@dataclass(frozen=True, slots=True)
class OriginalFiles:
    """A folder of original weights: its Hugging Face id or folder name, and tensor shapes by file."""

    folder: Path
    name: str
    files: Mapping[str, Mapping[str, Shape]]  # file → tensor → shape, in byte order

    @property
    def shapes(self) -> dict[str, Shape]:
        return {name: shape for tensors in self.files.values() for name, shape in tensors.items()}

    @property
    def config(self) -> dict[str, Any]:
        return read_object(self.folder / "config.json", "model")

    def arrays(self) -> dict[str, mx.array]:
        """All tensors by original name, lazily."""
        arrays: dict[str, mx.array] = {}
        for file in self.files:
            loaded: Any = mx.load(str(self.folder / file))
            arrays |= loaded
        return arrays

    def sanitized(self, arrays: Mapping[str, mx.array]) -> tuple[Any, dict[str, mx.array]]:
        """(new model with lazy random weights, original `arrays` as its `sanitize`, which runs only once, has them)."""
        config = mlx_lm_utils.load_config(self.folder)
        config |= mlx_lm_settings(config)
        with loading(self.name, "model"):
            model_class, arguments = model_classes(config)
            model = model_class(arguments.from_dict(config))
        named = dict(arrays)
        return model, model.sanitize(named) if hasattr(model, "sanitize") else named

    def open_with(self, arrays: Mapping[str, mx.array]) -> nn.Module:
        """Load original `arrays` into a model as mlx-lm does."""
        model, named = self.sanitized(arrays)
        model.load_weights(list(named.items()))
        return model.eval()


def find_original(base: Path, name: str, fetch: Fetch | None = None) -> OriginalFiles:
    """The model's own files, or those of the original that at most FURTHEST cards lead to; `fetch` downloads what is
    missing. Only headers are read. Raises UserError, also for types that are not written and mlx-lm's names."""
    folder, called, followed = base, name, 0
    while _is_converted(folder):
        followed += 1
        if followed > FURTHEST:
            lost = f"The cards of {name} and of the models that it comes from lead to no original weights"
            raise UserError("model", f"{lost}.")
        called = _named_by_card(folder, called, fetch)
        found = local_folder(called)
        if found is not None and (found / "config.json").is_file() and not is_incomplete(found):
            folder = found
        elif fetch is not None:
            folder = fetch(called)
        else:
            missing = f"The original weights are those of {called}, which is not on this disk"
            raise UserError("model", f"{missing}; download that model first, or give --fetch.")
    files: dict[str, dict[str, Shape]] = {}
    odd: list[str] = []
    for file in sorted(folder.glob("model*.safetensors")):
        tensors = header_of(file, "model").items()
        files[file.name] = {tensor: array.shape for tensor, array in tensors}
        odd += [f"{tensor} ({array.dtype})" for tensor, array in tensors if array.dtype not in _WRITABLE]
    original = OriginalFiles(folder, called, files)
    if odd or "quantization_config" in original.config:
        packed = f"packed{f', {odd[0]} among them' if odd else ''}"
        raise UserError("model", f"The original weights of {called} are {packed}, so nothing can be merged into them.")
    if stacked := [tensor for tensor in original.shapes if ".switch_" in tensor]:
        renamed = f"have mlx-lm's names ({stacked[0]}), and no card names their original"
        raise UserError("model", f"The weights of {called} {renamed}.")
    return original


def converted_from(base: Path, name: str) -> tuple[str | None, int]:
    """(repository that it was converted from, by cards on this disk, or None; bits, 0 for floats). Raises UserError."""
    folder: Path | None = base
    called, tries = name, FURTHEST
    while folder is not None and _is_converted(folder) and tries:
        called, tries = _named_by_card(folder, called), tries - 1
        folder = local_folder(called)
    packed = read_object(base / "config.json", "model").get("quantization") or {}
    return (None if called == name else called), int(packed.get("bits", 0))


def trained_on_original(trained: TrainedWeights, fetch: Fetch | None = None) -> tuple[TrainedWeights, OriginalFiles]:
    """(the same training applied to the original of its base, the original). Raises as `find_original`."""
    if trained.untrained is None:
        gone = f"The base model {trained.name} is not on this disk any more"
        raise UserError("model", f"{gone}, and its weights are needed.")
    original = find_original(trained.untrained, trained.name, fetch)
    folder = original.folder
    tokenizer = trained.tokenizer if trained.has_own_tokenizer else folder
    trained = replace(trained, name=original.name, tokenizer=tokenizer, untrained=folder)
    return trained if trained.adapters is None else replace(trained, base=folder, quantization="none"), original


def _is_converted(folder: Path) -> bool:
    card, config = card_of(folder), read_object(folder / "config.json", "model")
    return "quantization" in config or bool(card.get("library_name") == "mlx" and card.get("base_model"))


def _named_by_card(folder: Path, name: str, fetch: Fetch | None = None) -> str:
    if folder.parent.name == "snapshots" and not (folder / "README.md").exists():  # mlx-lm downloads no card
        if fetch is None:
            missing = f"The card of {name}, which names the original weights, is not on this disk"
            raise UserError("model", f"{missing}; run `hf download {split_revision(name)[0]} README.md`.")
        folder = fetch(name)
    named = card_of(folder).get("base_model") or []
    if models := [named] if isinstance(named, str) else named:
        return str(models[0])
    unknown = f"{name} was quantised by mlx, and its card names no base_model: the original weights are unknown"
    raise UserError("model", f"{unknown}, so train on them, or export for mlx.")


def card_of(folder: Path) -> dict[str, Any]:
    """Metadata of the model card in a folder; {} without one."""
    try:
        return ModelCard.load(folder / "README.md", ignore_metadata_errors=True).data.to_dict()
    except (OSError, ValueError):
        return {}


def fetch_original(name: str, progress: Progress) -> Path:
    """Download a model; a later call resumes it. Raises UserError."""

    def report(state: dict[str, Any]) -> None:
        share = state["done"] / state["total"] if state["total"] else None
        progress(f"Downloading the original weights, {name}.", share)

    listener: Any = SimpleNamespace(report=report, check=lambda: None, sleep=time.sleep)
    return hub.download(name, "model", listener)


# Which original rows every array of mlx-lm consists of


@dataclass(frozen=True, slots=True)
class RowRun:
    """`count` rows of `array` from `start` on are those of `original` from `original_start` on."""

    array: str
    start: int
    original: str
    original_start: int
    count: int

    @property
    def source(self) -> slice:
        return slice(self.original_start, self.original_start + self.count)


Trace = dict[str, list[RowRun]]  # by mlx-lm array name. Arrays with computed values or mixed rows are missing.


def trace(original: OriginalFiles) -> Trace:
    """Find the source of every mlx-lm array without reading weights."""
    shapes = original.shapes
    # Random codes: `sanitize` adding 1 to an array would turn a counted code into its neighbour's.
    codes = dict(zip(shapes, random.Random(0).sample(range(1, LARGEST), len(shapes)), strict=True))
    # Broadcast arrays take the memory of one number.
    tagged = {name: mx.broadcast_to(mx.array(float(codes[name])), shape) for name, shape in shapes.items()}
    origins = {id(array): name for name, array in tagged.items()}
    _, passed = original.sanitized(tagged)
    found: Trace = {}
    for name, array in passed.items():
        if source := origins.get(id(array)):
            found[name] = [RowRun(name, 0, source, 0, _flat(shapes[source])[0])]
    if changed := passed.keys() - found.keys():
        row_numbers: dict[str, mx.array] = {}
        column_numbers: dict[str, mx.array] = {}
        for name, shape in shapes.items():
            count, width = _flat(shape)
            row = mx.arange(count, dtype=mx.float32).reshape((*shape[:-1], 1) if len(shape) > 1 else shape)
            row_numbers[name] = mx.broadcast_to(row, shape)
            column = mx.arange(width, dtype=mx.float32)
            column_numbers[name] = mx.broadcast_to(column if shape else column[0], shape)
        (_, rows), (_, columns) = original.sanitized(row_numbers), original.sanitized(column_numbers)
        names = {code: name for name, code in codes.items()}
        for name in [name for name in passed if name in changed]:
            if runs := _runs(name, passed[name], rows[name], columns[name], names, shapes):
                found[name] = runs
    return found


def by_original(rows: Iterable[RowRun]) -> dict[str, list[RowRun]]:
    """The same rows by original tensor, in row order."""
    ordered = sorted(rows, key=attrgetter("original", "original_start"))
    return {name: list(runs) for name, runs in groupby(ordered, attrgetter("original"))}


def _flat(shape: Shape) -> tuple[int, int]:
    """(rows, numbers in a row) of a tensor."""
    return (math.prod(shape), 1) if len(shape) < 2 else (math.prod(shape[:-1]), shape[-1])


def _runs(
    name: str,
    tensors: mx.array,
    rows: mx.array,
    columns: mx.array,
    names: Mapping[int, str],
    shapes: Mapping[str, Shape],
) -> list[RowRun]:
    """Runs of consecutive rows; [] if the array is not made of whole original rows."""
    if not tensors.shape == rows.shape == columns.shape or not tensors.size:
        return []
    _, width = _flat(tensors.shape)
    tensors, rows, columns = (array.astype(mx.float32).reshape(-1, width) for array in (tensors, rows, columns))
    is_whole = mx.all(tensors == tensors[:, :1]) & mx.all(rows == rows[:, :1]) & mx.all(columns == mx.arange(width))
    if not is_whole.item():
        return []
    runs: list[RowRun] = []
    code_N, row_N = (np.array(array[:, 0]) for array in (tensors, rows))
    ends = np.flatnonzero((np.diff(code_N) != 0) | (np.diff(row_N) != 1)) + 1
    for start, end in pairwise([0, *ends.tolist(), len(code_N)]):
        source, row = names.get(code_N[start]), row_N[start]
        if source is None or row != int(row) or _flat(shapes[source])[1] != width:
            return []
        runs.append(RowRun(name, start, source, int(row), end - start))
    return runs


# The result of training by rows, because an original tensor may hold a part of one of mlx-lm's arrays, or several


@dataclass(frozen=True, slots=True)
class LowRank:
    """scale · b a: `a` [E, r, in], E = 1 without experts of R/E rows each; `b` [R, r]; DoRA's `magnitude` [R]."""

    a: mx.array
    b: mx.array
    magnitude: mx.array | None
    scale: float
    is_linear: bool = True  # false for an embedding and for experts

    @property
    def rank(self) -> int:
        return self.a.shape[1]

    def scaled(self, scale: float) -> LowRank:
        """The same with another scale."""
        return self if scale == self.scale else replace(self, b=(self.scale / scale) * self.b, scale=scale)

    @staticmethod
    def joined(parts: Sequence[tuple[int, LowRank, slice]], rows: int) -> tuple[mx.array, mx.array]:
        """A [r, in] and B [`rows`, r] of adapters with one scale. Each part: the first row of B that it takes, an
        adapter, and the rows of that. Equal A are shared; rows in no part are zeros in B."""
        shared, place = list[mx.array](), dict[int, int]()
        for layer in {id(layer): layer for _, layer, _ in parts}.values():
            same = (at for at, other in enumerate(shared) if mx.array_equal(layer.a[0], other).item())
            place[id(layer)] = next(same, len(shared))
            shared += [layer.a[0]] if place[id(layer)] == len(shared) else []
        starts = [sum(a.shape[0] for a in shared[:at]) for at in range(len(shared) + 1)]
        b = mx.zeros((rows, starts[-1]))
        for start, layer, taken in parts:
            at, learned = place[id(layer)], layer.b[taken]
            b[start : start + len(learned), starts[at] : starts[at + 1]] = learned
        return mx.concatenate(shared) if shared else mx.zeros((0, 0)), b

    def merged(self, base: mx.array, start: int = 0) -> mx.array:
        """Merge the adapter into `base` [n, in], float32, rows from `start` on."""
        per_expert, end = self.b.shape[0] // self.a.shape[0], start + base.shape[0]
        changes: list[mx.array] = []
        for expert in range(start // per_expert, -(-end // per_expert)):
            rows = slice(max(start, expert * per_expert), min(end, (expert + 1) * per_expert))
            changes.append(self.b[rows].astype(mx.float32) @ self.a[expert].astype(mx.float32))
        merged = base + self.scale * mx.concatenate(changes)
        if self.magnitude is None:
            return merged
        length = mx.linalg.norm(merged, axis=-1, keepdims=True)
        return self.magnitude[start:end, None].astype(mx.float32) / length * merged


@dataclass(frozen=True, slots=True)
class TrainedRows:
    """Adapters or whole trained arrays by mlx-lm name."""

    adapters: dict[str, LowRank]
    arrays: dict[str, mx.array]

    def rows(self, name: str, start: int, base: mx.array) -> mx.array:
        """Trained rows of `name` from `start` on, float32; `base` [n, in] are the untrained ones."""
        if name in self.adapters:
            return self.adapters[name].merged(base.astype(mx.float32), start)
        array = self.arrays[name]
        return array.reshape(-1, base.shape[-1])[start : start + base.shape[0]].astype(mx.float32)


def trained_rows(trained: TrainedWeights) -> TrainedRows:
    """Raises UserError for an unknown adapter type."""
    model = trained.open()
    arrays: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    if trained.adapters is None:
        return TrainedRows({}, arrays)
    modules: Any = model.named_modules()
    adapters: dict[str, LowRank] = {}
    for name, layer in modules:
        if "lora_a" not in layer:
            continue
        magnitude = layer.m if "m" in layer else None
        match layer:
            case LoRALinear() | DoRALinear():
                adapter = LowRank(layer.lora_a.T[None], layer.lora_b.T, magnitude, layer.scale)
            case LoRAEmbedding() | DoRAEmbedding():
                adapter = LowRank(layer.lora_b[None], layer.lora_a, magnitude, layer.scale, is_linear=False)
            case LoRASwitchLinear():
                experts, outputs, rank = layer.lora_b.shape
                a, b = layer.lora_a.reshape(experts, rank, -1), layer.lora_b.reshape(experts * outputs, rank)
                adapter = LowRank(a, b, None, layer.scale, is_linear=False)
            case _:
                kind = f"of a kind ({type(layer).__name__}) that only mlx-lm knows"
                raise UserError("format", f"The adapter of {name} is {kind}; choose its format.")
        adapters[f"{name}.weight"] = adapter
    return TrainedRows(adapters, {name: arrays[name] for name in array_names(model, trained.whole_modules())})


def write_merged(trained: TrainedWeights, original: OriginalFiles, to: Path, done: Done) -> None:
    """Write the merged files into a new folder. Raises UserError if a trained array has no counterpart."""
    arrays = merged_arrays(trained, original)
    written = counter(sum(array.nbytes for array in arrays.values()), done)
    to.mkdir(parents=True)
    for file, tensors in original.files.items():
        write_safetensors(to / file, {name: arrays.pop(name) for name in tensors}, written, metadata={"format": "pt"})
    for file in [*kept_files(original.folder, COPIED), *kept_files(trained.tokenizer)]:
        shutil.copyfile(file, to / file.name)
    if trained.has_own_tokenizer:
        config = with_end_tokens(original.config, load_tokenizer(trained.tokenizer))
        (to / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def merged_arrays(trained: TrainedWeights, original: OriginalFiles) -> dict[str, mx.array]:
    """Every original tensor, lazily merged in float32 and cast back. Raises as `write_merged`."""
    learned, traced = trained_rows(trained), trace(original)
    changed = {*learned.adapters, *learned.arrays}
    if lost := sorted(changed - traced.keys()):
        unknown = f"How mlx-lm makes {lost[0]} from the original weights could not be found out"
        raise UserError("format", f"{unknown}, so nothing can be merged into them; choose one of mlx's formats.")
    arrays = original.arrays()
    for name, runs in by_original(run for array in changed for run in traced[array]).items():
        arrays[name] = merged(arrays[name], runs, learned)
    # Some files hold an output layer beside the embedding that it is tied to. mlx-lm drops it; llama.cpp would use it.
    used = {run.original for runs in traced.values() for run in runs}
    heads = [name for name in arrays if name.endswith("lm_head.weight") and name not in used]
    embeddings = [name for name in used if name.endswith("embed_tokens.weight")]
    if original.config.get("tie_word_embeddings") and len(heads) == len(embeddings) == 1:
        arrays[heads[0]] = arrays[embeddings[0]].astype(arrays[heads[0]].dtype)
    return arrays


def merged(tensor: mx.array, runs: list[RowRun], learned: TrainedRows) -> mx.array:
    rows = tensor.reshape(_flat(tensor.shape))
    parts: list[mx.array] = []
    at = 0
    for run in runs:
        if run.original_start < at:
            twice = f"mlx-lm uses {run.original} twice"
            raise UserError("format", f"{twice}, so what was trained cannot be merged into it.")
        parts += [rows[at : run.original_start], learned.rows(run.array, run.start, rows[run.source])]
        at = run.source.stop
    parts.append(rows[at:])
    return mx.concatenate([part.astype(mx.float32) for part in parts]).reshape(tensor.shape).astype(tensor.dtype)
