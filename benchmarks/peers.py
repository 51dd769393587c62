"""The virtual environment of the other trainers, at the versions we compare with, with exactly our own mlx and mlx-lm.

It is in the platform's cache folder, never in our environment. The peers are installed without their declared
dependencies, only with what a GRPO step of theirs imports, at our versions where we have them, so that all run the same
arithmetic.
"""

import os
import subprocess
import sys
import venv
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PEERS = {
    "unsloth-zoo": "2026.10.9",
    "inductive-mlxrl": "0.2.4",
    "mlx-lm-lora": "5.10.2",
    "mlx-vlm": "0.7.10",
    "mlx-tune": "0.6.0",
}

NEEDED = (  # what mlx-lm and the peers' GRPO import; torch and packages for speech and vision are not among it
    *("mlx", "mlx-lm", "transformers", "tokenizers", "numpy", "datasets", "tqdm", "protobuf", "pyyaml", "jinja2"),
    *("pillow", "requests"),
)


def folder() -> Path:
    """The environment's folder."""
    if sys.platform == "darwin":
        cache = Path.home() / "Library" / "Caches"
    else:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "grpo-studio" / "bench-peers"


def python() -> Path:
    """The environment's interpreter; it exists once `install` has run."""
    return folder() / "bin" / "python"


def requirements() -> list[str]:
    """NEEDED at the versions installed here; unpinned where not installed here."""
    extra = "[cpu]" if sys.platform == "linux" else ""
    found: list[str] = []
    for name in NEEDED:
        found.append(name + extra if name == "mlx" else name)
        with suppress(PackageNotFoundError):
            found[-1] += f"=={version(name)}"
    return found


def install() -> None:
    """Make the environment, unless it exists with these versions. Raises CalledProcessError when pip fails."""
    required = PEERS | {name: version(name) for name in ("mlx", "mlx-lm")}
    if versions() == required:
        return
    venv.EnvBuilder(with_pip=True, clear=True).create(folder())
    pip = [str(python()), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *requirements()], check=True)
    subprocess.run([*pip, "--no-deps", *(f"{name}=={number}" for name, number in PEERS.items())], check=True)


def versions() -> dict[str, str]:
    """Installed version by name; empty where there is no environment."""
    if not python().exists():
        return {}
    names = [*PEERS, "mlx", "mlx-lm"]
    script = f"from importlib.metadata import version\nfor name in {names!r}:\n    print(name, version(name))"
    done = subprocess.run([str(python()), "-c", script], capture_output=True, text=True)
    return dict(line.split() for line in done.stdout.splitlines())
