"""What a person can mend: a setting (or file, or function) and one sentence about it.

Everything else that goes wrong is an exception that reaches `failed` with its traceback.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing to mend.

    `setting` is the key of the form's field it belongs to (`temperature`, `data`, `reward_functions_file`, …),
    so that the window can put the sentence beside it; `sentence` is plain words that end in a full stop.
    """

    setting: str
    sentence: str

    def __str__(self) -> str:
        return f"{self.setting}: {self.sentence}"

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


class Mistake(Exception):
    """Raised where a person's input cannot be used; carries every fault found at once. The CLI exits 2 on it."""

    def __init__(self, setting: str | Iterable[Fault], sentence: str = "") -> None:
        self.faults: list[Fault] = [Fault(setting, sentence)] if isinstance(setting, str) else list(setting)
        super().__init__("\n".join(str(fault) for fault in self.faults))
