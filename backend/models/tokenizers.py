"""Loading the tokenizer of a model's folder, without running code of the model's and without trusting its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from backend.models.mlx_lm_import import import_mlx_lm
from backend.models.model_folder import check_kinds
from backend.models.template_probe import check_template
from backend.models.tokenizer_limits import check_growth
from backend.utils.errors import UserError
from backend.utils.text import quote

NO_CODE = {"trust_remote_code": False}
"""Options of transformers. Left out, it asks on stdin whether to run what `auto_map` names, and stdin may be the window's pipe."""


def load_tokenizer(folder: Path, setting: str = "model", eos_token_ids: Any = None) -> Any:
    """The tokenizer in a model's folder, through mlx-lm, without the model; `eos_token_ids` as config.json has them. Raises UserError on
    `setting`."""
    import_mlx_lm()
    from mlx_lm.utils import load_tokenizer as load

    check_kinds(folder, setting)
    check_growth(folder, setting)
    try:
        tokenizer = load(folder, tokenizer_config_extra=NO_CODE, eos_token_ids=eos_token_ids)
    except Exception as error:  # transformers raises anything at all for files it cannot read
        raise UserError(
            setting, f"The tokenizer in {quote(folder, 70)} cannot be loaded: {reason_of(error)}."
        ) from error
    except BaseException as error:
        if not is_panic(error):
            raise
        raise UserError(
            setting, f"The tokenizer in {quote(folder, 70)} cannot be loaded: its files are broken."
        ) from error
    check_template(tokenizer, setting, quote(folder, 70))
    return tokenizer


def is_panic(error: BaseException) -> bool:
    """Whether Rust code of the tokenizers has given up: an exception without a public class, and no Exception."""
    return type(error).__name__ == "PanicException"


def reason_of(error: BaseException, text: str | None = None) -> str:
    """The first line of an exception's message, without its full stop, for the end of a sentence; with the second where the first ends in
    a colon. `text` is in place of the message."""
    lines = (text or _message(error)).strip().splitlines() or [type(error).__name__]
    first = " ".join(line.strip() for line in lines[: 2 if lines[0].rstrip().endswith(":") else 1])
    return quote(first.rstrip(".: "), 90)


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # an exception's own code
        return ""
