"""Confine the calling process, for good, before it runs reward functions (`confine`) or a model's program
(`confine_program`).

Promised: no change to a file outside its folders; no secrets read; no network, unless it is allowed; no hold on other
processes (signals, memory, environment). What holds depends on the system, and `Confinement` says so. Not promised:
that the disk does not fill up, that other files are not read, that /dev/shm stays as it is (`multiprocessing` needs
it).
"""

from __future__ import annotations

import os
import platform
import pwd
import re
import resource
import site
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_INSIDE = "GRPO_STUDIO_CONFINED"
"""Set in a confined process, for the processes that it starts."""


@dataclass(frozen=True, slots=True)
class Confinement:
    """The mechanism by which each promise holds, such as "Landlock (ABI 7)"; "" where it does not.

    `network` is "" too where the caller allowed it. `reason`: why something does not hold.
    """

    files: str = ""
    secrets: str = ""
    network: str = ""
    processes: str = ""
    network_allowed: bool = False
    reason: str = ""

    def sentences(self) -> list[str]:
        """A message for each promise that does not hold here."""
        missing = {
            "can change every file that you can": not self.files,
            "can read your keys and tokens": not self.secrets,
            "can use the network although reward_network is off": not (self.network or self.network_allowed),
            "can signal your other programs": not self.processes,
        }
        return [f"A reward function {what}: {self.reason}." for what, is_missing in missing.items() if is_missing]


def confine(writable: Sequence[Path], network: bool, secrets: Sequence[Path]) -> Confinement:
    """Let this process, and all that it starts, change files in `writable` only, and not read `secrets`.

    Called once, in a fresh child with one thread, before any user code is imported. It never fails: what the system
    does not offer is "" in the result. Raises RuntimeError where there are several threads, because the others would
    stay free.
    """
    if _thread_count() > 1:
        raise RuntimeError("confine() was called in a process with several threads")
    if sys.platform == "linux":
        return _confine_linux(writable, network, secrets)
    if sys.platform == "darwin":
        from backend.rewards.confinement import seatbelt

        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        error = _error_of(lambda: seatbelt.restrict(seatbelt.profile(writable, secrets, network)))
        holds = "" if error else "seatbelt"
        return Confinement(holds, holds, "" if network else holds, holds, network, error)
    return Confinement(network_allowed=network, reason=f"there is no sandbox on {platform.system()}")


def _confine_linux(writable: Sequence[Path], network: bool, secrets: Sequence[Path]) -> Confinement:
    from backend.rewards.confinement import landlock, seccomp

    with suppress(OSError, ValueError):
        landlock.limit_resources()
    privileges_error = _error_of(landlock.give_up_privileges)
    version = landlock.abi()
    kernel = platform.release()
    signals = False

    def restrict_files() -> None:
        nonlocal signals
        signals = landlock.restrict(writable, secrets, version)

    no_landlock = f"the kernel {kernel} offers no Landlock here"
    landlock_error = privileges_error or (_error_of(restrict_files) if version else no_landlock)
    filter_error = privileges_error or _error_of(lambda: seccomp.restrict(network))
    if not filter_error:
        seccomp.forgive_modes_of_copies()
    files = f"Landlock (ABI {version})" if not landlock_error else ""
    call_filter = "a filter of system calls" if not filter_error else ""
    if not landlock_error and version < 3:
        landlock_error = f"Landlock of {kernel} cannot refuse truncate()"
    if not landlock_error and not signals:
        landlock_error = f"Landlock of {kernel} does not know signals"
    both = f"{files} and {call_filter}" if files and call_filter else ""
    return Confinement(
        files=both if version >= 3 else "",
        secrets=files,
        network="" if network else call_filter,
        processes=both if signals else "",
        network_allowed=network,
        reason="; ".join(reason for reason in (landlock_error, filter_error) if reason),
    )


