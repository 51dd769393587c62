"""The policy: load a model, quantise it, attach adapters, keep a frozen reference.

The reference shares the policy's base arrays, so it needs no memory under LoRA and DoRA; under full fine-tuning they
diverge at the first update.
"""

import contextlib
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from typing import cast as typed

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map, tree_map_with_path
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.tuner.utils import load_adapters

from backend.config.model_and_data_names import model_source
from backend.config.setting import AdapterSettings, ModelSettings
from backend.engine import cpu, device
from backend.engine.images import PromptImages
from backend.engine.model_probe import gradient_error, split
from backend.engine.output_layer import PROBE, SplitModel
from backend.engine.shared_weights import SharedWeights, copy_sharing_arrays
from backend.models.adapters import ADAPTER_ENDS, SIXTEEN_BIT_TYPES, attach_adapters, lora_parameters, without_adapters
from backend.models.loading import check_runs, open_model, read_weights
from backend.models.model_folder import check_adapter, check_adapter_config, header_of
from backend.models.tokenizers import run_tokenizer, with_end_tokens
from backend.runs.saved_weights import SETTING, AdapterSource, adapter_settings, find_adapter
from backend.types import Problem
from backend.utils.errors import ConfigProblem, UserError
from backend.utils.files import user_path
from backend.utils.hub_cache import local_folder
from backend.utils.text import quote, reason_of, shown_path
from backend.vision.tokenizer import with_vision

if TYPE_CHECKING:
    from backend.vision.tower import VisionTower

QUANTIZATION = {
    "4": {"bits": 4, "group_size": 64, "mode": "affine"},
    "6": {"bits": 6, "group_size": 64, "mode": "affine"},
    "8": {"bits": 8, "group_size": 64, "mode": "affine"},
    "mxfp4": {"bits": 4, "group_size": 32, "mode": "mxfp4"},
}

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}  # values of `dtype` except "auto"


