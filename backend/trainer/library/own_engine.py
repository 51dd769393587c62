"""Optimizer, schedule and rollout function of a program (docs/library.md). Settings describe the first two in text,
which a resume compares. A checkpoint keeps an optimizer's `state` alone, so each is tried on a few small arrays."""

import copy
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import mlx.core as mx
from mlx.optimizers import Optimizer
from mlx.utils import tree_flatten

from backend.config.config import Config
from backend.config.settings.training import OWN
from backend.models.policy import Policy
from backend.rewards.calls import class_name
from backend.sampling.conversations import common_prefix
from backend.sampling.rollout import Poll, Sampler
from backend.sampling.sampler import Sampling
from backend.trainer.library.own_functions import errors_of_program, name_of
from backend.training.optimizers import OwnUpdates, rate_of, restore, state_arrays
from backend.types import Completion, Group, Problem
from backend.utils.errors import ConfigProblem, UserError
from backend.utils.text import quote

LONGEST = 200  # characters of the description of an optimizer

GivenOptimizer = Optimizer | Callable[[float], Optimizer]


def _guarded(optimizer: Optimizer) -> Optimizer:
    for method, where in (("init", "The init"), ("apply_gradients", "An update")):
        guard = errors_of_program("optimizer", f"{where} of {class_name(optimizer)}")
        setattr(optimizer, method, guard(getattr(optimizer, method)))
    return optimizer


def _maker(given: GivenOptimizer) -> Callable[[float], Optimizer]:
    if isinstance(given, Optimizer):
        for each in _leaves(given):
            if each.state.keys() - {"step", "learning_rate"} or int(each.state.get("step", 0)):
                sentence = f"This {class_name(given)} has a state from elsewhere; a run begins with a new optimizer."
                raise UserError("optimizer", sentence)
        return lambda rate: _guarded(copy.deepcopy(given))
    if not callable(given):
        what = "An optimizer is one of mlx.optimizers, or gives one when called with a learning rate"
        raise UserError("optimizer", f"{what}; {class_name(given)} is neither.")

    def make(rate: float) -> Optimizer:
        with errors_of_program("optimizer", f"Called with the learning rate {rate:g}, it"):
            made: Any = given(rate)
        if not isinstance(made, Optimizer):
            sentence = f"Called with a learning rate, it gave {class_name(made)} and no optimizer of mlx.optimizers."
            raise UserError("optimizer", sentence)
        return _guarded(made)

    return make


def _parts(optimizer: Optimizer) -> list[Optimizer]:
    parts: Any = getattr(optimizer, "optimizers", None)
    return parts if isinstance(parts, list) and all(isinstance(part, Optimizer) for part in parts) else []


def _leaves(optimizer: Optimizer) -> list[Any]:
    return [leaf for part in _parts(optimizer) for leaf in _leaves(part)] or [optimizer]


def _described(optimizer: Optimizer) -> str:
    """Its class and constants, as in “Lion(betas=[0.9, 0.99], weight_decay=0.0)”."""

    def is_plain(value: Any) -> bool:
        values = cast("list[Any]", value) if isinstance(value, list | tuple) else [value]
        return all(isinstance(each, bool | int | float | str | None) for each in values)

    parts = [_described(part) for part in _parts(optimizer)]
    constants = [f"{name}={value!r}" for name, value in vars(optimizer).items() if name[0] != "_" and is_plain(value)]
    return quote(f"{class_name(optimizer)}({', '.join([*parts, *constants])})", LONGEST)


def _try_out(make: Callable[[float], Optimizer]) -> None:
    """Two updates, the state into another object of its kind, and a third update with both, which must agree."""

    def arrays(number: int) -> Any:
        draw = functools.partial(mx.random.normal, key=mx.random.key(number))
        lora = {"lora_a": draw((16, 4)), "lora_b": draw((4, 16))}
        layer = {"self_attn": {"q_proj": lora}, "norm": {"weight": draw((16,))}}
        return {"layers": [layer], "head": {"weight": draw((8, 16))}}

    optimizer, other = make(1e-3), make(1e-3)
    parameters = arrays(0)
    optimizer.init(parameters)
    for number in (1, 2):
        parameters = optimizer.apply_gradients(arrays(number), parameters)
        mx.eval(parameters, optimizer.state)
    other.init(arrays(0))
    is_alike = all(isinstance(value, mx.array) for _, value in tree_flatten(optimizer.state))
    try:
        if is_alike:
            restore(other, state_arrays(optimizer))
            outcomes = [(each.apply_gradients(arrays(3), parameters), each.state) for each in (optimizer, other)]
            pairs = zip(*(tree_flatten(outcome) for outcome in outcomes), strict=True)
            is_alike = all(bool(mx.array_equal(one, two, equal_nan=True)) for (_, one), (_, two) in pairs)
    except ValueError:
        is_alike = False
    if not is_alike:
        what = f"An update of {class_name(optimizer)} depends on more than the arrays that its init makes"
        raise UserError("optimizer", f"{what}, which are all that a checkpoint keeps.")


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
            with errors_of_program("rollout_func", "rollout_func"):
                returned = self._function(prompts, trainer)
        except UserError as error:
            raise (ours[0] if ours else error) from None
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


