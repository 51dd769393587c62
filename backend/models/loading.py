"""Opening a model through mlx-lm: whatever goes wrong in somebody else's files becomes one sentence, and no code of theirs is run."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm import utils as mlx_lm_utils

from backend.config.model_and_data_names import model_source
from backend.engine.cpu import compiler
from backend.engine.model_probe import is_causal
from backend.engine.output_layer import PROBE
from backend.models.model_folder import check_arrays, check_config, check_kinds
from backend.models.time_limit import TimeLimitError, time_limit
from backend.models.tokenizers import is_panic, load_tokenizer, reason_of
from backend.runs.start_progress import tell, telling
from backend.utils.errors import UserError
from backend.utils.hub_cache import local_folder
from backend.utils.text import quote

BUILD_S = 15.0
"""Seconds for building a model without its weights. The largest in use take one or two."""
NAME = 50
"""Characters of a model's name in a sentence."""


def load_model(name: str, setting: str) -> tuple[nn.Module, Any, dict[str, Any]]:
    """(model, tokenizer, its config.json) of a folder or Hub id, through mlx-lm. Raises UserError naming `setting`."""
    model, tokenizer, config = open_model(name, setting)
    with loading(name, setting):
        _read_weights(model, name)
    check_runs(model, name, setting)
    return model, tokenizer, config


def open_model(name: str, setting: str) -> tuple[nn.Module, Any, dict[str, Any]]:
    """`load_model` with arrays that are not read yet, and not run."""
    compiler.prepare()  # mlx-lm's models call compiled functions
    source = model_source(name, setting)
    if local_folder(source) is None:
        tell(f"Fetching the model {quote(source, 60)}")
    with loading(name, setting):
        folder = mlx_lm_utils._download(source)  # the folder itself, or the Hub's files in the cache
    return _open(folder, name, setting)


def _read_weights(model: nn.Module, name: str) -> None:
    """Read all arrays of a model that was opened, one after the other, and say how far that has come."""
    arrays: list[Any] = [array for _, array in tree_flatten(model.parameters())]
    ends = list(accumulate((array.nbytes for array in arrays), initial=0))
    read = telling(
        arrays, "Loading", name, lambda number: ends[number] / ends[-1],
        amount=lambda number: ends[number] / 1e9, unit="GB", looked=1,
    )  # fmt: skip
    for array in read:
        mx.eval(array)


def open_weights(folder: Path, name: str, setting: str) -> tuple[nn.Module, dict[str, Any]]:
    """(model, its config.json), nothing read of the weights but headers: names and shapes of all arrays are those of the model that
    config.json describes. Raises UserError naming `setting`."""
    check_kinds(folder, setting)
    check_arrays(folder, check_config(folder / "config.json", name, setting), setting)
    try:
        with loading(name, setting), time_limit(BUILD_S):
            return mlx_lm_utils.load_model(folder, lazy=True, trust_remote_code=False)
    except TimeLimitError:
        sentence = (
            f"The model {quote(Path(name), NAME)} cannot be built from its config.json within {BUILD_S:g} seconds."
        )
        raise UserError(setting, sentence) from None


def _open(folder: Path, name: str, setting: str) -> tuple[nn.Module, Any, dict[str, Any]]:
    model, config = open_weights(folder, name, setting)
    tokenizer = load_tokenizer(folder, setting, config.get("eos_token_id"))
    _check_end_tokens(tokenizer, name, setting)
    return model, tokenizer, config


def check_opens(folder: Path, name: str, setting: str) -> tuple[nn.Module, Any, dict[str, Any]]:
    """`load_model` of a folder, with arrays that are not read. Raises the UserError that it would raise, as far as it shows without the weights."""
    compiler.prepare()
    model, tokenizer, config = _open(folder, name, setting)
    try:
        model.trainable_parameters()
        model(PROBE)  # not evaluated: shapes that do not fit each other raise here
    except Exception as error:  # of any kind: the code of any model runs here
        raise UserError(setting, _cannot_run(name, error)) from error
    return model, tokenizer, config


@contextlib.contextmanager
def loading(name: str, setting: str) -> Iterator[None]:
    """Inside, whatever mlx-lm raises while it loads the model `name` becomes a UserError, and what it prints is dropped."""
    stdout = io.StringIO()
    refused = f"The model {quote(Path(name), NAME)} cannot be loaded"
    try:
        with contextlib.redirect_stdout(stdout):
            yield
    except UserError:
        raise
    except SystemExit as end:  # some models' code prints a missing package and exits
        raise UserError(setting, f"{refused}: {reason_of(end, stdout.getvalue())}.") from end
    except Exception as error:  # of any kind: mlx-lm, transformers, the Hub and the model's own code raise here
        raise UserError(setting, f"{refused}: {reason_of(error)}.") from error
    except BaseException as error:
        if not is_panic(error):
            raise
        raise UserError(setting, f"{refused}: its files are broken.") from error


def _check_end_tokens(tokenizer: Any, name: str, setting: str) -> None:
    """Raises UserError where the ids of the end-of-sequence tokens, from config.json and the tokenizer, are no ids, or where there is no
    token to fill rows with."""
    ends = set(tokenizer.eos_token_ids)
    if odd := [end for end in ends if type(end) is not int or end < 0]:
        raise UserError(
            setting,
            f"The model {quote(Path(name), NAME)} has {quote(odd[0], 40)} as the id of a token that ends a text.",
        )
    if not ends and getattr(tokenizer, "pad_token_id", None) is None:
        raise UserError(
            setting,
            f"The model {quote(Path(name), NAME)} has no token that ends a text, neither in config.json nor in its tokenizer.",
        )


def check_runs(model: nn.Module, name: str, setting: str) -> None:
    """Run a few tokens forward: some models load and cannot run, for lack of a kernel or by a bug in their code. Raises UserError."""
    try:
        model.trainable_parameters()
        causal = is_causal(model)
    except Exception as error:  # of any kind, as above
        raise UserError(setting, _cannot_run(name, error)) from error
    if not causal:
        raise UserError(
            setting,
            f"In mlx-lm's code of the model {quote(Path(name), NAME)} a token's logits change with the tokens after it.",
        )


def _cannot_run(name: str, error: Exception) -> str:
    return f"The model {quote(Path(name), NAME)} loads, but cannot run with this mlx-lm here: {quote(reason_of(error), 80)}."