@dataclass(eq=False, repr=False)
class Policy:
    """Model, tokenizer and reference of one run. Built by `load_policy`.

    `original_dtypes`: types to save arrays in that are trained in float32. `masters`: float32 trainable arrays under
    mixed precision (arXiv:1710.03740), else None. `adapted_keys`: adapted layers if not all. `shared_weights`: a base
    shared with other policies.
    """

    model: nn.Module
    tokenizer: Any
    model_config: dict[str, Any]
    reference_model: nn.Module | None
    original_dtypes: dict[str, mx.Dtype] = field(default_factory=dict[str, mx.Dtype])
    masters: Any = None
    adapted_keys: list[str] = field(default_factory=list[str])
    shared_weights: SharedWeights | None = None

    is_sharded: ClassVar[bool] = False  # true if several ranks compute one model

    def __post_init__(self) -> None:
        self.split_model = split(self.model)
        self.reference = split(self.reference_model) if self.reference_model is not None else None
        self.teacher_model: nn.Module | None = None  # of distillation (`load_teacher`)
        self.teacher: SplitModel | None = None
        self.eos_ids = sorted(int(token) for token in self.tokenizer.eos_token_ids)
        pad = getattr(self.tokenizer, "pad_token_id", None)
        self.pad_id = pad if pad is not None else self.eos_ids[0]
        self.vision: VisionTower | None = None  # opened with the first picture

    def images_of(self, problems: Iterable[Problem]) -> list[PromptImages | None]:
        """The pictures of each problem as the model reads them, None where there are none. Raises UserError."""
        found: list[PromptImages | None] = []
        for problem in problems:
            if problem.images and self.vision is None:
                from backend.vision.tower import VisionTower

                self.vision = VisionTower(self.tokenizer, self.split_model.dtype)
            found.append(self.vision.read(problem) if problem.images and self.vision is not None else None)
        return found

    def parameters(self) -> Any:
        """Trainable arrays as the optimizer has them."""
        return self.model.trainable_parameters() if self.masters is None else self.masters

    def set_parameters(self, parameters: Any) -> None:
        """Set the optimizer's arrays. Lazy: evaluate `arrays()` afterwards."""
        if self.masters is not None:
            self.masters = parameters
            parameters = tree_map(lambda x, own: x.astype(own.dtype), parameters, self.model.trainable_parameters())
        self.model.update(parameters)

    def trainable(self) -> dict[str, mx.array]:
        return dict(tree_flatten(self.parameters()))

    def arrays(self) -> Any:
        """All arrays that training changes, 16-bit copies included."""
        return [self.parameters(), self.model.trainable_parameters()]

    def assign(self, arrays: dict[str, mx.array]) -> None:
        """Restore saved trainable arrays. Raises ValueError for other names or shapes."""
        own = self.trainable()
        if own.keys() != arrays.keys() or any(own[name].shape != arrays[name].shape for name in own):
            raise ValueError("The saved weights do not belong to this model.")
        self.set_parameters(tree_map_with_path(lambda name, _: arrays[name], self.parameters()))

    def follow(self) -> None:
        """Copy the present adapters of the policy that learns (see `QuantizedRollouts`)."""

    def gather_gradient(self, gradient: Any) -> Any:
        """Gradient for `parameters()` from that of the model's arrays (see `ShardedPolicy`)."""
        return gradient

    def broadcast_from_rank0(self, arrays: Sequence[mx.array]) -> Sequence[mx.array]:
        """Rank 0's arrays under sharding (see `ShardedPolicy`)."""
        return arrays

    def move_reference(self, alpha: float) -> None:
        """reference ← (1 − α)·reference + α·policy, over the trainable arrays (TR-DPO, arXiv:2404.09656)."""
        policy, reference = self.trainable(), self.reference_arrays()
        self.restore_reference({name: (1 - alpha) * reference[name] + alpha * policy[name] for name in policy})

    def use_reference(self, config: ModelSettings) -> None:
        """Load or drop the reference; under full fine-tuning it cannot be loaded again. Raises UserError."""
        if config.needs_reference == (self.reference is not None):
            return
        self.reference_model = self.reference = None
        if config.needs_reference:
            assert config.train_type != "full" and not config.modules_to_save
            model = without_adapters(copy_sharing_arrays(self.model))
            self.reference_model = reference = _load_reference(model, self.tokenizer, config, {})
            assert reference is not None
            mx.eval(reference.parameters())
            self.reference = split(reference)

    def reference_arrays(self) -> dict[str, mx.array]:
        """Reference values of the trainable arrays. Complete only with `moves_reference` or full fine-tuning."""
        assert self.reference_model is not None
        everything = dict(tree_flatten(self.reference_model.parameters()))
        return {name: everything[name] for name in self.trainable()}

    def restore_reference(self, arrays: dict[str, mx.array]) -> None:
        assert self.reference_model is not None
        own = dict(tree_flatten(self.reference_model.parameters()))
        arrays = {name: x.astype(own[name].dtype) for name, x in arrays.items()}
        self.reference_model.load_weights(list(arrays.items()), strict=False)
        mx.eval(self.reference_model.parameters())


class QuantizedRollouts(Policy):
    """A policy to sample from: the base of `exact` in `rollout_quantization` bits, with the adapters of `exact` as of
    the last `follow`. Raises UserError."""

    def __init__(self, exact: Policy, config: ModelSettings) -> None:
        self.exact = exact
        # Without adapters: some models choose the bits by the names of layers, which adapters change.
        model = without_adapters(copy_sharing_arrays(exact.model))
        model, model_config = quantized_as(model, exact.model_config, config, "rollout_quantization")
        attach_adapters(model, config)
        mx.eval(model.parameters())
        super().__init__(model, exact.tokenizer, model_config, None)

    def follow(self) -> None:
        self.model.update(self.exact.model.trainable_parameters())

    def images_of(self, problems: Iterable[Problem]) -> list[PromptImages | None]:
        return self.exact.images_of(problems)


@dataclass(frozen=True, slots=True)
class Base:
    """A model in the configured precision without adapters, which adapter policies can share; fields as in `Policy`."""

    model: nn.Module
    tokenizer: Any
    model_config: dict[str, Any]
    original_dtypes: dict[str, mx.Dtype]
    masters: Any
    weights: SharedWeights
    references: dict[str, nn.Module] = field(default_factory=dict)  # others by path, teachers by name and bits


def load_base(config: ModelSettings, note: Callable[[str], None] = lambda sentence: None) -> Base:
    """Load, quantise and cast a run's model. Raises UserError naming the setting."""
    model, tokenizer, model_config = open_configured(config)
    if (folder := local_folder(model_source(config.model, "model"))) is not None:
        tokenizer = with_vision(tokenizer, folder, config.image_max_pixels)
    is_full = config.train_type == "full"
    original_dtypes = _prepare_full_training(model, note) if is_full else {}
    # After quantising, so that the codes are those of the model as it came, which an export quantises too.
    masters = cast(model, config.dtype, keep=is_full)
    read_weights(model, config.model, "model")  # last, so that no array is held in two types
    check_computes(model, config)
    check_runs(model, config.model, "model")
    return Base(model, tokenizer, model_config, original_dtypes, masters, SharedWeights(model))


