"""Confine this process before it runs reward functions (`confine`) or a model's program (`confine_program`).

Prevents changes outside its folders, reading secrets, network use unless allowed, and access to other processes, as far
as the system supports it. Does not prevent filling the disk, reading other files, or changes in /dev/shm, where
`multiprocessing` keeps its locks.
"""

import ctypes
import os
import platform
import pwd
import re
import resource
import site
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from backend.utils import file_lock
from backend.utils.files import remove_tree

INSIDE = "GRPO_STUDIO_CONFINED"  # set in the environment of confined processes
FOLDER_PREFIX = "grpo-studio-rewards-"  # of the names of working folders, followed by the creator's pid
LARGEST_FILE = 2 << 30  # bytes of a file that reward functions may write


@dataclass(frozen=True, slots=True)
class Confinement:
    """True for each promise that holds, that of no network also where it is allowed. `reason`: why others do not."""

    files: bool
    secrets: bool
    network: bool
    processes: bool
    reason: str

    def sentences(self) -> list[str]:
        promises = {
            "can change every file that you can": self.files,
            "can read your keys and tokens": self.secrets,
            "can use the network although reward_network is off": self.network,
            "can signal your other programs": self.processes,
        }
        return [f"A reward function {what}: {self.reason}." for what, holds in promises.items() if not holds]


def confine(writable: Sequence[Path], network: bool, secrets: Sequence[Path]) -> Confinement:
    """Let this process write only `writable` and not read `secrets`, as far as the system supports it. Raises
    RuntimeError with several threads, of which only one would obey."""
    if (len(os.listdir("/proc/self/task")) if sys.platform == "linux" else threading.active_count()) > 1:
        raise RuntimeError("confine() was called in a process with several threads")
    if sys.platform != "linux":
        set_limits({resource.RLIMIT_CORE: 0})
        error = f"there is no sandbox on {platform.system()}"
        if sys.platform == "darwin":
            error = _error_of(lambda: seatbelt(seatbelt_profile(writable, secrets, network)))
        return Confinement(not error, not error, network or not error, not error, error)
    from backend.rewards.confinement import linux

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    # RLIMIT_DATA, not RLIMIT_AS: libraries reserve address space that they never use.
    set_limits({resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: LARGEST_FILE, resource.RLIMIT_DATA: memory})
    # The trainer is the larger process, and the kernel ends the largest first.
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")
    version, kernel, signals = linux.abi(), platform.release(), False
    landlock_error = filter_error = _error_of(linux.give_up_privileges)
    if not landlock_error:
        readable = linux.readable_places(secrets) if secrets else None
        try:
            if version:
                signals = linux.restrict_files([*map(str, writable), linux.SHARED_MEMORY], readable, version)
            else:
                landlock_error = f"the kernel {kernel} offers no Landlock here"
        except OSError as error:
            landlock_error = error.strerror or str(error)
        filter_error = _error_of(lambda: linux.filter_calls(network))
    has_landlock, both = not landlock_error, not (landlock_error or filter_error)
    if has_landlock and version < 3:
        landlock_error = f"Landlock of {kernel} cannot refuse truncate()"
    elif has_landlock and not signals:
        landlock_error = f"Landlock of {kernel} does not know signals"
    return Confinement(
        files=both and version >= 3,
        secrets=has_landlock,
        network=network or not filter_error,
        processes=both and signals,
        reason="; ".join(filter(None, (landlock_error, filter_error))),
    )


def confine_program(folder: Path) -> str:
    """Confine this fork to an empty folder. Linux: reads only Python, writes only its folder, no network, processes or
    signals. macOS: keeps an enclosing sandbox's rights. Returns why it is not confined, or ""."""
    if sys.platform == "linux":
        from backend.rewards.confinement import linux

        version = linux.abi()
        error = _error_of(linux.give_up_privileges) or ("" if version else "the kernel offers no Landlock here")
        error = error or _error_of(
            lambda: linux.restrict_files([str(folder)], readable_by_programs(), version, lists=True)
        )
        no_filter = _error_of(lambda: linux.filter_calls(network=False, processes=False))
        return "; ".join(filter(None, (error, no_filter)))
    set_limits({resource.RLIMIT_NPROC: 0})
    if sys.platform == "darwin":
        error = _error_of(lambda: seatbelt(seatbelt_profile([folder], secret_places(), False)))
        return "" if INSIDE in os.environ else error
    return "there is no sandbox on this system"


def set_limits(limits: Mapping[int, int]) -> None:
    """Set resource limits, hard ones too, as far as the system has them and allows it."""
    for limit, value in limits.items():
        with suppress(OSError, ValueError):
            _, hard = resource.getrlimit(limit)
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(limit, (value, value))


@cache
def readable_by_programs() -> tuple[str, ...]:
    """Python with its packages, and system libraries."""
    places = {sys.prefix, sys.base_prefix, sys.exec_prefix, getattr(sys, "_MEIPASS", sys.prefix)}
    places |= {path for name, path in sysconfig.get_paths().items() if "lib" in name}
    libraries = ("/usr/lib", "/usr/lib64", "/usr/local/lib", "/lib", "/lib64", "/nix/store", "/etc/ld.so.cache")
    return (*sorted(places - {"/"}), *libraries, "/usr/share/zoneinfo", "/etc/localtime")


