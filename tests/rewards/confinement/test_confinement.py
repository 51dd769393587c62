"""What a confined process cannot do, each tried in a real child; and what it must still be able to do."""

import errno
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.rewards.confinement.conftest import ProbedChild
from tests.support.precious import contents

REFUSED = (errno.EACCES, errno.EPERM, errno.EXDEV, errno.EROFS)
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc, which a Mac has not")


CHANGES = {
    "write": "open(f'{run}/events.jsonl', 'w').write('x')",
    "append": "open(f'{run}/events.jsonl', 'a').write('x')",
    "truncate by path": "import os; os.truncate(f'{run}/events.jsonl', 0)",
    "delete": "import os; os.remove(f'{run}/run.lock')",
    "delete a checkpoint": "import shutil; shutil.rmtree(f'{run}/checkpoints/000004')",
    "delete a folder": "import os; os.mkdir(f'{own}/empty'); os.rename(f'{own}/empty', f'{run}/empty')",
    "rename": "import os; os.rename(f'{run}/events.jsonl', f'{run}/old.jsonl')",
    "move out": "import os; os.rename(f'{run}/events.jsonl', f'{own}/stolen')",
    "move in": "import os; open(f'{own}/new', 'w').close(); os.replace(f'{own}/new', f'{run}/events.jsonl')",
    "create": "open(f'{run}/new', 'x')",
    "make a folder": "import os; os.mkdir(f'{run}/new')",
    "make a fifo": "import os; os.mkfifo(f'{run}/new')",
    "make a symlink": "import os; os.symlink('/etc/passwd', f'{run}/new')",
    "write through a symlink": "import os; os.symlink(f'{run}/events.jsonl', f'{own}/s1'); "
    "open(f'{own}/s1', 'w').write('x')",
    "write through a symlinked folder": "import os; os.symlink(run, f'{own}/s2'); "
    "open(f'{own}/s2/new', 'w').write('x')",
    "hard link and write": "import os; os.link(f'{run}/events.jsonl', f'{own}/h1'); open(f'{own}/h1', 'w').write('x')",
    "write by way of ..": "import os; open(os.path.relpath(f'{run}/events.jsonl', own), 'w').write('x')",
    "write by way of /proc/self/fd": "import os; f = os.open(f'{run}/events.jsonl', os.O_RDONLY); "
    "open(f'/proc/self/fd/{f}', 'w').write('x')",
    "write by way of /proc/self/root": "open(f'/proc/self/root{run}/events.jsonl', 'w').write('x')",
    "write through memory": "import mmap, os; f = os.open(f'{run}/events.jsonl', os.O_RDWR); mmap.mmap(f, 4)[0] = 0",
    "chmod": "import os; os.chmod(f'{run}/events.jsonl', 0)",
    "chmod the folder": "import os; os.chmod(run, 0)",
    "fchmod": "import os; os.fchmod(os.open(run, os.O_RDONLY), 0)",
    "chown": "import os; os.chown(f'{run}/events.jsonl', os.getuid(), os.getgid())",
    "utime": "import os; os.utime(f'{run}/events.jsonl', (0, 0))",
    "in a child": "import subprocess; subprocess.run(['rm', '-rf', run], check=True, stderr=subprocess.DEVNULL)",
}


@pytest.mark.parametrize("how", CHANGES)
def test_nothing_outside_can_be_changed(confined: ProbedChild, run_folder: Path, how: str) -> None:
    confined.needs("files")
    before = contents(run_folder)
    outcome = confined.run(CHANGES[how], run=run_folder, own=confined.folder)
    assert contents(run_folder) == before
    assert outcome.get("errno") in REFUSED or outcome.get("error") == "CalledProcessError", outcome


