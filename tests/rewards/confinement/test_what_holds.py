"""What is reported where a system offers less, the tables behind the filter, the profile for macOS as text (seatbelt
itself is only on a Mac: docs/mac-checklist.md), and the environment of confined code."""

import json
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from backend.rewards.confinement import confine, linux
from backend.rewards.confinement.confine import confined_environment
from backend.utils.command import backend_environment

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has it")

# The child refuses some calls to itself first, as an old kernel or a container does.
LESS = """
import json, sys
from dataclasses import asdict
from pathlib import Path
from backend.rewards.confinement.confine import confine
from backend.rewards.confinement import linux
{before}
confinement = confine([Path(sys.argv[1])], network={network}, secrets=[])
print(json.dumps({{**asdict(confinement), "sentences": confinement.sentences()}}))
"""
NO_LANDLOCK = "linux._CREATE_RULESET = 9999"
NO_FILTER = "import platform; platform.machine = lambda: 'riscv64'"


def older(version: int) -> str:
    return f"linux.abi = lambda: {version}"


RED_HAT = """
create = linux.syscall
def syscall(number, *rest):
    if number == 444 and rest[1] == 24: raise OSError(22, "Invalid argument")
    return create(number, *rest)
linux.syscall = syscall
"""


def held(tmp_path: Path, before: str, network: bool = False) -> dict[str, str | list[str]]:
    code = LESS.format(before=before, network=network)
    out = subprocess.check_output([sys.executable, "-c", code, str(tmp_path)], env=backend_environment(), text=True)
    return json.loads(out)


@on_linux
@pytest.mark.parametrize(
    ("before", "missing"),
    [
        (NO_LANDLOCK, {"files", "secrets", "processes"}),
        (NO_FILTER, {"files", "network", "processes"}),
        (f"{NO_LANDLOCK}; {NO_FILTER}", {"files", "secrets", "network", "processes"}),
        (older(1), {"files", "processes"}),
        *((before, {"processes"}) for before in (older(3), older(5), RED_HAT)),
        ("", set()),
    ],
)
def test_what_does_not_hold_is_said_with_its_reason(tmp_path: Path, before: str, missing: set[str]) -> None:
    if not linux.abi() or linux.abi() < 6 or platform.machine() not in linux.MACHINES:
        pytest.skip("this system itself offers less")
    confinement = held(tmp_path, before)
    promises = {"files", "secrets", "network", "processes"}
    assert {promise for promise in promises if not confinement[promise]} == missing
    assert len(confinement["sentences"]) == len(missing)
    for sentence in confinement["sentences"]:
        assert sentence.endswith(".") and len(sentence) <= 200 and sentence.isprintable(), sentence
    assert bool(confinement["reason"]) == bool(missing)


HEADERS = {"x86_64": "/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "aarch64": "/usr/include/asm-generic/unistd.h"}


def number_of(name: str, machine: str) -> int | None:
    return linux.NUMBERS[name][list(linux.MACHINES).index(machine)]


@pytest.mark.parametrize("machine", linux.MACHINES)
def test_the_numbers_are_those_of_the_kernels_headers(machine: str) -> None:
    header = Path(HEADERS[machine])
    if not header.exists():
        pytest.skip(f"no {header}")
    found = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text())
    known = {name: int(number) for name, number in reversed(found)}
    ours = {name: number for name in linux.NUMBERS if (number := number_of(name, machine)) is not None}
    assert {name: known[name] for name in ours if name in known} == {name: ours[name] for name in ours if name in known}
    assert len(set(ours) & set(known)) > 70


def verdict(code: list[linux.Instruction], machine: int, call: int, *arguments: int) -> int:
    """What the kernel would answer: an interpreter of the instructions that the filter uses."""
    data = {0: call, 4: machine} | {16 + 8 * index: value & 0xFFFFFFFF for index, value in enumerate(arguments)}
    at, register = 0, 0
    while True:
        operation, yes, no, constant = code[at]
        at += 1
        match operation:
            case 0x20:
                register = data.get(constant, 0)
            case 0x54:
                register &= constant
            case 0x15:
                at += yes if register == constant else no
            case 0x25:
                at += yes if register > constant else no
            case 0x06:
                return constant


