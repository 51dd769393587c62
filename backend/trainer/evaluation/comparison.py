"""Evaluate a model on a split: sample, score, and compare the run's model before training with the one at a checkpoint.
One model is loaded, and the arrays are replaced. Both sides get the same prompts and random numbers."""

from __future__ import annotations

import hashlib
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from backend.config.config import SETTINGS, Config, dump
from backend.config.model_and_data_names import check_weights, model_source
from backend.data.files import Row
from backend.data.problems import PromptFormat
from backend.data.prompts import TokenizedPrompts
from backend.data.rows import SPLITS, Rows, Splits, check_columns
from backend.models.policy import load_policy
from backend.runs.archive import summary
from backend.runs.checkpoint import arrays_of
from backend.runs.completion_rows import CompletionRow
from backend.runs.events import step_of_end
from backend.runs.run_folder import RunFolder, find_run
from backend.runs.saved_weights import END, Checkpoint, find_checkpoint
from backend.runs.steering import run_config
from backend.sampling.conversations import Tools
from backend.sampling.rollout import Sampler
from backend.sampling.sampler import Sampling
from backend.trainer.evaluation.evaluate import EVAL_SEED, scored_groups
from backend.trainer.evaluation.evaluation_rows import (
    CONFIDENCE,
    TOTAL,
    Data,
    Decoding,
    DecodingName,
    EvaluatedRow,
    Evaluation,
    Figures,
    MeanWithInterval,
    PassRule,
    RewardFunctionUsed,
    SideName,
    SideResult,
    Subject,
    change_of,
    default_pass_rule,
    mean_reward,
    read_pass_rule,
)
from backend.trainer.memory.plan import dtype_here, image_tokens, plan_limits, plan_memory
from backend.trainer.run_inputs import read_inputs
from backend.trainer.scoring import ScoringStages
from backend.trainer.telemetry import completion_row, versions
from backend.trainer.trial_sampling import SMALLEST_MODEL, WITHOUT_REFERENCE
from backend.types import IMAGES, Problem
from backend.utils.errors import UserError
from backend.utils.hub_cache import local_folder
from backend.utils.text import quote

PROMPTS_AT_ONCE = 32  # prompts that are sampled together, and for which memory is planned

RESAMPLES = 10_000
RESAMPLES_AT_ONCE = 256
BOOTSTRAP_SEED = 0x626F6F74  # the same resamples at every evaluation ("boot" in ASCII)
ROUNDING = 1e-9  # sums of floats in another order differ by less

MODEL_KEYS = (  # settings that a run's checkpoint decides
    *("model", "tokenizer", "quantization", "dtype", "train_type", "num_layers", "rank", "scale", "dropout"),
    *("lora_keys", "lora_alpha", "use_rslora", "modules_to_save"),
)


@dataclass(frozen=True, slots=True)
class EvaluationChoices:
    """`ks`: the k of pass@k; () for 1, 2, 4 … up to `completions`. `limit`: prompts; −1 for all. `split`: "" for test,
    else valid, else train. `data`: a file or dataset asked instead. `passing`: see `read_pass_rule`; "": default."""

    split: str = ""
    data: str = ""
    decodings: tuple[DecodingName, ...] = ("greedy", "sampled")
    completions: int = 4
    ks: tuple[int, ...] = ()
    limit: int = -1
    base_only: bool = False
    seed: int = EVAL_SEED
    passing: str = ""

    def count(self, decoding: DecodingName) -> int:
        return 1 if decoding == "greedy" else self.completions


Report = Callable[[str, float | None, float | None], None]
"""Takes a phase, the share of all completions that is done and the estimated seconds left; None while unknown."""


@dataclass(frozen=True, slots=True)
class EvaluatedModel:
    """A run at a checkpoint, or a plain model without either. The reward functions of `step` of `steps` score."""

    config: Config
    run: RunFolder | None
    checkpoint: Checkpoint | None
    steps: int

    @property
    def step(self) -> int:
        return self.checkpoint.state.step if self.checkpoint is not None else self.steps


