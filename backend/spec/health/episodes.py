"""Findings with the steps from which and until which they held: of a whole diary by the rules of today, or as the diary reports them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from backend.spec.events import Event
from backend.spec.health.rules import RULES
from backend.spec.health.watch import Watch, title_of


@dataclass(frozen=True, slots=True)
class Episode:
    """One finding from `since` to `until`, both steps; `until` None: it holds at the newest step."""

    code: str
    title: str
    level: str
    sentence: str
    advice: str
    since: int | None
    until: int | None = None
    chart: str = ""
    metric: str = ""
    value: float | None = None
    threshold: float | None = None
    setting: str = ""
    """The setting to look at first; "" where no setting helps."""
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Setting → proposed value."""

    @property
    def rule(self) -> str:
        """The code of the rule that found it."""
        return self.code.partition(" ")[0]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def reported(health: Iterable[Event]) -> list[Episode]:
    """The episodes that `health` events tell of, in the order in which they began."""
    begun: list[Event] = []
    until: dict[int, int | None] = {}
    open_at: dict[str, int] = {}
    for event in health:
        code = str(event.get("code") or event.get("sentence") or "")
        if "until" in event:
            if (index := open_at.pop(code, None)) is not None:
                until[index] = event["until"]
        else:
            open_at[code] = len(begun)
            begun.append(event | {"code": code})
    return [_episode(event, until.get(index)) for index, event in enumerate(begun)]


def examined(settings: Mapping[str, Any], events: Iterable[Event]) -> list[Episode]:
    """The episodes of a diary by the rules as they are now, whatever was reported while it was written. Sentences have the figures of
    the last step at which the finding held."""
    watch = Watch(settings)
    episodes: list[Episode] = []
    for event in events:
        for fields in watch.take(event):
            if "until" in fields:
                _close(episodes, fields, watch)
            else:
                episodes.append(_episode(fields, None))
    return [_with_newest(episode, watch) if episode.until is None else episode for episode in episodes]


def _close(episodes: list[Episode], over: Mapping[str, Any], watch: Watch) -> None:
    index = max(index for index, episode in enumerate(episodes) if episode.code == over["code"])
    episodes[index] = _with_newest(episodes[index], watch, over["until"])


def _with_newest(episode: Episode, watch: Watch, until: int | None = None) -> Episode:
    return _episode(watch.newest[episode.code].fields() | {"step": episode.since}, until)


def _episode(fields: Mapping[str, Any], until: int | None) -> Episode:
    code = str(fields["code"])
    rule = RULES.get(code.partition(" ")[0])
    settings: Mapping[str, Any] = fields.get("settings") or {}
    return Episode(
        code, title_of(code), str(fields.get("level") or "warning"), str(fields.get("sentence") or ""), str(fields.get("advice") or ""),
        fields.get("step"), until, rule.chart if rule else "", str(fields.get("metric") or ""), fields.get("value"),
        fields.get("threshold"), next(iter(settings), rule.setting if rule else ""), settings,
    )  # fmt: skip
