"""What crosses the pipes between a scorer and its scoring process.

Requests may hold any Python object, for the columns of a dataset come with their exact types: a length and a pickle. Answers come
from a process that runs a user's code and is not trusted: one line of JSON each, never a pickle. Beside the pipes the two share a
page of memory with a number that says what the process is doing: of a process that hangs or has died, its parent reads there
which function it was.
"""

from __future__ import annotations

import json
import mmap
import os
import pickle
import struct
from array import array
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from backend.types import Completion, Group, Problem

VERB = "scorer"
"""The argument that makes a bundled app's executable the scoring process, where there is no Python to run a module with."""
LOST_CHANNEL = 97
"""The exit code of a process that finds its pipes closed."""
SPOILED = 98
"""The exit code of a process in which our own code can go on no more, because a user's has replaced what it is made of."""
LONGEST_ANSWER = 64 << 20
"""Bytes of one answer. A thousand completions with ten logged columns of a kilobyte are 10 MB."""
LONGEST_TEXT = 2000
"""Characters of any one text in an answer that is shown to a person: words of a failure, the end of what a function printed."""

# The mark in the shared page.
IDLE, LOADING = 0, 1
"""At no user's code; executing a user's files."""
FIRST_CALL = 2
"""Plus the index of a function: calling it."""
FIRST_ASYNC = 1 << 20
"""Plus the index of a function: awaiting it beside others."""

_LENGTH = struct.Struct("<Q")
_MARK = struct.Struct("<I")
PAGE_BYTES = mmap.PAGESIZE


class ChannelLost(Exception):
    """One of the pipes to the parent is closed, or is no longer the pipe that it was."""


class StatusPage:
    """The shared page; `file` is an open descriptor of `PAGE_BYTES` bytes."""

    def __init__(self, file: int) -> None:
        self._page = mmap.mmap(file, PAGE_BYTES)

    @property
    def mark(self) -> int:
        return _MARK.unpack_from(self._page)[0]

    @mark.setter
    def mark(self, value: int) -> None:
        _MARK.pack_into(self._page, 0, value)


def request_bytes(request: Any) -> bytes:
    """Raises what pickle raises for an object that it cannot hold."""
    pickled = pickle.dumps(request, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(pickled)) + pickled


class Channel:
    """The child's side. What it calls is bound before any user's code runs, so that a patched `os.write` or `json.dumps` changes
    nothing here."""

    def __init__(self, requests: int, answers: int) -> None:
        self._requests, self._answers = requests, answers
        self._read, self._write, self._fstat, self._getpid = os.read, os.write, os.fstat, os.getpid
        self._loads, self._encode = (
            pickle.loads,
            json.JSONEncoder(ensure_ascii=True, allow_nan=False, default=str).encode,
        )
        self._identity, self._pid = self._identities(), os.getpid()
        # No program that a user's code starts inherits the pipes, and no fork of this process keeps them.
        for file in (requests, answers):
            os.set_inheritable(file, False)
        os.register_at_fork(after_in_child=self._close)

    def receive(self) -> Any:
        """The next request. Raises EOFError once the parent has closed its end, and ChannelLost."""
        try:
            (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
            return self._loads(self._exactly(length))
        except OSError:
            raise ChannelLost from None

    def send(self, answer: dict[str, Any]) -> None:
        """Raises ChannelLost."""
        line = memoryview(f"{self._encode(answer)}\n".encode("ascii"))
        self.check()
        try:
            while line:
                line = line[self._write(self._answers, line) :]
        except OSError:
            raise ChannelLost from None

    def check(self) -> None:
        """Raises ChannelLost if a user's code has closed or replaced a descriptor, or this is a fork of the process."""
        if self._getpid() != self._pid or self._identities() != self._identity:
            raise ChannelLost

    def _exactly(self, count: int) -> bytes:
        pieces: list[bytes] = []
        while count:
            piece = self._read(self._requests, min(count, 1 << 20))
            if not piece:
                raise EOFError
            pieces.append(piece)
            count -= len(piece)
        return b"".join(pieces)

    def _identities(self) -> list[tuple[int, int]]:
        try:
            return [(about.st_dev, about.st_ino) for about in map(self._fstat, (self._requests, self._answers))]
        except OSError:
            return []

    def _close(self) -> None:
        for file in (self._requests, self._answers):
            with suppress(OSError):
                os.close(file)


# Groups of completions, with what reward functions get and nothing else

PackedGroup = tuple[str, list[dict[str, Any]], str, str | None, dict[str, Any], list[tuple[str, "array[int]"]]]
"""Prompt, messages, answer, type and row of a problem; text and token ids of each completion."""


def packed(groups: Iterable[Group]) -> list[PackedGroup]:
    return [
        (problem.prompt, problem.messages, problem.answer, problem.type, problem.row,
         [(completion.text, array("q", completion.tokens)) for completion in completions])
        for problem, completions in ((group.problem, group.completions) for group in groups)
    ]  # fmt: skip


def unpacked(groups: Iterable[PackedGroup]) -> list[Group]:
    return [
        Group(
            Problem(index, prompt, messages, [], answer, kind, row),
            [Completion(tokens.tolist(), [], text, "eos") for text, tokens in completions],
        )
        for index, (prompt, messages, answer, kind, row, completions) in enumerate(groups)
    ]