def find_evaluated(name: str, config: Config | None, runs_dir: Path | None = None, which: str = END) -> EvaluatedModel:
    """The run `name` at the checkpoint `which` (end, last, best, or a step); else the model `name`, a folder or an id.
    `config` gives data, rewards and sampling in place of the run's own settings; a model needs it. Raises UserError."""
    try:
        run = find_run(name, runs_dir)
    except UserError:
        if config is None and local_folder(name) is None:
            raise
        source = model_source(name, "model")
        if config is None:
            what = f"{name} is a model and no run: give the settings too, evaluate {name} CONFIG.yaml."
            raise UserError("config", what) from None
        check_weights(source, "model")
        settings = config.model_copy(update=SMALLEST_MODEL | {"model": name, "quantization": "none"})
        return EvaluatedModel(settings, None, None, config.iters)
    if run.is_locked():
        raise UserError("run", f"The run {run.name} is being trained; evaluate it once it has ended, or stop it first.")
    if which == END:
        left = step_of_end(run)
        which = "last" if left is None else str(left)
    saved = find_checkpoint(run, which)
    own = run_config(run, saved.step)
    settings = own if config is None else config.model_copy(update={key: getattr(own, key) for key in MODEL_KEYS})
    steps = summary(run).iterations or own.iters
    return EvaluatedModel(settings.model_copy(update=WITHOUT_REFERENCE), run, saved, steps)


def evaluate_model(
    evaluated: EvaluatedModel, choices: EvaluationChoices, name: str, report: Report = lambda phase, done, left_s: None
) -> tuple[Evaluation, list[EvaluatedRow]]:
    """Run an evaluation; nothing is written. Raises UserError."""
    began, created, notes = time.perf_counter(), time.time(), list[str]()
    config, run, saved = evaluated.config, evaluated.run, evaluated.checkpoint
    report("Reading the dataset", None, None)
    if choices.data:
        config = config.model_copy(update={"eval_data": {Path(choices.data).name: {"data": choices.data}}})
    inputs = read_inputs(config)
    splits = inputs.splits
    notes += splits.notes
    held_out = [name for name in ("test", "valid") if splits.rows(name)]
    split = Path(choices.data).name if choices.data else choices.split or [*held_out, "train"][0]
    rows, source, of_rows = _rows(splits, split, config)
    scoring = ScoringStages(config, inputs.scorer, evaluated.steps)
    weights_then = saved.state.reward_weights if saved is not None else []
    if len(weights_then) == len(scoring.stages):  # another config may have other stages than the run
        scoring.restore(weights_then)
    stage = scoring.stage(evaluated.step)
    of_stage = config.stages[stage.index].get("reward_functions") if config.stages else None
    entries = of_stage or config.reward_functions
    rule = read_pass_rule(choices.passing, entries) if choices.passing else default_pass_rule(entries)
    if rule is None:
        what = "No reward is known to say what is right, so there is no pass@k: mark one on Completions, or use --pass."
        notes.append(what)
    report("Loading the model", None, None)
    dtype, sentence = dtype_here([config])
    notes += [sentence] if sentence else []
    policy = load_policy(config.model_copy(update={"dtype": dtype}), notes.append)
    prompts = TokenizedPrompts(rows, policy.tokenizer, PromptFormat.of(of_rows, inputs.schemas), source)
    problems = prompts.first(choices.limit)
    if not problems:
        raise UserError("max_seq_length", f"Every prompt of {source} leaves no room for a completion within Max Seq.")
    trained = {_asked(row, config.prompt_feature) for row in (splits.train if run is not None else ())}
    trained_on = sum(_asked(rows[problem.index], of_rows.prompt_feature) in trained for problem in problems)
    if trained_on == len(problems):
        notes.append("The run has trained on these prompts: they show what it learned, not what it does on new ones.")
    elif trained_on:
        notes.append(f"{trained_on:,} of these {len(problems):,} prompts are among those that the run has trained on.")
    # A sampler within the memory estimate of a step of this evaluation's size.
    most = max(map(choices.count, choices.decodings))
    step = {"batch_size": min(PROMPTS_AT_ONCE, len(problems)), "gradient_accumulation_steps": 1}
    settings = config.model_copy(update=step | {"steps_per_generation": 1, "group_size": most})
    lengths = [len(problem.tokens) for problem in problems]
    plan = plan_memory(
        settings, policy, lengths, notes.append, images=image_tokens(policy.tokenizer, problems, max(lengths))
    )
    tools = Tools.of(config, inputs.tools, policy.tokenizer)
    sampler = Sampler(policy, config.max_completion_length, stop=config.stop, tools=tools, **plan_limits(plan)[1])
    row_list: list[EvaluatedRow] = []
    for problem in problems:
        about = {name: getattr(problem, name) for name in ("index", "prompt", "answer", "type")}
        row_list.append(EvaluatedRow(**about, greedy=None, sampled=None))
        if problem.images:
            row_list[-1]["images"] = problem.images
    took = _sample_sides(evaluated, choices, sampler, scoring, problems, row_list, report)
    if inputs.tools is not None:
        inputs.tools.close()
    inputs.scorer.close()
    decodings = [
        decoding_of(name, _sampling(name, config), took[name], row_list, rule, choices.ks) for name in choices.decodings
    ]
    weights = zip(stage.names, stage.weights.at(evaluated.step), strict=True)
    evaluation = Evaluation(
        name=name,
        created=created,
        seconds=time.perf_counter() - began,
        device=str(mx.default_device()),
        versions=versions(),
        subject=Subject(
            model=config.model,
            **{} if run is None else {"run": run.name, "step": evaluated.step, "train_type": config.train_type},
            config_sha256=hashlib.sha256(dump(evaluated.config).encode()).hexdigest(),
        ),
        data=Data(
            dataset=of_rows.data,
            split=split,
            source=source,
            rows=len(problems),
            rows_in_split=len(rows),
            too_long=prompts.too_long,
            trained_on=trained_on,
        ),
        functions=[RewardFunctionUsed(name=name, weight=weight) for name, weight in weights],
        pass_rule=rule,
        max_completion_length=config.max_completion_length,
        seed=choices.seed,
        decodings=decodings,
        notes=list(dict.fromkeys([*notes, *scoring.notes(), *sampler.new_notes(), *sampler.slow_paths])),
    )
    return evaluation, row_list