def _error_of(action: Callable[[], object]) -> str:
    try:
        action()
    except OSError as error:
        return error.strerror or str(error)
    return ""


_NEEDED = re.compile(
    r"PATH|HOME|TMPDIR|LANG|LANGUAGE|LC_\w+|TZ|TZDIR|TERM|USER|LOGNAME|SHELL|VIRTUAL_ENV|CONDA_PREFIX|CONDA_DEFAULT_ENV"
    r"|LD_LIBRARY_PATH|DYLD_\w+|PYTHON\w+|GRPO_\w+|HF_HOME|HF_HUB_CACHE|HUGGINGFACE_HUB_CACHE|HF_DATASETS_CACHE"
    r"|XDG_CACHE_HOME|NLTK_DATA|TORCH_HOME|SSL_CERT_FILE|SSL_CERT_DIR|OMP_\w+|MKL_\w+|OPENBLAS_\w+|VECLIB_\w+"
    r"|NUMEXPR_\w+|TOKENIZERS_PARALLELISM|COVERAGE_\w+"
)  # environment variables to pass on
_NEVER = re.compile(
    r"(?i).*(TOKEN|SECRET|PASSW|CREDENTIAL).*|HF_API_KEY|HUGGING\w*_KEY|GRPO_STUDIO_LOCK|SSH_\w+|GPG_\w+|DBUS_\w+"
    r"|XDG_RUNTIME_DIR|DISPLAY|WAYLAND_DISPLAY|XAUTHORITY|DOCKER_HOST|PYTHON(STARTUP|INSPECT)"
)  # variables never passed on: tokens, locks, session agents


def without_secrets(variables: Mapping[str, str], network: bool = False) -> dict[str, str]:
    """The variables that confined code needs; with network access all but secrets, plus API keys that judges need."""
    return {
        name: value
        for name, value in variables.items()
        if name == "TOKENIZERS_PARALLELISM" or (not _NEVER.fullmatch(name) and (network or _NEEDED.fullmatch(name)))
    }


def confined_environment(folder: Path, network: bool, variables: Mapping[str, str]) -> dict[str, str]:
    """Environment of a child confined to `folder`, which gets home and temporary folders. Raises OSError."""
    kept = without_secrets(variables, network)
    home, temporary = folder / "home", folder / "tmp"
    for made in (home, temporary):
        made.mkdir(parents=True, exist_ok=True)
    cache_folder, link = Path(variables.get("HOME") or Path.home()) / ".cache", home / ".cache"
    if cache_folder.is_dir() and not link.is_symlink():  # the sandbox sees the place behind the link: only reading
        link.symlink_to(cache_folder.resolve(), target_is_directory=True)
    if "PYTHONUSERBASE" not in kept and (base := site.getuserbase()):
        kept["PYTHONUSERBASE"] = base
    if not network:
        kept |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    return kept | {"HOME": str(home), "TMPDIR": str(temporary)}


_SECRETS = (
    *(".ssh", ".gnupg", ".aws", ".azure", ".kube", ".docker", ".netrc", ".git-credentials", ".password-store"),
    *(".pypirc", ".npmrc", ".cargo/credentials", ".cargo/credentials.toml", ".gem/credentials", ".vault-token"),
    *(".pgpass", ".my.cnf", ".kaggle", ".databrickscfg", ".m2", ".gradle/gradle.properties", ".terraform.d"),
    *(".config/gh", ".config/gcloud", ".config/git/credentials", ".config/rclone", ".config/op", ".config/1Password"),
    *(".cache/huggingface/token", ".cache/huggingface/stored_tokens", ".local/share/fish/fish_history", ".history"),
    *(".mozilla", ".thunderbird", ".config/google-chrome", ".config/chromium", ".config/BraveSoftware"),
    *(".config/microsoft-edge", ".config/vivaldi", ".config/opera", ".librewolf", "snap", ".var/app"),
    *(".local/share/keyrings", ".local/share/kwalletd", ".pki"),
)  # in a home; so are `.bash_history` and the like
_SECRETS_OF_A_MAC = (
    *("Library/Keychains", "Library/Cookies", "Library/Mail", "Library/Messages", "Library/Safari", ".zsh_sessions"),
    *("Library/Application Support/Google/Chrome", "Library/Application Support/Firefox"),
    *("Library/Application Support/BraveSoftware", "Library/Application Support/com.apple.TCC"),
    *("Library/Application Support/Microsoft Edge", "Library/Application Support/Arc"),
)
_MOVED = {".config": "XDG_CONFIG_HOME", ".local/share": "XDG_DATA_HOME", ".cache": "XDG_CACHE_HOME"}
_MOVED |= {".cache/huggingface": "HF_HOME"}
_NAMED = (
    *("HF_TOKEN_PATH", "HF_STORED_TOKENS_PATH", "NETRC", "PGPASSFILE", "KUBECONFIG", "DOCKER_CONFIG", "GNUPGHOME"),
    *("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE", "AZURE_CONFIG_DIR", "CLOUDSDK_CONFIG", "GH_CONFIG_DIR"),
    *("GOOGLE_APPLICATION_CREDENTIALS", "KAGGLE_CONFIG_DIR", "DATABRICKS_CONFIG_FILE", "HISTFILE", "XDG_RUNTIME_DIR"),
)  # variables with the path of a secret


