"""What transformers finds in its sources is found more quickly, and is the same."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import transformers

from backend.models import transformers_scan

MODELS = Path(transformers.__file__).parent / "models"


def fresh_scanner() -> ModuleType:
    """`transformers.utils.import_utils` as transformers has it: run once more, beside the one in use."""
    spec = importlib.util.find_spec(transformers_scan.SCANNER)
    assert spec is not None and spec.loader is not None
    scanner = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(scanner)
    return scanner


@pytest.fixture(scope="module")
def scanners() -> tuple[ModuleType, ModuleType]:
    """The module as it is, and patched."""
    plain, quick = fresh_scanner(), fresh_scanner()
    transformers_scan.patch(quick)
    return plain, quick


def counting_open(scanner: ModuleType) -> list[str]:
    """The names of the files that the scanner opens from now on."""
    opened: list[str] = []

    def noting(name: str, *args: Any, **more: Any) -> Any:
        opened.append(name)
        return open(name, *args, **more)

    scanner.__dict__["open"] = noting
    return opened


def test_each_source_is_read_once_and_the_same_is_found(scanners: tuple[ModuleType, ModuleType]) -> None:
    plain, quick = scanners
    opened = counting_open(quick)
    found = quick.define_import_structure(MODELS, prefix="models")
    assert found == plain.define_import_structure(MODELS, prefix="models")
    assert len(opened) == len(set(opened)) > 1000
    within = quick.define_import_structure(str(MODELS / "__init__.py"))
    assert {key: {f"models.{name}": value for name, value in names.items()} for key, names in within.items()} == found
    assert len(opened) == len(set(opened)), "the second time nothing is read"


@pytest.mark.parametrize(
    "text",
    [
        "", "x = 1\n", '"__all__"\n', '__all__ = ["A", "B"]', '__all__ = ["A"]\n__all__ = ["B"]\n', 'x = "__all__"\n__all__ = ["A"]\n',
        '__all__ = [\n    "A",\n    "B",\n]\nx = 1\n', 'y = 1\n  __all__ = ["no"]\n',
    ],
)  # fmt: skip
def test_names_are_those_of_the_last_list(scanners: tuple[ModuleType, ModuleType], text: str) -> None:
    plain, quick = scanners
    assert quick.fetch__all__(text) == plain.fetch__all__(text)
