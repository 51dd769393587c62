"""The reward bench: completions and their scores; judges, the servers that could judge, and the check of a judge."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from PySide6.QtCore import QObject, QTimer, Signal

from app.state import charts
from app.state.consent import Consent
from app.state.draft import Draft
from app.state.processes import Service
from backend.config.config import keys_used_by
from backend.judges.rubric import bundled_rubrics, rubric_path
from backend.rewards import catalogue
from backend.rewards.catalogue import JUDGE, RewardCall, find_call
from backend.tools.mcp_settings import is_here
from backend.utils.errors import ConfigProblem, UserError
from backend.utils.files import is_file


def reward_file(settings: Mapping[str, Any]) -> Path | None:
    """The user's reward file, if these settings name one that exists."""
    text = str(settings.get("reward_functions_file") or "").strip()
    try:
        path = catalogue.locate_reward_file(text) if text else None
    except UserError:  # it cannot be a path
        return None
    return path if path is not None and is_file(path) else None


def case_of(settings: Mapping[str, Any], scores: Mapping[str, float | None]) -> dict[str, Any] | None:
    """Arguments of `reward_cases` for a completion with these scores; None if no function of a reward file gave one."""
    file = reward_file(settings)
    if file is None or not scores:
        return None
    try:
        registered = {entry.name for entry in catalogue.rewards_in_file(file)}
    except UserError:  # the file cannot be read any more, as scoring has said
        return None
    calls = {catalogue.metric_name(str(entry)): str(entry) for entry in settings["reward_functions"]}
    shipped = {entry.name for entry in catalogue.builtin_rewards()}
    parsed = {name: catalogue.reward_call(entry, shipped | registered) for name, entry in calls.items()}
    # A file may register a function under a shipped name; the name is then the file's.
    own = {name for name, call in parsed.items() if call.file or call.function not in shipped - registered}
    expected = {name: score for name, score in scores.items() if name in own}
    return {"do": "keep", "file": str(file), "expected": expected, "calls": calls} if expected else None


MAX_ROWS = 1000  # most rows that can be sampled in one request
SETTLE_MS = 300
SCORING_SETTINGS = keys_used_by("scoring")
DECLINED = "The code was not allowed to run, so nothing was scored."
NO_CASE = "Cases are kept with a reward file of your own; none of its functions has scored this one."

Group = dict[str, Any]


