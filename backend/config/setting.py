"""The description of a setting: a pydantic field with label, help, unit, limits, and when it applies."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic import Field
from pydantic.fields import FieldInfo

# Upper limits that several settings share: higher values are slips.
MOST_TOKENS = 10_000_000
NEVER = 1_000_000_000
"""Of settings that count steps between two events."""
MOST_COMPLETIONS = 1_000_000
"""Completions of one step."""
MOST_STEPS = 100_000_000
LARGEST_WEIGHT = 1_000_000
"""Of a reward: products with larger ones leave float32's exact range."""

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
"""Which editor a setting has. `prose` is text of several lines, `numbers` a list of numbers, `mapping` a small YAML
map."""

Use = Literal["task", "rows", "row_view", "prompt_text", "prompt_limit", "rewards", "scoring", "duration"]
"""What depends on a setting (see `keys_used_by`):

- `task`: what a user trains on and for; a preset leaves it alone.
- `rows`: which rows a dataset has.
- `row_view`: what the preview of a row shows.
- `prompt_text`: the text of a prompt, and its length in tokens.
- `prompt_limit`: the longest prompt.
- `rewards`: how completions are rewarded during a run.
- `scoring`: scores, rewards and advantages of given completions, and the checks of these settings.
- `duration`: how long a completion takes, sampling and learning.
"""


@dataclass(frozen=True, slots=True)
class Choice:
    """One entry of a menu: the value in the file, its label, one sentence on when to choose it."""

    value: str
    label: str
    sentence: str = ""
    is_written: bool = False
    """A program writes this value; menus leave it out."""


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
    """Empty is a valid value, None."""
    advanced: bool = False
    when: tuple[str, tuple[Any, ...]] | None = None
    """(other key, values it must have for this setting to apply)."""
    used_by: tuple[Use, ...] = ()
    stays_visible: bool = False
    """The form disables it where `when` does not hold, instead of hiding it."""
    empty_is_default: bool = False
    """An empty list means the default, as in mlx-lm-lora."""
    note: str = ""
    """A sentence that the form always shows below the control."""
    group: str = ""
    """Heading in the form (`backend.config.form`)."""
    default_entry: str = ""
    """Label of an additional first menu entry for the default."""
    known_as: tuple[str, ...] = ()
    """Other labels that people search for."""

    def applies(self, values: Mapping[str, Any]) -> bool:
        """Whether the setting has any effect with these values."""
        return self.when is None or values.get(self.when[0]) in self.when[1]


_RANGES = {"within": ("ge", "le"), "above": ("gt", "le"), "below": ("ge", "lt"), "between": ("gt", "lt")}


def setting(default: Any, label: str, help: str, *, section: str, **about: Any) -> Any:
    """Declare a setting.

    `about` takes a range (low, high) or (low, high, unit) and fields of `Setting`. The range is `within` (both ends
    included), `above` (without its lower end), `below` (without its upper end) or `between` (without both).
    """
    limits: dict[str, Any] = {}
    for name in about.keys() & _RANGES.keys():
        *ends, about["unit"] = (*about.pop(name), "")[:3]
        limits = dict(zip(_RANGES[name], ends, strict=True)) | {"allow_inf_nan": False}
    extra = {"section": section, "label": label, "help": help, **about}
    return Field(default, **limits, json_schema_extra={"setting": extra})  # pyright: ignore


def setting_from_field(key: str, field: FieldInfo) -> Setting:
    """The Setting behind a pydantic field declared with `setting`."""
    extra = dict(typing.cast("dict[str, Any]", field.json_schema_extra)["setting"])
    annotation, optional = field.annotation, False
    if get_origin(annotation) in (typing.Union, types.UnionType):
        optional = type(None) in get_args(annotation)
        annotation = next(part for part in get_args(annotation) if part is not type(None))
    choices = tuple(Choice(*entry) for entry in extra.pop("choices", ()))
    limits = {
        name: getattr(entry, name)
        for entry in field.metadata
        for name in ("gt", "ge", "lt", "le")
        if getattr(entry, name, None) is not None
    }
    return Setting(
        key=key,
        kind=extra.pop("kind", None) or ("choice" if choices else _kind(annotation)),
        default=field.get_default(call_default_factory=True),
        choices=choices,
        low=limits.get("gt", limits.get("ge")),
        high=limits.get("lt", limits.get("le")),
        low_open="gt" in limits,
        high_open="lt" in limits,
        optional=optional,
        **extra,
    )


def _kind(annotation: Any) -> Kind:
    if get_origin(annotation) is list:
        return "numbers" if get_args(annotation)[0] is float else "list"
    if get_origin(annotation) is dict:
        return "mapping"
    return typing.cast("Kind", {bool: "bool", int: "int", float: "float", str: "text"}[annotation])
