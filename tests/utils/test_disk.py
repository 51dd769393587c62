"""A file that cannot be written: the line, file or folder stays whole, and the sentence names it and the cause."""

import errno
import math
import os
import resource
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from backend.runs.events import TAIL_BYTES, JsonLines, read_events
from backend.utils import disk
from backend.utils.child_process import ChildEnded, ChildProcess, ChildTimeout, module_command
from backend.utils.command import backend_command, backend_environment
from backend.utils.disk import DiskError, fault_of, remove_folder, replace_file, room_on, save_as, whole_folder
from tests.support.cases import cases


@pytest.fixture
def size_limit() -> Iterator[None]:
    """No file of this process may exceed 4 kB: the kernel takes what fits, then gives EFBIG, as a full disk ENOSPC."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_line_is_written_whole_or_not_at_all(tmp_path: Path, size_limit: None) -> None:
    rows = JsonLines(tmp_path / "rows.jsonl")
    rows.append({"n": 1})
    size = rows.size
    with pytest.raises(DiskError, match=r"rows\.jsonl cannot be written: File too large\."):
        rows.append({"text": "x" * 9000})
    assert rows.size == size == rows.path.stat().st_size
    rows.append({"n": 2})
    rows.close()
    assert [event["n"] for event in read_events(rows.path)] == [1, 2] and rows.path.stat().st_size == rows.size


@pytest.mark.parametrize(
    ("whole", "half"),
    [(b'{"n": 1}\n', b'{"n'), (b"", b'{"n"'), (b"", b"a" * 200_000), (b'{"n": 1}\n', b"x" * (TAIL_BYTES - 1))],
    ids=range(4),
)
def test_half_a_line_is_cut_off(whole: bytes, half: bytes, tmp_path: Path) -> None:
    """In the last case the newline is the first byte of the last block."""
    (tmp_path / "rows.jsonl").write_bytes(whole + half)
    rows = JsonLines(tmp_path / "rows.jsonl")
    assert rows.path.read_bytes() == whole and rows.size == len(whole)


def test_a_sync_that_failed_once_is_never_believed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = JsonLines(tmp_path / "rows.jsonl")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
        with pytest.raises(DiskError):
            rows.sync()
    with pytest.raises(DiskError, match="Input/output"):
        rows.sync()


@pytest.mark.parametrize("write", [replace_file, save_as])
def test_a_file_that_cannot_be_replaced_stays(write: Any, tmp_path: Path, size_limit: None) -> None:
    path = tmp_path / "about.json"
    write(path, "old")
    with pytest.raises(DiskError, match=r"about\.json cannot be written"):
        write(path, "x" * 9000)
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["about.json"]


def test_a_file_keeps_its_rights_and_a_chosen_place_its_link(tmp_path: Path) -> None:
    kept, link, pipe = tmp_path / "kept.py", tmp_path / "link.py", tmp_path / "pipe"
    kept.write_text("old")
    kept.chmod(0o750)
    link.symlink_to(kept)
    save_as(link, "new")
    assert link.is_symlink() and kept.read_text() == "new" and kept.stat().st_mode & 0o777 == 0o750
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    save_as(pipe, "through")
    assert os.read(reader, 100) == b"through" and pipe.is_fifo()
    os.close(reader)
    with pytest.raises(DiskError, match=r"missing/a cannot be written: its folder is not there"):
        save_as(tmp_path / "missing" / "a", "new")


def test_drafts_of_processes_that_are_gone_are_deleted_by_the_next_writer(tmp_path: Path) -> None:
    path, gone = tmp_path / "about.json", 2**22 + 1  # beyond every pid of Linux and macOS
    for name in (f".about.json.{gone}", f".about.json.{os.getppid()}", f".other.json.{gone}"):
        (tmp_path / name).write_text("half")
    replace_file(path, "new")
    assert sorted(os.listdir(tmp_path)) == sorted([f".about.json.{os.getppid()}", f".other.json.{gone}", "about.json"])


@pytest.mark.parametrize("target", ["theirs", "is not there"])
def test_a_link_in_the_place_of_the_draft_is_not_followed(target: str, tmp_path: Path) -> None:
    """Its name can be guessed by whoever can write in the folder."""
    path, planted = tmp_path / "about.json", tmp_path / f".about.json.{os.getpid()}"
    (tmp_path / "theirs").write_text("untouched")
    planted.symlink_to(tmp_path / target)
    replace_file(path, "new")
    assert path.read_text() == "new" and not path.is_symlink()
    assert (tmp_path / "theirs").read_text() == "untouched"
    assert sorted(os.listdir(tmp_path)) == ["about.json", "theirs"]


def test_a_folder_is_replaced_whole_or_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    final = tmp_path / "model"
    with whole_folder(final) as draft:
        (draft / "a").write_text("old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def full_at_the_end(self: Path, to: Path, rename: Any = Path.rename) -> Path | None:
        return full() if self.name == ".model" else rename(self, to)

    for where, name, broken in (
        (disk, "sync", full),
        (Path, "rename", full_at_the_end),
        (None, "while it is made", None),
    ):
        with monkeypatch.context() as patch:
            if where is not None:
                patch.setattr(where, name, broken)
            with (
                pytest.raises(DiskError, match="/model cannot be written: the disk is full"),
                whole_folder(final) as draft,
            ):
                (draft / "b").write_text("new")
                if where is None:
                    full()
        assert os.listdir(tmp_path) == ["model"] and os.listdir(final) == ["a"], name
    with pytest.raises(DiskError), whole_folder(final) as draft:
        shutil.rmtree(draft)  # as somebody may who tidies up
    assert os.listdir(tmp_path) == ["model"] and os.listdir(final) == ["a"]
    final.rename(tmp_path / ".model.old")  # as a process leaves it that is killed between the two renames
    with pytest.raises(DiskError), whole_folder(final) as draft:
        full()
    assert os.listdir(tmp_path) == ["model"] and os.listdir(final) == ["a"]
    remove_folder(final)
    assert os.listdir(tmp_path) == []


@cases(
    ("error", "says"),
    [
        (OSError(errno.ENOSPC, "x", "/a/b.json"), "/a/b.json cannot be used: the disk is full."),
        (OSError(errno.EDQUOT, "x"), "A file cannot be written: the disk quota is used up."),
        (RuntimeError("[write] Unable to write 8 bytes."), "A file cannot be written: mlx reports [write] Unable"),
        *(
            (error, None)
            for error in (
                OSError(errno.ENOENT, "x"),
                RuntimeError("[METAL] Command buffer execution failed"),
                ValueError("x"),
            )
        ),
    ],
)
def test_the_last_net_takes_what_disks_do_and_no_bug(error: Exception, says: str | None) -> None:
    fault = fault_of(error)
    assert fault is None if says is None else str(fault).startswith(f"disk: {says}")


def test_room_is_that_of_the_nearest_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = room_on(tmp_path / "not" / "yet")
    assert room is not None and room > 0
    monkeypatch.setattr(os, "statvfs", lambda path: (_ for _ in ()).throw(OSError(errno.ENOSYS, "x")))
    assert room_on(tmp_path) is None


CHILD = """
import os, sys, time
from backend.utils import child_process
out = child_process.claim_stdout()
for request in child_process.requests():
    if str(request).startswith("print"):
        print(request)
        os.write(1, b"printed by C\\n")
    if request == "die":
        print("last words", file=sys.stderr, flush=True)
        os._exit(3)
    if request == "hang":
        time.sleep(60)
    child_process.answer(out, [os.getpid(), request])
