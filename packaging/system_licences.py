"""The licences of what a frozen app contains and no Python package brought: the interpreter, and on Debian the system's
libraries.

`packaging/grpo-studio.spec` puts them into the bundle's folder system_licences/, from which `backend.utils.about` lists
them in About.
"""

import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

DOCUMENTS = Path("/usr/share/doc")


def write_licences(libraries: Iterable[str], folder: Path) -> list[Path]:
    """Write the licence of Python and of each Debian package that one of these files belongs to into `folder`, which is
    emptied before.

    A file's name is <package>_<version>.txt. Raises SystemExit where a package has no licence to ship.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    texts = {("Python", platform.python_version()): Path(sysconfig.get_path("stdlib")) / "LICENSE.txt"}
    for package, version in debian_packages(libraries):
        texts[package, version] = DOCUMENTS / package / "copyright"
    written: list[Path] = []
    for (name, version), text in sorted(texts.items()):
        if not text.is_file():
            if name == "Python":  # some builds lack it; About then shows sys.copyright
                continue
            raise SystemExit(f"{name} is in the bundle, and its licence is not at {text}.")
        written.append(folder / f"{name}_{version}.txt")
        shutil.copyfile(text, written[-1])
    return written


def debian_packages(files: Iterable[str]) -> list[tuple[str, str]]:
    """(package, version) of those files that Debian packages brought; of Python's own folders and of other systems
    none."""
    if shutil.which("dpkg-query") is None:
        return []
    ours = (Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve())
    paths = {path for file in files if not (path := Path(file).resolve()).is_relative_to(ours[0])}
    asked = {str(path) for path in paths if not path.is_relative_to(ours[1]) or ours[1] == Path("/usr")}
    # Since /usr was merged a library is listed under /lib or /usr/lib, as its package has it.
    asked |= {path.removeprefix("/usr") for path in asked if path.startswith("/usr/lib")}
    if not asked:
        return []
    owners = _output("dpkg-query", "--search", *sorted(asked))
    packages = {name.strip() for line in owners for name in line.rpartition(": ")[0].split(",") if name.strip()}
    if not packages:
        return []
    rows = _output("dpkg-query", "--show", "--showformat=${Package} ${source:Upstream-Version}\n", *sorted(packages))
    return sorted({(name, version) for name, _, version in (row.partition(" ") for row in rows)})


def _output(*command: str) -> list[str]:
    # It exits with 1 where one of the files is nobody's.
    return subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
