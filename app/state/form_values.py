"""Raw values of a form: read from a config, converted to their types, compared. Nothing is validated here."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from backend.config import config
from backend.config.config import SETTINGS
from backend.config.other_programs.translation import translate
from backend.config.setting import Setting
from backend.rewards.catalogue import catalog
from backend.utils.errors import ConfigProblem

Values = dict[str, Any]


def defaults() -> Values:
    return {key: copy.deepcopy(about.default) for key, about in SETTINGS.items()}


def values_from(raw: Mapping[str, Any]) -> tuple[Values, list[ConfigProblem]]:
    """(a value for every setting, faults for the keys of `raw` that are no setting). Aliases of other programs are translated."""
    translated, misread = translate(raw)
    unknown = [fault for fault in config.problems(raw) if fault.setting not in SETTINGS and fault not in misread]
    values = defaults() | {key: value for key, value in translated.items() if key in SETTINGS}
    if isinstance(values["reward_functions"], list):
        values["reward_functions"] = [catalog.canonical_entry(str(name)) for name in values["reward_functions"]]
    return values, [*misread, *unknown]


def typed_value(about: Setting, raw: Any) -> Any:
    """`raw` converted to the type of its setting; the default where that fails."""
    if about.optional and raw in ("", None):
        return None
    if about.empty_is_default and raw in ("", [], None):
        return about.default
    try:
        if about.kind == "int":
            return int(str(raw))
        if about.kind == "float":
            return float(str(raw))
    except ValueError:
        return about.default
    fits = isinstance(raw, type(about.default)) or about.default is None
    return raw if fits else about.default


def is_identical(left: Any, right: Any) -> bool:
    """Equal and of one type: 1, 1.0 and True are three values in a form."""
    return type(left) is type(right) and left == right


def is_equivalent(left: Any, right: Any) -> bool:
    """Equal in meaning: 1e-5 typed and 1e-05 read are one number, None and "" are both empty."""
    if left == right or (left in (None, "") and right in (None, "")):
        return True
    try:
        return not isinstance(left, bool) and float(str(left)) == float(str(right))
    except ValueError:
        return False
