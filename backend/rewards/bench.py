"""Reward bench: score completions outside a run, one function at a time. Imports no mlx: advantages are plain Python
and equal to a run's."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from backend.config.config import Config, keys_used_by
from backend.judges.model_reward import model_entries
from backend.rewards.allowed_code import code_files
from backend.rewards.calls import Poll, wait_on
from backend.rewards.catalogue import builtin_rewards, locate_reward_file, reward_call, rewards_in_file
from backend.rewards.errors import RewardError
from backend.rewards.findings import Sample, Scores, required_texts, verdicts
from backend.rewards.inputs import TrainerState
from backend.rewards.scorer import Scorer
from backend.rewards.scoring import RewardSource, samples_of, total_reward
from backend.rewards.worker_process import RewardWorker
from backend.runs.completion_rows import SampledRow, ScoringRow, images_of, token_ids
from backend.tools.host import ToolHost
from backend.tools.load import load_tools
from backend.training.advantages import advantage_values
from backend.types import Completion, Group, Problem, Turn, content_text, is_chat
from backend.utils import documents
from backend.utils.errors import UserError
from backend.utils.files import read_text, user_path
from backend.utils.text import quote

Line = Mapping[str, Any]  # A group as written by `line_of`
MOST_BYTES = 2**31  # of a file of completions


def reward_file_of(config: Config) -> Path | None:
    file = config.reward_functions_file
    return locate_reward_file(file).resolve() if file else None


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
        lines: Sequence[Line],
        poll: Poll = wait_on,
        on_function: Callable[[str], None] = lambda name: None,
    ) -> list[Scores]:
        """Score all completions with each of the `reward_functions` separately. `poll` may raise to cancel;
        `on_function` gets each name first. Raises UserError."""
        groups = [group_of(row, index, f"Row {index + 1}") for index, row in enumerate(lines)]
        state = TrainerState(max_completion_length=config.max_completion_length)
        results: list[Scores] = []
        with self._lock:
            try:
                scorer, timeout_s = self._scorer_of(config), config.reward_timeout
                for index, function in enumerate(scorer.load(poll)[0]):
                    on_function(function.name)
                    try:
                        scored = scorer.call(groups, 0, [index], timeout_s, state, captures=True, poll=poll)
                    except RewardError as error:  # of a model
                        results.append(Scores(function.name, error=error.place))
                        continue
                    result = Scores(function.name, printed=scored.printed)
                    if failure := scored.failure:
                        result.error = scorer.error([function], failure, samples_of(groups)).place
                    else:
                        result.seconds, result.given = scored.seconds[0], scored.scores[0]
                        result.logged = scored.columns
                    results.append(result)
                scorer.unload_models()  # a bench may stay open for hours
            except BaseException:
                self.close()  # the next task begins in a fresh process
                raise
        return results

    @contextmanager
    def tools(self, config: Config, scoring: Config, poll: Poll = wait_on) -> Iterator[ToolHost | None]:
        """The tools of a run, in the process that scores; nothing is scored meanwhile. Their environments stay until
        the next rollout, for functions that read them. Raises UserError."""
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
        base, names, file = Path.cwd(), config.reward_functions, reward_file_of(config)
        files = code_files({"reward_functions": names, "reward_functions_file": str(file or "")}, base)
        loaded = (_stamps(files), config.reward_network, tuple(names), file, base)
        if self._scorer is None or loaded != self._loaded:
            if loaded[:2] != self._loaded[:2]:
                self.close()
                self.worker = RewardWorker(config.reward_network)
            source = RewardSource([names], file, base, tuple(files), models=model_entries(names, file))
            self._end_scorer()
            self._scorer, self._loaded = Scorer(source, self.worker, config.reward_timeout), loaded
        return self._scorer

    def _end_scorer(self) -> None:
        if self._scorer is not None:
            self._scorer.unload_models()
        tools, self._tools, self._tools_of = self._tools, None, ()
        if tools is not None:
            with suppress(UserError):  # its process may be gone
                tools.close()

    def close(self) -> None:
        self._end_scorer()
        self._scorer, self._loaded = None, ()
        self.worker.stop()


def _stamps(files: Sequence[Path]) -> tuple[tuple[str, int, int], ...]:
    """What tells an edited file. Take it before the worker reads the files, so that an edit in between is seen."""
    return tuple((str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in files)


def score_lines(
    bench: RewardBench,
    lines: Sequence[Line],
    config: Config,
    poll: Poll = wait_on,
    on_function: Callable[[str], None] = lambda name: None,
) -> dict[str, Any]:
    """Score groups; `poll` and `on_function` as in `RewardBench.score`. Raises UserError. Returns {"scored":
    [{"rewards", "reward", "advantage", "logged"?} of each completion, by group], "functions": [{"name", "label",
    "weight", "seconds", "error", "printed"}], "findings": [Finding as a dict], "seconds"}."""
    start = time.perf_counter()
    results = bench.score(config, lines, poll, on_function)
    seconds = time.perf_counter() - start
    of_environments = [result.name for result in results[len(config.reward_functions) :]]  # their `get_reward`
    names, weights_given = (
        [*config.reward_functions, *of_environments],
        [*config.weights, *[1.0] * len(of_environments)],
    )
    completions = [completion for line in lines for completion in line["completions"]]
    sizes = [len(line["completions"]) for line in lines]
    counted = [(result, weight) for result, weight in zip(results, weights_given, strict=True) if not result.error]
    weights = [weight for _, weight in counted]
    scores_by_row = [[result.given[i] for result, _ in counted] for i in range(len(completions))]
    rewards = [total_reward(scores, weights) for scores in scores_by_row]
    rows: list[dict[str, Any]] = []
    for i, advantage in enumerate(_advantages(scores_by_row, sizes, weights, config)):
        given = {result.name: result.given[i] for result, _ in counted}
        logged = {column: values[i] for result, _ in counted for column, values in result.logged.items()}
        row = {"rewards": given, "reward": rewards[i], "advantage": advantage}
        rows.append(row | ({"logged": logged} if logged else {}))
    # Labels and required texts are read from source.
    own, own_file = dict[str, str](), reward_file_of(config)
    with suppress(UserError):
        own = {entry.name: entry.label for entry in rewards_in_file(own_file)} if own_file else {}
    labels = {entry.name: entry.label for entry in builtin_rewards()} | own
    for name, result, weight in zip(names, results, weights_given, strict=True):
        call = reward_call(name, labels)
        result.weight, result.label = weight, call.alias or labels.get(call.function, call.name)
        result.looks_for = (str(call.arguments.get("word", "")),)
        if call.function != "keyword" or not result.looks_for[0]:
            file = locate_reward_file(call.file).resolve() if call.file else None
            result.looks_for = required_texts(call.name, call.function, own_file if call.function in own else file)
    sample = Sample(
        sizes,
        [completion["text"] for completion in completions],
        rewards,
        results,
        [str(completion.get("stop", "eos")) for completion in completions],
        [str(line.get("answer") or "") for line in lines],
        config.group_size,
        config.success_reward_threshold,
    )
    in_order = iter(rows)
    told = ("name", "label", "weight", "seconds", "error", "printed")
    return {
        "scored": [list(islice(in_order, size)) for size in sizes],
        "functions": [{key: getattr(result, key) for key in told} for result in results],
        "findings": [asdict(finding) for finding in verdicts(sample)],
        "seconds": seconds,
    }


def _advantages(
    scores_by_row: Sequence[list[Any]], sizes: Sequence[int], weights: list[float], config: Config
) -> list[float]:
    if not weights:
        return [0.0] * len(scores_by_row)
    if len(set(sizes)) > 1:
        rows = iter(scores_by_row)
        return [value for size in sizes for value in _advantages(list(islice(rows, size)), [size], weights, config)]
    if sizes[0] == 1 and config.scale_rewards != "batch":
        return [0.0] * len(scores_by_row)
    values, _ = advantage_values(
        scores_by_row,
        sizes[0],
        weights=weights,
        scale_rewards=config.scale_rewards,
        multi_objective_aggregation=config.multi_objective_aggregation,
        baseline=config.advantage_baseline,
    )
    return array("f", values).tolist()  # rounded to float32, as a training step has them


# Completions to score, as JSON lines: dataset-like rows, a run's completions.jsonl, or bench output


def read_groups(path: Path) -> list[Group]:
    """As `groups_in`, of a file."""
    return groups_in(read_text(user_path(str(path), "completions"), "completions", MOST_BYTES), quote(path))


def groups_in(text: str, where: str) -> list[Group]:
    """One group per line of `text`; `where` names it. Raises UserError on `completions`."""
    groups = [group_of(row, number - 1, line) for number, line, row in json_lines(text, where, "completions")]
    if not groups:
        raise UserError("completions", f"{where} holds no completions.")
    return groups


def json_lines(text: str, where: str, setting: str) -> Iterator[tuple[int, str, Any]]:
    """(number, its name in a message, value) of each line that is not empty. Raises UserError on `setting`."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            name = f"Line {number} of {where}"
            try:
                yield number, name, documents.parse_loose_json(line)
            except documents.BrokenJson as error:
                raise UserError(setting, f"{name} is not JSON that can be read: {error.why}.") from None


