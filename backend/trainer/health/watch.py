"""Follows an event log, applies the rules after every step, and reports when a finding begins and ends.

A function of the event log, so a resumed run continues as if never stopped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from fnmatch import filter as matching
from typing import Any

from backend.config.config import read
from backend.runs import archive
from backend.runs.events import ENDINGS, Event, read_events
from backend.runs.run_folder import RunFolder
from backend.trainer.health.recent import WINDOW, Recent
from backend.trainer.health.rules import RULES, Finding, findings

QUIET = WINDOW
"""Steps without a finding after which it is over: one that hovers about its limit is one finding and not many."""


class Watch:
    """`standing`: code → the fields of the `health` event with which each finding that still holds began; `newest`:
    code → the finding as it was when it last held."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """`settings`: the run's raw settings, as its config.yaml has them; `change` events go on from there."""
        self.recent = Recent(settings)
        self.standing: dict[str, dict[str, Any]] = {}
        self.newest: dict[str, Finding] = {}
        self._held_at: dict[str, int] = {}

    @classmethod
    def resumed(cls, settings: Mapping[str, Any], events: Iterable[Event]) -> Watch:
        """A watch that has followed these events already: what it reported is among them, so only the newest steps
        are looked at."""
        watch = cls(settings)
        unseen: deque[Event] = deque()
        steps = 0
        for event in events:
            if event.get("kind") == "health":
                watch._take_report(event)
                continue
            unseen.append(event)
            steps += event.get("kind") == "step"
            while steps > QUIET:
                oldest = unseen.popleft()
                steps -= oldest.get("kind") == "step"
                watch.recent.take(oldest)
        for event in unseen:
            watch.recent.take(event)
            if event.get("kind") == "step":
                watch._look()
        return watch

    def take(self, event: Event) -> list[dict[str, Any]]:
        """Apply one event of the event log. Returns the fields of the `health` events that follow from it: one for
        each finding that begins, and one for each that is over, with `until`, the last step at which it held."""
        self.recent.take(event)
        if event.get("kind") != "step":
            return []
        return [*self._begun(self._look()), *self._over()]

    def _look(self) -> dict[str, Finding]:
        """Code → finding at the newest step."""
        found = {finding.code: finding for finding in findings(self.recent)}
        self.newest |= found
        self._held_at |= dict.fromkeys(found, self.recent.step)
        return found

    def _begun(self, found: Mapping[str, Finding]) -> list[dict[str, Any]]:
        step = self.recent.step
        new = {code: finding.fields() | {"step": step} for code, finding in found.items() if code not in self.standing}
        self.standing |= new
        return list(new.values())

    def _over(self) -> list[dict[str, Any]]:
        step = self.recent.step
        over = [code for code in self.standing if step - self._held_at.get(code, 0) >= QUIET]
        return [self._end(self.standing.pop(code), code) for code in over]

    def _end(self, begun: Mapping[str, Any], code: str) -> dict[str, Any]:
        until = self._held_at.pop(code, begun.get("step"))
        return {
            "code": code,
            "level": "info",
            "sentence": f"{title_of(code)}: over, it last held at step {until}.",
            "advice": "",
            "step": self.recent.step,
            "until": until,
        }

    def _take_report(self, event: Event) -> None:
        code = str(event.get("code"))
        if "until" in event:
            self.standing.pop(code, None)
        else:
            self.standing[code] = {key: value for key, value in event.items() if key not in ("v", "seq", "t", "kind")}


def title_of(code: str) -> str:
    """The title of the rule that found it; for a rule of another version its code."""
    rule = RULES.get(code.partition(" ")[0])
    return rule.title if rule else code.replace("_", " ").capitalize()


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
    """The episodes of an event log by the rules as they are now, whatever was reported while it was written.
    Sentences have the figures of the last step at which the finding held."""
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
        code,
        title_of(code),
        str(fields.get("level") or "warning"),
        str(fields.get("sentence") or ""),
        str(fields.get("advice") or ""),
        fields.get("step"),
        until,
        rule.chart if rule else "",
        str(fields.get("metric") or ""),
        fields.get("value"),
        fields.get("threshold"),
        next(iter(settings), rule.setting if rule else ""),
        settings,
    )


@dataclass(slots=True)
class Examination:
    """`not_measured`: code of a rule → the metric that it needs and no step of the event log has; `too_short`: code
    → the steps that it needs, where the run has fewer."""

    run: str
    state: str = ""
    sentence: str = ""
    """How the run ended, in its own words; "" where it has not, or did not say."""
    steps: int = 0
    evaluations: int = 0
    episodes: list[Episode] = field(default_factory=list[Episode])
    not_measured: dict[str, str] = field(default_factory=dict[str, str])
    too_short: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def looked_at(self) -> list[str]:
        """Codes of the rules that could find something."""
        return [code for code in RULES if code not in self.not_measured and code not in self.too_short]

    def to_dict(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "state": self.state,
            "sentence": self.sentence,
            "steps": self.steps,
            "evaluations": self.evaluations,
            "looked_at": self.looked_at,
            "not_measured": self.not_measured,
            "too_short": self.too_short,
            "findings": [episode.to_dict() for episode in self.episodes],
        }


def examine(run: RunFolder) -> Examination:
    """Examine a whole run. Raises UserError where its settings cannot be read."""
    return examine_events(run.name, read(run.config), read_events(run.events), archive.summary(run).state)


def examine_events(name: str, settings: Mapping[str, Any], events: Iterable[Event], state: str) -> Examination:
    examination = Examination(name, state)
    measured: set[str] = set()
    examination.episodes = examined(settings, _counted(events, examination, measured))
    if examination.steps:
        missing = {code: rule.metric for code, rule in RULES.items() if not matching(measured, rule.metric)}
        short = {
            code: rule.needs for code, rule in RULES.items() if rule.needs > examination.steps and code not in missing
        }
        examination.not_measured, examination.too_short = missing, short
    return examination


def _counted(events: Iterable[Event], examination: Examination, measured: set[str]) -> Iterator[Event]:
    """Pass the events on, and note what there is: an event log may be long, and is read once."""
    for event in events:
        kind = event.get("kind")
        if kind == "step":
            metrics: dict[str, Any] = event.get("metrics") or {}
            examination.steps += 1
            measured |= {key for key, value in metrics.items() if value is not None}
        examination.evaluations += kind == "eval" and event.get("split") != "test"
        # An event log goes on after an ending only where the run was resumed.
        examination.sentence = (
            str(event.get("sentence") or "") if kind in ENDINGS else "" if kind == "step" else examination.sentence
        )
        yield event