def _rows(splits: Splits, split: str, config: Config) -> tuple[Rows, str, Config]:
    """(rows, their source, the settings that they are read with)."""
    if split in splits.evals:
        named = splits.evals[split]
        rows, source, config = named.rows, named.source, config.model_copy(update=named.settings)
    elif split in SPLITS:
        rows, source = splits.rows(split), splits.source_of(split)
    else:
        known = ", ".join([*SPLITS, *splits.evals])
        raise UserError("split", f"There is no split {quote(split, 40)}; there are {quote(known, 100)}.")
    if not rows:
        way = "" if split == "test" else ", or hold rows of the training split out with Validation share"
        others = [f"--split {name}" for name in SPLITS if splits.rows(name) and name != "train"]
        instead = f", or evaluate {' or '.join(others)}" if others else ""
        raise UserError(
            f"{split}_split",
            f"{config.data} has no {split} split: name a split in {split.capitalize()} split, or a dataset of its own "
            f"in {SETTINGS[f'{split}_data'].label}{way}{instead}.",
        )
    if faults := check_columns(rows, config, source):
        raise UserError(faults)
    return rows, source, config


def _sample_sides(
    evaluated: EvaluatedModel,
    choices: EvaluationChoices,
    sampler: Sampler,
    scoring: ScoringStages,
    problems: list[Problem],
    row_list: list[EvaluatedRow],
    report: Report,
) -> dict[DecodingName, dict[SideName, float]]:
    """Fill the rows of the problems with the completions of both sides. → seconds by decoding and side."""
    sides: list[SideName] = ["model"] if evaluated.run is None else ["base"] if choices.base_only else ["base", "tuned"]
    began, before = time.perf_counter(), 0.0
    total = len(sides) * sum(map(choices.count, choices.decodings))
    took: dict[DecodingName, dict[SideName, float]] = {name: {} for name in choices.decodings}
    for side in sides:
        if side == "tuned":
            assert evaluated.checkpoint is not None and evaluated.run is not None
            try:
                sampler.policy.assign(arrays_of(evaluated.checkpoint, "weights"))
            except ValueError:
                what = f"The weights in {evaluated.checkpoint.path} do not fit the model {evaluated.config.model}"
                why = f"it is not the one that the run {evaluated.run.name} trained."
                raise UserError("checkpoint", f"{what}: {why}") from None
            mx.eval(sampler.policy.arrays())
        for decoding in choices.decodings:
            began_side, count = time.perf_counter(), choices.count(decoding)
            phase = f"Sampling the {side if side == 'model' else f'{side} model'}, {decoding}"

            def poll(done: float, phase: str = phase, share: float = count / total, before: float = before) -> None:
                whole = before + share * done
                elapsed = time.perf_counter() - began
                report(phase, whole, elapsed / whole * (1 - whole) if whole else None)

            poll(0.0)
            groups = scored_groups(
                sampler,
                problems,
                lambda groups, poll: scoring.score(groups, evaluated.step, poll=poll),
                sampling=_sampling(decoding, evaluated.config),
                group_size=count,
                batch_size=PROMPTS_AT_ONCE,
                seed=choices.seed,
                poll=poll,
                overlap_scoring=not scoring.uses_mlx,
            )
            mx.synchronize()  # raises what has failed on the GPU, before the figures count
            before += count / total
            for row, group in zip(row_list, groups, strict=True):
                rows = [completion_row(completion) for completion in group.completions]
                for each in rows:
                    each.pop("advantage", None)  # nothing was compared with its group
                row[decoding] = {**(row[decoding] or {}), side: rows}
            took[decoding][side] = time.perf_counter() - began_side
    return took


