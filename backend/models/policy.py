"""The model being trained: loaded, quantised, given adapters, saved; and its reference.

A Policy holds two faces of one model. `model` learns. `reference` is the model as it was before training: its module
tree is a twin made before adapters were attached, and it shares every array with the base, so it costs no memory under
LoRA and DoRA; under full fine-tuning the arrays part ways at the first update.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters

from backend.engine.model_probe import split
from backend.spec.config import Config
from backend.spec.faults import Mistake
from backend.spec.model_and_data_names import model_source

QUANTIZATION = {
    "4": {"bits": 4, "group_size": 64, "mode": "affine"},
    "6": {"bits": 6, "group_size": 64, "mode": "affine"},
    "8": {"bits": 8, "group_size": 64, "mode": "affine"},
    "mxfp4": {"bits": 4, "group_size": 32, "mode": "mxfp4"},
}

SIXTEEN_BITS = (mx.bfloat16, mx.float16)

ADAPTABLE = (
    *(nn.Linear, nn.QuantizedLinear, nn.Embedding, nn.QuantizedEmbedding),
    *(SwitchLinear, QuantizedSwitchLinear),
)
"""What mlx-lm puts adapters on."""


class Policy:
    """Model, tokenizer and reference of one run. Build with `load_policy`.

    `came_as` holds the type of every array that came in 16 bits and learns in 32: it is saved as it came.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        model_config: dict[str, Any],
        reference: nn.Module | None,
        came_as: dict[str, mx.Dtype] | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.model_config = model_config
        self.came_as = came_as or {}
        self.split_model = split(model)
        self.reference_model = reference
        self.reference = split(reference) if reference is not None else None
        self.eos_ids = sorted(int(token) for token in tokenizer.eos_token_ids)
        pad = getattr(tokenizer, "pad_token_id", None)
        self.pad_id = pad if pad is not None else self.eos_ids[0]

    def hidden(self, tokens: mx.array, cache: Any = None) -> mx.array:
        return self.split_model.hidden(tokens, cache)

    def logits(self, hidden: mx.array) -> mx.array:
        return self.split_model.logits(hidden)

    def trainable(self) -> dict[str, mx.array]:
        """Every array that learns, by name."""
        return dict(tree_flatten(self.model.trainable_parameters()))

    def assign(self, arrays: dict[str, mx.array]) -> None:
        """Put saved arrays back. Raises ValueError when names or shapes are not those of this policy."""
        mine = self.trainable()
        if mine.keys() != arrays.keys() or any(mine[name].shape != arrays[name].shape for name in mine):
            raise ValueError("The saved weights do not belong to this model.")
        self.model.load_weights(list(arrays.items()), strict=False)

    def move_reference(self, alpha: float) -> None:
        """reference ← (1 − α)·reference + α·policy, over what learns (TR-DPO, arXiv:2404.09656)."""
        mine, theirs = self.trainable(), self.reference_arrays()
        mixed = [(name, (1 - alpha) * theirs[name] + alpha * mine[name]) for name in mine]
        self.restore_reference(dict(mixed))

    def reference_arrays(self) -> dict[str, mx.array]:
        """The reference's counterpart of everything that learns; only a reference that follows has all of it."""
        assert self.reference_model is not None
        everything = dict(tree_flatten(self.reference_model.parameters()))
        return {name: everything[name] for name in self.trainable()}

    def restore_reference(self, arrays: dict[str, mx.array]) -> None:
        assert self.reference_model is not None
        self.reference_model.load_weights(list(arrays.items()), strict=False)
        mx.eval(self.reference_model.parameters())


# ── loading ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def load_policy(config: Config, note: Callable[[str], None] = lambda sentence: None) -> Policy:
    """The policy that `config` asks for, before its first step. Raises Mistake for a model that cannot be used."""
    model, tokenizer, model_config = load_model(config.model, "model")
    if config.quantization != "none":
        model, model_config = _quantised(model, model_config, config.quantization)
    came_as = _prepare_full(model, note) if config.train_type == "full" else {}
    reference = _reference(model, tokenizer, config)
    if config.train_type == "full":
        model.unfreeze()
    else:
        attach_adapters(model, config, note)
        if config.sync_ref_model:  # the reference is a copy of the adapter, not of the model, and moves with it
            reference = _frozen(twin(model))
    mx.eval(model.parameters())
    return Policy(model, tokenizer, model_config, reference, came_as)