def group_of(row: Any, index: int, where: str) -> Group:
    """Group of one line. Raises UserError on `completions` naming `where`."""
    row = row if isinstance(row, dict) else {}
    listed = row.get("completions")
    if isinstance(row.get("completion"), str):
        listed = [row["completion"]]
    rows = [item if isinstance(item, dict) else {"text": item} for item in listed] if isinstance(listed, list) else []
    if not rows or not all(isinstance(each.get("text"), str) for each in rows):
        raise UserError("completions", f"{where} has neither a text under completion nor a list under completions.")
    completions: list[Completion] = []
    for each in rows:
        stop = each.get("stop")
        stop = stop if stop in ("eos", "length", "string") else "eos"
        try:
            turns = [Turn.of(turn) for turn in each.get("turns") or ()]
        except (KeyError, TypeError):
            raise UserError("completions", f"{where} has turns that are not as in completions.jsonl.") from None
        completion = Completion(token_ids(each.get("tokens")), [], each["text"], stop, turns=turns)
        completion.conversation = each.get("conversation", -1)
        completions.append(completion)
    kind, prompt, columns = row.get("type"), row.get("prompt", ""), row.get("columns")
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
        answer=str(row.get("answer", "")),
        type=None if kind is None else str(kind),
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


def merge_consecutive(groups: list[Group]) -> list[Group]:
    merged: list[Group] = []
    for group in groups:
        a, b = merged[-1].problem if merged else None, group.problem
        if a and (a.prompt, a.answer, a.type, a.row) == (b.prompt, b.answer, b.type, b.row):
            merged[-1].completions.extend(group.completions)
        else:
            merged.append(Group(b, list(group.completions)))
    return merged
