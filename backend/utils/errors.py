"""Errors that the user can fix: the setting (or file, or function) concerned and one message about it.

Every other error is an exception that ends the run as `failed`, with its traceback.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from backend.utils.text import one_line, quote, shorten

LONGEST_KEY = 60  # characters of `setting`: a key that a user misspelt may be of any length


@dataclass(frozen=True, slots=True)
class ConfigProblem:
    """One problem with the input.

    `setting` is the key of the form's field (`temperature`, `reward_functions_file`, …), so that the window can show
    the sentence beside it. `sentence` ends in a full stop; values in it go through `backend.utils.text.quote`. Both
    become one printable line of a limited length.
    """

    setting: str
    sentence: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "setting", quote(self.setting, LONGEST_KEY))
        object.__setattr__(self, "sentence", shorten(one_line(self.sentence)))

    def __str__(self) -> str:
        return f"{self.setting}: {self.sentence}"

    def to_dict(self) -> dict[str, str]:
        """As JSON."""
        return asdict(self)


class UserError(Exception):
    """The user's input cannot be used; carries all problems. The CLI exits with 2 on it.

    `traceback` is that of the user's own code, for log.txt.
    """

    traceback: str = ""

    def __init__(self, setting: str | Iterable[ConfigProblem], sentence: str = "") -> None:
        self.faults: list[ConfigProblem] = (
            [ConfigProblem(setting, sentence)] if isinstance(setting, str) else list(setting)
        )
        super().__init__("\n".join(str(fault) for fault in self.faults))
