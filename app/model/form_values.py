"""Raw values of a form: where they come from, how one is read, and when two of them say the same. Nothing is judged."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from backend.spec import config
from backend.spec.aliases import translate
from backend.spec.config import SETTINGS
from backend.spec.faults import Fault
from backend.spec.rewards import catalog
from backend.spec.setting import Setting

Values = dict[str, Any]


def defaults() -> Values:
    return {key: copy.deepcopy(about.default) for key, about in SETTINGS.items()}


def values_from(raw: Mapping[str, Any]) -> tuple[Values, list[Fault]]:
    """(a value for every setting, what of `raw` has no place in the form). Other programs' spellings are understood."""
    given, misread = translate(raw)
    homeless = [fault for fault in config.problems(raw) if fault.setting not in SETTINGS and fault not in misread]
    values = defaults() | {key: value for key, value in given.items() if key in SETTINGS}
    if isinstance(values["reward_functions"], list):
        values["reward_functions"] = [catalog.canonical(str(name)) for name in values["reward_functions"]]
    return values, [*misread, *homeless]


def typed_value(about: Setting, raw: Any) -> Any:
    """`raw` as the type of its setting; the default where it cannot be read so."""
    if about.optional and raw in ("", None):
        return None
    try:
        if about.kind == "int":
            return int(str(raw))
        if about.kind == "float":
            return float(str(raw))
    except ValueError:
        return about.default
    fits = isinstance(raw, type(about.default)) or about.default is None
    return raw if fits else about.default


def is_identical(one: Any, other: Any) -> bool:
    """Equal and of one type: 1, 1.0 and True are three values in a form."""
    return type(one) is type(other) and one == other


def is_equivalent(one: Any, other: Any) -> bool:
    """Equal to a reader: 1e-5 typed and 1e-05 read are one number, None and "" are both empty."""
    if one == other or (one in (None, "") and other in (None, "")):
        return True
    try:
        return not isinstance(one, bool) and float(str(one)) == float(str(other))
    except ValueError:
        return False