def load_model(name: str, setting: str) -> tuple[nn.Module, Any, dict[str, Any]]:
    """(model, tokenizer, its config.json) of a folder or Hub id, through mlx-lm. Raises Mistake naming `setting`."""
    where = model_source(name, setting)
    told = io.StringIO()
    try:
        with contextlib.redirect_stdout(told):
            model, tokenizer, model_config = mlx_lm_utils.load(where, return_config=True)  # pyright: ignore
    except SystemExit as end:  # of a model whose code asks for a package that is not there
        raise Mistake(setting, f"The model {name} cannot be loaded: {_first_line(told.getvalue(), end)}.") from end
    except Exception as error:
        raise Mistake(setting, f"The model {name} cannot be loaded: {_first_line(str(error), error)}.") from error
    _try(model, name, setting)
    return model, tokenizer, model_config


def _try(model: nn.Module, name: str, setting: str) -> None:
    """One token forward: some models load and cannot run, for want of a kernel or by a fault in their code."""
    try:
        model.trainable_parameters()
        mx.eval(model(mx.array([[0]])))
    except Exception as error:
        reason = _first_line(str(error), error)
        raise Mistake(setting, f"The model {name} loads, but cannot run with this mlx-lm here: {reason}.") from error


def _first_line(text: str, error: BaseException) -> str:
    return (text.strip().splitlines() or [type(error).__name__])[0].strip().rstrip(".")


def _quantised(model: nn.Module, model_config: dict[str, Any], kind: str) -> tuple[nn.Module, dict[str, Any]]:
    if is_quantised(model):
        raise Mistake("quantization", "The model is quantised already; choose None to train it as it comes.")
    how = QUANTIZATION[kind]
    with contextlib.redirect_stdout(io.StringIO()):  # mlx-lm prints a line, and stdout may carry the diary
        model, model_config = mlx_lm_utils.quantize_model(
            model, model_config, how["group_size"], how["bits"], mode=how["mode"]
        )
    if not is_quantised(model):
        raise Mistake(
            "quantization",
            f"No weight of this model can be quantised: none is a multiple of {how['group_size']} wide; choose None.",
        )
    return model, model_config


def is_quantised(model: nn.Module) -> bool:
    return any(isinstance(module, (nn.QuantizedLinear, nn.QuantizedEmbedding)) for module in model.modules())


def _prepare_full(model: nn.Module, note: Callable[[str], None]) -> dict[str, mx.Dtype]:
    """Full fine-tuning learns in float32: a 16-bit weight swallows updates smaller than its own rounding. → what came
    in 16 bits, by name."""
    if is_quantised(model):
        raise Mistake(
            "train_type",
            "Full fine-tuning has no gradient for quantised weights, and this model is quantised; choose LoRA.",
        )
    came_as = {name: array.dtype for name, array in tree_flatten(model.parameters()) if array.dtype in SIXTEEN_BITS}
    if came_as:
        model.set_dtype(mx.float32)
        note(
            "Full fine-tuning keeps its weights in 32 bits while it learns; the saved model has the precision it came with."
        )
    return came_as


def _reference(model: nn.Module, tokenizer: Any, config: Config) -> nn.Module | None:
    """The model as it was before training, the person's own reference model, or the base with an adapter of it."""
    if not config.needs_reference:
        return None
    path = Path(config.reference_model_path).expanduser()
    if not config.reference_model_path:
        return _frozen(twin(model))
    if (path / "adapter_config.json").is_file():
        return _frozen(_adapted(twin(model), path))
    reference, other, _ = load_model(config.reference_model_path, "reference_model_path")
    if other.get_vocab() != tokenizer.get_vocab():
        raise Mistake(
            "reference_model_path",
            f"The reference model {config.reference_model_path} has other tokens than {config.model}, so their "
            f"log-probabilities cannot be compared.",
        )
    return _frozen(reference)


def _frozen(model: nn.Module) -> nn.Module:
    model.freeze()
    model.eval()
    return model


def _adapted(model: nn.Module, adapters: Path) -> nn.Module:
    """The base with a trained adapter of it."""
    try:
        return load_adapters(model, str(adapters))
    except Exception as error:
        first, _, rest = str(error).strip().partition("\n")
        reason = _first_line(rest if first.endswith(":") else first, error)
        raise Mistake("reference_model_path", f"The adapter {adapters} does not fit this model: {reason}.") from error