def open_configured(config: ModelSettings) -> tuple[nn.Module, Any, dict[str, Any]]:
    """(model, tokenizer, config.json) of a run, quantised as configured, lazily. Raises UserError."""
    device.use(config.device)
    model, tokenizer, model_config = open_model(config.model, "model")
    tokenizer = run_tokenizer(config.tokenizer, tokenizer, model)
    if config.tokenizer:
        model_config = with_end_tokens(model_config, tokenizer)
    model, model_config = quantized_as(model, model_config, config)
    return model, tokenizer, model_config


def check_learns(model: nn.Module, model_config: dict[str, Any], config: ModelSettings) -> None:
    """Raise `load_policy`'s UserError without weights; `model` is unusable afterwards."""
    model, _ = quantized_as(model, model_config, config)
    if config.needs_reference:
        _adapted_reference(model, config)
    if config.train_type == "full":
        _prepare_full_training(model, lambda sentence: None)
        model.unfreeze()
    else:
        attach_adapters(model, config)
    check_can_learn(model, config.model)


def load_policy(
    config: ModelSettings, note: Callable[[str], None] = lambda sentence: None, shared: Base | None = None
) -> Policy:
    """`shared`: a base with this `model`, `quantization` and `dtype`, for adapters. Raises UserError."""
    if sentence := cpu.check_compiler():
        note(sentence)
    is_full = config.train_type == "full"
    assert shared is None or not is_full
    base = shared or load_base(config, note)
    tokenizer, masters = base.tokenizer, base.masters
    model = copy_sharing_arrays(base.model) if shared else base.model
    reference = _load_reference(model, tokenizer, config, base.references)
    adapted_keys: list[str] = []
    if is_full:
        model.unfreeze()
    else:
        adapted_keys = attach_adapters(model, config, note)
        if config.modules_to_save:
            own = model.trainable_parameters()
            arrays: dict[str, mx.array] = dict(tree_flatten(own))
            if any(array.dtype in SIXTEEN_BIT_TYPES for array in arrays.values()):
                masters = tree_map(lambda x: x.astype(mx.float32) if x.dtype in SIXTEEN_BIT_TYPES else x, own)
        if config.moves_reference:  # it needs adapters of its own; the base is still shared
            reference = copy_sharing_arrays(model).freeze().eval()
    check_can_learn(model, config.model)
    mx.eval(model.parameters(), masters)
    weights = base.weights if shared else None
    return Policy(model, tokenizer, base.model_config, reference, base.original_dtypes, masters, adapted_keys, weights)


def cast(model: nn.Module, dtype: str, keep: bool = False) -> Any:
    """Cast float arrays, quantised layers' scales and biases included; "auto" does nothing. Arrays that need float32
    (routers, state-space decays) stay, as in mlx-lm. On a CPU, whose quantised products are slow, float32 expands
    quantised layers. `keep`: return the arrays before rounding to 16 bits, else None."""
    if dtype == "auto":
        return None
    casts: Callable[[str], bool] = getattr(model, "cast_predicate", lambda name: True)  # mlx-lm's name
    before = model.parameters()

    def as_type(name: str, array: Any) -> mx.array:
        is_float = mx.issubdtype(array.dtype, mx.floating)
        return array.astype(DTYPES[dtype]) if is_float and casts(name) else array

    model.update(tree_map_with_path(as_type, before))
    if dtype == "float32" and device.on_cpu():
        mlx_lm_utils.dequantize_model(model)
        model.update(tree_map_with_path(as_type, model.parameters()))  # MXFP4 expands to bfloat16
    return before if keep and DTYPES[dtype] in SIXTEEN_BIT_TYPES else None


def check_computes(model: nn.Module, config: ModelSettings) -> None:
    """Raise UserError if the model cannot run in the configured type."""
    if config.dtype == "auto":  # as `check_runs` has run it
        return
    try:
        mx.eval(model(PROBE))
    except Exception as error:  # of any kind: the code of any model runs here
        sentence = f"The model {quote(Path(config.model), 50)} does not run in {config.dtype} here: {reason_of(error)}."
        raise UserError("dtype", sentence) from error


