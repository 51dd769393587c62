"""The problems of a config file that is opened: their lines, and which keys were probably meant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from backend.config.config import SETTINGS
from backend.config.other_programs.translation import FOREIGN_WORDS, program_of, settings_of
from backend.rewards.catalogue import nearest
from backend.utils.documents import YAML_LIMIT
from backend.utils.errors import ConfigProblem
from backend.utils.files import read_text


@dataclass(frozen=True, slots=True)
class UnreadKey:
    key: str
    sentence: str
    meant: str = ""


@dataclass(frozen=True, slots=True)
class FileProblems:
    """What of a file was not read into the form. `raw`: its keys and values. `lines`: key, or the setting of ours that
    it names → its line in the file, from 1. `refusal`: why nothing of the file was read, or ""."""

    path: Path
    raw: Mapping[str, Any] = field(default_factory=dict)
    unread: Sequence[UnreadKey] = ()
    lines: Mapping[str, int] = field(default_factory=dict)
    refusal: str = ""


def file_problems(
    path: Path, raw: Mapping[str, Any], faults: Sequence[ConfigProblem], lines: Mapping[str, int]
) -> FileProblems:
    """`faults`: of reading `raw`. A correction is offered where one unknown key is meant, and the file lacks it."""
    known = [*SETTINGS, *FOREIGN_WORDS]
    unknown = [fault.setting for fault in faults if fault.setting in raw and fault.setting not in known]
    meant = {key: near for key in unknown if (near := nearest(key, known)) is not None}
    clear = {key: near for key, near in meant.items() if near not in raw and list(meant.values()).count(near) == 1}
    unread = [UnreadKey(fault.setting, fault.sentence, clear.get(fault.setting, "")) for fault in faults]
    return FileProblems(path, raw, sorted(unread, key=lambda each: lines.get(each.key, 0)), lines)


def key_lines(path: Path, raw: Mapping[str, Any]) -> dict[str, int]:
    lines, program, read = dict[str, int](), program_of(raw), set[int]()
    nodes: list[Any] = [yaml.compose(read_text(path, "config", YAML_LIMIT), Loader=yaml.SafeLoader)]
    for node in nodes:  # those within a mapping come after it
        if isinstance(node, yaml.MappingNode) and id(node) not in read:  # an alias may stand within its own node
            read.add(id(node))
            for key, value in node.value:
                for name in (str(key.value), *settings_of(str(key.value), program)):
                    lines.setdefault(name, key.start_mark.line + 1)
                nodes.append(value)
    return lines