def test_tokens_and_keys_cannot_be_read(tmp_path: Path) -> None:
    home = tmp_path / "user"
    for name in (
        ".ssh/id_ed25519",
        ".cache/huggingface/token",
        ".cache/huggingface/hub/config.json",
        ".config/other/settings",
        "data.json",
    ):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text("text")
    folder, named = tmp_path / "own", tmp_path / "named"
    folder.mkdir()
    (tmp_path / "config").mkdir()
    places = {"HF_TOKEN_PATH": str(named), "HISTFILE": "~/typed", "XDG_CONFIG_HOME": str(tmp_path / "config")}
    places |= {"XDG_CACHE_HOME": str(tmp_path / "config")}
    child = ProbedChild(folder, network=False, environment={"HOME": str(home), **places})
    try:
        child.needs("secrets")
        read = "value = open(path).read()"
        later = [
            named,
            tmp_path / "stored_tokens",
            home / "typed",
            home / ".psql_history",
            home / ".kaggle/kaggle.json",
        ]
        later += [tmp_path / "config" / name for name in ("gh/hosts.yml", "huggingface/token")]
        for secret in later:  # tokens made during the run
            secret.parent.mkdir(parents=True, exist_ok=True)
            secret.write_text("text")
        for secret in (home / ".ssh/id_ed25519", home / ".cache/huggingface/token", *later):
            assert child.run(read, path=secret).get("errno") in REFUSED, secret
        for other in (".cache/huggingface/hub/config.json", ".config/other/settings", "data.json"):
            assert child.run(read, path=home / other) == {"value": "text"}, other
        linked = child.run(
            "import os; os.symlink(path, f'{own}/s'); open(f'{own}/s').read()",
            path=home / ".ssh/id_ed25519",
            own=folder,
        )
        assert linked.get("errno") in REFUSED
    finally:
        child.close()


