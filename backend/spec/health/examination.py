"""A whole run looked at by every rule: what was found, between which steps, and what could not be looked at."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import filter as matching
from typing import Any

from backend.spec.config import read
from backend.spec.events import ENDINGS, Event, read_events
from backend.spec.health.episodes import Episode, examined
from backend.spec.health.rules import RULES
from backend.spec.run_folder import RunFolder
from backend.spec.runs import archive


@dataclass(slots=True)
class Examination:
    """`not_measured`: code of a rule → the metric that it needs and no step of the diary has; `too_short`: code → the steps that it
    needs, where the run has fewer."""

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
            "run": self.run, "state": self.state, "sentence": self.sentence, "steps": self.steps, "evaluations": self.evaluations,
            "looked_at": self.looked_at, "not_measured": self.not_measured, "too_short": self.too_short,
            "findings": [episode.to_dict() for episode in self.episodes],
        }  # fmt: skip


def examine(run: RunFolder) -> Examination:
    """Look at a run from its first step to its newest. Raises Mistake where its settings cannot be read."""
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
    """Pass the events on, and note what there is: a diary may be long, and is read once."""
    for event in events:
        kind = event.get("kind")
        if kind == "step":
            metrics: dict[str, Any] = event.get("metrics") or {}
            examination.steps += 1
            measured |= {key for key, value in metrics.items() if value is not None}
        examination.evaluations += kind == "eval" and event.get("split") != "test"
        # A diary goes on after an ending only where the run was resumed.
        examination.sentence = (
            str(event.get("sentence") or "") if kind in ENDINGS else "" if kind == "step" else examination.sentence
        )
        yield event
