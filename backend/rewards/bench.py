"""Reward bench: score completions outside a run, one function at a time, and find problems in the scores. Imports no
mlx: advantages are plain Python and equal to a run's.

Regression tests of a reward file are completions with their expected scores. `my_rewards.py` has its cases in
`my_rewards.cases.jsonl`, one per line: {prompt, answer, type, columns, completion, tokens, expected: {function: score
or null}, calls: {function: its entry, if more than the name}}."""

import json
import math
import statistics
import threading
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, get_args

from backend.config.config import Config, keys_used_by
from backend.data.problems import as_text
from backend.data.signal import expected_signal
from backend.rewards import catalogue
from backend.rewards.allowed_code import code_files
from backend.rewards.calls import Poll, RewardError, wait_on
from backend.rewards.scorer import Scorer, reward_source
from backend.rewards.scoring import TrainerState, total_reward
from backend.rewards.worker import RewardWorker
from backend.runs.completion_rows import SampledRow, ScoringRow, Stop, images_of, token_ids
from backend.tools.host import ToolHost
from backend.tools.load import load_tools
from backend.trainer.health.rules import Finding
from backend.training.advantages import advantage_values
from backend.types import Completion, Group, Problem, Turn, content_text, is_chat
from backend.utils import documents
from backend.utils.disk import save_as, writing
from backend.utils.errors import UserError
from backend.utils.files import read_text, user_path
from backend.utils.text import quote

Case = dict[str, Any]
Expected = Mapping[str, float | None]
TOLERANCE = 1e-6  # absolute or relative tolerance of scores
MOST_BYTES, MOST_CASE_BYTES = 2**31, 2**28  # of a file of completions, and of cases
SAME_REWARD = 1e-8  # difference below which rewards are equal
DOMINANT_SHARE = 0.9  # share of the within-group spread that counts as dominant
SLOW_S = 0.25
FEW_SIGNALS = 0.7  # share of groups with a signal below which choosing prompts may pay
LEVELS = ("error", "warning", "good", "note")  # levels of findings, in report order

_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
REQUIRED_TEXTS = {
    "r1_accuracy_reward_func": ("<answer>",),
    "r1_int_reward_func": ("<answer>",),
    "r1_strict_format_reward_func": _TAGS,
    "r1_soft_format_reward_func": _TAGS,
    "r1_count_xml": _TAGS,
    "think_format_reward": ("<think>", "</think>"),
}  # texts that a shipped function requires; `keyword` requires its argument


@dataclass(slots=True)
class FunctionScores:
    """Of one function. `given`: of each completion, empty after an `error`, the place of `RewardError`. `looks_for`:
    required texts. `logged`: columns by name."""

    name: str
    label: str = ""
    weight: float = 1.0
    given: Sequence[float | None] = ()
    seconds: float = 0.0
    error: Mapping[str, Any] | None = None
    looks_for: Sequence[str] = ()
    logged: Mapping[str, Sequence[Any]] = field(default_factory=dict[str, Any])
    printed: str = ""

    @property
    def known(self) -> list[float]:
        return [score for score in self.given if score is not None]

    @property
    def is_constant(self) -> bool:
        return bool(self.known) and max(self.known) - min(self.known) <= SAME_REWARD


@dataclass(frozen=True, slots=True)
class ScoredSample:
    """Completions with their rewards, and the scores that these are made of."""

    groups: Sequence[Group]
    functions: Sequence[FunctionScores]
    group_size: int = 0  # of a run, 0 if unknown
    solved_from: float = 1.0

    @property
    def texts(self) -> list[str]:
        return [completion.text for group in self.groups for completion in group.completions]

    @property
    def rewards(self) -> list[list[float]]:
        """Of each group, without unknown ones."""
        return [[each.reward for each in group.completions if each.reward is not None] for group in self.groups]

    def spread_of(self, scores: FunctionScores) -> list[float]:
        """Of one function, within each group."""
        given = iter(scores.given)
        parts = (islice(given, len(group.completions)) for group in self.groups)
        return [_std([score for score in part if score is not None]) for part in parts]

    @property
    def working(self) -> list[FunctionScores]:
        return [scores for scores in self.functions if scores.given and scores.weight]

    @property
    def is_single(self) -> bool:
        return all(len(group.completions) == 1 for group in self.groups)


