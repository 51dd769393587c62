"""The environment that confined code is started with: what Python and libraries need, and no token of anybody's."""

from __future__ import annotations

import os
import re
import site
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

_NEEDED = re.compile(
    r"PATH|LANG|LANGUAGE|LC_\w+|TZ|TZDIR|TERM|USER|LOGNAME|SHELL|VIRTUAL_ENV|CONDA_PREFIX|CONDA_DEFAULT_ENV|LD_LIBRARY_PATH"
    r"|DYLD_\w+|PYTHON\w+|GRPO_\w+|HF_HOME|HF_HUB_CACHE|HUGGINGFACE_HUB_CACHE|HF_DATASETS_CACHE|XDG_CACHE_HOME|NLTK_DATA|TORCH_HOME"
    r"|SSL_CERT_FILE|SSL_CERT_DIR|OMP_\w+|MKL_\w+|OPENBLAS_\w+|VECLIB_\w+|NUMEXPR_\w+|TOKENIZERS_PARALLELISM|COVERAGE_\w+"
)
"""Variables that are passed on: how programs, modules, libraries, text and caches are found, and threads counted."""
_NEVER = re.compile(
    r"(?i).*(TOKEN|SECRET|PASSW|CREDENTIAL).*|HF_API_KEY|HUGGING\w*_KEY|GRPO_STUDIO_LOCK|SSH_\w+|GPG_\w+|DBUS_\w+|XDG_RUNTIME_DIR"
    r"|DISPLAY|WAYLAND_DISPLAY|XAUTHORITY|DOCKER_HOST|PYTHON(STARTUP|INSPECT)"
)
"""Variables that are never passed on: tokens, our lock's descriptor, the way to the user's session, agents and keychain."""
_NOT_TOKENS = frozenset({"TOKENIZERS_PARALLELISM"})


def confined_environment(
    folder: Path, network: bool = False, environment: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The environment of a child that is confined to `folder`, in which its home and its temporary folder are made.

    Without a network it is a short list of what is needed. With one it is the user's own (`environment`, by default this process's),
    because a judge needs its API key, whose name only its author knows; tokens of Hugging Face, GitHub and whatever else is named a token
    or password are left out even then, an API key named …_KEY is passed on.

    HOME is `folder/home`, which `~/.cache` can be read through; TMPDIR is `folder/tmp`. Packages that the user installed for
    themselves (`pip install --user`) are still found. Raises OSError where the folders cannot be made.
    """
    variables = dict(os.environ if environment is None else environment)
    kept = {name: value for name, value in variables.items() if _is_passed_on(name, network)}
    home, temporary = folder / "home", folder / "tmp"
    for made in (home, temporary):
        made.mkdir(parents=True, exist_ok=True)
    _link_cache(Path(variables.get("HOME") or Path.home()) / ".cache", home / ".cache")
    if "PYTHONUSERBASE" not in kept and (base := site.getuserbase()):
        kept["PYTHONUSERBASE"] = base
    if not network:
        kept |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    return kept | {"HOME": str(home), "TMPDIR": str(temporary)}


def _is_passed_on(name: str, network: bool) -> bool:
    if _NEVER.fullmatch(name) and name not in _NOT_TOKENS:
        return False
    return network or _NEEDED.fullmatch(name) is not None


def _link_cache(real: Path, link: Path) -> None:
    """Let libraries find what they have downloaded. They can only read it: the sandbox decides by the place behind the link."""
    if real.is_dir() and not link.is_symlink():
        with suppress(FileExistsError):  # another child of the same folder was first
            link.symlink_to(real.resolve(), target_is_directory=True)
