"""A path or file that cannot be used gets a sentence that names it, at once."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from backend.utils.errors import UserError
from backend.utils.files import names_folder, possible_path, read_bytes, read_text, user_path


def sentence(call: object, *arguments: object) -> str:
    with pytest.raises(UserError) as told:
        call(*arguments)  # type: ignore
    (fault,) = told.value.faults
    assert fault.setting == "data" and len(fault.sentence) <= 200 and fault.sentence.isprintable(), fault
    return fault.sentence


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\0b", r"a\x00b cannot be a path: it contains a NUL character."),
        ("a\ud800", r"a\ud800 cannot be a path: it contains characters that are not valid text."),
        ("a\udcff", r"a\udcff cannot be a path: it contains characters that are not valid text."),
        ("~nosuchuser/x", "~nosuchuser/x cannot be a path: this machine has no home folder ~nosuchuser."),
        ("~" + "x" * 500, "this machine has no home folder ~xxx"),
        ("x" * 256, "cannot be a file's name: it is longer than 255 bytes."),
        ("é" * 128, "cannot be a file's name: it is longer than 255 bytes."),
        ("a/" * 3000, "bytes."),
    ],
    ids=range(8),
)
def test_an_impossible_path_is_named(text: str, expected: str) -> None:
    assert expected in sentence(user_path, text, "data")


def test_a_path_is_expanded_and_joined(tmp_path: Path) -> None:
    assert user_path("~/x", "data") == Path.home() / "x"
    assert user_path("x", "data", tmp_path) == tmp_path / "x"
    assert user_path("/x", "data", tmp_path) == Path("/x")
    assert user_path("~/x", "data", tmp_path) == Path.home() / "x"


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with socket.socket(socket.AF_UNIX) as server:
        os.chdir(tmp_path)  # a socket's name is short
        server.bind("socket")
        assert sentence(read_bytes, tmp_path / "socket", "data").endswith("it is a socket, not a file.")
    for name, says in (
        ("pipe", "it is a pipe, not a file."),
        (".", "it is a folder, not a file."),
        ("/dev/zero", "/dev/zero cannot be read: it is a device, not a file."),
        ("none", "There is no file "),
        ("loop", "symbolic links"),
        ("\0", "cannot be a path."),
        ("\ud800", "cannot be a path."),
        ("x" * 300, "name too long"),
    ):
        assert says in sentence(read_bytes, tmp_path / name, "data")


def test_a_file_beyond_the_limit_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x" * 1025)
    assert sentence(read_bytes, file, "data", 1024).endswith("it is larger than 1 KB.")
    assert len(read_bytes(file, "data", 1025)) == 1025


def test_text_is_utf_8_with_or_without_a_mark(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes("\ufeffa\r\nb\rc".encode())
    assert read_text(file, "data") == "a\nb\nc"
    file.write_bytes("naïve".encode("latin-1"))
    assert sentence(read_text, file, "data").endswith("it is not UTF-8 text.")
    file.write_bytes("text".encode("utf-16"))
    assert sentence(read_text, file, "data").endswith("it is UTF-16; save it as UTF-8.")


def test_a_text_that_may_be_no_path_is_asked_about_without_a_failure(tmp_path: Path) -> None:
    """`Path.is_dir` raises for a name that is too long, and `Path.expanduser` for a user that is not there."""
    assert names_folder(str(tmp_path)) and possible_path(str(tmp_path)) == tmp_path
    for text in ("owner/name", "x" * 5000, "~nosuchuser/x", "a\0b", "\ud800", ""):
        assert text == "" or not names_folder(text)
    assert possible_path("~nosuchuser") is None is possible_path("x" * 300)