def check_can_learn(model: nn.Module, name: str) -> None:
    """Raise UserError for an operation without a gradient, such as a forward-only Metal kernel."""
    if reason := gradient_error(model):
        operation = f"an operation of its code has no gradient on this device ({quote(reason, 50)})"
        raise UserError("model", f"The model {quote(Path(name), 50)} cannot be trained here: {operation}.")


def quantized_as(
    model: nn.Module, model_config: dict[str, Any], config: ModelSettings, setting: str = "quantization"
) -> tuple[nn.Module, dict[str, Any]]:
    """(model, config.json) quantised as configured, lazily. Raises UserError."""
    if getattr(config, setting) == "none":
        return model, model_config
    # Experts may come packed (gpt-oss), and leave the other layers to quantise.
    if any(isinstance(module, (nn.QuantizedLinear, nn.QuantizedEmbedding)) for module in model.modules()):
        raise UserError(setting, "The model is quantised already; choose None to take it as it comes.")
    how = QUANTIZATION[getattr(config, setting)]
    try:
        model, model_config = quantize(model, model_config, **how)
    except Exception as error:  # a model's code may ask for a group size of its own that its widths do not allow
        raise UserError(setting, f"This model cannot be quantised: {reason_of(error)}; choose None.") from error
    if not is_quantised(model):
        too_narrow = f"none is a multiple of {how['group_size']} wide"
        raise UserError(setting, f"No weight of this model can be quantised: {too_narrow}; choose None.")
    return model, model_config


def quantize(
    model: nn.Module, model_config: dict[str, Any], *, bits: int, group_size: int, mode: str
) -> tuple[nn.Module, dict[str, Any]]:
    """(model, config.json) quantised by mlx-lm, lazily; widths not divisible by `group_size` stay."""
    with contextlib.redirect_stdout(io.StringIO()):  # mlx-lm prints a line, and stdout may carry the event log
        return mlx_lm_utils.quantize_model(model, model_config, group_size, bits, mode=mode)


def is_quantised(model: nn.Module) -> bool:
    return any(map(is_packed, model.modules()))


def is_packed(module: nn.Module) -> bool:
    return "scales" in module and hasattr(module, "bits")


def _prepare_full_training(model: nn.Module, note: Callable[[str], None]) -> dict[str, mx.Dtype]:
    """Float32, since 16-bit weights lose small updates; returns the original types. Raises UserError if quantised."""
    if is_quantised(model):
        packed = "Full fine-tuning has no gradient for quantised weights, and this model is quantised"
        raise UserError("train_type", f"{packed}; choose LoRA.")
    original_dtypes = {
        name: array.dtype for name, array in tree_flatten(model.parameters()) if array.dtype in SIXTEEN_BIT_TYPES
    }
    if original_dtypes:
        model.set_dtype(mx.float32)
        saved = "the saved model has the precision it came with"
        note(f"Full fine-tuning keeps its weights in 32 bits while it learns; {saved}.")
    return original_dtypes


def _load_reference(
    model: nn.Module, tokenizer: Any, config: ModelSettings, loaded: dict[str, nn.Module]
) -> nn.Module | None:
    path = config.reference_model_path
    if not config.needs_reference:
        return None
    if not path:
        return copy_sharing_arrays(model).freeze().eval()
    if path not in loaded:
        reference = _adapted_reference(model, config)
        if reference is None:
            reference = load_other(path, "reference_model_path", tokenizer, config)
        loaded[path] = reference
    return loaded[path]


def load_teacher(policy: Policy, config: ModelSettings, shared: Base | None = None) -> None:
    """Load the frozen teacher of distillation into `policy`, in the run's type. Raises UserError."""
    if config.train_mode != "distill":
        return
    name, setting = config.teacher_model, "teacher_model"
    loaded, key = {} if shared is None else shared.references, f"{name} {config.teacher_quantization}"
    if key not in loaded:
        loaded[key] = load_other(name, setting, policy.tokenizer, config, "teacher_quantization")
    policy.teacher_model = loaded[key]
    policy.teacher = split(policy.teacher_model)


def load_other(name: str, setting: str, tokenizer: Any, config: ModelSettings, quantization: str = "") -> nn.Module:
    """A frozen model with this tokenizer, in the run's type. `quantization`: its setting. Raises UserError."""
    model, own, model_config = open_model(name, setting)
    check_same_tokens(own, tokenizer, config, setting)
    if quantization:
        model, _ = quantized_as(model, model_config, config, quantization)
    cast(model, config.dtype)
    read_weights(model, name, setting)
    check_runs(model, name, setting)
    return model.freeze().eval()


