"""What lies on the reward bench: groups of completions, what each reward function gives them, and what that means.

It asks the desk and holds the answers; it scores nothing itself and knows no widget. Settings come from the draft, and
no code of a person's runs without their consent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PySide6.QtCore import QObject, QTimer, Signal

from app.model.consent import Consent
from app.model.draft import Draft
from app.model.service import Service
from backend.spec.faults import Fault
from backend.spec.rewards import catalog

SETTLE_MS = 300
"""How long weights must rest before completions are scored again by themselves."""
SCORING_SETTINGS = ("reward_functions", "reward_weights", "reward_functions_file", "scale_rewards", "multi_objective_aggregation",
          "advantage_baseline", "max_completion_length")  # fmt: skip
"""Settings that scores, rewards or advantages depend on."""
DECLINED = "The reward file was not allowed to run, so nothing was scored."

Group = dict[str, Any]


class RewardBench(QObject):
    """Attributes: groups – lines as completions.jsonl has them, scores laid in; functions – what each function came to;
    findings – the verdict; failed – where a reward file could not be loaded, and why; cases – rerun with the last
    scoring; origin – where the completions are from; seconds – that scoring took; means – function → its mean score.

    Signals: changed – any of these; busy_changed(what is being done, or ""); progress(done, of; of is 0 where that is
    not known); refused(sentence).
    """

    changed = Signal()
    busy_changed = Signal(str)
    progress = Signal(int, int)
    refused = Signal(str)

    def __init__(self, draft: Draft, service: Service, consent: Consent, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.draft, self.service, self.consent = draft, service, consent
        self.groups: list[Group] = []
        self.functions: list[dict[str, Any]] = []
        self.findings: list[dict[str, str]] = []
        self.cases: list[dict[str, Any]] = []
        self.failed: dict[str, Any] | None = None
        self.seconds: float | None = None
        self.origin, self.busy = "", ""
        self.steps: list[int] = []
        self.step: int | None = None
        self.stale = False
        self._number: int | None = None
        self._rest_timer = QTimer(self, singleShot=True, interval=SETTLE_MS)
        self._rest_timer.timeout.connect(self.score_quietly)
        draft.changed.connect(self._on_setting)

    # Where completions come from

    def sample(self, how: str, count: int, numbers: Sequence[int], group_size: int, seed: int) -> None:
        """Draw completions from the chosen model and score them."""
        about = {"how": how, "count": count, "numbers": list(numbers), "group_size": group_size, "seed": seed}
        self._fetch("sample", "Sampling", "sampled from the model", settings=self.draft.values(), **about)

    def load_run(self, folder: Path, step: int | None) -> None:
        """Bring back what a run wrote at a step, the newest by default."""
        self._fetch("run_completions", "Reading the run", "", run=str(folder), step=step)

    def load_file(self, path: Path) -> None:
        self._fetch("read_completions", f"Reading {path.name}", f"from {path.name}", path=str(path))

    def load_text(self, text: str) -> None:
        self._fetch("read_completions", "Reading what was pasted", "pasted", text=text)

    def cancel(self) -> None:
        """Give up what is being done; what lies on the bench stays."""
        if self._number is not None:
            self.service.cancel(self._number)
        self._end_request()

    def _fetch(self, question: str, what: str, origin: str, **about: Any) -> None:
        def answered(answer: Any) -> None:
            if isinstance(answer, list):
                self._set_groups(answer, answer, origin)
            else:
                self._set_groups(
                    answer, answer["groups"], origin or f"from {Path(about['run']).name}, step {answer['step']}"
                )

        self._ask(question, what, answered, **about)

    def _set_groups(self, answer: Any, lines: list[Group], origin: str) -> None:
        self.steps, self.step = (answer["steps"], answer["step"]) if isinstance(answer, dict) else ([], None)
        self.groups, self.origin = lines, origin
        self.functions, self.findings, self.failed = [], [], None
        self._end_request()
        self.changed.emit()
        self.score()

    # Scoring

    def score(self) -> None:
        """Score what lies on the bench, asking first where code was not allowed yet."""
        if not self.groups:
            return
        if not self.consent.obtain(self.draft.values()):
            self.stale = True
            self.refused.emit(DECLINED)
            self.changed.emit()
            return
        self._score()

    def score_quietly(self) -> None:
        """Score again where that takes no question; else it can be seen that the scores are old."""
        if not self.groups:
            return
        if self.busy or self.consent.unconfirmed(self.draft.values()):
            self.stale = True
            self.changed.emit()
        else:
            self._score()

    def _score(self) -> None:
        self._rest_timer.stop()
        settings = self.draft.values()
        given = {key: settings[key] for key in (*SCORING_SETTINGS, "reward_timeout")}
        bare = [_without_scores(line) for line in self.groups]
        self._ask(
            "score", "Scoring", self._on_scores, settings=given, groups=bare, trusted=self.consent.trusted(settings)
        )

    def _on_scores(self, answer: dict[str, Any]) -> None:
        self._end_request()
        self.stale = False
        self.failed = answer.get("failed")
        if self.failed is None:
            self.functions, self.findings = answer["functions"], answer["findings"]
            self.seconds, self.cases = answer["seconds"], answer.get("cases") or []
            for line, scored in zip(self.groups, answer["scored"], strict=True):
                line["completions"] = [one | marks for one, marks in zip(line["completions"], scored, strict=True)]
        self.changed.emit()

    @property
    def means(self) -> dict[str, float]:
        """Function → the mean of what it gave; functions that failed or had no opinion are left out."""
        made = [one.get("rewards") or {} for line in self.groups for one in line["completions"]]
        known = {
            one["name"]: [marks[one["name"]] for marks in made if marks.get(one["name"]) is not None]
            for one in self.functions
        }
        return {name: sum(scores) / len(scores) for name, scores in known.items() if scores}

    @property
    def count(self) -> int:
        """Completions on the bench."""
        return sum(len(line["completions"]) for line in self.groups)

    # Cases

    @property
    def reward_file(self) -> Path | None:
        """The person's file, where one is chosen and there."""
        text = str(self.draft.value("reward_functions_file") or "").strip()
        path = catalog.locate_reward_file(text) if text else None
        return path if path is not None and path.is_file() else None

    def keep_case(self, group: Mapping[str, Any], completion: Mapping[str, Any]) -> None:
        """Keep a scored completion with the reward file, with the scores that the file's own functions gave it."""
        file = self.reward_file
        own = self._own_names(file) if file else set()
        expected = {name: score for name, score in (completion.get("rewards") or {}).items() if name in own}
        if file is None or not expected:
            self.refused.emit(
                "Cases are kept with a reward file of your own; none of its functions has scored this one."
            )
            return
        calls = {catalog.metric_name(str(entry)): str(entry) for entry in self.draft.value("reward_functions")}
        self._cases(
            file, do="keep", group=_without_scores(group), completion=completion["text"], expected=expected, calls=calls
        )

    def remove_case(self, place: int) -> None:
        """Throw away the case at this place."""
        if self.reward_file is not None:
            self._cases(self.reward_file, do="drop", place=place)

    def _own_names(self, file: Path) -> set[str]:
        """Names under which functions of the file are scored now."""
        shipped = {entry.name for entry in catalog.builtin_rewards()}
        names = {catalog.metric_name(str(entry)): str(entry) for entry in self.draft.value("reward_functions")}
        registered = {entry.name for entry in catalog.rewards_in_file(file)}
        return {name for name, entry in names.items() if entry.partition("(")[0] not in shipped - registered}

    def _cases(self, file: Path, **about: Any) -> None:
        self._ask("reward_cases", "Keeping the case", lambda answer: self._after_cases(), file=str(file), **about)

    def _after_cases(self) -> None:
        self._end_request()
        self.score_quietly()

    # Asking

    def _ask(self, question: str, what: str, answered: Any, **about: Any) -> None:
        self.cancel()
        self._set_busy(what)
        self._number = self.service.ask(
            question, answered, on_refused=self._on_refused, on_progress=self._on_progress, owner=self, **about
        )

    def _on_progress(self, told: dict[str, Any]) -> None:
        if "scoring" in told:
            self._set_busy(f"Scoring with {told['scoring']}")
        elif "phase" in told:
            self._set_busy(told["phase"].capitalize())
            self.progress.emit(told.get("done", 0), told.get("of", 0))

    def _on_refused(self, faults: list[Fault]) -> None:
        self._end_request()
        self.refused.emit(" ".join(fault.sentence for fault in faults))
        self.changed.emit()

    def _end_request(self) -> None:
        self._number = None
        self._set_busy("")

    def _set_busy(self, what: str) -> None:
        if what != self.busy:
            self.busy = what
            self.busy_changed.emit(what)

    def _on_setting(self, key: str) -> None:
        if self.groups and (key in SCORING_SETTINGS or not key):
            self._rest_timer.start()


def _without_scores(line: Mapping[str, Any]) -> Group:
    """A line without the scores that were laid in: what is sent to be scored."""
    kept = ("text", "tokens", "stop")
    completions = [{key: one[key] for key in kept if key in one} for one in line["completions"]]
    return {**line, "completions": completions}
