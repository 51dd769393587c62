"""Conversations: completions that call tools. The ids of a conversation are never rendered again: the ids of the
results and of the next turn's beginning are appended to a turn's own, and the model continues from there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from backend.config.config import Config
from backend.data.problems import PromptFormat, with_opening
from backend.sampling.outputs import EOS, WAITING, CompletionBuffer
from backend.sampling.turn_format import TurnFormat
from backend.tools.host import Poll, ToolHost, ToolSchemas
from backend.types import Completion, Group, Problem, Turn
from backend.utils.errors import UserError

WAIT_S = 0.05  # seconds between checks for a stop, while nothing can be decoded
LEFT_OUT = 1000  # characters recorded of a result that did not fit


def turn_format(config: Config, schemas: ToolSchemas, tokenizer: Any) -> TurnFormat:
    """The tool-call format of this tokenizer's model. Raises UserError if there are tools and it has none."""
    made = TurnFormat(tokenizer, config.chat_template_kwargs)
    if made.fault and schemas:
        raise UserError("model", made.fault)
    return made


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of a run. `most_turns`: with calls, in one completion. `schemas_of`: those that a problem's row has.
    `with_opening`: a problem with the text of its environment's `reset` in its prompt."""

    host: ToolHost
    format: TurnFormat
    most_turns: int
    schemas_of: Callable[[Problem], list[dict[str, Any]]]
    with_opening: Callable[[Problem, str], Problem]

    @classmethod
    def of(cls, config: Config, host: ToolHost | None, tokenizer: Any) -> Tools | None:
        """None without a host. Raises UserError for a tokenizer that cannot be used with tools."""
        if host is None:
            return None
        prompt_format = PromptFormat.of(config, host.schemas)
        return cls(
            host,
            turn_format(config, host.schemas, tokenizer),
            config.max_tool_calling_iterations,
            lambda problem: host.schemas.of(prompt_format.environment_of(problem.row)),
            lambda problem, text: with_opening(problem, text, tokenizer, prompt_format),
        )

    def begin(self, problems: Sequence[Problem], group_size: int, poll: Poll) -> Rollout:
        """Begin `group_size` conversations about each problem. Raises UserError where an environment cannot."""
        rows = [problem.row for problem in problems for _ in range(group_size)]
        began = self.host.begin(rows, poll)
        shared, own = list[Problem](), list[list[int]]()
        for p, problem in enumerate(problems):
            texts = [text for _, text in began[p * group_size : (p + 1) * group_size]]
            opened = {text: problem if text is None else self.with_opening(problem, text) for text in set(texts)}
            same = common_prefix([each.tokens for each in opened.values()])
            shared.append(replace(opened[texts[0]], tokens=same))
            own += [opened[text].tokens[len(same) :] for text in texts]
        return Rollout(self, shared, own, [number for number, _ in began])


def common_prefix(rows: Sequence[list[int]]) -> list[int]:
    """The longest common prefix of lists of ids."""
    same = takewhile(lambda ids: len(set(ids)) == 1, zip(*rows, strict=False))
    return [ids[0] for ids in same]


class Rollout:
    """The conversations of one rollout, numbered like its completions: parses what a turn says, has its calls run, and
    hands the results back as tokens. `problems`: what the prompts of each group have in common; `openings`: the rest of
    each completion's prompt, which differs where `reset` says different things of one row."""

    def __init__(
        self, tools: Tools, problems: list[Problem], openings: list[list[int]], numbers: Sequence[int]
    ) -> None:
        self.problems, self.openings = problems, openings
        self._tools, self._numbers = tools, list(numbers)
        group_size = len(numbers) // len(problems)
        self._schemas = [tools.schemas_of(problem) for problem in problems for _ in range(group_size)]
        self._row_of = {number: row for row, number in enumerate(numbers)}
        self.turns: list[list[Turn]] = [[] for _ in numbers]  # of each conversation, so far
        self.waiting = 0  # conversations whose calls run

    def one(self, row: int) -> Rollout:
        """The conversation of one completion as a separate rollout; for rollouts with groups of one."""
        return Rollout(self._tools, [self.problems[row]], [[]], [self._numbers[row]])

    def end_turns(self, rows: Sequence[int], outputs: CompletionBuffer, poll: Poll) -> list[int]:
        """Read the turns that have ended in these completions, and begin to run their calls. → those that wait."""
        waiting: list[int] = []
        for row in rows:
            if outputs.stop[row] != EOS or not self._schemas[row]:
                continue
            turns, start = self.turns[row], self._start(row)
            ids = outputs.tokens(row, start)
            content, calls = self._tools.format.parse(ids, self._schemas[row])
            turns.append(Turn(content, calls, len(ids)))
            if calls and len(turns) <= self._tools.most_turns:
                outputs.stop[row] = WAITING
                self._tools.host.submit(self._numbers[row], calls, poll)
                waiting.append(row)
        self.waiting += len(waiting)
        return waiting

    def results(self, outputs: CompletionBuffer, wait_s: float, poll: Poll) -> tuple[list[int], list[int]]:
        """(completions that go on: their results are appended; those that end, since theirs do not fit)."""
        going_on: list[int] = []
        ending: list[int] = []
        for number, results in self._tools.host.finished(wait_s, poll):
            row = self._row_of[number]
            turn, room = self.turns[row][-1], outputs.max_tokens - int(outputs.length[row])
            turn.results = list(results)
            suffix = [] if self._tools.format.exceeds(results, room) else self._tools.format.suffix(results)
            if suffix and len(suffix) < room:
                outputs.insert(row, suffix)
                turn.result_tokens = len(suffix)
                going_on.append(row)
            else:
                for place, each in enumerate(results):
                    if (size := len(each.content)) > LEFT_OUT:
                        turn.results[place] = replace(each, content=f"{each.content[:LEFT_OUT]}… ({size:,} characters)")
                outputs.stop[row] = EOS
                ending.append(row)
        self.waiting -= len(going_on) + len(ending)
        return going_on, ending

    def completion(self, row: int, outputs: CompletionBuffer) -> Completion:
        """The finished completion with its turns."""
        completion, turns = outputs.completion(row), self.turns[row]
        start = self._start(row)
        if start < len(completion.tokens):  # cut off by the length limit or a stop string
            text = outputs.text(row, start)
            turns.append(Turn(text, [], len(completion.tokens) - start))
        else:
            text = outputs.text(row, start - turns[-1].tokens) if turns else ""
        return replace(completion, text=text, turns=turns, conversation=self._numbers[row])

    def _start(self, row: int) -> int:
        """Where the present turn begins."""
        return len(self.openings[row]) + sum(turn.tokens + turn.result_tokens for turn in self.turns[row])


def tool_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """TRL's call and failure frequency of tools (0 without calls), mean turns, and the share of completions that ended
    because results did not fit. Empty for completions without turns."""
    completions = [completion for group in groups for completion in group.completions]
    if not any(completion.turns for completion in completions):
        return {}
    turns = [turn for completion in completions for turn in completion.turns]
    results: list[Any] = [result for turn in turns for result in turn.results]
    failed = sum(result.failed for result in results)
    dropped = sum(bool(turn.results) and not turn.result_tokens for turn in turns)
    return {
        "tools/call_frequency": len(results) / len(completions),
        "tools/failure_frequency": failed / len(results) if results else 0.0,
        "tools/turns": len(turns) / len(completions),
        "tools/dropped_frequency": dropped / len(completions),
    }
