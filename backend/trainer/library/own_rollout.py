"""A program's own function that samples the completions of a step, as TRL's `rollout_func`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from backend.config.config import Config
from backend.models.policy import Policy
from backend.rewards.calls import class_name, describe_error
from backend.sampling.conversations import common_prefix
from backend.sampling.rollout import Poll, Sampler
from backend.sampling.sampler import Sampling
from backend.types import Completion, Group, Problem
from backend.utils.errors import UserError, user_traceback
from backend.utils.text import quote

REQUIRED = ("prompt_ids", "completion_ids", "logprobs")

RolloutFunction = Callable[[list[Any], "RolloutTrainer"], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class RolloutTrainer:
    """What a rollout function gets beside the prompts, by TRL's names. `generate`: ids of prompts → ids and
    log-probabilities (nats, after the temperature) of one completion of each, by the run's own sampler."""

    model: Any
    processing_class: Any
    args: Config
    generate: Callable[[Sequence[list[int]]], list[tuple[list[int], list[float]]]]


class OwnSampler(Sampler):
    """Samples by `function`, which returns a mapping: REQUIRED, a list for each prompt; `env_mask`, 0 where a token is
    not the model's; other columns go to reward functions. Raises UserError."""

    def __init__(self, function: RolloutFunction, config: Config, policy: Policy, *args: Any, **limits: Any) -> None:
        super().__init__(policy, *args, **limits)
        self._function, self._config = function, config

    def sample(
        self,
        problems: Sequence[Problem],
        group_size: int,
        sampling: Sampling,
        seed: int,
        first_number: int,
        poll: Poll = lambda token_count: None,
        finished: Callable[[Group], None] | None = None,
    ) -> list[Group]:
        if any(problem.images for problem in problems):
            raise UserError("rollout_func", "A rollout function reads prompts as text, and these have pictures.")
        number = first_number << 32  # its own random numbers for each prompt that it generates from
        ours = list[BaseException]()  # a stop, or another error that is not the function's

        def generate(prompts: Sequence[list[int]]) -> list[tuple[list[int], list[float]]]:
            nonlocal number
            asked = [Problem(i, "", [], list(ids), "") for i, ids in enumerate(prompts)]
            try:
                groups = super(OwnSampler, self).sample(asked, 1, sampling, seed, number, poll)
            except BaseException as error:
                ours.append(error)
                raise
            number += len(asked)
            return [(group.completions[0].tokens, group.completions[0].logps) for group in groups]

        column = self._config.prompt_feature
        prompts = [problem.row.get(column, problem.messages) for problem in problems for _ in range(group_size)]
        trainer = RolloutTrainer(self.policy.model, self.policy.tokenizer, self._config, generate)
        self.policy.model.eval()
        try:
            returned = self._function(prompts, trainer)
        except Exception as error:
            if ours:
                raise ours[0] from None
            what = f"rollout_func raised {describe_error(error, None, 110)}."
            raise UserError("rollout_func", what, user_traceback(error)) from error
        rows = self._checked(returned, len(prompts))
        poll(sum(len(row["completion_ids"]) for row in rows))
        self.completions += len(rows)
        return [self._group(problem, rows[p * group_size : (p + 1) * group_size]) for p, problem in enumerate(problems)]

    def _checked(self, returned: Any, count: int) -> list[dict[str, Any]]:
        missing = [key for key in REQUIRED if not isinstance(returned, Mapping) or key not in returned]
        if missing:
            keys = ", ".join(REQUIRED)
            what = f"rollout_func must return keys {keys}; it returned {class_name(returned)} without {missing[0]}."
            raise UserError("rollout_func", what)
        for key, values in returned.items():
            if not hasattr(values, "__len__") or len(values) != count:
                what = f"rollout_func must return a list of {count:,} {quote(key, 30)}, one for each prompt."
                raise UserError("rollout_func", what)
        rows = [dict(zip(returned, row, strict=True)) for row in zip(*returned.values(), strict=True)]
        for row in rows:
            size = len(row["completion_ids"])
            for key in ("logprobs", "env_mask"):
                if key in row and len(row[key]) != size:
                    what = f"rollout_func returned {len(row[key]):,} {key} for a completion of {size:,} tokens."
                    raise UserError("rollout_func", what)
        return rows

    def _group(self, problem: Problem, rows: Sequence[dict[str, Any]]) -> Group:
        shared = common_prefix([list(row["prompt_ids"]) for row in rows])
        completions: list[Completion] = []
        for row in rows:
            opening, ids = list(row["prompt_ids"])[len(shared) :], [int(token) for token in row["completion_ids"]]
            mask = [0] * len(opening) + [int(own) for own in row.get("env_mask", [1] * len(ids))]
            ended = bool(ids) and ids[-1] in self.policy.eos_ids
            text = self.policy.tokenizer.decode(ids[: len(ids) - ended], skip_special_tokens=False)
            logps = [0.0] * len(opening) + [float(logp) for logp in row["logprobs"]]
            columns = {key: value for key, value in row.items() if key not in (*REQUIRED, "env_mask")}
            completion = Completion(opening + ids, logps, text, "eos" if ended else "length", columns=columns)
            completions.append(replace(completion, mask=[] if all(mask) else mask))
        return Group(replace(problem, tokens=shared), completions)
