"""What the frozen app leaves out is really there to leave out, and nothing that is used is left out.

Building takes minutes and is `make app-test`'s (test_frozen.py); here the rules are held against the installed packages.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType

import pytest

from app.help_menu import DOCUMENTS
from app.state import guide
from app.state.guide import GLOSSARY
from backend.config import loss_menu
from backend.rewards import catalogue
from backend.utils import about

ROOT = Path(__file__).parents[2]
PACKAGING = ROOT / "packaging"


def script(name: str) -> ModuleType:
    """A module of packaging/, which is no package."""
    sys.path.insert(0, str(PACKAGING))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(PACKAGING))


contents = script("bundle_contents")

IMPORT_EVERY_TOKENIZER = """
import importlib.abc, sys
sys.path.insert(0, {packaging!r})
import bundle_contents

class LeftOut(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "transformers" and not bundle_contents.is_kept_of_transformers(name):
            raise ModuleNotFoundError(f"{{name}} is left out", name=name)

sys.meta_path.insert(0, LeftOut())
import mlx_lm
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES, tokenizer_class_from_name

for name in TOKENIZER_MAPPING_NAMES.values():
    if name:
        tokenizer_class_from_name(name)
print(len([CONFIG_MAPPING[name] for name in CONFIG_MAPPING.keys()]))
"""


@pytest.mark.proof
def test_every_tokenizer_and_configuration_of_transformers_imports_from_what_is_kept() -> None:
    """A model names its tokenizer's class in a file, so nothing but trying all of them shows that none is missing."""
    code = IMPORT_EVERY_TOKENIZER.format(packaging=str(PACKAGING))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 300


def test_models_of_transformers_are_left_out_and_every_pattern_keeps_something() -> None:
    kept, left_out = contents.transformers_modules()
    assert "transformers.models.qwen3.modeling_qwen3" in left_out and "transformers.trainer" in left_out
    assert "transformers.models.qwen2.tokenization_qwen2" in kept and "transformers.models.qwen3" in kept
    assert not [name for name in contents.TRANSFORMERS if not any(fnmatchcase(module, name) for module in kept)]


def test_packages_that_are_left_out_of_one_program_are_in_the_other() -> None:
    assert not {*contents.ENGINE, *contents.WINDOW} & set(contents.NEVER)
    assert not [name for name in (*contents.ENGINE, *contents.WINDOW) if importlib.util.find_spec(name) is None]


def test_reward_files_may_import_the_standard_library() -> None:
    names = set(contents.standard_library())
    assert {"json", "sqlite3", "xml.etree.ElementTree", "email.mime.text", "concurrent.futures", "_decimal"} <= names
    assert not {name for name in names if name.split(".")[0] in ("tkinter", "idlelib", "ensurepip")}
    assert not {name for name in names if "test" in name.split(".")}


def test_sources_that_menus_read_are_in_the_bundle() -> None:
    inside = {file for pattern in contents.READ_AS_TEXT for file in ROOT.glob(pattern)}
    read = {loss_menu._SOURCE, *(catalogue._REWARDS_FOLDER / f"{name}.py" for name in catalogue._REWARD_MODULES)}
    assert read <= inside


def test_the_documents_of_the_help_menu_are_in_the_bundle() -> None:
    there = {file.relative_to(ROOT / "docs").as_posix() for file in contents.documents() if file.is_file()}
    assert there == {*DOCUMENTS.values(), GLOSSARY.name} | guide.documents()


def test_metadata_is_that_of_everything_we_require() -> None:
    names = set(about.needed())
    assert {
        "grpo-studio",
        "mlx",
        "mlx-cpu" if sys.platform == "linux" else "mlx-metal",
        "numpy",
        "huggingface-hub",
        "antlr4-python3-runtime",
    } <= names
    assert not names & {"pytest", "ruff", "pyinstaller"}, "an extra is no part of the app"


def test_metadata_that_is_older_than_the_requirements_is_noticed() -> None:
    """A package that was added to pyproject.toml after the install would be missing from the bundle's metadata and from About."""
    requirements = ["numpy", "pydantic>=2", "never_heard.of[it]>=3; sys_platform == 'linux'"]
    assert contents.not_in_metadata(requirements) == ["never-heard-of"]


def test_a_package_that_is_not_required_is_noticed() -> None:
    """Libraries use what they find: an environment with requests in it would ship requests, and About would not say so."""
    site = Path(sysconfig.get_path("purelib"))
    files = [
        site / "numpy" / "__init__.py",
        site / "numpy.libs" / "x.so",
        site / "pytest" / "main.py",
        site / "typing_extensions.py",
    ]
    assert contents.unlisted([*map(str, files), __file__], about.needed()) == ["pytest"]


@pytest.mark.skipif(shutil.which("dpkg-query") is None, reason="packages of the system are named where it is Debian")
def test_libraries_of_the_system_bring_their_licences(tmp_path: Path) -> None:
    (tmp_path / "left").mkdir()
    dpkg = shutil.which("dpkg-query")
    written = script("system_licences").write_licences([dpkg, pytest.__file__], tmp_path / "left")
    names = {path.name.partition("_")[0]: path for path in written}
    assert set(names) <= {"dpkg", "Python"} and "dpkg" in names
    assert "General Public License" in names["dpkg"].read_text()


def test_a_library_goes_with_the_only_file_that_needed_it() -> None:
    entries = [
        ("PySide6/Qt/plugins/platforms/libqxcb.so", "/q/libqxcb.so", "BINARY"),
        ("PySide6/Qt/plugins/platformthemes/libqgtk3.so", "/q/libqgtk3.so", "BINARY"),
        ("libxcb.so.1", "/l/libxcb.so.1", "BINARY"),
        ("libXau.so.6", "/l/libXau.so.6", "BINARY"),
        ("libgtk.so.0", "/l/libgtk.so.0", "BINARY"),
        ("libcairo.so.2", "/l/libcairo.so.2", "BINARY"),
        ("libpython3.so", "/l/libpython3.so", "BINARY"),
        ("pyarrow/libarrow.so", "/p/libarrow.so", "BINARY"),
    ]
    needs = {
        "/q/libqxcb.so": ["/l/libxcb.so.1", "/lib/libc.so"],
        "/l/libxcb.so.1": ["/l/libXau.so.6"],
        "/q/libqgtk3.so": ["/l/libgtk.so.0"],
        "/l/libgtk.so.0": ["/l/libcairo.so.2"],
    }
    left = contents.without_orphans(contents.without_unused(entries), lambda path: needs.get(path, []))
    expected = {"libqxcb.so", "libxcb.so.1", "libXau.so.6", "libpython3.so", "libarrow.so"}
    assert {Path(target).name for target, _, _ in left} == expected


def test_a_link_to_a_file_that_is_left_out_goes_with_it() -> None:
    entries = [
        ("libarrow_flight.so.2600", "pyarrow/libarrow_flight.so.2600", "SYMLINK"),
        ("libarrow.so.2600", "pyarrow/libarrow.so.2600", "SYMLINK"),
        ("pyarrow/libarrow_flight.so.2600", "/p/libarrow_flight.so.2600", "BINARY"),
        ("pyarrow/libarrow.so.2600", "/p/libarrow.so.2600", "BINARY"),
    ]
    assert [target for target, _, _ in contents.without_unused(entries)] == [
        "libarrow.so.2600",
        "pyarrow/libarrow.so.2600",
    ]


# ── the start of a frozen program ────────────────────────────────────────────────────────────────────────────────────


def test_programs_that_we_start_get_the_systems_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyInstaller's loader sets LD_LIBRARY_PATH; g++ and a browser must not inherit it."""
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/app/_internal")
    monkeypatch.setenv("LD_LIBRARY_PATH_ORIG", "/usr/local/lib")
    monkeypatch.setenv("DYLD_LIBRARY_PATH", "/opt/app/_internal")
    script("frozen_start").prepare()
    assert os.environ["LD_LIBRARY_PATH"] == "/usr/local/lib"
    assert not {"LD_LIBRARY_PATH_ORIG", "DYLD_LIBRARY_PATH"} & set(os.environ)


@pytest.mark.skipif(sys.platform != "linux", reason="a Mac has all that Qt needs")
def test_a_missing_library_is_a_sentence_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    libraries = script("system_libraries")
    monkeypatch.setattr(libraries, "REQUIRED", {"libc.so.6": "libc6", "libnowhere.so.1": "libnowhere1"})
    sentence = libraries.missing_for_window()
    assert "lacks: libnowhere.so.1. On Debian and Ubuntu: sudo apt-get install libnowhere1" in sentence
    monkeypatch.setattr(libraries, "REQUIRED", {"libc.so.6": "libc6"})
    assert libraries.missing_for_window() == ""


# ── sizes, and the download for Linux ────────────────────────────────────────────────────────────────────────────────


def test_sizes_are_added_up_by_package(tmp_path: Path) -> None:
    table = script("size_table")
    for name, size in (("grpo-studio", 5), ("_internal/numpy/a.so", 3), ("_internal/numpy.libs/b.so", 4)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * size * 1_000_000)
    (tmp_path / "_internal" / "b.so").symlink_to("numpy.libs/b.so")
    lines = table.table({"size": table.sizes(tmp_path)}).splitlines()
    assert lines[2:] == [
        "| numpy | 7.0 |",
        "| grpo-studio | 5.0 |",
        "| everything else | – |",
        "| **sum** | **12.0** |",
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="the download for Linux is made on Linux")
def test_the_download_installs_the_app_and_removes_it_again(tmp_path: Path) -> None:
    dist, home = tmp_path / "dist", tmp_path / "home of mine"
    bundle = dist / "GRPO Studio"
    (bundle / "_internal").mkdir(parents=True)
    home.mkdir()
    for name in ("grpo-studio", "grpo-studio-backend"):
        (bundle / name).write_text(f"#!/bin/sh\necho {name} $*\n")
        (bundle / name).chmod(0o755)
    (bundle / "_internal" / "link").symlink_to("GRPO Studio")
    archive = script("linux_package").package(dist)
    assert sorted(path.name for path in dist.iterdir()) == ["GRPO Studio", archive.name]
    subprocess.run(["tar", "-xf", str(archive), "-C", str(tmp_path)], check=True)
    folder = tmp_path / archive.name.removesuffix(".tar.xz")
    assert (folder / "GRPO Studio" / "_internal" / "link").readlink() == Path("GRPO Studio")

    def install(*arguments: str) -> str:
        environment = {"HOME": str(home), "PATH": os.environ["PATH"]}
        command = [str(folder / "install.sh"), *arguments]
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout

    install()
    install()  # again, as an update
    prefix = home / ".local"
    assert subprocess.check_output([prefix / "bin" / "grpo-studio", "a.yaml"], text=True) == "grpo-studio a.yaml\n"
    entry = (prefix / "share" / "applications" / "grpo-studio.desktop").read_text()
    assert f'\nExec="{prefix}/opt/grpo-studio/grpo-studio" %f\n' in entry
    assert (prefix / "share" / "icons" / "hicolor" / "scalable" / "apps" / "grpo-studio.svg").exists()
    install("--remove")
    left = {path.name for path in prefix.rglob("*") if not path.is_dir()}
    assert left <= {"mimeinfo.cache"}, "the desktop's own list of all entries"