def _asked(row: Row, prompt_feature: str) -> tuple[str, ...]:
    return (str(row.get(prompt_feature)), *(str(row[name]) for name in IMAGES if row.get(name)))


def _sampling(decoding: DecodingName, config: Config) -> Sampling:
    return Sampling.greedy(config) if decoding == "greedy" else Sampling.of(config)


@dataclass(frozen=True, slots=True)
class Column:
    """One figure of every prompt, in the prompts' order; NaN where a prompt has none. `low` and `high`: its range."""

    values: np.ndarray
    low: float
    high: float

    @classmethod
    def difference(cls, after: Column, before: Column) -> Column:
        """after − before. Its range: the largest change, to both sides; without one, what was possible."""
        values = after.values - before.values
        largest = float(np.nanmax(np.abs(values), initial=0.0))
        reach = largest if largest > ROUNDING else max(after.high, before.high) - min(after.low, before.low)
        return cls(values, -reach, reach)


def estimates(
    columns: Sequence[Column], resamples: int = RESAMPLES, rng: np.random.Generator | None = None
) -> list[MeanWithInterval]:
    """The mean of each column with its bootstrap interval, all resampled together. No interval where nothing varied."""
    if not columns:
        return []
    values_PM = np.stack([column.values for column in columns], axis=1)
    # Two added prompts, at the ends of the range. A resample may draw no prompt that has a figure; these always have.
    ends = np.array([[column.low for column in columns], [column.high for column in columns]])
    values_PM = np.concatenate([values_PM, ends])
    is_known_PM = (~np.isnan(values_PM)).astype(np.float64)
    known_PM = np.nan_to_num(values_PM)
    rng, prompts, means = rng or np.random.default_rng(BOOTSTRAP_SEED), len(values_PM), list[np.ndarray]()
    for start in range(0, resamples, RESAMPLES_AT_ONCE):
        count = min(RESAMPLES_AT_ONCE, resamples - start)
        drawn_RP = rng.integers(0, prompts, (count, prompts), dtype=np.int32)
        # How often each prompt was drawn: the means are then one product, whatever the number of columns.
        offset_R1 = np.arange(count, dtype=np.int64)[:, None] * prompts
        times_RP = np.bincount((drawn_RP + offset_R1).ravel(), minlength=count * prompts).reshape(count, prompts)
        times_RP = times_RP.astype(np.float64)
        means.append((times_RP @ known_PM) / np.maximum(times_RP @ is_known_PM, 1))
    tail = (1 - CONFIDENCE) / 2
    bounds_2M = np.quantile(np.concatenate(means), [tail, 1 - tail], axis=0)
    low_M, high_M = np.where(np.abs(bounds_2M) > ROUNDING, bounds_2M, 0.0)  # a bound of 7e-17 does not exclude 0
    found: list[MeanWithInterval] = []
    for column, low, high in zip(columns, low_M, high_M, strict=True):
        known = column.values[~np.isnan(column.values)]
        value = float(known.mean()) if known.size else None
        if value is None or not column.high > column.low:
            found.append(MeanWithInterval(value=value))
        else:
            # The two added prompts pull the interval towards the middle of the range, at its end past the mean itself.
            found.append(MeanWithInterval(value=value, low=min(float(low), value), high=max(float(high), value)))
    return found


