"""Judges: the servers that could judge, and the check of a judge against the user's labels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from PySide6.QtCore import QObject, Signal

from app.state.processes import Service
from app.state.reward_bench import DECLINED, SCORING_SETTINGS, RewardBench, without_scores
from backend.judges.rubric import bundled_rubrics, rubric_path
from backend.rewards.catalogue import JUDGE, RewardCall, find_call
from backend.tools.mcp_settings import is_here
from backend.utils.errors import ConfigProblem, UserError

DEFAULT_URL = "http://localhost:1234/v1"
LOCAL = "local"  # `url` of a judge that the run loads itself


def address_of(url: str) -> str:
    """Host and port of a server; "" if that is no URL."""
    try:
        return urlsplit(url).netloc.replace("127.0.0.1", "localhost")
    except ValueError:
        return ""


def is_remote(url: str) -> bool:
    return bool(address_of(url)) and not is_here(url)


class JudgeServers(QObject):
    """`found`: servers on this machine that could judge, {"name", "url", "models"}; None until the first answer."""

    changed = Signal()

    def __init__(self, service: Service, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._service = service
        self.found: list[dict[str, Any]] | None = None

    def refresh(self) -> None:
        def on_answer(answer: list[dict[str, Any]]) -> None:
            if answer != self.found:
                self.found = answer
                self.changed.emit()

        self._service.ask("judge_servers", on_answer, owner=self)

    def at(self, url: str) -> dict[str, Any] | None:
        return next((each for each in self.found or () if address_of(each["url"]) == address_of(url)), None)

    def store_key(self, url: str, key: str, say: Callable[[str], None]) -> None:
        # The key reaches the warm process through its stdin, and is kept in the keychain only.
        self._service.ask(
            "judge_key",
            lambda _: say("The key is in the keychain." if key else "The key is deleted."),
            on_refused=lambda problems: say(problems[0].sentence),
            url=url,
            key=key,
        )


class JudgeCheck(QObject):
    """How far judges and reward models can be trusted, measured on the bench's completions and the user's labels."""

    changed = Signal()
    progress = Signal(int, int)  # done and total
    refused = Signal(str)  # a sentence for the user

    def __init__(self, bench: RewardBench, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._bench = bench
        self.calls: dict[str, int] = {}  # that a check of each makes, by name in metrics, as the next two
        self.results: dict[str, dict[str, Any]] = {}  # answers to `judge_agreement`
        self.labels: dict[str, list[dict[str, Any]]] = {}  # cases with the user's scores
        self.busy = ""  # the one that is being asked
        self._request: int | None = None

    @property
    def models(self) -> dict[str, RewardCall]:
        entries = self._bench.draft.valid_values()["reward_functions"]
        calls = [call for call in map(find_call, map(str, entries)) if call is not None]
        return {call.name: call for call in calls if call.is_model or (call.function == JUDGE and not call.file)}

    def labels_file(self, name: str) -> Path | None:
        """The rubric beside which labels for a judge are kept; None if that is not a file of the user's."""
        call = self.models.get(name)
        with suppress(UserError):
            path = rubric_path(str(call.arguments.get("rubric", ""))) if call else None
            return None if path in bundled_rubrics().values() else path
        return None

    def count(self) -> None:
        """Ask how many calls a check makes, and for the labels."""
        self.calls = {}
        if self.models and self._bench.groups:
            self._ask(self.models.values(), lambda answer: self.calls.update(answer["calls"]), only_calls=True)
        for name in self.models:
            self.edit_labels(name, do="list")
        self.changed.emit()

    def check(self, name: str) -> None:
        """Ask one of them, after asking for missing consent."""
        if not self._bench.consent.obtain(self._bench.draft.values()):
            self.refused.emit(DECLINED)
            return

        def on_results(answer: dict[str, Any]) -> None:
            self.results |= {found["name"]: found for found in answer["judges"]}
            self._request, self.busy = None, ""

        self.busy = name
        self._request = self._ask([self.models[name]], on_results)
        self.changed.emit()

    def cancel(self) -> None:
        if self._request is not None:
            self._bench.service.cancel(self._request)
        self._end()

    def keep(self, name: str, group: Mapping[str, Any], text: str, score: float) -> None:
        """Keep the user's score of a completion as a label for a judge."""
        self.edit_labels(name, do="keep", group=without_scores(group), completion=text, expected={name: score})

    def edit_labels(self, name: str, **edit: Any) -> None:
        """List, keep or drop, as the question `reward_cases`."""

        def on_answer(answer: Any) -> None:
            self.labels[name] = answer["cases"]
            self.changed.emit()

        if file := self.labels_file(name):
            ask = self._bench.service.ask
            ask("reward_cases", on_answer, on_refused=self._on_refused, owner=self, file=str(file), **edit)

    def _ask(self, models: Iterable[RewardCall], on_answer: Callable[[Any], object], **more: Any) -> int | None:
        bench, values = self._bench, self._bench.draft.values()
        values |= {"reward_functions": [call.text for call in models], "reward_weights": []}

        def answered(answer: Any) -> None:
            on_answer(answer)
            self.changed.emit()

        return bench.service.ask(
            "judge_agreement",
            answered,
            on_refused=self._on_refused,
            on_progress=lambda progress: self.progress.emit(progress["done"], progress["of"]),
            owner=self,
            settings={key: values[key] for key in SCORING_SETTINGS},
            groups=[without_scores(group) for group in bench.groups],
            trusted=bench.consent.code.fingerprints(values),
            **more,
        )

    def _on_refused(self, problems: list[ConfigProblem]) -> None:
        self.refused.emit(problems[0].sentence)
        self._end()

    def _end(self) -> None:
        self._request, self.busy = None, ""
        self.changed.emit()
