"""A Mac's bundle: the checker finds what would keep it from starting on another Mac; it is signed, notarised and
packed, with stand-ins for Apple's tools that note their calls. A real certificate is in docs/mac-checklist.md."""

import hashlib
import json
import os
import plistlib
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from backend import __version__

ARM64, X86_64 = 0x0100000C, 0x01000007  # types of processor, as in <mach/machine.h>


def library(processor: int = ARM64, macos: tuple[int, int] = (13, 3), loads: str = "@rpath/other.dylib") -> bytes:
    """A Mach-O file of nothing but headers: the macOS it was built for and a library that it loads."""
    name = loads.encode() + b"\0" * (8 - len(loads) % 8)
    build = struct.pack("<6I", 0x32, 24, 1, macos[0] << 16 | macos[1] << 8, 0, 0)
    load = struct.pack("<6I", 0xC, 24 + len(name), 24, 0, 0, 0) + name
    return struct.pack("<8I", 0xFEEDFACF, processor, 0, 6, 2, len(build) + len(load), 0, 0) + build + load


FOREIGN = Path("/somewhere/checkout")


@pytest.fixture
def check(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("check_bundle")


@pytest.fixture
def app(script: Callable[[str], ModuleType], tmp_path: Path) -> Path:
    """A bundle like PyInstaller's: two programs, a framework, libraries and their links."""
    contents = tmp_path / "GRPO Studio.app" / "Contents"
    programs = ("MacOS/GRPO Studio", "MacOS/grpo-studio-backend")
    libraries = ("Python", "mlx/core.so", "mlx/lib/libmlx.dylib", "QtCore.framework/Versions/A/QtCore")
    for name in (*programs, *(f"Frameworks/{each}" for each in libraries)):
        (contents / name).parent.mkdir(parents=True, exist_ok=True)
        (contents / name).write_bytes(library())
        (contents / name).chmod(0o755)
    (contents / "Frameworks/QtCore.framework/QtCore").symlink_to("Versions/A/QtCore")
    (contents / "Resources").mkdir()
    (contents / "Resources" / "app.icns").write_bytes(b"icns")
    (contents / "Resources" / "presets.yaml").write_text("a: 1\n")
    (contents / "Resources" / "core.so").symlink_to("../Frameworks/mlx/core.so")
    (contents / "Info.plist").write_bytes(plistlib.dumps(script("info_plist").info_plist("1.2.3")))
    return contents.parent


@pytest.fixture
def contents(app: Path) -> Path:
    return app / "Contents"


def set_plist(contents: Path, **changes: object) -> None:
    plist = plistlib.loads((contents / "Info.plist").read_bytes())
    (contents / "Info.plist").write_bytes(plistlib.dumps(plist | changes))


def test_a_sound_bundle_has_no_problems(check: ModuleType, contents: Path) -> None:
    """Nor has one with a library of Qt, which promises an older system than its headers name."""
    (contents / "Frameworks" / "PySide6").mkdir()
    (contents / "Frameworks" / "PySide6" / "QtCore.abi3.so").write_bytes(library(macos=(15, 0)))
    assert list(check.problems(contents.parent, [FOREIGN])) == []


FAT = b"\xca\xfe\xba\xbe\0\0\0\x01" + b"\0" * 60
BREW = library(loads="/opt/homebrew/lib/libffi.dylib")
FILES: dict[str, tuple[str, bytes, str]] = {  # what is wrong: (file, its content, what is said)
    "plist": ("Info.plist", b"no plist", "Info.plist cannot be read"),
    "program": ("MacOS/GRPO Studio", b"#!/usr/bin/env python3\n", "neither a Mac program nor"),
    "icon": ("Resources/app.icns", b"\x89PNG", "no .icns file"),
    "beside": ("../notes.txt", b"", "lies beside Contents"),
    "path": ("Resources/a.txt", f"x={FOREIGN}/app/y".encode(), "names /somewhere/checkout"),
    "Intel": ("Frameworks/a.so", library(X86_64), "not built for Apple silicon"),
    "torn": ("Frameworks/a.so", FAT, "begins like a Mac program"),
    "newer": ("Frameworks/a.so", library(macos=(15, 2)), "needs macOS 15.2"),
    "brew": ("Frameworks/a.so", BREW, "loads /opt/homebrew"),
}
OTHERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "version": (lambda c: set_plist(c, CFBundleShortVersionString="1.0rc1"), "up to three numbers"),
    "system": (lambda c: set_plist(c, LSMinimumSystemVersion="12.0"), "LSMinimumSystemVersion is '12.0'"),
    "bit": (lambda c: (c / "MacOS" / "GRPO Studio").chmod(0o644), "missing or not executable"),
    "link out": (lambda c: (c / "link").symlink_to("/usr/bin"), "is a link out of the bundle"),
    "link up": (lambda c: (c / "link").symlink_to("../../elsewhere"), "is a link out of the bundle"),
    "dangling": (lambda c: (c / "link").symlink_to("missing"), "which is missing"),
}


