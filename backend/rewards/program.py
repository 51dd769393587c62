"""Fork for one program: confines itself, runs it, and reports what its tests observe.

The program sees its tests, but no expected value. It could forge reports on descriptor `REPORTS`, so
`backend.rewards.functions.code` verifies them.
"""

from __future__ import annotations

import json
import numbers
import os
import resource
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from backend.rewards.confinement.confine import confine_program, set_limits
from backend.rewards.program_tests import OBSERVE, OBSERVE_PAIR, OPERATORS

MOST_HASHED = 4096  # maximum elements of a set or dict, against hash collisions
REPORTS = 3
LARGEST_FILE = 1 << 20
MOST_FILES = 64
FAILED = 1  # exit code of a program that raised
_MODULE = "solution"  # module name for imports, as in `from solution import add`
_TAGS: dict[str, Any] = {"l": list, "t": tuple, "s": (set, frozenset), "d": dict}
_KINDS: dict[str, Any] = {"l": list, "t": tuple, "s": set, "d": dict}


class NotPlainError(ValueError):
    """Not a plain value."""


def encoded(value: Any) -> Any:
    """Encode a value as Python's JSON; subclasses and other numbers become built-in types.

    Raises NotPlainError, RecursionError.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float):
        return int(value) if isinstance(value, int) else float(value)
    for tag, kinds in _TAGS.items():
        if isinstance(value, kinds):
            return [tag, *map(encoded, value.items() if tag == "d" else value)]
    if isinstance(value, bytes | bytearray):
        return ["b", bytes(value).hex()]
    if isinstance(value, complex):
        return ["c", value.real, value.imag]
    if type(value).__module__.partition(".")[0] == "numpy" and hasattr(value, "item") and not getattr(value, "ndim", 0):
        return encoded(value.item())
    if isinstance(value, numbers.Number):  # a Fraction or Decimal
        return float(value)  # pyright: ignore[reportArgumentType]
    raise NotPlainError(type(value).__name__)


def decoded(value: Any) -> Any:
    """Inverse of `encoded`. Raises NotPlainError, RecursionError."""
    if not isinstance(value, list | dict):
        return value
    try:
        tag, *parts = value
        if tag == "b":
            return bytes.fromhex(parts[0])
        if tag == "c":
            return complex(*map(float, parts))
        if tag in ("s", "d") and len(parts) > MOST_HASHED:
            raise NotPlainError("too many elements")
        return _KINDS[tag](map(decoded, parts))
    except (TypeError, ValueError, LookupError) as error:
        raise NotPlainError(str(error)) from None


def become_program(task: Mapping[str, Any], folder: Path, seconds: float, memory_mb: int) -> NoReturn:
    """Run a program in this fresh fork and exit.

    `task`: see `backend.rewards.program_runner`; `seconds` of CPU time; `memory_mb` on top of Python.
    """
    code = FAILED
    try:
        os.chdir(folder)
        confine_program(folder)
        set_limits(
            {
                resource.RLIMIT_CPU: max(1, round(seconds + 0.5)),
                resource.RLIMIT_FSIZE: LARGEST_FILE,
                resource.RLIMIT_NOFILE: MOST_FILES,
                resource.RLIMIT_DATA: memory_mb << 20,
                resource.RLIMIT_CORE: 0,
            }
        )
        # An empty main module in an interpreter that looks fresh.
        module = ModuleType("__main__")
        sys.modules["__main__"] = sys.modules[_MODULE] = module
        sys.argv = [f"{_MODULE}.py"]
        for name in [name for name in sys.modules if name.partition(".")[0] == "backend"]:
            del sys.modules[name]
        sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
        sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
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


def _execute(source: str, module: ModuleType) -> None:
    exec(compile(source, f"{_MODULE}.py", "exec", dont_inherit=True), vars(module))


def _run_tests(task: Mapping[str, Any], module: ModuleType) -> None:
    write, dumps = os.write, json.dumps  # before the program can replace them
    current = 0

    def report(*fields: Any) -> None:
        line = memoryview(f"{dumps(fields)}\n".encode())
        while line:
            line = line[write(REPORTS, line) :]

    def claim(value: Any) -> dict[str, Any]:
        try:
            return {"value": encoded(value)}
        except (NotPlainError, RecursionError):
            return {}

    def observe(number: int, value: Any) -> None:
        report(current, number, claim(value))

    def observe_pair(number: int, name: str, left: Any, right: Any) -> None:
        claims = claim(left), claim(right)
        if all(claims):
            report(current, number, {"value": ["t", *(each["value"] for each in claims)]})
        else:
            report(current, number, {} if any(claims) else {"truth": bool(OPERATORS[name](left, right))})

    def entry(name: str) -> Any:
        found = getattr(module, name, None)
        return found if found is not None else getattr(module.Solution(), name)

    with suppress(SystemExit):  # a program may end itself where it is the main one
        _execute(task["source"], module)
    vars(module).update({OBSERVE: observe, OBSERVE_PAIR: observe_pair, "__entry__": entry})
    _execute(task["setup"], module)
    for current, test in enumerate(task["tests"]):
        with suppress(Exception):
            _execute(test, module)
            report(current)
