"""Rubrics: what a judge scores by. A plain text, or TOML or JSON with criteria (verifiers' RubricJudge)."""

from __future__ import annotations

import difflib
import json
import tomllib
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError, model_validator

from backend.utils.disk import replace_file
from backend.utils.errors import UserError
from backend.utils.files import read_text, user_path
from backend.utils.places import resources
from backend.utils.text import quote

SETTING = "reward_functions"
SUFFIXES = (".toml", ".json")
Choice = Annotated[str, Field(pattern=r"^[^\n\"]*[^\s\"]$")]


class Criterion(BaseModel, extra="forbid", frozen=True):
    """`choices`: verdicts from worst to best, worth 0 … 1 in even steps."""

    name: Annotated[str, Field(pattern=r"^[^\s\"](?:[^\n\"]*[^\s\"])?$")]
    text: str = ""
    weight: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    choices: Annotated[tuple[Choice, ...], Field(min_length=2)] = ("no", "yes")

    def value(self, verdict: Any) -> float | None:
        """What a verdict is worth, 0 … 1; None where it is not one of the choices."""
        choices, given = [folded(choice) for choice in self.choices], folded(verdict)
        return choices.index(given) / (len(choices) - 1) if given in choices else None


class Rubric(BaseModel, extra="forbid", frozen=True):
    """`text`: instructions. Without criteria the judge gives one score from 0 to 1."""

    title: str = ""
    text: str = ""
    criteria: tuple[Criterion, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Rubric:
        if not self.text.strip() and not self.criteria:
            raise ValueError("it needs a text or criteria")
        for words in ([each.name for each in self.criteria], *(each.choices for each in self.criteria)):
            if len({folded(word) for word in words}) < len(words):
                raise ValueError(f"a name is there twice in {', '.join(words)}")
        return self

    def save(self, path: Path) -> None:
        """Write JSON or, by the suffix, TOML. Raises DiskError."""
        about = self.model_dump(mode="json", exclude_defaults=True)
        if path.suffix.lower() == ".json":
            replace_file(path, json.dumps(about, ensure_ascii=False, indent=2) + "\n")
            return
        tables = [("", {key: value for key, value in about.items() if key != "criteria"})]
        tables += [("\n[[criteria]]\n", each) for each in about.get("criteria", [])]
        # JSON's strings, numbers and lists are TOML's too, but for one character.
        text = ""
        for head, table in tables:
            values = ((key, json.dumps(value, ensure_ascii=False)) for key, value in table.items())
            text += head + "".join(f"{key} = {value}\n" for key, value in values)
        replace_file(path, text.replace("\x7f", "\\u007F"))


def folded(word: Any) -> str:
    return " ".join(str(word).split()).casefold()


def bundled_rubrics() -> dict[str, Path]:
    """The rubrics that ship with the program, by name."""
    return {path.stem: path for path in sorted((resources() / "rubrics").glob("*.toml"))}


def rubric_path(rubric: str) -> Path | None:
    """The file of a judge's `rubric`; None for a plain text. Raises UserError for what cannot be a path."""
    if (name := rubric.strip()) in (bundled := bundled_rubrics()):
        return bundled[name]
    if "\n" not in name and name.lower().endswith(SUFFIXES):
        return user_path(name, SETTING, Path.cwd())
    if len(name.split()) == 1 and (near := difflib.get_close_matches(name, bundled, n=1)):
        raise UserError(SETTING, f"There is no rubric {quote(name, 40)}; the nearest is {near[0]}.")
    return None


def read_rubric(rubric: str) -> Rubric:
    """A judge's `rubric`: a text, a file, or a bundled one's name. Raises UserError."""
    path = rubric_path(rubric)
    try:
        if path is None:
            return Rubric(text=rubric.strip())
        text = read_text(path, SETTING)
        return Rubric.model_validate(tomllib.loads(text) if path.suffix.lower() == ".toml" else json.loads(text))
    except ValidationError as error:
        first = error.errors()[0]
        where, what = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
        what = f"{quote(where, 40)}: {what[:1].lower()}{what[1:]}" if where else what
    except (ValueError, RecursionError) as error:
        what = quote(error, 100)
    raise UserError(SETTING, f"The rubric {quote(path or rubric, 60)} cannot be used: {what}.")