def pass_at_k(completions: int, passed: int, k: int) -> float:
    """The chance that at least one of k ≤ `completions` passes, unbiased, from `passed` of them: 1 − C(n − c, k) / C(n,
    k) (Chen et al. 2021, arXiv:2107.03374, section 2.1)."""
    return 1.0 - math.comb(completions - passed, k) / math.comb(completions, k)


def decoding_of(
    name: DecodingName,
    sampling: Sampling,
    took: dict[SideName, float],
    rows: Sequence[EvaluatedRow],
    rule: PassRule | None,
    ks: Sequence[int],
) -> Decoding:
    """The results of one way of sampling. `took`: seconds of each side. `ks`: the k of pass@k; none for 1, 2, 4 …"""
    by_prompt = {side: [(row[name] or {})[side] for row in rows] for side in took}
    count = len(next(iter(by_prompt.values()))[0])
    ks = sorted({k for k in ks or [1 << power for power in range(count.bit_length())] if k <= count} | {1})
    values = {side: _values(of_side, rule, ks) for side, of_side in by_prompt.items()}
    columns: dict[str, dict[str, Column]] = {side: {} for side in took}
    for key in next(iter(values.values())):
        low, high = 0.0, 1.0
        if key not in ("cut_off", "different") and not key.startswith("pass/"):  # no share: the range that was seen
            seen = [value for of_side in values.values() for value in of_side[key] if value is not None]
            low, high = min(seen, default=0.0), max(seen, default=0.0)
        for side, of_side in values.items():
            columns[side][key] = Column(np.array(of_side[key], np.float64), low, high)  # None becomes NaN
    if {"base", "tuned"} <= columns.keys():
        base, tuned = columns["base"], columns["tuned"]
        columns["difference"] = {key: Column.difference(tuned[key], base[key]) for key in base}
    means = iter(estimates([column for of_group in columns.values() for column in of_group.values()]))
    figures: dict[str, Figures] = {}
    for group, of_group in columns.items():
        own = {key: next(means) for key in of_group}
        figures[group] = Figures(
            **{key: mean for key, mean in own.items() if "/" not in key},
            rewards={key.removeprefix("rewards/"): mean for key, mean in own.items() if key.startswith("rewards/")},
            pass_at={int(key.removeprefix("pass/")): mean for key, mean in own.items() if key.startswith("pass/")},
        )
    tokens = {side: sum(row["tokens"] for rows in of_side for row in rows) for side, of_side in by_prompt.items()}
    results: dict[SideName, SideResult] = {
        side: SideResult(figures=figures[side], seconds=seconds, tokens_per_second=tokens[side] / seconds)
        for side, seconds in took.items()
    }
    changes = [change for row in rows if (change := change_of(row, name)) is not None]
    better, worse = sum(change > 0 for change in changes), sum(change < 0 for change in changes)
    return Decoding(
        name=name,
        completions=count,
        **{key: getattr(sampling, key) for key in ("temperature", "top_p", "top_k", "min_p")},
        sides=results,
        difference=figures.get("difference"),
        better=better,
        worse=worse,
        unchanged=len(changes) - better - worse,
    )


def _values(
    by_prompt: list[list[CompletionRow]], rule: PassRule | None, ks: Sequence[int]
) -> dict[str, list[float | None]]:
    values: dict[str, list[float | None]] = {TOTAL: [mean_reward(rows) for rows in by_prompt]}
    for name in by_prompt[0][0]["rewards"]:
        scores = [[score for row in rows if (score := row["rewards"][name]) is not None] for rows in by_prompt]
        values[f"rewards/{name}"] = [sum(known) / len(known) if known else None for known in scores]
    values["tokens"] = [sum(row["tokens"] for row in rows) / len(rows) for rows in by_prompt]
    values["cut_off"] = [sum(row["stop"] == "length" for row in rows) / len(rows) for rows in by_prompt]
    if all(len(rows) > 1 for rows in by_prompt):
        rewards = [[reward for row in rows if (reward := row["reward"]) is not None] for rows in by_prompt]
        values["spread"] = [statistics.stdev(known) if len(known) > 1 else None for known in rewards]
        values["different"] = [len({row["text"] for row in rows}) / len(rows) for rows in by_prompt]
    if rule is not None:
        for k in ks:
            values[f"pass/{k}"] = [pass_at_k(len(rows), sum(map(rule.is_met_by, rows)), k) for rows in by_prompt]
    return values