class RewardBench(QObject):
    changed = Signal()  # any attribute but `busy`
    busy_changed = Signal(str)
    progress = Signal(int, int)  # done and total, 0 if unknown
    refused = Signal(str)  # a sentence for the user

    def __init__(self, draft: Draft, service: Service, consent: Consent, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.draft, self.service, self.consent = draft, service, consent
        self.groups: list[Group] = []  # rows as in completions.jsonl, with scores added
        self.functions: list[dict[str, Any]] = []  # as the next two, of the answer to the question `score`
        self.findings: list[dict[str, str]] = []
        self.cases: list[dict[str, Any]] = []
        self.failed: dict[str, Any] | None = None  # why nothing was scored, as `RewardError.place`
        self.seconds: float | None = None  # that scoring took
        self.origin, self.busy = "", ""  # where `groups` come from; what is being done
        self.stale = False  # the scores are older than the settings
        self._loaded_for: tuple[Any, ...] = ()
        self._request: int | None = None
        # Restarted at every change of a setting: one scoring for a typed number, not one for each of its digits.
        self._rest_timer = QTimer(self, singleShot=True, interval=SETTLE_MS)
        self._rest_timer.timeout.connect(self.score_quietly)
        draft.changed.connect(self._on_setting)

    def sample(self, how: str, count: int, numbers: Sequence[int], group_size: int, seed: int) -> None:
        """Sample on rows of the training split, once the functions that will score may run."""
        if not self.consent.obtain(self.draft.values()):
            self.refused.emit(DECLINED)
            return
        choice = {"how": how, "count": count, "numbers": list(numbers), "group_size": group_size, "seed": seed}
        self._load("sample", "Sampling", "sampled from the model", settings=self.draft.values(), **choice)

    def load_run(self, folder: Path, step: int | None) -> None:
        """Load the completions of a step, the newest by default."""
        self._load("run_completions", "Reading the run", "", run=str(folder), step=step)

    def load_file(self, path: Path) -> None:
        self._load("read_completions", f"Reading {path.name}", f"from {path.name}", path=str(path))

    def load_text(self, text: str) -> None:
        self._load("read_completions", "Reading what was pasted", "pasted", text=text)

    def cancel(self) -> None:
        self.service.cancel(self._request)
        self._end_request()

    def _load(self, question: str, activity: str, origin: str, **arguments: Any) -> None:
        def on_answer(answer: Any) -> None:
            self.groups, self.origin = answer, origin
            if not isinstance(answer, list):  # the answer to run_completions, which also says the step
                self.groups = answer["groups"]
                self.origin = f"from {Path(arguments['run']).name}, step {answer['step']}"
            self._loaded_for = (self.draft.value("model"), self.draft.value("data"))
            self.functions, self.findings, self.failed = [], [], None
            self.changed.emit()
            self.score()

        self._ask(question, activity, on_answer, **arguments)

    def score(self) -> None:
        if self.groups and self.consent.obtain(self.draft.values()):
            self._score()
        elif self.groups:
            self._show_stale()
            self.refused.emit(DECLINED)

    def score_quietly(self) -> None:
        """Score again if that needs no consent and nothing is pending."""
        # Scoring would cancel what is pending, whose answer leads to scoring anyway.
        if self.groups and (self.busy or self.consent.is_missing(self.draft.values())):
            self._show_stale()
        elif self.groups:
            self._score()

    def _show_stale(self) -> None:
        self.stale = True
        self.changed.emit()

    def _score(self) -> None:
        self._rest_timer.stop()  # this request has the newest settings already

        def on_scores(answer: dict[str, Any]) -> None:
            self.stale = False
            self.failed = answer.get("failed")
            if self.failed is None:
                self.functions, self.findings = answer["functions"], answer["findings"]
                self.seconds, self.cases = answer["seconds"], answer.get("cases") or []
                for group, scored in zip(self.groups, answer["scored"], strict=True):
                    pairs = zip(group["completions"], scored, strict=True)
                    group["completions"] = [row | scores for row, scores in pairs]
            self.changed.emit()

        settings = self.draft.values()
        scoring = {key: settings[key] for key in SCORING_SETTINGS}
        groups = [without_scores(group) for group in self.groups]
        self._ask("score", "Scoring", on_scores, settings=scoring, groups=groups)

    def try_entry(
        self, entry: str, group: Group, on_answer: Callable[[Any], None], on_refused: Callable[[str], None]
    ) -> None:
        """Score a group with one entry of `reward_functions`, apart from what is on the bench."""
        tried = {"reward_functions": [entry], "reward_weights": [], "reward_functions_file": ""}
        settings = {key: self.draft.valid_values()[key] for key in SCORING_SETTINGS} | tried
        if not self.consent.obtain(settings):
            on_refused(DECLINED)
            return
        self.service.ask(
            "score",
            on_answer,
            on_refused=lambda problems: on_refused(problems[0].sentence),
            owner=self,
            settings=settings,
            groups=[without_scores(group)],
            with_cases=False,
        )

    def chosen_functions(self) -> list[dict[str, Any]]:
        """The form's functions as rows of `functions`, not yet scored."""
        values = self.draft.valid_values()
        names = [catalogue.metric_name(str(entry)) for entry in values["reward_functions"]]
        weights = [*values["reward_weights"], *[1.0] * len(names)]
        unscored = {"error": None, "seconds": None, "printed": "", "known": []}
        return [
            {"name": name, "label": charts.label_of(name), "weight": weight, **unscored}
            for name, weight in zip(names, weights, strict=False)
        ]

    @property
    def is_of_form(self) -> bool:
        """The form still has the model and dataset of the completions."""
        return self._loaded_for == (self.draft.value("model"), self.draft.value("data"))

    @property
    def means(self) -> dict[str, float]:
        """Of functions; {} of completions that are not `is_of_form`."""
        scored = [each for each in self.functions if each["known"]] if self.is_of_form else []
        return {each["name"]: sum(each["known"]) / len(each["known"]) for each in scored}

    @property
    def count(self) -> int:
        return sum(len(group["completions"]) for group in self.groups)

    @property
    def reward_file(self) -> Path | None:
        return reward_file(self.draft.values())

    def keep_case(self, group: Mapping[str, Any], completion: Mapping[str, Any]) -> None:
        case = case_of(self.draft.values(), completion.get("rewards") or {})
        if case is None:
            self.refused.emit(NO_CASE)
        else:
            self._edit_cases(group=without_scores(group), completion=completion["text"], **case)

    def remove_case(self, index: int) -> None:
        if self.reward_file is not None:
            self._edit_cases(do="drop", file=str(self.reward_file), place=index)

    def _edit_cases(self, **edit: Any) -> None:
        self._ask("reward_cases", "Keeping the case", lambda _: self.score_quietly(), **edit)

    def _ask(self, question: str, activity: str, on_answer: Callable[[Any], None], **arguments: Any) -> None:
        self.cancel()  # one request at a time; an answer to an older one must not replace what is shown after it
        self._set_busy(activity)

        def answered(answer: Any) -> None:
            self._end_request()
            on_answer(answer)

        self._request = self.service.ask(
            question,
            answered,
            on_refused=partial(self._on_refused, question),
            on_progress=self._on_progress,
            owner=self,
            **arguments,
        )

    def _on_progress(self, progress: dict[str, Any]) -> None:
        if "scoring" in progress:
            self._set_busy(f"Scoring with {progress['scoring']}")
        elif "phase" in progress:
            self._set_busy(progress["phase"].capitalize())
            self.progress.emit(progress.get("done", 0), progress.get("of", 0))

    def _on_refused(self, question: str, faults: list[ConfigProblem]) -> None:
        sentence = " ".join(fault.sentence for fault in faults)
        if question == "score":  # such as for a judge whose server is gone
            self.failed = {"sentence": sentence, "file": "", "line": 0, "frames": []}
        self._end_request()
        self.changed.emit()
        self.refused.emit(sentence)

    def _end_request(self) -> None:
        self._request = None
        self._set_busy("")

    def _set_busy(self, activity: str) -> None:
        if activity != self.busy:
            self.busy = activity
            self.busy_changed.emit(activity)

    def _on_setting(self, key: str) -> None:
        if self.groups and (key in SCORING_SETTINGS or not key):  # "": all settings changed
            self._rest_timer.start()


def without_scores(group: Mapping[str, Any]) -> Group:
    keys = ("text", "tokens", "stop", "turns", "conversation")
    completions = [{key: row[key] for key in keys if key in row} for row in group["completions"]]
    return {**group, "completions": completions}


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
        self._bench.service.cancel(self._request)
        self._end()

    def keep(self, name: str, group: Mapping[str, Any], text: str, score: float) -> None:
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
            **more,
        )

    def _on_refused(self, problems: list[ConfigProblem]) -> None:
        self.refused.emit(problems[0].sentence)
        self._end()

    def _end(self) -> None:
        self._request, self.busy = None, ""
        self.changed.emit()
