"""A run's settings while they are put into TRL's words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from backend.config.config import SETTINGS, Config
from backend.config.other_programs.rewriting import plain


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A setting whose value is not carried as it stands. `instead`: what stands in for it, a clause without a full stop."""

    setting: str
    value: Any
    instead: str

    @property
    def line(self) -> str:
        """For a list: the setting as a file has it, and the sentence."""
        return f"{self.setting}: {self.shown} – {self.instead}"

    @property
    def shown(self) -> str:
        """The value, nearly as a file has it."""
        return as_yaml(self.value)


class TrlWriting:
    """The words written so far, changed in place by one function after the other.

    Attributes:
        config – the settings.
        words – TRL's word → value.
        left_out – settings that are not carried as they stand, in the order in which that was found.
        by_files – setting → how the folder's own files carry it, where TRL's words do not.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.words: dict[str, Any] = {}
        self.left_out: list[LeftOut] = []
        self.by_files: dict[str, str] = {}

    def put(self, **words: Any) -> None:
        self.words |= {word: plain(value) if isinstance(value, float) else value for word, value in words.items()}

    def leave(self, setting: str, instead: str) -> None:
        """Say that the value of a setting is not carried, and what stands in for it."""
        self.left_out.append(LeftOut(setting, getattr(self.config, setting), instead))

    def hand_over(self, setting: str, how: str) -> None:
        """Say that a file of the folder carries a setting, as TRL's words do not."""
        self.by_files[setting] = how

    def applies(self, setting: str) -> bool:
        """Whether the setting has any effect beside the others."""
        about = SETTINGS[setting]
        return about.when is None or getattr(self.config, about.when[0]) in about.when[1]

    @property
    def updates_per_step(self) -> int:
        """TRL counts updates where we count steps."""
        return self.config.updates_per_step

    @property
    def updates(self) -> int | None:
        """Updates of the whole run; None where its length is in epochs, which only the dataset tells in steps."""
        return None if self.config.epochs else self.config.iters * self.config.updates_per_step


def as_yaml(value: Any) -> str:
    """A value in a sentence, nearly as a file has it."""
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "empty"
    text = f"{value:g}" if isinstance(value, float) else " ".join(str(value).split())
    return text if len(text) <= 60 else f"{text[:59]}…"
