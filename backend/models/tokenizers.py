"""Load a model's tokenizer, or the configured one, without running model code."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backend.utils.errors import UserError
from backend.utils.files import is_file, is_folder, user_path
from backend.utils.hub_cache import local_folder, split_revision
from backend.utils.text import quote, reason_of, shown_path

if TYPE_CHECKING:
    import mlx.nn as nn

NO_CODE = {"trust_remote_code": False}  # transformers options; without them it may prompt on stdin
SETTING = "tokenizer"
FILES = (  # files to fetch from the Hub
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt"),
    *("spiece.model", "*.tiktoken", "chat_template.*"),
)

_first_import = threading.Lock()


def import_mlx_lm() -> None:
    """Import mlx-lm before threads import parts of it, or transformers: concurrent imports end in `_DeadlockError`, or
    in an ImportError, as transformers replaces its module while it is imported."""
    with _first_import:
        import mlx_lm  # noqa: F401  # pyright: ignore[reportUnusedImport]


def load_tokenizer(folder: Path, setting: str = "model", eos_token_ids: Any = None) -> Any:
    """Tokenizer in a folder, with `eos_token_ids` from config.json. Raises UserError."""
    import_mlx_lm()
    from mlx_lm.utils import load_tokenizer as load

    with refusing(f"The tokenizer in {quote(folder, 70)} cannot be loaded", setting):
        tokenizer = load(folder, tokenizer_config_extra=NO_CODE, eos_token_ids=eos_token_ids)
        # Else it says that a long text ends in errors: who encodes it here checks its length.
        tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
        return tokenizer


@contextmanager
def refusing(sentence: str, setting: str) -> Iterator[None]:
    """Raise any error of mlx-lm, transformers, the Hub or a model's code as a UserError: `sentence` and the reason."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(setting, f"{sentence}: {reason_of(error)}.") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of Rust, in `tokenizers`; it has no public class
            raise
        raise UserError(setting, f"{sentence}: its files are broken.") from error


def tokenizer_folder(name: str) -> Path:
    """Folder of a tokenizer: `name`, or a Hub id's cache, fetched if missing. Raises UserError."""
    folder = user_path(name, SETTING)
    if not is_folder(folder):
        cached = local_folder(name)
        if cached is not None and is_file(cached / "tokenizer_config.json"):
            return cached
        repo, revision = split_revision(name)
        if name.startswith((".", "/", "~")) or repo.count("/") != 1:
            what = "it is neither a folder nor an owner/name id on Hugging Face"
            raise UserError(SETTING, f"There is no tokenizer {shown_path(name, 90)}: {what}.")
        from huggingface_hub import snapshot_download

        from backend.models.hub import check_reachable
        from backend.models.hub_client import hub_errors

        check_reachable(name, "model", SETTING)
        with hub_errors(name, "model", SETTING):
            folder = Path(snapshot_download(repo, revision=revision, allow_patterns=list(FILES)))
    if not is_file(folder / "tokenizer_config.json"):
        raise UserError(SETTING, f"The folder {quote(folder)} holds no tokenizer: tokenizer_config.json is missing.")
    return folder


def run_tokenizer(name: str, own: Any, model: nn.Module) -> Any:
    """Tokenizer `name`, or the model's `own` for "". Raises UserError if it does not fit the model."""
    if not name:
        return own
    tokenizer = load_tokenizer(tokenizer_folder(name), SETTING)
    import mlx.nn as nn

    kinds = (nn.Embedding, nn.QuantizedEmbedding)
    embeddings = [module.weight.shape[0] for module in model.modules() if isinstance(module, kinds)]
    largest, rows = max(tokenizer.get_vocab().values(), default=-1), max(embeddings, default=None)
    called = f"The tokenizer {quote(Path(name), 50)}"
    if rows is not None and largest >= rows:
        ends = f"the model's vocabulary ends at {rows - 1:,}"
        raise UserError(SETTING, f"{called} has tokens up to {largest:,}, and {ends}: it is another model's.")
    if not set(tokenizer.eos_token_ids):
        raise UserError(SETTING, f"{called} names no token that ends a text.")
    return tokenizer


def with_end_tokens(config: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """config.json with this tokenizer's end tokens."""
    return config | {"eos_token_id": sorted(int(token) for token in tokenizer.eos_token_ids)}