@pytest.mark.parametrize("machine", linux.MACHINES)
def test_the_filter_decides_as_it_should(machine: str) -> None:
    closed = linux.program(list(linux.refusals(network=False)), machine)
    judge = linux.program(list(linux.refusals(network=True)), machine)
    allow, refuse, denied, missing = 0x7FFF0000, 0x50001, 0x5000D, 0x50026
    architecture = linux.MACHINES[machine]

    def of(code: list[linux.Instruction], name: str, *arguments: int) -> int:
        call = number_of(name, machine)
        assert call is not None
        return verdict(code, architecture, call, *arguments)

    assert [of(closed, "socket", family) for family in (1, 2, 10, 16, 38)] == [denied] * 5
    assert [of(judge, "socket", family) for family in (1, 2, 10, 16, 38)] == [denied, allow, allow, allow, denied]
    assert (of(closed, "fchmod"), of(judge, "fchmod")) == (refuse, refuse)
    assert [of(closed, "socketpair", 1, kind) for kind in (1, 0x80001, 0x80002, 3)] == [allow, allow, denied, denied]
    assert (of(closed, "flock"), of(closed, "fcntl", 3, 2), of(closed, "fcntl", 3, 1024)) == (missing, allow, refuse)
    assert (of(closed, "ptrace"), of(closed, "io_uring_setup"), of(closed, "clone3")) == (refuse, missing, missing)
    assert (of(closed, "prlimit64", 0), of(closed, "prlimit64", 42)) == (allow, refuse)
    # Process 0 of PRIO_PROCESS is the caller, of PRIO_USER all that the user has.
    assert {of(closed, "setpriority", which, who) for which in (0, 1, 2) for who in (0, 42)} == {refuse}
    assert (of(closed, "clone", 0x1200011), of(closed, "clone", 0x10000011)) == (allow, refuse)
    assert (of(closed, "ioctl", 1, 0x5401), of(closed, "ioctl", 1, 0x5412)) == (allow, refuse)
    assert verdict(closed, architecture, 63 if machine == "aarch64" else 0) == allow, "read"
    assert verdict(closed, architecture, 470) == missing
    assert verdict(closed, architecture, 0x40000000 + 41) == missing
    assert verdict(closed, 0x40000003, 1) == refuse, "32-bit programs"
    assert all(max(yes, no) < 256 and 0 <= constant < 1 << 32 for _, yes, no, constant in closed)
    assert len(closed) < 4096


SECRETS = (
    *("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "GITHUB_TOKEN", "GH_TOKEN", "NPM_TOKEN", "MY_PASSWORD"),
    *("AWS_SECRET_ACCESS_KEY", "GRPO_STUDIO_LOCK", "GRPO_API_TOKEN", "SSH_AUTH_SOCK", "DBUS_SESSION_BUS_ADDRESS"),
    *("XDG_RUNTIME_DIR", "DISPLAY"),
)
NEEDED = (
    *("PATH", "LANG", "LC_ALL", "TZ", "PYTHONPATH", "PYTHONHASHSEED", "GRPO_STUDIO_RUNS", "HF_HOME"),
    *("OMP_NUM_THREADS",),
)


@pytest.fixture
def users(tmp_path: Path) -> dict[str, str]:
    """The environment of somebody who has everything set."""
    home = tmp_path / "user"
    (home / ".cache").mkdir(parents=True)
    names = (*SECRETS, *NEEDED, "OPENAI_API_KEY", "EDITOR", "TOKENIZERS_PARALLELISM")
    return {name: f"value of {name}" for name in names} | {"HOME": str(home)}


@pytest.mark.parametrize("network", [False, True])
def test_no_token_is_passed_on(tmp_path: Path, users: dict[str, str], network: bool) -> None:
    environment = confined_environment(tmp_path / "own", network, users)
    assert not set(SECRETS) & set(environment)
    assert set(NEEDED) | {"TOKENIZERS_PARALLELISM"} <= set(environment)
    assert {"OPENAI_API_KEY", "EDITOR"} & set(environment) == ({"OPENAI_API_KEY", "EDITOR"} if network else set())
    assert ("HF_HUB_OFFLINE" in environment) is not network


def test_home_and_temporary_files_lie_in_its_folder_and_caches_are_found(tmp_path: Path, users: dict[str, str]) -> None:
    own = tmp_path / "own"
    (tmp_path / "user" / ".cache" / "model").write_text("weights")
    for _ in range(2):  # a second child of the same folder
        environment = confined_environment(own, False, users)
    assert Path(environment["HOME"]) == own / "home" and Path(environment["TMPDIR"]) == own / "tmp"
    assert Path(environment["HOME"], ".cache", "model").read_text() == "weights"
    assert Path(environment["TMPDIR"]).is_dir()


@pytest.mark.parametrize("network", [False, True])
def test_the_profile(tmp_path: Path, network: bool) -> None:
    """Of several rules that fit, the last one holds."""
    own = f'(subpath "{tmp_path.resolve()}")'
    lines = confine.seatbelt_profile([tmp_path], [tmp_path / "keys"], network).splitlines()
    assert lines[:2] == ["(version 1)", "(allow default)"]
    writing = [line for line in lines if "file-write*" in line]
    assert writing == ["(deny file-write*)", f"(allow file-write* {own})"]
    assert lines.index("(deny signal)") < lines.index("(allow signal (target same-sandbox))")
    assert f'(deny file-read-data (subpath "{tmp_path.resolve()}/keys"))' in lines
    assert ("(deny network*)" in lines) is not network
    last = [line for line in lines if "network*" in line][-2:]
    assert last == [f"(allow network* ({side} unix-socket {own}))" for side in ("local", "remote")]


def test_any_name_is_one_string(tmp_path: Path) -> None:
    (line,) = (
        line
        for line in confine.seatbelt_profile([tmp_path / 'a "b\\c'], [], False).splitlines()
        if "allow file-write* " in line
    )
    assert line.endswith('/a \\"b\\\\c"))')
