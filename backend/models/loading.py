"""Load models through mlx-lm without running their code; errors become one message.

Of a vision model that mlx-lm itself does not know, such as SmolVLM, Idefics 3, LFM2-VL and LLaVA, the text model.
"""

import contextlib
import io
import re
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.models.cache import make_prompt_cache

from backend.config.model_and_data_names import model_source
from backend.engine import cpu
from backend.engine.model_probe import is_causal
from backend.engine.output_layer import PROBE
from backend.models import hub
from backend.models.architectures import is_text_part, language_model, mlx_lm_settings
from backend.models.hub_client import hub_errors
from backend.models.inventory import is_incomplete
from backend.models.model_folder import check_arrays, check_config
from backend.models.tokenizers import load_tokenizer, refusing
from backend.runs.start_progress import DownloadListener, telling
from backend.utils.errors import UserError
from backend.utils.hub_cache import local_folder
from backend.utils.text import quote, reason_of

TEXT = re.compile(r"^(?:model\.)?(?:language_model|text_model)\.(?:model\.)?|^(?=lm_head\.)")
"""Prefixes of the text model's arrays, as transformers and mlx-vlm write them; the others are the vision tower's."""


def model_classes(config: dict[str, Any]) -> tuple[Any, Any]:
    """Classes of a model and its arguments, for `mlx_lm.utils.load_model`."""
    as_dict = SimpleNamespace(from_dict=dict[str, Any])
    return (TextPart, as_dict) if is_text_part(config) else mlx_lm_utils._get_classes(config)


class TextPart(nn.Module):
    """`language_model` is mlx-lm's model of `text_config`."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        from transformers import CONFIG_MAPPING

        text = dict(language_model(config))
        self._is_tied = bool(text.get("tie_word_embeddings") or config.get("tie_word_embeddings"))
        if text["model_type"] in CONFIG_MAPPING:  # config.json leaves out its defaults, and mlx-lm's are others
            whole = CONFIG_MAPPING[text["model_type"]](**text).to_dict()
            text = {**whole, **mlx_lm_settings(whole), **text}
        self._text = text
        self._make(self._is_tied)

    def _make(self, is_tied: bool) -> None:
        kind, arguments = mlx_lm_utils._get_classes(self._text)
        self.language_model: Any = kind(arguments.from_dict({**self._text, "tie_word_embeddings": is_tied}))
        self.cast_predicate: Any = getattr(self.language_model, "cast_predicate", lambda name: True)
        self.quant_predicate: Any = getattr(self.language_model, "quant_predicate", None)

    def __call__(self, inputs: mx.array, cache: Any = None, input_embeddings: mx.array | None = None) -> mx.array:
        other = {} if input_embeddings is None else {"input_embeddings": input_embeddings}  # some models lack it
        return self.language_model(inputs, cache=cache, **other)

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """The text model's arrays. Without an output layer among them it is the embedding."""
        named: dict[str, mx.array] = {}
        for name, array in weights.items():
            if found := TEXT.match(name):
                rest = name[found.end() :]
                named[rest if rest.startswith("lm_head.") else f"model.{rest}"] = array
        if not self._is_tied:
            self._make("lm_head.weight" not in named)
        if hasattr(self.language_model, "sanitize"):
            named = self.language_model.sanitize(named)
        return {f"language_model.{name}": array for name, array in named.items()}

    @property
    def layers(self) -> list[nn.Module]:
        return self.language_model.layers

    def make_cache(self) -> list[Any]:
        return make_prompt_cache(self.language_model)


def load_model(name: str, setting: str) -> tuple[nn.Module, Any, dict[str, Any]]:
    """(model, tokenizer, config.json) of a folder or Hub id. Raises UserError naming `setting`."""
    model, tokenizer, config = open_model(name, setting)
    read_weights(model, name, setting)
    check_runs(model, name, setting)
    return model, tokenizer, config


def open_model(name: str, setting: str) -> tuple[nn.Module, Any, dict[str, Any]]:
    """`load_model` with unread arrays, without a trial run."""
    cpu.check_compiler()  # mlx-lm's models call compiled functions
    return _open(fetch(name, setting), name, setting)


