"""The description of a setting: a pydantic field with label, help, unit, limits, and when it applies.

`backend.config.config` declares every setting with `setting(…)`; form, command line, checks and documentation read the
`Setting` objects. A `Setting` never holds a value.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic import Field
from pydantic.fields import FieldInfo

Kind = Literal[
    "int",
    "float",
    "bool",
    "text",
    "prose",
    "choice",
    "file",
    "hosts",
    "model",
    "adapter",
    "dataset",
    "list",
    "numbers",
    "mapping",
    "stages",
    "rewards",
]
"""Which editor a setting has. `prose` is text of several lines, `list` a list of words, `numbers` a list of numbers,
`mapping` a small YAML map, `rewards` the reward table."""

Use = Literal["task", "rows", "row_view", "prompt_text", "prompt_limit", "rewards", "scoring", "duration"]
"""What else depends on a setting, so that a list of such settings is derived and never kept in step by hand:

- `task`: what a user trains on and for; a preset leaves it alone.
- `rows`: which rows a dataset has.
- `row_view`: the parts of a row that the preview shows: prompt, answer, type, and the columns that the rewards need.
- `prompt_text`: the text of a prompt, and so its length in tokens.
- `prompt_limit`: how long a prompt may be.
- `rewards`: how completions are rewarded in the course of a run.
- `scoring`: scores, rewards and advantages of given completions; also what a setting of these is checked against.
- `duration`: how long a completion takes, sampling and learning.
"""


@dataclass(frozen=True, slots=True)
class Choice:
    """One entry of a menu: the value in the file, its label, one sentence on when to choose it."""

    value: str
    label: str
    sentence: str = ""
    is_written: bool = False
    """Whether no person picks it: it stands for an object of a program, which writes it down. Menus leave it out."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting. `low` and `high` are inclusive unless `low_open` or `high_open`; None means no limit."""

    key: str
    kind: Kind
    default: Any
    section: str
    label: str
    help: str
    unit: str = ""
    choices: tuple[Choice, ...] = ()
    low: float | None = None
    high: float | None = None
    low_open: bool = False
    high_open: bool = False
    optional: bool = False
    """Whether empty is a valid value, None."""
    advanced: bool = False
    when: tuple[str, tuple[Any, ...]] | None = None
    """(other key, values it must have for this setting to apply)."""
    used_by: tuple[Use, ...] = ()
    stays_visible: bool = False
    """Whether the form shows it disabled, with the reason, where `when` does not hold; else it hides it."""
    empty_is_default: bool = False
    """Whether an empty list means the default, as it does in mlx-lm-lora."""
    note: str = ""
    """A sentence that the form always shows below the control."""
    group: str = ""
    """Heading above this setting and those after it that have the same."""
    default_entry: str = ""
    """Label of a further entry of the menu, the first, which stands for the default."""
    known_as: tuple[str, ...] = ()
    """Other labels that people look for: those of MLX LoRA Studio and our own former ones."""

    def applies(self, values: Mapping[str, Any]) -> bool:
        """Whether the setting has any effect with these values; the form hides it where it has none."""
        if self.when is None:
            return True
        key, allowed = self.when
        return values.get(key) in allowed


def setting(default: Any, section: str, label: str, help: str, **about: Any) -> Any:
    """Declare a setting. `about`: gt, ge, lt, le (pydantic's limits), and fields of `Setting`."""
    limits = {name: about.pop(name) for name in ("gt", "ge", "lt", "le") if name in about}
    finite = {"allow_inf_nan": False} if limits else {}
    extra = {"section": section, "label": label, "help": help, **about}
    return Field(default, **limits, **finite, json_schema_extra={"setting": extra})  # pyright: ignore


def setting_from_field(key: str, field: FieldInfo) -> Setting:
    """The Setting behind a pydantic field declared with `setting`."""
    extra = dict(typing.cast("dict[str, Any]", field.json_schema_extra)["setting"])
    bare, optional = _without_none(field.annotation)
    choices = tuple(_choice(entry) for entry in extra.pop("choices", ()))
    limits = {
        name: getattr(entry, name)
        for entry in field.metadata
        for name in ("gt", "ge", "lt", "le")
        if getattr(entry, name, None) is not None
    }
    return Setting(
        key=key,
        kind=extra.pop("kind", None) or _kind(bare, bool(choices)),
        default=field.get_default(call_default_factory=True),
        choices=choices,
        low=limits.get("gt", limits.get("ge")),
        high=limits.get("lt", limits.get("le")),
        low_open="gt" in limits,
        high_open="lt" in limits,
        optional=optional,
        **extra,
    )


def _choice(entry: Choice | tuple[Any, ...]) -> Choice:
    return entry if isinstance(entry, Choice) else Choice(*entry)


def _without_none(annotation: Any) -> tuple[Any, bool]:
    if get_origin(annotation) in (typing.Union, types.UnionType):
        bare = [part for part in get_args(annotation) if part is not type(None)]
        return bare[0], len(bare) < len(get_args(annotation))
    return annotation, False


def _kind(annotation: Any, has_choices: bool) -> Kind:
    if has_choices:
        return "choice"
    if get_origin(annotation) is list:
        return "numbers" if get_args(annotation)[0] is float else "list"
    if get_origin(annotation) is dict:
        return "mapping"
    return typing.cast("Kind", {bool: "bool", int: "int", float: "float", str: "text"}[annotation])