"""


@pytest.fixture
def child() -> Iterator[ChildProcess]:
    process = ChildProcess([sys.executable, "-c", CHILD], grace_s=0.5)
    yield process
    process.stop()


def test_prints_of_python_and_c_never_become_answers(child: ChildProcess) -> None:
    assert child.request("print") == [child.pid, "print"]
    assert child.request({"a": "ä\n\ud800", "b": math.nan}) == [child.pid, {"a": "ä\n?", "b": None}]


def test_more_than_a_pipe_holds_goes_through_in_both_directions_and_on_stderr(child: ChildProcess) -> None:
    text = "print" + "x" * 1_000_000
    assert child.request(text) == [child.pid, text]


def test_a_child_that_died_is_reported_with_its_exit_code_and_stderr_and_replaced(child: ChildProcess) -> None:
    child.grace_s = 60.0  # a kill would be another exit code
    first, _ = child.request(1)
    with pytest.raises(ChildEnded, match="exit code 3:\nlast words") as caught:
        child.request("die")
    assert (caught.value.exit_code, caught.value.stderr) == (3, "last words") and child.pid is None
    second, answer = child.request(2)
    assert second != first and answer == 2


def test_a_request_that_times_out_kills_the_child(child: ChildProcess) -> None:
    child.request(1)
    with pytest.raises(ChildTimeout):
        child.request("hang", timeout_s=0.1)
    assert child.pid is None and child.request(2)[1] == 2


def test_poll_may_give_up_on_a_request(child: ChildProcess) -> None:
    """Ctrl-C and cancelled questions raise from `poll`."""
    child.request(1)
    calls: list[float] = []

    def poll() -> None:
        calls.append(time.monotonic())
        if len(calls) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        child.request("hang", poll=poll)
    assert child.pid is None and child.request(2)[1] == 2


def test_a_child_ends_by_itself_when_its_stdin_is_closed(child: ChildProcess) -> None:
    child.grace_s = 60.0
    child.request(1)
    assert child.stop() == 0 and child.pid is None
    assert child.stop() == 0, "twice does no harm"


def test_a_bundled_app_starts_the_trainers_executable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert backend_command("train", "--run", "a b") == [sys.executable, "-P", "-m", "backend", "train", "--run", "a b"]
    assert module_command("backend.some.module") == [sys.executable, "-P", "-m", "backend.some.module"]
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    for program in ("grpo-studio", "grpo-studio-backend"):  # from the window, and from the trainer itself
        monkeypatch.setattr(sys, "executable", f"/opt/GRPO Studio/{program}")
        assert backend_command("train", "x") == ["/opt/GRPO Studio/grpo-studio-backend", "train", "x"]
        assert module_command("backend.a")[1:] == ["child", "backend.a"]
    assert backend_environment({"HOME": "/h"}) == {"HOME": "/h"}, "a program of the user's must not import our packages"
