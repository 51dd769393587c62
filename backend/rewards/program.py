"""Fork for one program: confines itself, runs it, and reports what its tests observe.

The program sees its tests, but no expected value. It could forge reports on descriptor `REPORTS`, so
`backend.rewards.functions.code` verifies them.
"""

from __future__ import annotations

import decimal
import fractions
import json
import math
import os
import resource
import sys
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from backend.rewards.confinement.confine import confine_program
from backend.rewards.program_tests import OBSERVE, OBSERVE_PAIR, OPERATORS

MOST_HASHED = 4096
"""Maximum elements of a set or dict, against hash collisions."""
_EXACT = 1 << 53
"""Largest integer that is exact in all JSON readers."""


class NotPlainError(ValueError):
    """Not a plain value."""


def encoded(value: Any) -> Any:
    """Encode a value as JSON; subclasses count as built-in types. Raises NotPlainError, RecursionError."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value) if abs(value) < _EXACT else ["i", hex(value)]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else ["f", repr(float(value))]
    for kinds, tag, parts in _COLLECTIONS:
        if isinstance(value, kinds):
            return [tag, *([encoded(part) for part in parts(value)])]
    for kind, tag, text in _SCALARS:
        if isinstance(value, kind):
            return [tag, text(value)]
    if type(value).__module__.partition(".")[0] == "numpy" and hasattr(value, "item") and not getattr(value, "ndim", 0):
        return encoded(value.item())
    raise NotPlainError(type(value).__name__)


def decoded(value: Any) -> Any:
    """Inverse of `encoded`. Raises NotPlainError, RecursionError."""
    if value is None or isinstance(value, bool | str | int | float):
        return value
    if not isinstance(value, list) or not value or value[0] not in _DECODERS:
        raise NotPlainError("no value")
    tag, *parts = value
    try:
        return _DECODERS[tag](parts)
    except (TypeError, ValueError, ArithmeticError, IndexError) as error:
        raise NotPlainError(str(error)) from None


_COLLECTIONS: list[tuple[Any, str, Callable[[Any], Any]]] = [
    (list, "l", list),
    (tuple, "t", list),
    (deque, "q", list),
    ((set, frozenset), "s", list),
    (dict, "d", lambda value: list(value.items())),
]
_SCALARS: list[tuple[Any, str, Callable[[Any], str]]] = [
    ((bytes, bytearray), "b", lambda value: bytes(value).hex()),
    (complex, "c", lambda value: f"{value.real!r} {value.imag!r}"),
    (fractions.Fraction, "r", str),
    (decimal.Decimal, "n", str),
]


def _hashed(parts: list[Any]) -> list[Any]:
    if len(parts) > MOST_HASHED:
        raise NotPlainError("too many elements")
    return [decoded(part) for part in parts]


def _fraction(text: str) -> fractions.Fraction:
    # From whole numbers: an exponent in the text could stand for a number of any size.
    above, _, below = text.partition("/")
    return fractions.Fraction(int(above), int(below or 1))


_DECODERS: dict[str, Callable[[list[Any]], Any]] = {
    "i": lambda parts: int(parts[0], 16),
    "f": lambda parts: float(parts[0]),
    "b": lambda parts: bytes.fromhex(parts[0]),
    "c": lambda parts: complex(*map(float, parts[0].split(" "))),
    "r": lambda parts: _fraction(parts[0]),
    "n": lambda parts: decimal.Decimal(parts[0]),
    "l": lambda parts: [decoded(part) for part in parts],
    "t": lambda parts: tuple(decoded(part) for part in parts),
    "q": lambda parts: deque(decoded(part) for part in parts),
    "s": lambda parts: set(_hashed(parts)),
    "d": lambda parts: dict(_hashed(parts)),
}


REPORTS = 3
"""Descriptor for reports."""
LARGEST_FILE = 1 << 20
"""Maximum bytes per file."""
MOST_FILES = 64
"""Maximum open descriptors."""
FAILED = 1
"""Exit code of a program that raised."""
_MODULE = "solution"
"""Module name for imports, as in `from solution import add`."""


def become_program(task: Mapping[str, Any], folder: Path, seconds: float, memory_mb: int) -> NoReturn:
    """Run a program in this fresh fork and exit.

    `task`: see `backend.rewards.program_runner`; `seconds` of CPU time; `memory_mb` on top of Python.
    """
    code = FAILED
    try:
        os.chdir(folder)
        confine_program(folder)
        _limit_resources(seconds, memory_mb)
        module = _fresh_module()
        if "tests" in task:
            _run_tests(task, module)
        else:
            _execute(task["source"], module)
        code = 0
    except SystemExit as end:
        code = 0 if end.code in (None, 0) else FAILED
    except BaseException:  # of the program, which is judged by its exit code alone
        pass
    finally:
        with suppress(BaseException):
            sys.stdout.flush()
        os._exit(code)


def _limit_resources(cpu_seconds: float, memory_mb: int) -> None:
    seconds = max(1, round(cpu_seconds + 0.5))
    wanted = {
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_FSIZE: LARGEST_FILE,
        resource.RLIMIT_NOFILE: MOST_FILES,
        resource.RLIMIT_DATA: memory_mb << 20,
        resource.RLIMIT_CORE: 0,
    }
    for limit, value in wanted.items():
        with suppress(OSError, ValueError):  # macOS has no limit of that kind on memory
            _, hard = resource.getrlimit(limit)
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(limit, (value, value))


def _fresh_module() -> ModuleType:
    """An empty main module in a fresh-looking interpreter."""
    module = ModuleType("__main__")
    sys.modules["__main__"] = sys.modules[_MODULE] = module
    sys.argv = [f"{_MODULE}.py"]
    for name in [name for name in sys.modules if name.partition(".")[0] == "backend"]:
        del sys.modules[name]
    # Kept for the life of the process.
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    return module


def _execute(source: str, module: ModuleType) -> None:
    exec(compile(source, f"{_MODULE}.py", "exec", dont_inherit=True), vars(module))


def _run_tests(task: Mapping[str, Any], module: ModuleType) -> None:
    """Run program, setup and every test; a failing test ends only itself."""
    report = _reporter()
    with suppress(SystemExit):  # a program may end itself where it is the main one
        _execute(task["source"], module)
    current = [0]

    def observe(number: int, value: Any) -> None:
        report(current[0], number, _claim(lambda: encoded(value)))

    def observe_pair(number: int, name: str, left: Any, right: Any) -> None:
        report(current[0], number, _pair_claim(name, left, right))

    vars(module).update({OBSERVE: observe, OBSERVE_PAIR: observe_pair, "__entry__": lambda name: _entry(module, name)})
    _execute(task["setup"], module)
    for index, test in enumerate(task["tests"]):
        current[0] = index
        with suppress(Exception):
            _execute(test, module)
            report(index)


def _reporter() -> Callable[..., None]:
    write, dumps = os.write, json.dumps

    def report(*fields: Any) -> None:
        line = memoryview(f"{dumps(fields)}\n".encode())
        while line:
            line = line[write(REPORTS, line) :]

    return report


def _claim(encode: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"value": encode()}
    except (NotPlainError, RecursionError):
        return {}


def _pair_claim(name: str, left: Any, right: Any) -> dict[str, Any]:
    """Both sides, or their comparison if they are not plain."""
    claims = _claim(lambda: encoded(left)), _claim(lambda: encoded(right))
    if all(claims):
        return {"value": ["t", *(claim["value"] for claim in claims)]}
    return {} if any(claims) else {"truth": bool(OPERATORS[name](left, right))}


def _entry(module: ModuleType, name: str) -> Any:
    """A function of the program, or a method of its class `Solution`."""
    found = getattr(module, name, None)
    return found if found is not None else getattr(module.Solution(), name)
