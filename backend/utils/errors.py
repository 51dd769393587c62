"""Errors that the user can fix: the setting (or file, or function) concerned and one message about it.

Of code that the user wrote the traceback belongs to it, in log.txt. Every other error is an exception that ends the run
as `failed`, with its traceback.
"""

import sys
import traceback
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from backend.utils.text import cut_in_the_middle, one_line, quote, shorten, visible

LONGEST_TRACEBACK = 20_000
LONGEST_KEY = 60  # characters of `setting`: a key that a user misspelt may be of any length


@dataclass(frozen=True, slots=True)
class ConfigProblem:
    """One problem with the input. `setting`: key of the form's field. `sentence` ends in a full stop; values in it go
    through `text.quote`. Both become one printable line. `traceback`: of the user's own code."""

    setting: str
    sentence: str
    traceback: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "setting", quote(self.setting, LONGEST_KEY))
        object.__setattr__(self, "sentence", shorten(one_line(self.sentence)))

    def __str__(self) -> str:
        return f"{self.setting}: {self.sentence}"

    def to_dict(self) -> dict[str, str]:
        return {key: value for key, value in asdict(self).items() if value or key != "traceback"}


class UserError(Exception):
    """The user's input cannot be used; carries all problems. The CLI exits with 2 on it."""

    def __init__(self, setting: str | Iterable[ConfigProblem], sentence: str = "", traceback: str = "") -> None:
        self.faults: list[ConfigProblem] = (
            [ConfigProblem(setting, sentence, traceback)] if isinstance(setting, str) else list(setting)
        )
        super().__init__("\n".join(str(fault) for fault in self.faults))

    @property
    def traceback(self) -> str:
        """Tracebacks of the user's own code."""
        return "\n".join(dict.fromkeys(fault.traceback for fault in self.faults if fault.traceback))


def user_traceback(error: BaseException, file: Path | None = None) -> str:
    """The traceback of an exception of the user's code, from `file` or the first module of others on. Never raises."""
    nodes = []
    while node := nodes[-1].tb_next if nodes else error.__traceback__:
        nodes.append(node)
    in_file = [node for node in nodes if node.tb_frame.f_code.co_filename == str(file)]
    of_others = [node for node in nodes if not str(node.tb_frame.f_globals.get("__name__")).startswith("backend.")]
    first = next(iter(in_file or of_others), None) if file else error.__traceback__
    text = type(error).__name__
    with suppress(Exception):  # an exception's own __str__ may raise anything
        text = "".join(traceback.format_exception(type(error), error, first))
    return visible(cut_in_the_middle(text, LONGEST_TRACEBACK))


def log_traceback(text: str) -> str:
    """Write a traceback to log.txt alone, where there is a run. Returns where it is, as a sentence; "" without."""
    to_log = getattr(sys.stderr, "write_to_log", None)
    if not text or to_log is None:
        return ""
    to_log(f"{text.rstrip()}\n")
    return " The traceback is in log.txt."
