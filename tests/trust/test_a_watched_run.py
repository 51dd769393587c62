"""A queued run whose reward functions hunt for tokens, watched from outside: its writes, command lines and sockets."""

import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from backend.runs.queue import QueueFile
from backend.runs.run_folder import RunFolder
from backend.utils.command import backend_command, backend_environment
from backend.utils.places import RUNS_VARIABLE
from tests.support import small_run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

IN_ENVIRONMENT = "hf_InTheEnvironmentOfTheTrainer012345"
IN_FILE = "hf_InTheTokenFileOfHuggingFace01234567"

THIEF = """
import os, time
from backend.rewards import register_reward_function
PLACES = ["/proc/self/environ", f"/proc/{os.getppid()}/environ", "TOKEN_FILE"]
def hunt():
    yield str(dict(os.environ))
    yield from (f"{number}: {name}" for number, name in enumerate(os.listdir("/proc")) if name.isdecimal())
    for place in [*PLACES, *(f"/proc/{name}/environ" for name in os.listdir("/proc") if name.isdecimal())]:
        try:
            yield open(place, "rb").read().decode(errors="replace")
        except OSError as error:
            yield f"{place}: {error}"
@register_reward_function("thief")
def thief(completions, log_extra):
    found = " ".join(hunt())
    print("THIEF WAS HERE", found)
    log_extra("found", [found[-4000:]] * len(completions))
    time.sleep(0.3)  # to be seen at work
    return [float(len(text)) for text in completions]
"""


@dataclass
class Watched:
    """What was seen of a process and of all that came from it."""

    folder: Path
    output: str = ""
    command_lines: set[str] = field(default_factory=set)
    listening: set[str] = field(default_factory=set)
    read: set[str] = field(default_factory=set)  # command lines of the processes whose descriptors could be read


def tree(root: int) -> list[int]:
    """A process and its descendants."""
    parents = dict[int, int]()
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):
            parents[int(name)] = int(Path("/proc", name, "stat").read_text().rpartition(")")[2].split()[1])
    found = [root]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found


def listening(pid: int) -> set[str]:
    """A process's sockets that wait for network connections or datagrams, or connections by a file system name."""
    own, found = set[str](), set[str]()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # closed since
            own.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            values = line.split()
            if f"socket:[{values[9]}]" in own and (values[3] == "0A" or table.startswith("udp")):
                found.add(f"{table} {values[1]}")
    for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        values = line.split()
        if f"socket:[{values[6]}]" in own and int(values[3], 16) & 0x10000:
            found.add(f"unix {' '.join(values[7:])}")
    return found


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    folder = tmp_path_factory.mktemp("watched")
    token_file = folder / "home" / ".cache" / "huggingface" / "token"
    token_file.parent.mkdir(parents=True)
    token_file.write_text(IN_FILE)
    (folder / "thief.py").write_text(THIEF.replace("TOKEN_FILE", str(token_file)))
    own = {"reward_functions": ["thief"], "reward_weights": [], "reward_functions_file": str(folder / "thief.py")}
    run = RunFolder(folder / "runs" / "one")
    small_run.prepare(run, small_run.settings_for(folder, iters=1, **own, reward_isolation="process"))
    QueueFile(folder / "runs").add(run)
    environment = backend_environment() | {"HF_TOKEN": IN_ENVIRONMENT, "HOME": str(folder / "home")}
    environment |= {"HF_HOME": str(token_file.parent), RUNS_VARIABLE: str(folder / "runs")}
    seen = Watched(folder)
    command = backend_command("queue", "run")
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while process.poll() is None:
        for pid in tree(process.pid):
            with suppress(OSError):  # it has ended
                line = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
                seen.command_lines.add(line)
                seen.listening |= listening(pid)
                seen.read.add(line)
        time.sleep(0.1)
    seen.output = process.communicate()[0]
    assert process.returncode == 0, seen.output
    return seen


def test_no_process_of_a_run_from_the_queue_listens(watched: Watched) -> None:
    for words in ("queue run", "train"):
        assert any(words in line for line in watched.read), watched.read
    assert len(watched.command_lines) >= 3, "the scoring process too"
    assert watched.listening == set()


def test_a_reward_function_that_hunts_for_tokens_finds_none(watched: Watched) -> None:
    """Not in its environment, the trainer's or the token file: they are in no file the run left, on no command line."""
    files = [path for path in watched.folder.rglob("*") if path.is_file() and path.name != "token"]
    contents = {path.name: path.read_bytes() for path in files}
    assert b"THIEF WAS HERE" in contents["log.txt"] and b"Permission denied" in contents["completions.jsonl"]
    assert {"events.jsonl", "config.yaml", "adapters.safetensors"} <= contents.keys()
    for token in (IN_ENVIRONMENT, IN_FILE):
        assert [name for name, content in contents.items() if token.encode() in content] == []
        assert token not in watched.output + "".join(watched.command_lines)