@pytest.fixture
def listener() -> Iterator[int]:
    """The port of a TCP socket of ours."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        yield server.getsockname()[1]


REACHING = {
    "TCP": "import socket; socket.create_connection(('127.0.0.1', port), 2)",
    "TCP, listening": "import socket; socket.create_server(('127.0.0.1', 0))",
    "UDP": "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', port))",
    "IPv6": "import socket; socket.socket(socket.AF_INET6, socket.SOCK_DGRAM).sendto(b'x', ('::1', port))",
    "HTTP": "import urllib.request; urllib.request.urlopen(f'http://127.0.0.1:{port}', timeout=2)",
    "a child's TCP": "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import socket, sys; "
    'socket.create_connection(("127.0.0.1", int(sys.argv[1])), 2)\', str(port)], check=True, '
    "stderr=subprocess.DEVNULL)",
}


@pytest.mark.parametrize("how", REACHING)
def test_no_network(confined: ProbedChild, listener: int, how: str) -> None:
    confined.needs("network")
    outcome = confined.run(REACHING[how], port=listener)
    assert outcome.get("error") in ("PermissionError", "URLError", "CalledProcessError"), outcome


def test_a_judge_reaches_the_network(judge: ProbedChild, listener: int) -> None:
    assert "error" not in judge.run(REACHING["TCP"], port=listener)
    assert "error" not in judge.run("import socket; socket.getaddrinfo('localhost', 80)")


@pytest.mark.parametrize("who", ["confined", "judge"])
@pytest.mark.parametrize("kind", ["path", "abstract"])
def test_unix_sockets_of_others_are_out_of_reach(request: pytest.FixtureRequest, who: str, kind: str) -> None:
    child: ProbedChild = request.getfixturevalue(who)
    child.needs("processes")
    if kind == "abstract" and sys.platform != "linux":
        pytest.skip("only Linux has abstract sockets")
    # Both sides name the socket, and its name has at most 103 bytes on a Mac: a temporary folder may have a longer one.
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, socket.socket(socket.AF_UNIX) as server:
        address = f"{folder}/s" if kind == "path" else f"\0grpo-{os.getpid()}"
        server.bind(address)
        server.listen()
        outcome = child.run("import socket; socket.socket(socket.AF_UNIX).connect(address)", address=address)
    assert outcome.get("errno") in REFUSED


HOLDS = {
    "signal": "import os; os.kill(pid, 0)",
    "kill": "import os, signal; os.kill(pid, signal.SIGKILL)",
    "signal its group": "import os, signal; os.killpg(os.getpgid(pid), signal.SIGCONT)",
    "pidfd": "import os, signal; signal.pidfd_send_signal(os.pidfd_open(pid), signal.SIGKILL)",
    "environment": "open(f'/proc/{pid}/environ').read()",
    "memory": "open(f'/proc/{pid}/mem', 'rb')",
    "write memory": "open(f'/proc/{pid}/mem', 'wb')",
    "its files": "import os; open(f'/proc/{pid}/fd/0')",
    "its working folder": "import os; os.listdir(f'/proc/{pid}/cwd')",
    "maps": "open(f'/proc/{pid}/maps').read()",
    "ptrace": "import ctypes, os; c = ctypes.CDLL(None, use_errno=True); r = c.ptrace(16, pid, None, None)\n"
    "if r < 0: raise OSError(ctypes.get_errno(), 'ptrace')",
    "process_vm_writev": "import ctypes; c = ctypes.CDLL(None, use_errno=True); "
    "r = c.process_vm_writev(pid, None, 0, None, 0, 0)\nif r < 0: raise OSError(ctypes.get_errno(), 'writev')",
    "priority": "import os; os.setpriority(os.PRIO_PROCESS, pid, 19)",
    "limits": "import resource; resource.prlimit(pid, resource.RLIMIT_CPU, (1, 1))",
    "processors": "import os; os.sched_setaffinity(pid, {0})",
    "scheduling": "import os; os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))",
}


@on_linux
@pytest.mark.parametrize("how", HOLDS)
def test_no_hold_on_other_processes(confined: ProbedChild, how: str) -> None:
    confined.needs("processes")
    with subprocess.Popen(["sleep", "60"]) as other:
        try:
            for pid in (other.pid, os.getpid()) if "kill" not in how else (other.pid,):
                outcome = confined.run(HOLDS[how], pid=pid)
                assert outcome.get("errno") in REFUSED, outcome
            assert other.poll() is None
        finally:
            other.kill()


ESCAPES = {
    "mount": "r = c.mount(b'tmpfs', own.encode(), b'tmpfs', 0, None)",
    "a user namespace": "r = c.unshare(0x10000000)",
    "a user namespace by clone": "r = c.syscall(56 if os.uname().machine == 'x86_64' else 220, 0x10000000 | 17, "
    "0, 0, 0, 0)",
    "chroot": "r = c.chroot(own.encode())",
    "io_uring": "r = c.syscall(425, 4, None)",
    "keyring": "r = c.syscall(248 if os.uname().machine == 'x86_64' else 217, b'user', b'x', b'x', 1, -3)",
    "System V memory": "r = c.shmget(0, 4096, 0o1600)",
    "privileges": "r = c.prctl(38, 0, 0, 0, 0)",
    "32-bit numbers of x86_64": "r = c.syscall(0x40000000 + 41, 2, 1, 0)",
}


@on_linux
@pytest.mark.parametrize("how", ESCAPES)
def test_ways_around_are_closed(confined: ProbedChild, how: str) -> None:
    confined.needs("processes")
    refused = "\nif r < 0: raise OSError(ctypes.get_errno(), 'refused')"
    code = f"import ctypes, os; c = ctypes.CDLL(None, use_errno=True); {ESCAPES[how]}{refused}"
    outcome = confined.run(code, own=confined.folder)
    assert outcome.get("errno") in (*REFUSED, errno.ENOSYS, errno.EINVAL), outcome


def test_limits(confined: ProbedChild) -> None:
    outcome = confined.run("import resource as r; value = [r.getrlimit(l)[1] for l in (r.RLIMIT_CORE, r.RLIMIT_FSIZE)]")
    assert outcome["value"][0] == 0
    if sys.platform == "linux":
        assert 0 < outcome["value"][1] <= 2 << 30
        assert confined.run("x = bytearray(1 << 45)")["error"] == "MemoryError"


@on_linux
def test_no_descriptor_is_inherited(confined: ProbedChild) -> None:
    """The three, and the copy of stdout that the answers go through."""
    assert confined.confinement.descriptors == [0, 1, 2, 3]


WORKS = {
    "its own files": "open(f'{own}/a', 'w').write('x'); import os; os.rename(f'{own}/a', f'{own}/b'); "
    "os.truncate(f'{own}/b', 0); os.remove(f'{own}/b')",
    "between its folders": "import os; os.mkdir(f'{own}/d'); open(f'{own}/c', 'w').close(); "
    "os.rename(f'{own}/c', f'{own}/d/c')",
    "temporary files": "import tempfile; tempfile.NamedTemporaryFile().write(b'x'); "
    "tempfile.TemporaryDirectory().cleanup()",
    "its home": "import pathlib; (pathlib.Path.home() / '.config').mkdir(exist_ok=True)",
    "copies": "import shutil, os; open(f'{own}/c1', 'w').close(); shutil.copy(f'{own}/c1', f'{own}/c2'); "
    "shutil.copy2(f'{own}/c1', f'{own}/c3'); os.mkdir(f'{own}/t'); shutil.copytree(f'{own}/t', f'{own}/u')",
    "sqlite": "import sqlite3; sqlite3.connect(f'{own}/db').execute('create table t (x)')",
    "a program": "import subprocess, sys; "
    "value = subprocess.run([sys.executable, '-c', 'print(7)'], capture_output=True, text=True, "
    "timeout=20).stdout.strip(); assert value == '7'",
    "a program in a session of its own, killed": "import subprocess; "
    "p = subprocess.Popen(['sleep', '60'], start_new_session=True); p.kill(); assert p.wait() == -9",
    "a shell": "import subprocess; "
    "assert subprocess.check_output('echo $((3 + 4)) | cat > /dev/null && echo 7', shell=True) == b'7\\n'",
    "processes": "import multiprocessing as m; assert m.get_context('fork').Pool(2).map(len, ['a', 'bc']) == [1, 2]",
    "shared memory": "from multiprocessing import shared_memory as s; m = s.SharedMemory(create=True, size=8); "
    "m.close(); m.unlink()",
    "threads": "import concurrent.futures as f; assert list(f.ThreadPoolExecutor(2).map(len, ['a', 'bc'])) == [1, 2]",
    "asyncio": "import asyncio; asyncio.run(asyncio.wait_for(asyncio.sleep(0), 2))",
    "an asyncio program": "import asyncio\n"
    "async def go(): return await (await asyncio.create_subprocess_exec('true')).wait()\nassert asyncio.run(go()) == 0",
    "numpy": "import numpy as n; assert n.linalg.inv(n.eye(200)).sum() == 200; n.random.default_rng()",
    "sympy": "import sympy; assert sympy.simplify('(x**2 - 1)/(x - 1)') == sympy.sympify('x + 1')",
    "math_verify": "import math_verify as m; assert m.verify(m.parse('$1/2$'), m.parse('$0.5$'), timeout_seconds=None)",
    "regex": "import regex; assert regex.fullmatch(r'\\p{L}+', 'aé')",
    "a limit of its own": "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (200, r.getrlimit(r.RLIMIT_NOFILE)[1]))",
    "clocks and random numbers": "import os, time, uuid; os.urandom(8); time.time(); uuid.uuid4(); "
    "open('/dev/urandom', 'rb').read(1)",
    "Python's own modules": "import ssl, ctypes, hashlib, zoneinfo; "
    "zoneinfo.ZoneInfo('Europe/Berlin') if zoneinfo.available_timezones() else 0",
}


@pytest.mark.parametrize("what", WORKS)
def test_what_reward_functions_use_works(confined: ProbedChild, what: str) -> None:
    outcome = confined.run(WORKS[what], own=confined.folder)
    assert "error" not in outcome, outcome