def twin(model: nn.Module) -> nn.Module:
    """A second module tree over the very same arrays."""
    arrays = {id(array): array for _, array in tree_flatten(model.parameters())}
    return copy.deepcopy(model, arrays)  # a memo that knows the arrays makes deepcopy share them


def attach_adapters(model: nn.Module, config: Config, note: Callable[[str], None] = lambda sentence: None) -> None:
    """Freeze the base and put LoRA or DoRA on its last `num_layers` layers (seeded)."""
    model.freeze()
    there = len(model.layers)  # pyright: ignore
    if config.num_layers > there:
        note(f"Layers is {config.num_layers}, and the model has {there}: all of them get adapters.")
    _refuse_unknown_keys(model, config.lora_keys)
    mx.random.seed(config.seed)
    try:
        linear_to_lora_layers(
            model, layer_count(model, config), lora_parameters(config), use_dora=config.train_type == "dora"
        )
    except ValueError as error:
        reason = _first_line(str(error), error)
        raise Mistake(
            "train_type", f"This model cannot take {config.train_type.upper()} adapters: {reason}."
        ) from error
    if not tree_flatten(model.trainable_parameters()):
        last = f"None of the model's last {layer_count(model, config)} layers has"
        if config.lora_keys:
            raise Mistake("lora_keys", f"{last} {' or '.join(config.lora_keys)}.")
        raise Mistake("train_type", f"{last} anything that takes adapters; choose Full, or another model.")


def _refuse_unknown_keys(model: nn.Module, keys: list[str]) -> None:
    """A name that fits nothing would be left out in silence: mlx-lm adapts what it finds."""
    inside = {name for layer in model.layers for name in adaptable(layer)}  # pyright: ignore
    everywhere = adaptable(model)
    if strange := [key for key in keys if key not in inside | everywhere]:
        known = sorted(inside | {name for name in everywhere if "layers." not in name})
        raise Mistake(
            "lora_keys", f"No layer of this model is called {', '.join(strange)}; there are {', '.join(known)}."
        )


def adaptable(module: nn.Module) -> set[str]:
    """Names, within `module`, of what takes an adapter."""
    return {name for name, one in module.named_modules() if isinstance(one, ADAPTABLE) or hasattr(one, "to_lora")}


def layer_count(model: nn.Module, config: Config) -> int:
    there = len(model.layers)  # pyright: ignore
    return there if config.num_layers < 0 else min(config.num_layers, there)


def lora_parameters(config: Config) -> dict[str, Any]:
    keys = {"keys": config.lora_keys} if config.lora_keys else {}
    return {"rank": config.rank, "scale": config.scale, "dropout": config.dropout} | keys


# ── saving ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def adapter_config(policy: Policy, config: Config) -> dict[str, Any]:
    """adapter_config.json as mlx-lm's `load_adapters` reads it."""
    return {
        "fine_tune_type": config.train_type,
        "model": config.model,
        "num_layers": layer_count(policy.model, config),
        "lora_parameters": lora_parameters(config),
    }


def save_adapters(policy: Policy, config: Config, folder: Path) -> None:
    """adapters.safetensors and adapter_config.json in mlx-lm's own format, each whole or as it was before."""
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / ".draft.safetensors"
    mx.save_safetensors(str(draft), policy.trainable(), metadata={"format": "mlx"})
    draft.replace(folder / "adapters.safetensors")
    text = json.dumps(adapter_config(policy, config), indent=2)
    (folder / "adapter_config.json").write_text(text + "\n", encoding="utf-8")


def save_model(policy: Policy, source: str, folder: Path) -> None:
    """The whole model as `mlx_lm.load` opens it, in the precision it came with."""

    def as_it_came(name: str, array: mx.array) -> mx.array:
        return array.astype(policy.came_as.get(name, array.dtype))

    model = twin(policy.model)
    model.update(tree_map_with_path(as_it_came, model.parameters()))
    path = Path(source).expanduser()
    # A folder, never an id: for an id mlx-lm would ask the Hub for a model card, and a run must end offline too.
    path = path if path.is_dir() else mlx_lm_utils.hf_repo_to_path(source)
    mlx_lm_utils.save(folder, path, model, policy.tokenizer, policy.model_config, donate_model=False)