@pytest.mark.parametrize("case", [*FILES, *OTHERS])
def test_each_of_these_is_found(check: ModuleType, contents: Path, case: str) -> None:
    if case in FILES:
        name, content, expected = FILES[case]
        (contents / name).write_bytes(content)
    else:
        spoil, expected = OTHERS[case]
        spoil(contents)
    [problem] = check.problems(contents.parent, [FOREIGN])
    assert expected in problem


def test_on_the_command_line(check: ModuleType, contents: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["check_bundle.py", str(contents.parent)])
    assert (check.main(), capsys.readouterr().out) == (0, "")
    os.rename(contents, contents.with_name("contents"))
    assert check.main() == 1 and "no folder Contents" in capsys.readouterr().out


IDENTITY = "Developer ID Application: Somebody (TEAM)"
TOOL = """#!/bin/sh
echo "$(basename "$0") $*" >>"$CALLS"
case "$*" in
    *"notarytool submit"*) echo '{"id": "abc", "status": "'"$VERDICT"'"}' ;;
    *"notarytool log"*) echo 'The signature of libmlx.dylib has no timestamp.' ;;
    *"$FAILING"*) echo 'no identity found' >&2; exit 3 ;;
esac
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Puts the stand-ins on the path; returns the calls made so far, one line each."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("codesign", "ditto", "xcrun", "spctl"):
        (tools / name).write_text(TOOL)
        (tools / name).chmod(0o755)
    log = tmp_path / "calls"
    set_all = {"PATH": f"{tools}:/usr/bin:/bin", "CALLS": str(log), "VERDICT": "Accepted", "FAILING": "nothing at all"}
    for name, value in set_all.items():
        monkeypatch.setenv(name, value)
    for name in ("SIGNING_IDENTITY", "NOTARY_PROFILE", "NOTARY_KEY", "NOTARY_KEY_ID", "NOTARY_ISSUER"):
        monkeypatch.delenv(name, raising=False)

    def build_dmg(filename: str, volume_name: str, settings: dict[str, object]) -> None:
        Path(filename).write_text(json.dumps([volume_name, settings], default=str))

    monkeypatch.setitem(sys.modules, "dmgbuild", SimpleNamespace(build_dmg=build_dmg))
    return lambda: log.read_text().splitlines() if log.exists() else []


def run_release(script: Callable[[str], ModuleType], app: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.argv", ["release.py", str(app), "--out", str(app.parent / "out")])
    return script("release").main()


def test_everything_is_signed_after_what_lies_inside_it(script, app: Path, calls, capfd) -> None:
    script("release").sign(app, IDENTITY)
    *signings, verification = calls()
    signed = [line.rpartition(str(app.parent) + "/")[2] for line in signings]
    order = {name: index for index, name in enumerate(signed)}
    inside = "GRPO Studio.app/Contents/"
    assert len(order) == len(signed) == 8, "six programs and libraries, the framework, the app; no link twice"
    framework = f"{inside}Frameworks/QtCore.framework"
    assert order[f"{framework}/Versions/A/QtCore"] < order[framework] < order["GRPO Studio.app"] == 7
    assert all("--timestamp --options runtime" in line and IDENTITY in line for line in signings)
    with_rights = {name for line, name in zip(signings, signed, strict=True) if "--entitlements" in line}
    assert with_rights == {f"{inside}MacOS/GRPO Studio", f"{inside}MacOS/grpo-studio-backend", "GRPO Studio.app"}
    assert "--verify --deep --strict" in verification


def test_a_release_is_notarised_and_stapled_twice(script, app: Path, calls, monkeypatch, capsys) -> None:
    monkeypatch.setenv("SIGNING_IDENTITY", IDENTITY)
    monkeypatch.setenv("NOTARY_PROFILE", "grpo-studio")
    assert run_release(script, app, monkeypatch) == 0
    image = app.parent / "out" / "GRPO-Studio-1.2.3-arm64.dmg"
    lines = [line.replace(str(app.parent), "") for line in calls() if "codesign --force" not in line]
    notarised = ["xcrun notarytool submit", "xcrun stapler staple", "xcrun stapler validate"]
    before, between = ["codesign --verify --deep", "ditto -c -k"], ["spctl --assess --type"]
    assert [" ".join(line.split()[:3]) for line in lines] == [*before, *notarised, *between, *notarised]
    assert f"{image}.sha256" in {str(path) for path in image.parent.iterdir()}
    digest, name = (image.parent / f"{image.name}.sha256").read_text().split()
    assert (digest, name) == (hashlib.sha256(image.read_bytes()).hexdigest(), image.name)
    assert "Not " not in capsys.readouterr().out


def test_without_a_certificate_it_is_signed_ad_hoc_and_says_so(script, app: Path, calls, monkeypatch, capsys) -> None:
    monkeypatch.setenv("NOTARY_PROFILE", "grpo-studio")
    assert run_release(script, app, monkeypatch) == 0
    assert "Not signed by a developer" in capsys.readouterr().out
    assert not [line for line in calls() if "notarytool" in line or "runtime" in line or "--entitlements" in line]
    assert len([line for line in calls() if "codesign --force --sign - " in line]) == 8


def test_a_refusal_and_a_failing_tool_end_the_release(script, app: Path, calls, monkeypatch, capsys) -> None:
    monkeypatch.setenv("SIGNING_IDENTITY", IDENTITY)
    monkeypatch.setenv("NOTARY_PROFILE", "grpo-studio")
    monkeypatch.setenv("VERDICT", "Invalid")
    assert run_release(script, app, monkeypatch) == 1
    refusal = "Apple refused GRPO Studio.app (Invalid):\nThe signature of libmlx.dylib has no timestamp."
    assert refusal in capsys.readouterr().err
    monkeypatch.setenv("FAILING", "--force")
    assert run_release(script, app, monkeypatch) == 1
    assert "codesign failed with exit code 3:\nno identity found" in capsys.readouterr().err
    (app / "Contents" / "Frameworks" / "mlx" / "core.so").write_bytes(library(macos=(26, 0)))
    assert run_release(script, app, monkeypatch) == 1
    assert "needs macOS 26.0, and the app promises 14.0" in capsys.readouterr().err
    assert not (app.parent / "out").exists()


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
def light_app(script: Callable[[str], ModuleType], wheel: Path, tmp_path: Path) -> Path:
    return script("light_app").make_app(wheel, tmp_path / "a disk")


@pytest.fixture(params=[SHELLS[-1], *(pytest.param(shell, marks=pytest.mark.proof) for shell in SHELLS[:-1])])
def mac(light_app: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Mac:
    made = Mac(tmp_path / "a home", light_app, request.param)
    made.add_program("osascript", OSASCRIPT, "stand-ins")
    made.add_program("open", '#!/bin/sh\necho "$@" >>"$HOME/opened"\n', "stand-ins")
    made.add_program("df", '#!/bin/sh\nprintf "in MB\\ndisk 9000 0 %s\\n" "${FREE_MB-9000}"\n', "stand-ins")
    made.add_program("python", PYTHON, ".")
    # The machine that runs the tests may have a Python in one of the other places.
    with (light_app / "Contents" / "Resources" / "set_up" / "find_python.sh").open("a") as file:
        file.write('program_folders() { echo "$HOME/.local/bin"; }\n')
    return made


def test_the_bundle_is_sound_and_holds_what_it_installs(script, light_app: Path) -> None:
    assert list(script("check_bundle").problems(light_app, [ROOT, Path(sys.prefix)])) == []
    plist = plistlib.loads((light_app / "Contents" / "Info.plist").read_bytes())
    assert plist["CFBundleShortVersionString"] == __version__
    package = {path.name for path in (light_app / "Contents" / "Resources" / "package").iterdir()}
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


def test_nothing_is_installed_where_there_is_no_space_for_it(mac: Mac) -> None:
    mac.add_program("python3.13", PYTHON)
    assert mac.start(FREE_MB="1023") == 1
    assert "MB of free disk space, and there are 1023." in mac.text("said")
    assert "installing" not in mac.text("did") and mac.environments == []


def test_cancel_ends_the_installation_and_leaves_nothing(mac: Mac) -> None:
    mac.add_program("python3.13", PYTHON)
    assert mac.start(INSTALL='echo $$ >"$HOME/pid"; exec sleep 1000', CANCEL="yes") == 0
    with pytest.raises(ProcessLookupError):
        os.kill(int(mac.text("pid")), 0)
    assert mac.environments == [] and not mac.text("started")
    assert mac.start() == 0 and mac.text("started")


def test_nothing_is_downloaded_before_a_yes(mac: Mac) -> None:
    mac.add_program("python3.13", PYTHON)
    assert mac.start(DECLINE="yes") == 0
    assert mac.environments == [] and not mac.text("did") and not mac.text("started")
