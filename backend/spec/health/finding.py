"""What a rule has found: a sentence with the figures, advice, and where known the settings that would help."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Finding:
    """`code` stays the same as long as a rule keeps finding the same, so that it is reported once.

    `metric` is the name of the metric behind it, `value` what it was and `threshold` the limit that it passed, in the metric's unit.
    `settings`: setting → the value that is proposed for it.
    """

    code: str
    sentence: str
    advice: str
    level: str = "warning"
    metric: str = ""
    value: float | None = None
    threshold: float | None = None
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def rule(self) -> str:
        """The code of the rule that found it."""
        return self.code.partition(" ")[0]

    def fields(self) -> dict[str, Any]:
        """As the fields of a `health` event; those that are not known are left out."""
        always = ("code", "sentence", "advice", "level")
        return {key: value for key, value in asdict(self).items() if key in always or value not in ("", None, {})}
