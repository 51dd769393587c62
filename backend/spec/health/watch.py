"""Follows a diary, applies the rules after every step, and says when a finding begins and when it is over.

The trainer, `doctor` and the tests feed it. What it knows is a function of the diary, so a resumed run goes on as if never stopped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from backend.spec.events import Event
from backend.spec.health.finding import Finding
from backend.spec.health.recent import WINDOW, Recent
from backend.spec.health.rules import RULES, findings

QUIET = WINDOW
"""Steps without a finding after which it is over: one that hovers about its limit is one finding and not many."""


class Watch:
    """`standing`: code → the fields of the `health` event with which each finding that still holds began; `newest`: code → the
    finding as it was when it last held."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """`settings`: the run's raw settings, as its config.yaml has them; `change` events go on from there."""
        self.recent = Recent(settings)
        self.standing: dict[str, dict[str, Any]] = {}
        self.newest: dict[str, Finding] = {}
        self._held_at: dict[str, int] = {}

    @classmethod
    def resumed(cls, settings: Mapping[str, Any], events: Iterable[Event]) -> Watch:
        """A watch that has followed these events already: what it reported is among them, so only the newest steps are looked at."""
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
        """Apply one event of the diary. Returns the fields of the `health` events that follow from it: one for each finding that
        begins, and one for each that is over, with `until`, the last step at which it held."""
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
            "code": code, "level": "info", "sentence": f"{title_of(code)}: over, it last held at step {until}.", "advice": "",
            "step": self.recent.step, "until": until,
        }  # fmt: skip

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
