"""The packages that the folder needs, for train.py's inline metadata (PEP 723) and for pip."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

TRL = "1.16"
"""The release whose arguments the tables of `backend.spec.other_programs.trl` have."""
_OF_CODE = {"regex": "regex", "math_verify": "math-verify"}
"""Module that our code imports → the package that has it."""


@dataclass(frozen=True, slots=True)
class Requirements:
    """`packages` as pip takes them, the first of which is TRL."""

    packages: tuple[str, ...]
    trl: str = TRL

    @property
    def header(self) -> str:
        """The comment that `uv run` reads, and a blank line."""
        listed = "".join(f'#     "{package}",\n' for package in self.packages)
        return f'# /// script\n# requires-python = ">=3.11"\n# dependencies = [\n{listed}# ]\n# ///\n'

    @property
    def install_line(self) -> str:
        return "pip install " + " ".join(f'"{package}"' for package in self.packages)


def requirements(words: Mapping[str, Any], code: Iterable[str]) -> Requirements:
    """For these arguments of TRL and these sources of ours."""
    extras = [name for name, is_on in (("peft", words.get("use_peft")), ("vllm", words.get("use_vllm"))) if is_on]
    text = "\n".join(code)
    packages = [f"trl[{','.join(extras)}]=={TRL}.*" if extras else f"trl=={TRL}.*"]
    if words.get("load_in_4bit") or words.get("load_in_8bit") or "8bit" in str(words.get("optim")):
        packages.append("bitsandbytes>=0.45.1")
    packages += [
        package for module, package in _OF_CODE.items() if f"import {module}" in text or f"from {module}" in text
    ]
    trackers = words.get("report_to")
    packages += [name for name in (trackers if isinstance(trackers, list) else []) if name != "none"]
    return Requirements(tuple(packages))