def secret_places() -> list[Path]:
    """Files and folders with this user's keys, tokens and histories, existing or not, by absolute path."""
    variables = os.environ
    homes = {variables.get("HOME") or ""}
    with suppress(KeyError):  # a container's user may be in no database
        homes.add(pwd.getpwuid(os.getuid()).pw_dir)
    homes.discard("")
    in_home = (*_SECRETS, *_SECRETS_OF_A_MAC) if sys.platform == "darwin" else _SECRETS
    places = {os.path.join(home, part) for home in homes for part in in_home}
    places |= {str(path) for home in homes for path in Path(home).glob(".*_history")}
    for folder, name in _MOVED.items():
        if base := variables.get(name):
            places |= {base + part.removeprefix(folder) for part in in_home if part.startswith(f"{folder}/")}
    places |= {variables[name] for name in _NAMED if variables.get(name)}
    if token := variables.get("HF_TOKEN_PATH"):
        places.add(os.path.join(os.path.dirname(token), "stored_tokens"))
    return [Path(os.path.abspath(os.path.expanduser(place))) for place in sorted(places)]


def make_working_folder() -> tuple[Path, int]:
    """A new folder and its lock's descriptor, after abandoned folders are removed. Raises OSError."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        number = folder.name.removeprefix(FOLDER_PREFIX).partition("-")[0]
        with suppress(OSError):
            is_ours = folder.lstat().st_uid == os.getuid() and not folder.is_symlink()
            # A dead pid and no lock: the folder may be shared with another system, or not locked yet.
            if is_ours and number.isdecimal() and not file_lock.is_alive(int(number)) and not file_lock.is_held(folder):
                remove_tree(folder)
    folder = Path(tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{os.getpid()}-"))
    handle = os.open(folder, os.O_RDONLY)
    with suppress(OSError):
        file_lock.take(handle)
    return folder, handle


_LIBRARY = "/usr/lib/libsandbox.1.dylib"
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom", "/dev/dtracehelper")
_SERVICES = (
    # the keychain
    *("com.apple.SecurityServer", "com.apple.securityd", "com.apple.securityd.xpc", "com.apple.secd"),
    # starting programs outside the sandbox
    *("com.apple.coreservices.launchservicesd", "com.apple.lsd.open", "com.apple.coreservices.appleevents"),
    *("com.apple.xpc.smd", "com.apple.pasteboard.1"),
)  # services that could bypass the sandbox


def seatbelt_profile(writable: Sequence[Path], unreadable: Iterable[Path], network: bool) -> str:
    """Text of a profile of macOS's sandbox, with resolved paths. Sources: sandbox_init(3),
    /System/Library/Sandbox/Profiles, Chromium's sandbox/policy/mac/common.sb. The last matching rule wins."""
    own = " ".join(f"(subpath {_quoted(path.resolve())})" for path in writable)
    sockets = ("(deny network* (local unix-socket))", "(deny network* (remote unix-socket))")
    lines = [
        "(version 1)",
        "(allow default)",
        "(deny file-write*)",
        f"(allow file-write* {own})",
        f"(allow file-write-data {' '.join(f'(literal {_quoted(device)})' for device in _DEVICES)})",
        *(f"(deny file-read-data (subpath {_quoted(path.resolve())}))" for path in unreadable),
        "(deny signal)",
        "(allow signal (target same-sandbox))",
        "(deny process-info*)",
        "(allow process-info* (target same-sandbox))",
        "(deny mach-priv-task-port)",
        "(deny appleevent-send)",
        "(deny lsopen)",
        "(deny job-creation)",
        "(deny ipc-sysv*)",
        f"(deny mach-lookup {' '.join(f'(global-name {_quoted(name)})' for name in _SERVICES)})",
        # Unix sockets of others lead to their services, with or without the internet.
        *(sockets if network else ("(deny network*)",)),
        f"(allow network* (local unix-socket {own}))",
        f"(allow network* (remote unix-socket {own}))",
    ]
    return "\n".join(lines) + "\n"


def _quoted(text: Path | str) -> str:
    return '"' + str(text).replace("\\", "\\\\").replace('"', '\\"') + '"'


def seatbelt(text: str) -> None:
    """Apply a profile to this process and its children. Raises OSError, also inside another sandbox."""
    library = ctypes.CDLL(_LIBRARY)
    library.sandbox_init.argtypes = [ctypes.c_char_p, ctypes.c_uint64, ctypes.POINTER(ctypes.c_char_p)]
    error = ctypes.c_char_p()
    if library.sandbox_init(text.encode(), 0, ctypes.byref(error)) != 0:
        sentence = (error.value or b"no reason given").decode(errors="replace").strip()
        raise OSError(f"seatbelt refused the profile: {sentence}")