def _std(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def verdicts(sample: ScoredSample) -> list[Finding]:
    """All findings, errors first; a positive one if there are no problems."""
    if not sample.texts:
        return []
    findings = [*_no_signal(sample), *_never_fires(sample), *_others(sample)]
    if not any(finding.level in LEVELS[:2] for finding in findings):
        if sample.is_single:
            findings.append(Finding("scored", "Every function gave scores that a run can use.", "", "good"))
        else:
            apart = sum(_std(rewards) > SAME_REWARD for rewards in sample.rewards)
            where = f"within {apart} of {len(sample.groups)} prompts " if len(sample.groups) > 1 else ""
            sentence = f"There is something to learn from: {where}the completions score differently."
            findings.append(Finding("signal", sentence, "", "good"))
    return sorted(findings, key=lambda finding: LEVELS.index(finding.level))


def _no_signal(sample: ScoredSample) -> Iterator[Finding]:
    pairs = [pair for pair in zip(sample.groups, sample.rewards, strict=True) if len(pair[0].completions) > 1]
    flat = [group.completions for group, rewards in pairs if rewards and _std(rewards) <= SAME_REWARD]
    if not flat or 2 * len(flat) < len(sample.groups):
        return
    several = len(pairs)
    if several == len(flat) == 1:
        sentence = f"All {len(flat[0])} completions score the same: no signal."
    elif several == len(flat):
        sentence = f"Within each of the {several} prompts all completions score the same: no signal."
    else:
        sentence = f"Within {len(flat)} of {several} prompts all completions score the same, and teach nothing."
    varying = [scores.label for scores in sample.working if max(sample.spread_of(scores)) > SAME_REWARD]
    if all(len({each.text for each in completions}) == 1 for completions in flat):
        advice = "They are the same text throughout: raise the temperature."
    elif len(varying) > 1 and len(flat) == len(sample.groups):
        advice = f"{_listed(varying)} differ, but weighted they cancel out: change a weight."
    elif all(scores.is_constant and scores.known[0] > 0 for scores in sample.working):
        advice = "Every function gives them the same: take harder prompts, or finer scores."
    else:
        advice = "Take a larger group, a higher temperature, partial credit, or easier prompts."
    yield Finding("no_signal", sentence, advice)


def _never_fires(sample: ScoredSample) -> Iterator[Finding]:
    silent = defaultdict[tuple[str, str], list[FunctionScores]](list)
    for scores in sample.functions:
        if not scores.known or any(scores.known):
            continue
        reason = f"it gives 0 to all {len(sample.texts)} completions"
        advice = "Read some completions beside their answers: the column may be the wrong one, or the task too hard."
        if missing := [mark for mark in scores.looks_for if not any(mark in text for text in sample.texts)]:
            reason = f"the model writes no {_listed(missing, 'or')}"
            advice = "Say in the system prompt what to write, or reward a first step towards it."
        elif scores.looks_for:
            count = sum(all(mark in text for mark in scores.looks_for) for text in sample.texts)
            have = "completions have" if len(sample.texts) > 1 else "completion has"
            listed = _listed(scores.looks_for)
            reason = f"{count} of {len(sample.texts)} {have} {listed}, and none is what it wants"
        if not any(group.problem.answer.strip() for group in sample.groups):
            advice = "The dataset's answers are empty: choose the Answer column on Train."
        silent[reason, advice].append(scores)
    for (reason, advice), alike in silent.items():
        fires = "fires" if len(alike) == 1 else "fire"
        sentence = f"{_listed([scores.label for scores in alike])} never {fires}: {reason}."
        yield Finding(f"never_fires {' '.join(scores.name for scores in alike)}", sentence, advice)


def _others(sample: ScoredSample) -> Iterator[Finding]:
    total = sum(scores.seconds for scores in sample.functions)
    for scores in sample.functions:
        if scores.error:
            yield Finding(f"fails {scores.name}", scores.error["sentence"], "A run would stop here.", "error")
        if scores.given and not scores.known:
            sentence = f"{scores.label} has no opinion on any completion."
            advice = "Look at what it prints, and at the columns that it asks for."
            yield Finding(f"silent {scores.name}", sentence, advice)
        if scores.seconds >= SLOW_S and scores.seconds >= DOMINANT_SHARE * total and len(sample.functions) > 1:
            sentence = f"{scores.label} takes {scores.seconds:.2g} s of {total:.2g} s: much slower than the rest."
            yield Finding(f"slow {scores.name}", sentence, "It is called once a step with every completion.", "note")
    if sample.is_single:
        sentence = "There is one completion for each prompt, so nothing to compare: every advantage is 0."
        yield Finding("single", sentence, "Give two or more completions for a prompt.", "note")
    same = [scores for scores in sample.functions if len(scores.known) > 1 and scores.is_constant and scores.known[0]]
    if same:
        gives, asks = f"gives {same[0].known[0]:.3g} to every completion: it adds", "it asks"
        if len(same) > 1:
            gives, asks = "give every completion the same: they add", "they ask"
        sentence = f"{_listed([scores.label for scores in same])} {gives} nothing to the advantage."
        code = f"constant {' '.join(scores.name for scores in same)}"
        yield Finding(code, sentence, f"What {asks} for may be learnt already, or too easy.", "note")
    # Nearly all of the weighted spread within groups.
    spreads = {scores.label: abs(scores.weight) * sum(sample.spread_of(scores)) for scores in sample.working}
    moving = [label for label, spread in spreads.items() if spread > SAME_REWARD]
    label, spread = max(spreads.items(), key=lambda pair: pair[1], default=("", 0.0))
    if len(moving) > 1 and spread >= DOMINANT_SHARE * sum(spreads.values()):
        others = "the other hardly counts" if len(moving) == 2 else f"the other {len(moving) - 1} hardly count"
        share = f"{spread / sum(spreads.values()):.0%}"
        sentence = f"{label} makes {share} of the difference between completions; {others}."
        yield Finding("dominates", sentence, "Lower its weight, if the others are meant to be heard.", "note")
    known = list(filter(None, sample.rewards))
    if sample.group_size > 1 and not sample.is_single and known:
        share = expected_signal(known, sample.group_size, sample.solved_from)
        sentence = f"Over the whole dataset about {share:.0%} of the groups of {sample.group_size} would have a signal."
        advice = "Prompt selection by pass rate chooses prompts that have one." if share < FEW_SIGNALS else ""
        yield Finding("expected_signal", sentence, advice, "note")
    cut = sum(completion.stop == "length" for group in sample.groups for completion in group.completions)
    if cut / len(sample.texts) > 0.3:
        sentence = f"{cut} of {len(sample.texts)} completions ran into the length limit."
        yield Finding("cut_off", sentence, "Raise Completion, or strengthen a reward for the right form.")


def _listed(words: Sequence[str], last: str = "and") -> str:
    words = [word for word in words if not word.startswith("</")] or list(words)
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"


def reward_file_of(config: Config) -> Path | None:
    file = config.reward_functions_file
    return catalogue.locate_reward_file(file).resolve() if file else None


class RewardBench:
    """A reward worker that is reused until the reward files change. One task at a time."""

    def __init__(self) -> None:
        self.worker = RewardWorker()
        self._scorer: Scorer | None = None
        self._loaded: tuple[Any, ...] = ()
        self._tools: ToolHost | None = None
        self._tools_of: tuple[Any, ...] = ()
        self._lock = threading.Lock()

    def score(
        self,
        config: Config,
        groups: Sequence[Group],
        poll: Poll = wait_on,
        on_function: Callable[[str], None] = lambda name: None,
    ) -> list[FunctionScores]:
        """Score all completions with each function separately. `poll` may raise to cancel. Raises UserError."""
        state = TrainerState(max_completion_length=config.max_completion_length)
        results: list[FunctionScores] = []
        with self._lock:
            try:
                scorer = self._scorer_of(config)
                for index, function in enumerate(scorer.load(poll)[0]):
                    on_function(function.name)
                    result = FunctionScores(function.name, function.name)
                    try:
                        scored = scorer.call(groups, 0, [index], state, captures=True, poll=poll)
                        result.seconds, result.given = scored.seconds[0], scored.scores[0]
                        result.logged, result.printed = scored.columns, scored.printed
                    except RewardError as error:
                        result.error, result.printed = error.place, error.failure.printed
                    results.append(result)
                scorer.unload_models()  # a bench may stay open for hours
            except BaseException:
                self.close()  # the next task begins in a fresh process
                raise
        return results

    @contextmanager
    def tools(self, config: Config, scoring: Config, poll: Poll) -> Iterator[ToolHost | None]:
        """A run's tools, in the scoring process; environments stay until the next rollout. Raises UserError."""
        named = {key: getattr(config, key) for key in keys_used_by("tools")}
        with self._lock:
            try:
                key = (_stamps(code_files(named, Path.cwd())), repr(named))
                if key != self._tools_of:
                    self.close()  # a scorer loads its tools once
                self._tools = self._tools or load_tools(config, self._scorer_of(scoring))
                self._tools_of = key
                yield self._tools
            except BaseException:
                self.close()
                raise

    def _scorer_of(self, config: Config) -> Scorer:
        about = {"stages": [], "train_mode": "grpo", "reward_functions_file": str(reward_file_of(config) or "")}
        source = reward_source(config.model_copy(update=about))
        loaded = (_stamps(source.files), config.reward_network, source)
        if self._scorer is None or loaded != self._loaded:
            if loaded[:2] != self._loaded[:2]:
                self.close()
                self.worker = RewardWorker(config.reward_network)
            self._end_scorer()
            self._scorer, self._loaded = Scorer(source, self.worker, config.reward_timeout), loaded
        self._scorer.timeout_s = config.reward_timeout
        return self._scorer

    def _end_scorer(self) -> None:
        tools, self._tools, self._tools_of = self._tools, None, ()
        if tools is not None:
            with suppress(UserError):  # its process may be gone
                tools.close()
        if self._scorer is not None:
            self._scorer.closing.close()
            self._scorer.unload_models()

    def close(self) -> None:
        self._end_scorer()
        self._scorer, self._loaded = None, ()
        self.worker.stop()


def _stamps(files: Sequence[Path]) -> tuple[tuple[str, int, int], ...]:
    """What tells an edited file. Take it before the worker reads the files, so that an edit in between is seen."""
    return tuple((str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in files)


def score_groups(
    bench: RewardBench,
    groups: Sequence[Group],
    config: Config,
    poll: Poll = wait_on,
    on_function: Callable[[str], None] = lambda name: None,
) -> dict[str, Any]:
    """Score as `RewardBench.score`, and fill in each completion's scores, reward, advantage and logged columns. Returns
    {"scored": [{"rewards", "reward", "advantage", "logged"?} of each completion, by group], "functions": [{"name",
    "label", "weight", "seconds", "error", "printed", "known": its scores without None}], "findings", "seconds"}."""
    start = time.perf_counter()
    results = bench.score(config, groups, poll, on_function)
    seconds = time.perf_counter() - start
    own, own_file = dict[str, str](), reward_file_of(config)
    with suppress(UserError):  # labels are read from source
        own = {entry.name: entry.label for entry in catalogue.rewards_in_file(own_file)} if own_file else {}
    labels = {entry.name: entry.label for entry in catalogue.builtin_rewards()} | own
    # Without `get_reward` of environments, which come last.
    for result, entry, weight in zip(results, config.reward_functions, config.weights, strict=False):
        call = catalogue.reward_call(entry, labels)
        result.weight, result.label = weight, call.alias or labels.get(call.function, call.name)
        if not call.file and call.function not in own:
            word = [str(call.arguments["word"])] if call.function == "keyword" else []
            result.looks_for = word or REQUIRED_TEXTS.get(call.function, ())
    counted = [result for result in results if not result.error]
    weights = [result.weight for result in counted]
    for i, completion in enumerate(completion for group in groups for completion in group.completions):
        completion.scores = {result.name: result.given[i] for result in counted}
        completion.reward = total_reward(completion.scores.values(), weights)
        completion.logged = {column: values[i] for result in counted for column, values in result.logged.items()}
    fill_advantages(groups, weights, config)
    sample = ScoredSample(groups, results, config.group_size, config.success_reward_threshold)
    told = ("name", "label", "weight", "seconds", "error", "printed", "known")
    return {
        "scored": [
            [
                {"rewards": each.scores, "reward": each.reward, "advantage": each.advantage}
                | ({"logged": each.logged} if each.logged else {})
                for each in group.completions
            ]
            for group in groups
        ],
        "functions": [{key: getattr(result, key) for key in told} for result in results],
        "findings": [asdict(finding) for finding in verdicts(sample)],
        "seconds": seconds,
    }


def fill_advantages(groups: Sequence[Group], weights: Sequence[float], config: Config) -> None:
    """Fill in each completion's advantage; 0 where there is nothing to compare."""
    sizes = {len(group.completions) for group in groups}
    if len(sizes) > 1:
        for group in groups:
            fill_advantages([group], weights, config)
        return
    completions = [completion for group in groups for completion in group.completions]
    values = [0.0] * len(completions)
    if weights and (sizes != {1} or config.scale_rewards == "batch"):
        values, _ = advantage_values(
            [[*completion.scores.values()] for completion in completions],
            sizes.pop(),
            weights=weights,
            scale_rewards=config.scale_rewards,
            multi_objective_aggregation=config.multi_objective_aggregation,
            baseline=config.advantage_baseline,
        )
        values = array("f", values)  # rounded to float32, as a training step has them
    for completion, advantage in zip(completions, values, strict=True):
        completion.advantage = advantage


# Completions to score, as JSON lines: dataset-like rows, a run's completions.jsonl, or bench output


def read_groups(path: Path) -> list[Group]:
    """As `groups_in`, of a file."""
    return groups_in(read_text(user_path(str(path), "completions"), "completions", MOST_BYTES), quote(path))


def groups_in(text: str, where: str) -> list[Group]:
    """A group for consecutive lines of one prompt; `where` names the text. Raises UserError on `completions`."""
    groups: list[Group] = []
    for index, (line, row) in enumerate(json_lines(text, where, "completions")):
        group = group_of(row, index, line)
        a, b = groups[-1].problem if groups else None, group.problem
        if a and (a.prompt, a.answer, a.type, a.row) == (b.prompt, b.answer, b.type, b.row):
            groups[-1].completions.extend(group.completions)
        else:
            groups.append(group)
    if not groups:
        raise UserError("completions", f"{where} holds no completions.")
    return groups


def json_lines(text: str, where: str, setting: str) -> Iterator[tuple[str, Any]]:
    """(its name in a message, value) of each line that is not empty. Raises UserError on `setting`."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            name = f"Line {number} of {where}"
            try:
                yield name, documents.parse_loose_json(line)
            except documents.BrokenJson as error:
                raise UserError(setting, f"{name} is not JSON that can be read: {error.why}.") from None


def group_of(row: Any, index: int, where: str) -> Group:
    """Group of one line. Raises UserError on `completions` naming `where`."""
    row = row if isinstance(row, dict) else {}
    listed = [row["completion"]] if isinstance(row.get("completion"), str) else row.get("completions")
    rows = [item if isinstance(item, dict) else {"text": item} for item in listed] if isinstance(listed, list) else []
    if not rows or not all(isinstance(each.get("text"), str) for each in rows):
        raise UserError("completions", f"{where} has neither a text under completion nor a list under completions.")
    completions: list[Completion] = []
    for each in rows:
        stop = each["stop"] if each.get("stop") in get_args(Stop) else "eos"
        try:
            turns = [Turn.of(turn) for turn in each.get("turns") or ()]
        except (KeyError, TypeError):
            raise UserError("completions", f"{where} has turns that are not as in completions.jsonl.") from None
        about = {"turns": turns, "conversation": each.get("conversation", -1)}
        completions.append(Completion(token_ids(each.get("tokens")), [], each["text"], stop, **about))
    prompt, columns = row.get("prompt", ""), row.get("columns")
    messages = next((chat for chat in (prompt, row.get("messages")) if is_chat(chat)), [])
    if not messages and (paths := images_of(row)):
        parts = [*({"type": "image", "image": path} for path in paths), {"type": "text", "text": str(prompt)}]
        messages = [{"role": "user", "content": parts}]
    other_keys = {key: value for key, value in row.items() if key not in ("completion", "completions")}
    problem = Problem(
        index=index,
        prompt=content_text(messages[-1]["content"]) if is_chat(prompt) else str(prompt),
        messages=messages,
        tokens=[],
        answer=as_text(row.get("answer")),
        type=None if row.get("type") is None else as_text(row["type"]),
        row=columns if isinstance(columns, dict) else other_keys,
    )
    return Group(problem, completions)


def line_of(group: Group) -> ScoringRow:
    """A group as a line for `group_of`."""
    problem = group.problem
    line = ScoringRow(
        prompt=problem.prompt,
        answer=problem.answer,
        type=problem.type,
        messages=problem.messages,
        columns=problem.row,
        completions=[],
    )
    for each in group.completions:
        line["completions"].append(row := SampledRow(text=each.text, tokens=list(each.tokens), stop=each.stop))
        if each.turns:
            row["turns"], row["conversation"] = [turn.row() for turn in each.turns], each.conversation
    if problem.images:
        line["images"] = problem.images
    return line


def cases_file(reward_file: Path) -> Path:
    return reward_file.with_name(f"{reward_file.stem}.cases.jsonl")


def read_cases(reward_file: Path) -> list[Case]:
    """Cases of a reward file or rubric in file order; [] without any. Raises UserError on `cases`."""
    path = cases_file(reward_file)
    return cases_in(path) if path.exists() else []


def cases_in(path: Path) -> list[Case]:
    """The cases of a file in its order. Raises UserError on `cases`."""
    cases: list[Case] = []
    text = read_text(path, "cases", MOST_CASE_BYTES)
    for where, case in json_lines(text, path.name, "cases"):
        expected = case.get("expected") if isinstance(case, dict) else None
        scores = expected.values() if isinstance(expected, dict) else ()
        are_scores = all(score is None or (isinstance(score, int | float) and math.isfinite(score)) for score in scores)
        if not expected or not scores or not are_scores or not isinstance(case.get("completion"), str):
            raise UserError("cases", f"{where} needs a text under completion, and function: score under expected.")
        cases.append(case)
    return cases


def write_cases(reward_file: Path, cases: Sequence[Case]) -> None:
    """Replace the file, or delete it if there are no cases. Raises DiskError."""
    path = cases_file(reward_file)
    if cases:
        save_as(path, "".join(json.dumps(case, ensure_ascii=False, default=str) + "\n" for case in cases))
        return
    with writing(path):
        path.unlink(missing_ok=True)


def new_case(
    group: Mapping[str, Any], completion: str, expected: Expected, calls: Mapping[str, str] | None = None
) -> Case:
    """A case of one completion of a group, given as by `line_of`."""
    keys = ("prompt", "answer", "type", "columns", "messages")
    about = {key: group[key] for key in keys if group.get(key) not in (None, [], {})}
    sampled = next((row for row in group.get("completions") or () if row.get("text") == completion), {})
    tokens = token_ids(sampled.get("tokens"))
    entries = {name: entry for name, entry in (calls or {}).items() if name in expected and entry != name}
    case = {**about, "completion": completion, "tokens": tokens, "expected": dict(expected), "calls": entries}
    return {key: value for key, value in case.items() if value or key not in ("tokens", "calls")}


def rerun(
    bench: RewardBench, file: Path, cases: Sequence[Case], timeout_s: float, poll: Callable[[], None] = lambda: None
) -> list[dict[str, Any]]:
    """Score every case with its functions: {"case", "given": its scores, "failures": a message for each that differs,
    "tracebacks": of functions that failed}. Raises UserError if the file cannot be loaded."""
    known = [function.name for function in (*catalogue.builtin_rewards(), *catalogue.rewards_in_file(file))]
    available: dict[str, None] = {}
    groups: list[Group] = []
    for index, case in enumerate(cases):
        for name in case["expected"]:
            entry = (case.get("calls") or {}).get(name, name)
            call = catalogue.RewardCall(entry) if entry in known else catalogue.find_call(entry)
            # A function may be gone; then only its own case fails.
            if call and (call.file or call.function in known or catalogue.computes_names(file)):
                available[entry] = None
        row = {key: value for key, value in case.items() if key not in ("expected", "calls", "tokens", "completion")}
        row["completions"] = [{"text": case["completion"], "tokens": case.get("tokens")}]
        groups.append(group_of(row, index, f"Row {index + 1}"))
    results: dict[str, FunctionScores] = {}
    if available:
        scoring = Config(reward_functions=list(available), reward_functions_file=str(file), reward_timeout=timeout_s)
        results = {result.name: result for result in bench.score(scoring, groups, poll)}

    def text(score: float | None) -> str:
        return "no opinion" if score is None else f"{score:.6g}"

    found: list[dict[str, Any]] = []
    for index, case in enumerate(cases):
        given = {name: result.given[index] for name, result in results.items() if not result.error}
        errors = {name: result.error for name, result in results.items() if result.error and name in case["expected"]}
        failures: list[str] = []
        for name, expected in case["expected"].items():
            score = given.get(name, math.nan)
            is_equal = expected is score
            if expected is not None and score is not None:
                is_equal = math.isclose(expected, score, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
            if not is_equal:
                gave = f"gave {text(score)}" if name in given else "gave no score"
                reason = f" {errors[name]['sentence']}" if name in errors else ""
                failures.append(f"{name} {gave}; {text(expected)} is expected.{reason}")
        tracebacks = [error["traceback"] for error in errors.values()]
        found.append({"case": case, "given": given, "failures": failures, "tracebacks": tracebacks})
    return found
