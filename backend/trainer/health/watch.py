"""Follows an event log, applies the rules after every step, and reports when a finding begins and ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from fnmatch import filter as matching
from typing import Any

from backend.config.config import read
from backend.runs import archive
from backend.runs.events import ENDINGS, Event, read_events
from backend.runs.run_folder import RunFolder
from backend.trainer.health.recent import WINDOW, Recent
from backend.trainer.health.rules import RULES, Finding

QUIET = WINDOW  # steps without a finding after which it is over


class Watch:
    """`standing`: code → fields of the `health` event of a finding that holds, with the figures of its last step."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.recent = Recent(settings)
        self.standing: dict[str, dict[str, Any]] = {}
        self._held_at: dict[str, int] = {}

    @classmethod
    def resumed(cls, settings: Mapping[str, Any], events: Iterable[Event]) -> Watch:
        """A watch that has followed these events already; what it reported is among them."""
        watch = cls(settings)
        unseen: deque[Event] = deque()
        steps = 0
        for event in events:
            if event.get("kind") == "health":
                code = str(event.get("code"))
                fields = {key: value for key, value in event.items() if key not in ("v", "seq", "t", "kind")}
                if "until" in event:
                    watch.standing.pop(code, None)
                else:
                    watch.standing[code] = fields
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
        """Apply one event. → the `health` events that follow: of findings that begin and, with `until`, are over."""
        self.recent.take(event)
        if event.get("kind") != "step":
            return []
        step, reports = self.recent.step, list[dict[str, Any]]()
        for code, finding in self._look().items():
            if code not in self.standing:
                self.standing[code] = {"step": step}
                reports.append(self.standing[code])
            begun = self.standing[code]  # in place: `examined` reads the reports at the end
            new = finding.fields() | {"step": begun["step"]}
            begun.clear()
            begun.update(new)
        for code in [code for code in self.standing if step - self._held_at.get(code, 0) >= QUIET]:
            until = self._held_at.pop(code, self.standing.pop(code).get("step"))
            sentence = f"{title_of(code)}: over, it last held at step {until}."
            over = {"code": code, "level": "info", "sentence": sentence, "advice": "", "step": step, "until": until}
            reports.append(over)
        return reports

    def _look(self) -> dict[str, Finding]:
        found = {finding.code: finding for rule in RULES.values() if (finding := rule.look(self.recent, rule))}
        self._held_at |= dict.fromkeys(found, self.recent.step)
        return found


def title_of(code: str) -> str:
    rule = RULES.get(code.partition(" ")[0])
    return rule.title if rule else code.replace("_", " ").capitalize()


@dataclass(frozen=True, slots=True)
class Episode(Finding):
    """A finding from `since` to `until`, both steps; None: it still holds. `setting`: the one to look at first."""

    title: str = ""
    since: int | None = None
    until: int | None = None
    chart: str = ""
    setting: str = ""

    @property
    def rule(self) -> str:
        return self.code.partition(" ")[0]

    @classmethod
    def of(cls, event: Event) -> Episode:
        code = event.get("code") or event.get("sentence") or ""
        names = ("sentence", "advice", "level", "metric", "value", "threshold", "settings")
        found: dict[str, Any] = {"sentence": "", "advice": ""} | {
            name: event[name] for name in names if event.get(name) is not None
        }
        rule, settings = RULES.get(code.partition(" ")[0]), found.get("settings") or ()
        about = {"chart": rule.chart if rule else "", "setting": next(iter(settings), rule.setting if rule else "")}
        return cls(code, title=title_of(code), since=event.get("step"), **about, **found)


def reported(health: Iterable[Event]) -> list[Episode]:
    episodes: list[Episode] = []
    open_at: dict[str, int] = {}
    for event in health:
        code = str(event.get("code") or event.get("sentence") or "")
        if "until" not in event:
            open_at[code] = len(episodes)
            episodes.append(Episode.of(event))
        elif (index := open_at.pop(code, None)) is not None:
            episodes[index] = replace(episodes[index], until=event["until"])
    return episodes


def examined(settings: Mapping[str, Any], events: Iterable[Event]) -> list[Episode]:
    """The episodes of an event log by today's rules, with the figures of the last step at which each finding held."""
    watch = Watch(settings)
    return reported([fields for event in events for fields in watch.take(event)])


@dataclass(slots=True)
class Examination:
    """`not_measured`: code of a rule → the metric that no step has; `too_short`: code → steps that it needs."""

    run: str
    state: str = ""
    sentence: str = ""
    steps: int = 0
    evaluations: int = 0
    episodes: list[Episode] = field(default_factory=list[Episode])
    not_measured: dict[str, str] = field(default_factory=dict[str, str])
    too_short: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def looked_at(self) -> list[str]:
        return [code for code in RULES if code not in self.not_measured and code not in self.too_short]

    def to_dict(self) -> dict[str, Any]:
        fields = asdict(self)
        return fields | {"looked_at": self.looked_at, "findings": fields.pop("episodes")}


def examine(run: RunFolder) -> Examination:
    """Examine a whole run. Raises UserError where its settings cannot be read."""
    found = Examination(run.name, archive.summary(run).state)
    measured: set[str] = set()

    def counted() -> Iterator[Event]:
        # An event log may be long, and is read once.
        for event in read_events(run.events):
            kind = event.get("kind")
            if kind == "step":
                metrics: dict[str, Any] = event.get("metrics") or {}
                found.steps += 1
                found.sentence = ""  # an event log goes on after an ending only where the run was resumed
                measured.update(key for key, value in metrics.items() if value is not None)
            elif kind in ENDINGS:
                found.sentence = str(event.get("sentence") or "")
            found.evaluations += kind == "eval" and event.get("split") != "test"
            yield event

    found.episodes = examined(read(run.config), counted())
    if found.steps:
        found.not_measured = {code: rule.metric for code, rule in RULES.items() if not matching(measured, rule.metric)}
        measurable = {code: rule for code, rule in RULES.items() if code not in found.not_measured}
        found.too_short = {code: rule.needs for code, rule in measurable.items() if rule.needs > found.steps}
    return found
