"""The light app: its bundle is put together as on a Mac, and its launcher runs in an empty home folder with a stand-in
for osascript, `open`, Python and uv. What the real ones do there is in docs/mac-checklist.md."""

from __future__ import annotations

import os
import plistlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from backend import __version__

ROOT = Path(__file__).parents[2]
SHELLS = [shell for shell in (["dash"], ["bash", "--posix"]) if shutil.which(shell[0])]
"""macOS's /bin/sh is either of them."""

OSASCRIPT = """#!/bin/sh
echo "$@" >>"$HOME/said"
if [ "$1" = -l ]; then  # the progress window
    [ -z "${NO_WINDOW-}" ] || exit 1
    until grep -qE '^(finished|failed)' "$4/state"; do
        if [ -n "${CANCEL-}" ] && grep -q installing "$HOME/did" 2>/dev/null; then touch "$4/cancel"; exit 0; fi
        sleep 0.02
    done
else
    [ -z "${DECLINE-}" ]
fi
"""
PYTHON = """#!/bin/sh
# A Python: -c checks it, -m venv makes an environment whose python is this same script.
echo "python $*" >>"$HOME/did"
case "$2" in
    venv) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    pip) echo installing >>"$HOME/did"; eval "${INSTALL-:}" ;;
    -m) echo "$*" >"$HOME/started" ;;
esac
"""
UV = """#!/bin/sh
echo "uv $*" >>"$HOME/did"
if [ "$1" = venv ]; then
    for folder; do :; done
    mkdir -p "$folder/bin" && cp "$HOME/python" "$folder/bin/python"
fi
"""


@dataclass
class Mac:
    """An empty home folder, the light app in it, and what stands in for the programs of a Mac."""

    home: Path
    app: Path
    shell: list[str]

    def add_program(self, name: str, text: str, folder: str = ".local/bin") -> None:
        path = self.home / folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def start(self, *arguments: str, **variables: str) -> int:
        """Open the app as the Finder does; returns its exit code."""
        environment = {"HOME": str(self.home), "PATH": f"{self.home / 'stand-ins'}:/usr/bin:/bin", **variables}
        program = self.app / "Contents" / "MacOS" / "GRPO Studio"
        return subprocess.run([*self.shell, program, *arguments], env=environment, cwd="/", timeout=30).returncode

    def text(self, name: str) -> str:
        path = self.home / name
        return path.read_text() if path.exists() else ""

    @property
    def environments(self) -> list[Path]:
        return sorted((self.home / "Library" / "Application Support" / "GRPO Studio" / "environments").glob("*"))


@pytest.fixture
def app(script: Callable[[str], ModuleType], wheel: Path, tmp_path: Path) -> Path:
    return script("light_app").make_app(wheel, tmp_path / "a disk")


@pytest.fixture(params=[SHELLS[-1], *(pytest.param(shell, marks=pytest.mark.proof) for shell in SHELLS[:-1])])
def mac(app: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Mac:
    made = Mac(tmp_path / "a home", app, request.param)
    made.add_program("osascript", OSASCRIPT, "stand-ins")
    made.add_program("open", '#!/bin/sh\necho "$@" >>"$HOME/opened"\n', "stand-ins")
    made.add_program("python", PYTHON, ".")
    # The machine that runs the tests may have a Python in one of the other places.
    with (app / "Contents" / "Resources" / "set_up" / "find_python.sh").open("a") as file:
        file.write('program_folders() { echo "$HOME/.local/bin"; }\n')
    return made


def test_the_bundle_is_sound_and_holds_what_it_installs(script, app: Path) -> None:
    assert list(script("check_bundle").problems(app, [ROOT, Path(sys.prefix)])) == []
    plist = plistlib.loads((app / "Contents" / "Info.plist").read_bytes())
    assert plist["CFBundleShortVersionString"] == __version__
    package = {path.name for path in (app / "Contents" / "Resources" / "package").iterdir()}
    assert package == {f"grpo_studio-{__version__}-py3-none-any.whl", "constraints.txt", "environment_name"}


def test_the_first_start_sets_up_and_the_second_just_starts(mac: Mac) -> None:
    mac.add_program("python3.12", PYTHON)
    assert mac.start("a config.yaml") == 0
    assert mac.text("started") == "-P -m grpo_studio.app a config.yaml\n"
    [environment] = mac.environments
    did = mac.text("did")
    assert f"pip install --disable-pip-version-check --no-input --progress-bar off --constraint {mac.app}" in did
    assert f"grpo_studio-{__version__}-py3-none-any.whl" in did
    said = mac.text("said").splitlines()
    assert "Set Up" in said[0] and "progress.js" in said[1] and len(said) == 2
    mac.app = mac.app.rename(mac.home / "Moved.app")
    assert mac.start() == 0
    assert mac.text("said").splitlines() == said and mac.text("did").count("installing") == 1
    # A Python that was removed leaves a dangling link, and the environment is made again.
    (environment / "bin" / "python").unlink()
    assert mac.start() == 0 and mac.text("did").count("installing") == 2


def test_uv_installs_where_there_is_one_and_brings_python_where_there_is_none(mac: Mac) -> None:
    mac.add_program("uv", UV)
    assert mac.start() == 0
    did = mac.text("did")
    assert "uv venv --managed-python --python 3.13 " in did and "uv pip install --python " in did
    shutil.rmtree(mac.environments[0])
    mac.add_program("python3.12", PYTHON)
    assert mac.start() == 0
    assert f"uv venv --python {mac.home}/.local/bin/python3.12 " in mac.text("did")


def test_without_python_it_says_so_and_opens_the_page_to_get_it(mac: Mac) -> None:
    assert mac.start() == 1
    assert "GRPO Studio needs Python 3.11 or newer." in mac.text("said")
    assert mac.text("opened") == "https://www.python.org/downloads/macos/\n"
    assert mac.environments == [] and not mac.text("started")


@pytest.mark.parametrize(
    ("failure", "sentence"),
    [
        ("echo 'Failed to establish a new connection'; exit 1", "Check the internet connection"),
        ("echo 'OSError: [Errno 28] No space left on device'; exit 1", "The disk is full."),
        ("exit 1", "The packages could not be installed."),
    ],
)
def test_a_failure_is_told_in_a_sentence_and_the_next_start_tries_again(mac: Mac, failure: str, sentence: str) -> None:
    mac.add_program("python3.11", PYTHON)
    assert mac.start(INSTALL=failure) == 1
    assert sentence in mac.text("said") and mac.text("opened").endswith("/Library/Logs/GRPO Studio/set_up.log\n")
    assert mac.environments == [] and not mac.text("started")
    assert mac.start() == 0 and mac.text("started")


@pytest.mark.timeout(15)
def test_cancel_ends_the_installation_and_leaves_nothing(mac: Mac) -> None:
    mac.add_program("python3.13", PYTHON)
    assert mac.start(INSTALL='echo $$ >"$HOME/pid"; exec sleep 20', CANCEL="yes") == 0
    with pytest.raises(ProcessLookupError):
        os.kill(int(mac.text("pid")), 0)
    assert mac.environments == [] and not mac.text("started")
    assert mac.start() == 0 and mac.text("started")


def test_nothing_is_downloaded_before_a_yes(mac: Mac) -> None:
    mac.add_program("python3.13", PYTHON)
    assert mac.start(DECLINE="yes") == 0
    assert mac.environments == [] and not mac.text("did") and not mac.text("started")