def tell_children(confinement: Confinement) -> None:
    """Let the processes that this one starts know that it keeps them from a person's files."""
    if confinement.files:
        os.environ[_INSIDE] = "1"


def confine_program(folder: Path) -> str:
    """Confine this process, a fork with one thread, to an empty folder, for a program that nobody has read.

    Stricter than `confine`, and often inside it: on Linux it can read Python and its packages, change files in its
    folder, reach no network, start no process and signal none. On a Mac, whose sandbox cannot be entered twice, a
    program of a confined process keeps that process's rights. → why it could still change a person's files; "" if it
    cannot.
    """
    if sys.platform == "linux":
        from backend.rewards.confinement import landlock, seccomp

        version = landlock.abi()
        error = _error_of(landlock.give_up_privileges) or ("" if version else "the kernel offers no Landlock here")
        error = error or _error_of(lambda: landlock.restrict_to([folder], readable_by_programs(), version))
        no_filter = _error_of(lambda: seccomp.restrict(network=False, processes=False))
        if no_filter:
            _start_nothing()
        return "; ".join(reason for reason in (error, no_filter) if reason)
    _start_nothing()
    if sys.platform == "darwin":
        from backend.rewards.confinement import seatbelt

        error = _error_of(lambda: seatbelt.restrict(seatbelt.profile([folder], secret_places(), False)))
        return "" if _INSIDE in os.environ else error
    return "there is no sandbox on this system"


def load_for_programs() -> None:
    """Import and work out once what each fork needs for `confine_program`."""
    readable_by_programs()
    if sys.platform == "linux":
        from backend.rewards.confinement import landlock, seccomp

        assert landlock and seccomp


@cache
def readable_by_programs() -> tuple[str, ...]:
    """Python with its packages, and the system's libraries."""
    places = {sys.prefix, sys.base_prefix, sys.exec_prefix, getattr(sys, "_MEIPASS", sys.prefix)}
    places |= {path for name, path in sysconfig.get_paths().items() if "lib" in name}
    libraries = ("/usr/lib", "/usr/lib64", "/usr/local/lib", "/lib", "/lib64", "/nix/store", "/etc/ld.so.cache")
    return (*sorted(places - {"/"}), *libraries, "/usr/share/zoneinfo", "/etc/localtime")


def _start_nothing() -> None:
    """Weaker than a filter of system calls: root is free of it, and on Linux it counts threads too."""
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))


def _error_of(action: Callable[[], object]) -> str:
    try:
        action()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _thread_count() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:  # a Mac: Python's own threads
        import threading

        return threading.active_count()


_NEEDED = re.compile(
    r"PATH|LANG|LANGUAGE|LC_\w+|TZ|TZDIR|TERM|USER|LOGNAME|SHELL|VIRTUAL_ENV|CONDA_PREFIX|CONDA_DEFAULT_ENV"
    r"|LD_LIBRARY_PATH|DYLD_\w+|PYTHON\w+|GRPO_\w+|HF_HOME|HF_HUB_CACHE|HUGGINGFACE_HUB_CACHE|HF_DATASETS_CACHE"
    r"|XDG_CACHE_HOME|NLTK_DATA|TORCH_HOME|SSL_CERT_FILE|SSL_CERT_DIR|OMP_\w+|MKL_\w+|OPENBLAS_\w+|VECLIB_\w+"
    r"|NUMEXPR_\w+|TOKENIZERS_PARALLELISM|COVERAGE_\w+"
)
"""Variables that are passed on: how programs, modules, libraries, text and caches are found, and threads counted."""
_NEVER = re.compile(
    r"(?i).*(TOKEN|SECRET|PASSW|CREDENTIAL).*|HF_API_KEY|HUGGING\w*_KEY|GRPO_STUDIO_LOCK|SSH_\w+|GPG_\w+|DBUS_\w+"
    r"|XDG_RUNTIME_DIR|DISPLAY|WAYLAND_DISPLAY|XAUTHORITY|DOCKER_HOST|PYTHON(STARTUP|INSPECT)"
)
"""Variables that are never passed on: tokens, our lock's descriptor, the way to the user's session and agents."""