def check_same_tokens(
    of_other: Any, of_model: Any, config: ModelSettings, setting: str = "reference_model_path"
) -> None:
    """Raise UserError for a reference, teacher or draft model, named by `setting`, with another vocabulary."""
    if of_other.get_vocab() != of_model.get_vocab():
        other, model = (quote(Path(path), 40) for path in (getattr(config, setting), config.model))
        kind = setting.partition("_")[0]
        has = f"The {kind} model {other} has other tokens than {model}"
        raise UserError(setting, f"{has}, so the two cannot be compared.")


def _adapted_reference(model: nn.Module, config: ModelSettings) -> nn.Module | None:
    """A frozen copy of `model` with the adapters in `reference_model_path`; None if that holds none."""
    adapters = user_path(config.reference_model_path, "reference_model_path")
    if not config.reference_model_path or not (adapters / "adapter_config.json").is_file():
        return None
    check_adapter(adapters, "reference_model_path")
    try:
        return load_adapters(copy_sharing_arrays(model), str(adapters)).freeze().eval()
    except Exception as error:
        first, _, rest = str(error).strip().partition("\n")
        reason = reason_of(error, rest if first.endswith(":") else first)
        sentence = f"The adapter {quote(adapters, 50)} does not fit this model: {reason}."
        raise UserError("reference_model_path", sentence) from error


LABELS = {"train_type": "Fine-tune", "rank": "Rank", "scale": "Scale"}  # settings that must match the adapter's


def load_start(policy: Policy, config: ModelSettings, adapter: str, runs_dir: Path | None = None) -> str:
    """Load `adapter` into the policy; returns a message for the event log. Raises UserError."""
    own = policy.trainable()
    source = check_start(own, config, adapter, runs_dir)
    arrays = typed("dict[str, mx.array]", mx.load(str(source.weights)))
    if odd := next((name for name in own if not mx.all(mx.isfinite(arrays[name])).item()), None):
        where = f"NaN or infinite numbers in {quote(odd, 60)}"
        raise UserError(SETTING, f"The adapter {shown_path(source.text, 50)} has {where}; start from another.")
    policy.assign({name: arrays[name].astype(own[name].dtype) for name in own})
    mx.eval(policy.arrays())
    base = adapter_settings(source).get("model", config.model)
    other = "" if base == config.model else f" They were trained on {quote(base, 60)}."
    return f"The adapters start from {source.text}.{other}"


def check_start(
    own: dict[str, mx.array], config: AdapterSettings, adapter: str, runs_dir: Path | None = None
) -> AdapterSource:
    """Find `adapter` for a run whose trainable arrays are `own`, unread. Raises UserError if it does not fit them."""
    source = find_adapter(adapter, runs_dir)
    if source.about is not None:
        check_adapter_config(source.about, SETTING)
    theirs = adapter_settings(source)
    ours: dict[str, Any] = lora_parameters(config, []) | {"train_type": config.train_type}
    faults: list[ConfigProblem] = []
    for key, label in LABELS.items():
        if key in theirs and theirs[key] != ours[key]:
            value = quote(theirs[key], 20)
            differs = f"{label} is {quote(ours[key], 20)}, and the adapter to start from has {value}"
            faults.append(ConfigProblem(key, f"{differs}; set it to {value}."))
    if faults:
        raise UserError(faults)
    stored = {name: array.shape for name, array in header_of(source.weights, SETTING).items()}
    shapes = {name: array.shape for name, array in own.items()}
    if other := sorted(name for name in shapes.keys() & stored.keys() if shapes[name] != stored[name]):
        why = f"{quote(other[0], 40)} is {stored[other[0]]} there and {shapes[other[0]]} here"
    elif odd := sorted(shapes.keys() ^ stored.keys(), key=lambda name: (name.endswith(ADAPTER_ENDS), name)):
        # A module that is trained as a whole comes first: its layers have no adapters.
        fields = "(Layers, Target modules)" if odd[0].endswith(ADAPTER_ENDS) else "(Modules to save)"
        has, trains = ("has", "does not train") if odd[0] in stored else ("lacks", "trains")
        why = f"it {has} {quote(odd[0], 40)}, which this run {trains} {fields}"
    else:
        return source
    raise UserError(SETTING, f"The adapter {shown_path(source.text, 50)} does not fit this run: {why}.")