def given_updates(optimizer: Any, schedule: Any, config: Config) -> tuple[OwnUpdates, dict[str, Any]]:
    """(a program's optimizer and schedule, tried out; their raw settings, a schedule by its name). Raises UserError."""
    if schedule is not None and not callable(schedule):
        what = "A schedule is called with the number of an update, from 0, and gives its learning rate"
        raise UserError("schedule", f"{what}; {class_name(schedule)} is not.")
    raw: dict[str, Any] = {}
    make, rate, keeps_rate, compiles = None, None, False, True
    if optimizer is not None:
        make = _maker(optimizer)
        sample = make(config.learning_rate)
        raw |= {"optimizer": OWN, "own_optimizer": _described(sample)}
        # The rate cannot be set from outside where there are several or none, or a schedule inside sets it.
        has_schedule = "learning_rate" in vars(sample).get("_schedulers", {})
        keeps_rate = bool(_parts(sample)) or has_schedule or math.isnan(rate_of(sample))
        if keeps_rate and schedule is not None:
            what = "The optimizer has several learning rates, none, or a schedule inside"
            raise UserError("schedule", f"{what}, so a schedule beside it would set nothing; give one of the two.")
        if isinstance(optimizer, Optimizer) and not keeps_rate:
            raw["learning_rate"] = float(f"{rate_of(sample):.7g}")  # float32 has no more digits
        _try_out(make)
        # Code that is not mlx's may look at its numbers, or count in Python: it is not compiled.
        compiles = all(type(each).__module__.startswith("mlx.") for each in (sample, *_leaves(sample)))
    if keeps_rate:
        raw |= {"lr_schedule": OWN, "own_schedule": "the optimizer"}
    elif schedule is not None:
        name = quote(name_of(schedule).strip("<>"), 40)
        rate = functools.partial(_rate, schedule, name)
        rate(0)
        raw |= {"lr_schedule": OWN, "own_schedule": name}
    return OwnUpdates(make, rate, keeps_rate, compiles), raw


def _rate(schedule: Callable[[int], Any], name: str, update: int) -> float:
    with errors_of_program("schedule", f"For update {update:,}, {name}"):
        given = schedule(update)
    try:
        rate = float(given)
    except (TypeError, ValueError, OverflowError):
        rate = math.nan
    if not 0 <= rate < math.inf:
        what = f"{quote(given, 40)} for update {update:,}; a learning rate is a finite number from 0 up."
        raise UserError("schedule", f"{name} gave {what}")
    return rate


def require_same_updates(config: Config, now: Mapping[str, Any]) -> None:
    """Raise UserError unless a run of these settings was trained with the optimizer and schedule `now` describes."""
    problems: list[ConfigProblem] = []
    for argument, key in (("optimizer", "optimizer"), ("schedule", "lr_schedule")):
        text = f"own_{argument}"
        before, given = getattr(config, text) if getattr(config, key) == OWN else "", now.get(text, "")
        what = f"{quote(before, 55)}, and given is {quote(given, 55)}; only the same goes on exactly."
        if not given:
            what = f"{quote(before, 80)} of a program; give it again: backend.resume(run, {argument}=…)."
        elif not before:
            what = f"{getattr(config, key)}, by its settings; an object may only replace it from the start."
        if before != given:
            problems.append(ConfigProblem(argument, f"The run was trained with {what}"))
    if not problems and (rate := now.get("learning_rate", config.learning_rate)) != config.learning_rate:
        asked = f"the optimizer given has {rate:g}; to change it: changes={{'learning_rate': {rate:g}}}"
        what = f"The run began with the learning rate {config.learning_rate:g}, and {asked}."
        problems.append(ConfigProblem("optimizer", what))
    if problems:
        raise UserError(problems)