def confined_environment(
    folder: Path, network: bool = False, environment: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The environment of a child that is confined to `folder`, in which its home and temporary folder are made.

    Without a network it is a short list of what is needed. With one it is the user's own (`environment`, by default
    this process's) without tokens and passwords, because a judge needs its API key, whose name only its author knows.
    Downloads in `~/.cache` and packages of `pip install --user` are still found. Raises OSError.
    """
    variables = dict(os.environ if environment is None else environment)
    kept = {
        name: value
        for name, value in variables.items()
        if name == "TOKENIZERS_PARALLELISM" or (not _NEVER.fullmatch(name) and (network or _NEEDED.fullmatch(name)))
    }
    home, temporary = folder / "home", folder / "tmp"
    for made in (home, temporary):
        made.mkdir(parents=True, exist_ok=True)
    cache_folder, link = Path(variables.get("HOME") or Path.home()) / ".cache", home / ".cache"
    if (
        cache_folder.is_dir() and not link.is_symlink()
    ):  # it can only be read: the sandbox sees the place behind the link
        link.symlink_to(cache_folder.resolve(), target_is_directory=True)
    if "PYTHONUSERBASE" not in kept and (base := site.getuserbase()):
        kept["PYTHONUSERBASE"] = base
    if not network:
        kept |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    return kept | {"HOME": str(home), "TMPDIR": str(temporary)}


_SECRETS = (
    *(".ssh", ".gnupg", ".aws", ".azure", ".kube", ".docker", ".netrc", ".git-credentials", ".password-store"),
    *(".pypirc", ".npmrc", ".cargo/credentials", ".cargo/credentials.toml", ".gem/credentials", ".vault-token"),
    *(".config/gh", ".config/gcloud", ".config/git/credentials", ".config/rclone", ".config/op", ".config/1Password"),
    *(".pgpass", ".kaggle", ".databrickscfg", ".m2", ".bash_history", ".zsh_history", ".python_history"),
    *(".mozilla", ".thunderbird", ".config/google-chrome", ".config/chromium", ".config/BraveSoftware"),
    *("snap/firefox", "snap/chromium", ".var/app", ".local/share/keyrings", ".local/share/kwalletd", ".pki"),
)
_SECRETS_OF_A_MAC = (
    *("Library/Keychains", "Library/Cookies", "Library/Mail", "Library/Messages", "Library/Safari"),
    *("Library/Application Support/Google/Chrome", "Library/Application Support/Firefox"),
    *("Library/Application Support/BraveSoftware", "Library/Application Support/com.apple.TCC"),
)


def secret_places(environment: Mapping[str, str] | None = None) -> list[Path]:
    """Files and folders of keys, tokens and passwords, existing or not, below the user's home folders.

    `environment` is the user's own: a confined process no longer has it, so its parent asks.
    """
    variables = os.environ if environment is None else environment
    homes = {variables.get("HOME")}
    with suppress(KeyError):  # a container's user may be in no database
        homes.add(pwd.getpwuid(os.getuid()).pw_dir)
    homes.discard(None)
    in_home = (*_SECRETS, *_SECRETS_OF_A_MAC) if sys.platform == "darwin" else _SECRETS
    places = {Path(home, part) for home in homes if home for part in in_home}
    caches = {Path(home, ".cache", "huggingface") for home in homes if home}
    if variables.get("HF_HOME"):
        caches.add(Path(variables["HF_HOME"]))
    if variables.get("XDG_CACHE_HOME"):
        caches.add(Path(variables["XDG_CACHE_HOME"], "huggingface"))
    places |= {cache / token for cache in caches for token in ("token", "stored_tokens")}
    if variables.get("HF_TOKEN_PATH"):
        places.add(Path(variables["HF_TOKEN_PATH"]))
    return sorted(places)
