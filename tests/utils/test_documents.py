"""YAML and JSON are read with limits, and a path, file or document that cannot be used gets a sentence at once."""

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from backend.utils.documents import parse_json, parse_yaml, read_json, read_yaml, validation_error
from backend.utils.errors import UserError
from backend.utils.files import DEPTH, names_folder, possible_path, read_bytes, read_text, user_path
from tests.support.cases import cases


def sentence(call: Any, *arguments: object, setting: str = "data") -> str:
    with pytest.raises(UserError) as told:
        call(*arguments)
    (fault,) = told.value.faults
    assert fault.setting == setting and len(fault.sentence) <= 200 and fault.sentence.isprintable(), fault
    return fault.sentence


def refusal(call: Any, text: str) -> str:
    begun = time.process_time()
    said = sentence(call, text, "x.txt", "config", setting="config")
    assert time.process_time() - begun < 4 and said.startswith("x.txt is not valid ")
    return said


@cases(
    ("text", "expected"),
    [
        ("a: *b", "found undefined alias"),
        ("[" * 10_000, "it is nested more than 50 levels deep."),
        ("x: !!python/object/apply:os.system [ls]", "tags are not read, and tag:yaml.org,2002:python/object/ap"),
        ("x: !mine 1", "tags are not read, and !mine is one."),
        ("a: 1\nb: 2\na: 3", "YAML at line 3: a is given twice."),
        ("a: " + "9" * 5000, "Exceeds the limit (4300 digits)"),
        ("a: 2026-13-45", "YAML: month must be in 1..12."),
        ("a: \x07", "special characters are not allowed."),
        ("a: \ud800", "special characters are not allowed."),
        ("a:\n\t- b", "found character '\\t' that cannot start any token."),
        ("? [1]\n: 2", "found unhashable key."),
        ("a: 1\n---\nb: 2", "but found another document."),
        ("x" * 2**20 + "x", "it is longer than 1,048,576 characters."),
    ],
)
def test_yaml_beyond_the_limits_is_refused(text: str, expected: str) -> None:
    assert expected in refusal(parse_yaml, text)


@cases(
    "text",
    [
        "a: 1\nb: [1, 2.5, x, null, true, .inf, 0x10, 010, 1:30, 1e5, 1.0e+5]",
        "base: &base {rank: 8, scale: 2}\nover:\n  <<: *base\n  rank: 4",
        "a: &a [1, 2]\nb: [*a, *a]",
        "2026-01-02: |\n  lines\n  of text\n",
        "[" * 50 + "]" * 50,
        "# only a comment",
        "\ufeffa: 1",
    ],
)
def test_what_pyyaml_reads_is_read_the_same(text: str) -> None:
    assert parse_yaml(text, "x", "config") == yaml.safe_load(text)


@cases(
    ("text", "expected"),
    [
        ("{", "JSON at character 2: expecting property name enclosed in double quotes."),
        ('{\n"a": }', "JSON at line 2: expecting value."),
        ("9" * 5000, "JSON: a whole number has more than 4,300 digits."),
        ("-Infinity", "JSON: -Infinity is not a number."),
        ('{"a": 1, "b": 2, "a": 3}', "JSON: a is given twice."),
        ("[" * 51 + "]" * 51, "JSON: it is nested more than 50 levels deep."),
        ('{"a":' * 100_000, "JSON: it is nested more than 50 levels deep."),
        ("", "expecting value"),
    ],
)
def test_json_beyond_the_limits_is_refused(text: str, expected: str) -> None:
    assert expected in refusal(parse_json, text)


def test_json_is_read() -> None:
    for value in ({"a": [1, 2.5, None, "x[[[[{{"]}, [[]] * 60, json.loads("[" * 50 + "]" * 50)):
        assert parse_json(json.dumps(value), "x", "config") == value


def test_files_are_named_in_the_sentence(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    for read, kind in ((read_yaml, "YAML"), (read_json, "JSON")):
        file.write_text("a: [")
        with pytest.raises(UserError, match=rf"c\.yaml is not valid {kind} at "):
            read(file, "config")
        file.write_text("{}")
        assert read(file, "config") == {}


def nested(levels: int) -> Any:
    value: Any = 1
    for level in range(levels):
        value = {"a": value} if level % 2 else [value]
    return value


def test_usable_values() -> None:
    for value in (None, True, 1, 1.5, float("nan"), "naïve", [], {}, {"a": [1, {"b": None}]}, nested(DEPTH), 10**300):
        assert validation_error(value) == ""


def test_what_nothing_can_work_with_is_named() -> None:
    itself: list[Any] = []
    itself.append(itself)
    assert validation_error([{"a": "\ud800"}]) == r"contains characters that are not valid text: \ud800"
    assert validation_error({"\udcff": 1}).startswith("contains characters that are not valid text")
    assert validation_error([10**400]).endswith("…0000000000000000000, which is beyond every limit")
    for value in (nested(DEPTH + 1), nested(10**5), itself):
        assert validation_error(value) == "is nested more than 50 levels deep"
    assert validation_error([0] * 12_000) == "contains more than 10,000 values"


@cases(
    ("text", "expected"),
    [
        ("a\0b", r"a\x00b cannot be a path: it contains a NUL character."),
        ("a\ud800", r"a\ud800 cannot be a path: it contains characters that are not valid text."),
        ("~nosuchuser/x", "~nosuchuser/x cannot be a path: this machine has no home folder ~nosuchuser."),
        ("~" + "x" * 500, "this machine has no home folder ~xxx"),
        ("x" * 256, "cannot be a file's name: it is longer than 255 bytes."),
        ("é" * 128, "cannot be a file's name: it is longer than 255 bytes."),
        ("a/" * 3000, "bytes."),
    ],
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