def fetch(name: str, setting: str) -> Path:
    """Folder of a model, downloaded if it, or its newest revision, is not here. Raises UserError."""
    source = model_source(name, setting)
    folder = local_folder(source)
    with loading(name, setting), hub_errors(source, "model", setting):
        if folder is not None and folder == Path(source):
            return folder
        is_whole = folder is not None and any(folder.glob("*.safetensors")) and not is_incomplete(folder)
        if folder is not None and is_whole and hub.is_newest(folder, source):
            return folder
        listener = DownloadListener(f"Fetching the model {quote(source, 60)}")
        return hub.download(source, "model", listener, setting=setting, waits=True)


def check_opens(folder: Path, name: str, setting: str) -> tuple[nn.Module, Any, dict[str, Any]]:
    """`load_model` without reading weights, for its UserError."""
    cpu.check_compiler()
    model, tokenizer, config = _open(folder, name, setting)
    try:
        model.trainable_parameters()
        model(PROBE)  # not evaluated: shapes that do not fit each other raise here
    except Exception as error:  # of any kind: the code of any model runs here
        raise UserError(setting, _cannot_run(name, error)) from error
    return model, tokenizer, config


def open_weights(
    folder: Path,
    name: str,
    setting: str,
    classes: Callable[..., tuple[type[nn.Module], Any]] = model_classes,
    changes: dict[str, Any] | None = None,
) -> tuple[nn.Module, dict[str, Any]]:
    """(model, config.json with `changes`), arrays unread. `classes`: of model and arguments. Raises UserError."""
    config = check_config(folder / "config.json", name, setting) | (changes or {})
    check_arrays(folder, setting)
    changes = {**(changes or {}), **mlx_lm_settings(config)}
    with loading(name, setting):
        return mlx_lm_utils.load_model(folder, True, True, changes, classes, trust_remote_code=False)


@contextlib.contextmanager
def loading(name: str, setting: str) -> Iterator[None]:
    """Raise mlx-lm's errors while loading `name` as a UserError, and drop its output."""
    stdout = io.StringIO()
    refused = f"{_called(name)} cannot be loaded"
    try:
        with contextlib.redirect_stdout(stdout), refusing(refused, setting):
            yield
    except SystemExit as end:  # some models' code prints a missing package and exits
        raise UserError(setting, f"{refused}: {reason_of(end, stdout.getvalue())}.") from end


def check_runs(model: nn.Module, name: str, setting: str) -> None:
    """Run a few tokens forward, since some models load but fail to run. Raises UserError."""
    try:
        model.trainable_parameters()
        causal = is_causal(model)
    except Exception as error:  # of any kind, as above
        raise UserError(setting, _cannot_run(name, error)) from error
    if not causal:
        what = f"In mlx-lm's code of the model {quote(Path(name), 50)}"
        raise UserError(setting, f"{what} a token's logits change with the tokens after it.")


def _open(folder: Path, name: str, setting: str) -> tuple[nn.Module, Any, dict[str, Any]]:
    model, config = open_weights(folder, name, setting)
    tokenizer = load_tokenizer(folder, setting, config.get("eos_token_id"))
    ends = set(tokenizer.eos_token_ids)
    if odd := [end for end in ends if type(end) is not int or end < 0]:
        raise UserError(setting, f"{_called(name)} has {quote(odd[0], 40)} as the id of a token that ends a text.")
    if not ends and getattr(tokenizer, "pad_token_id", None) is None:
        missing = "no token that ends a text, neither in config.json nor in its tokenizer"
        raise UserError(setting, f"{_called(name)} has {missing}.")
    return model, tokenizer, config


def read_weights(model: nn.Module, name: str, setting: str) -> None:
    """Evaluate the arrays one by one, and say how far it is. Raises UserError naming `setting`."""
    arrays: list[Any] = [array for _, array in tree_flatten(model.parameters())]
    ends = list(accumulate((array.nbytes for array in arrays), initial=0))

    def share(number: int) -> float:
        return ends[number] / ends[-1]

    with loading(name, setting):
        for array in telling(
            arrays, "Loading", name, share, amount=lambda number: ends[number] / 1e9, unit="GB", looked=1
        ):
            mx.eval(array)


def _called(name: str) -> str:
    return f"The model {quote(Path(name), 50)}"


def _cannot_run(name: str, error: Exception) -> str:
    return f"{_called(name)} loads, but cannot run with this mlx-lm here: {quote(reason_of(error), 80)}."
