"""The first import of transformers, four times as fast.

To know what its packages offer, transformers reads the source of all its models at each import, 1,600 files, twice: for itself and for
`transformers.models`. On the way it divides each file into lines to find the one that begins with `__all__`. That took 0.6 of the 2.0
seconds of CPU time in which a program of ours imports all that training needs. Here the second reading takes the results of the first, and
lines are divided from `__all__` on. What is found is the same (`tests/models/test_transformers_scan.py`).

The functions are those of one module, which transformers imports itself before it calls them; so they are replaced by the loader of
that module, as it has run it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

SCANNER = "transformers.utils.import_utils"
"""The module of transformers whose functions read its sources."""


def prepare() -> None:
    """Let the first import of transformers be quick, if it is still to come."""
    if SCANNER not in sys.modules and not any(isinstance(finder, _ScannerFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _ScannerFinder())


class _ScannerFinder(MetaPathFinder):
    """Finds the one module as the others do, and has `quicken` called when it has run. Then it is gone."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != SCANNER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_quicken(module: ModuleType) -> None:
                run(module)
                quicken(module)

            with contextlib.suppress(AttributeError):  # a loader that takes no attributes: then it is slow
                spec.loader.exec_module = run_and_quicken
        return spec


def quicken(scanner: ModuleType) -> None:
    """Replace the two functions of `transformers.utils.import_utils`, where this version of it has them."""
    names: Callable[[str], list[str]] | None = getattr(scanner, "fetch__all__", None)
    structure: Callable[[str], Any] | None = getattr(scanner, "create_import_structure_from_path", None)
    if names is None or structure is None:
        return
    scanner.__dict__["fetch__all__"] = lambda text: names(_from_last_all(text))
    # The first reading asks for a folder, the second for the same by its __init__.py; `structure` keeps results by the name.
    scanner.__dict__["create_import_structure_from_path"] = lambda path: structure(_folder(path))


def _from_last_all(text: str) -> str:
    """The lines from the last that begins with `__all__` on, which is the one that counts; all of them where there is none."""
    start = text.rfind("\n__all__") + 1
    return text[start:]


def _folder(path: str | os.PathLike[str]) -> str:
    name = os.fspath(path)
    return os.path.dirname(name) if os.path.isfile(name) else name
