"""What a model's card says, read from the run: rewards, curves, held-out results, samples, settings. No path of this machine is in it."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import HfApi
from huggingface_hub.errors import HTTPError

from backend.config.config import SETTINGS, Config
from backend.export.exports import ExportFormat
from backend.export.publish.privacy import public_name, public_settings, public_text
from backend.rewards.catalogue import canonical_entry, metric_name
from backend.runs.archive import WorkClock, first_and_last_means
from backend.runs.completion_rows import CompletionRow, GroupRow, parse_group_row
from backend.runs.events import Event, read_events, step_of_end
from backend.runs.run_folder import RunFolder
from backend.runs.run_record import read_parent
from backend.runs.saved_weights import find_checkpoint
from backend.runs.steering import Change, run_config
from backend.trainer.evaluation.evaluation_rows import (
    EvaluatedRow,
    Evaluation,
    change_of,
    evaluations_of,
    mean_reward,
    read_evaluation,
    read_rows,
)
from backend.utils.documents import parse_yaml
from backend.utils.errors import UserError
from backend.utils.hub_cache import local_folder
from backend.utils.machine import chip

Curve = list[tuple[int, float]]
"""(step, value) pairs."""

CURVES = {
    "reward": "Reward",
    "kl": "KL to the base model, nats",
    "completions/mean_length": "Completion length, tokens",
}
"""The metrics that are drawn → their titles."""

LONGEST_SAMPLE = 1200
"""Characters of a prompt or completion on the card."""

LICENCE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class RewardEnds:
    """A reward function: its weight, and its mean score over the first and the last steps."""

    name: str
    weight: float
    start: float | None
    end: float | None


@dataclass(frozen=True, slots=True)
class CardSample:
    """One prompt, and completions with a heading and their reward."""

    prompt: str
    completions: list[tuple[str, str, float | None]]


@dataclass(frozen=True, slots=True)
class Licence:
    """As the card of the base model has it."""

    key: str
    name: str | None = None
    link: str | None = None


@dataclass(frozen=True, slots=True)
class CardFacts:
    """Everything that the card is written from."""

    repo_id: str
    base: str
    """An id on Hugging Face, or the bare name of a folder."""
    base_is_on_hub: bool
    dataset: str
    dataset_is_on_hub: bool
    format: ExportFormat
    config: Config
    """As it was at that step."""
    settings: str
    """`config` as YAML, without paths of this machine."""
    step: int | None
    """The step whose weights these are."""
    changes: list[Change]
    """Of the settings, up to that step, without paths of this machine."""
    steps_before: int | None
    """Steps of another run, whose weights this one began with; None for one that began with the base."""
    rewards: list[RewardEnds]
    total: RewardEnds
    """The weighted sum."""
    curves: dict[str, Curve]
    evaluation: Evaluation | None
    samples: list[CardSample]
    licence: Licence | None
    seconds: float
    """Of training, without loading and pauses."""
    device: str
    versions: dict[str, str] = field(default_factory=dict[str, str])


def is_hub_id(name: str) -> bool:
    """Whether a name can be an owner's repository on the Hub, and so stand in a link."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name, re.ASCII) is not None


def read_facts(
    run: RunFolder, repo_id: str, format_: ExportFormat, checkpoint: str, original: str | None = None
) -> CardFacts:
    """Read a run. `checkpoint` as in an export: "best", "last", a step, or "" for the run's end. `original`: the model with whose
    weights these are written, where that is not the run's own. Raises UserError."""
    events = list(read_events(run.events))
    steps = [event for event in events if event["kind"] == "step"]
    started = next((event for event in reversed(events) if event["kind"] == "started"), {})
    of_end = step_of_end(run) or (steps[-1].get("step") if steps else None)
    step = find_checkpoint(run, checkpoint).step if checkpoint else of_end
    config = run_config(run, step)
    curves = {name: curve for name in CURVES if (curve := _curve(steps, name))}
    evaluation, rows = _evaluation(run, step)
    base, dataset = public_name(original or config.model), public_name(config.data)
    return CardFacts(
        repo_id=repo_id,
        base=base,
        base_is_on_hub=is_hub_id(base),
        dataset=dataset,
        dataset_is_on_hub=is_hub_id(dataset),
        format=format_,
        config=config,
        settings=yaml.safe_dump(public_settings(config.model_dump(mode="json")), sort_keys=False, allow_unicode=True),
        step=step,
        changes=list(_changes(events, step)),
        steps_before=_steps_before(run),
        rewards=list(_reward_rows(config, steps)),
        total=RewardEnds("weighted sum", 1.0, *_ends(steps, "reward")),
        curves=curves,
        evaluation=evaluation,
        samples=list(_samples_of_rows(evaluation, rows)) if evaluation else list(_samples_of_training(run, step)),
        licence=base_licence(original or config.model, base),
        seconds=_seconds(events),
        device=_device(started),
        versions={name: number for name, number in (started.get("versions") or {}).items() if name != "platform"},
    )


# ── training ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _curve(steps: Iterable[Event], name: str) -> Curve:
    pairs = ((event.get("step"), (event.get("metrics") or {}).get(name)) for event in steps)
    return [
        (step, float(value))
        for step, value in pairs
        if isinstance(step, int) and isinstance(value, int | float) and math.isfinite(value)
    ]


def _ends(steps: list[Event], name: str) -> tuple[float | None, float | None]:
    return first_and_last_means(value for _, value in _curve(steps, name))


def _reward_rows(config: Config, steps: list[Event]) -> Iterator[RewardEnds]:
    names = [metric_name(canonical_entry(entry)) for entry in config.reward_functions]
    weights = config.reward_weights or [1.0] * len(names)
    for name, weight in zip(names, weights, strict=False):
        yield RewardEnds(public_text(name), float(weight), *_ends(steps, f"rewards/{name}/mean"))


def _changes(events: Iterable[Event], step: int | None) -> Iterator[Change]:
    """From the event log, which has those of the run that a clone goes on from as well."""
    for event in events:
        if event["kind"] != "change" or (step is not None and event["step"] > step):
            continue
        change = Change.from_dict(event)
        pairs = {key: pair for key, pair in change.settings.items() if key in SETTINGS}
        old, new = (public_settings({key: pair[i] for key, pair in pairs.items()}) for i in (0, 1))
        yield Change(change.step, {key: (old[key], new[key]) for key in old})


def _steps_before(run: RunFolder) -> int | None:
    parent = read_parent(run)
    return parent.step if parent is not None and not parent.warm else None


def _seconds(events: list[Event]) -> float:
    clock = WorkClock()
    for event in events:
        clock.take(event)
    return clock.seconds


def _device(started: Event) -> str:
    """“Apple M3 Max (GPU)”, “Linux (CPU)”. The system's own name, which may be a person's, is left out."""
    kind = "GPU" if "gpu" in str(started.get("device", "")) else "CPU"
    system = str((started.get("versions") or {}).get("platform", "")).partition("-")[0]
    return f"{chip() or system or 'unknown'} ({kind})"


# ── held-out results and samples ─────────────────────────────────────────────────────────────────────────────────────


def _evaluation(run: RunFolder, step: int | None) -> tuple[Evaluation | None, list[EvaluatedRow]]:
    """The newest evaluation of these weights beside their base, and its rows; (None, []) where there is none."""
    for path in evaluations_of(run):
        try:
            found = read_evaluation(path)
        except UserError:
            continue  # another program's file
        if found.subject.step == step and found.headline.difference is not None:
            return found, list(read_rows(path))
    return None, []


def _samples_of_rows(evaluation: Evaluation, rows: list[EvaluatedRow]) -> Iterator[CardSample]:
    """The prompt that has gained most, and one whose reward after training is the median."""
    how = evaluation.headline.name
    changed = [(change, row) for row in rows if (change := change_of(row, how)) is not None]
    if not changed:
        return
    most = max(changed, key=lambda pair: pair[0])[1]
    by_reward = sorted((row for _, row in changed if row is not most), key=lambda row: _after(row, how))
    for row in (most, *by_reward[len(by_reward) // 2 :][:1]):
        sides = row[how] or {}
        before, after = (sides.get("base") or [])[:1], (sides.get("tuned") or [])[:1]
        yield CardSample(
            _short(row["prompt"]),
            [*(_told("Before training", it) for it in before), *(_told("After training", it) for it in after)],
        )


def _after(row: EvaluatedRow, how: Any) -> float:
    return mean_reward((row[how] or {}).get("tuned", [])) or 0.0


def _samples_of_training(run: RunFolder, step: int | None) -> Iterator[CardSample]:
    """Of a prompt of that step: the best completion, and the one of median reward."""
    group = _last_group(run, step)
    scored = (
        sorted((row for row in group["completions"] if row.get("reward") is not None), key=_reward) if group else []
    )
    if group is None or not scored:
        return
    typical = min(scored, key=lambda row: abs(_reward(row) - statistics.median(map(_reward, scored))))
    told = [_told("Best of its group", scored[-1])]
    if typical["text"] != scored[-1]["text"]:
        told.append(_told("Typical of its group", typical))
    yield CardSample(_short(group["prompt"]), told)


def _last_group(run: RunFolder, step: int | None) -> GroupRow | None:
    """The last group up to `step`, rather one whose completions differ in reward."""
    last = telling = None
    try:
        with run.completions.open("rb") as lines:
            for line in lines:
                group = parse_group_row(line)
                if group is None or not group.get("completions") or (step is not None and group["step"] > step):
                    continue
                last = group
                if len({row.get("reward") for row in group["completions"]}) > 1:
                    telling = group
    except OSError:
        return None
    return telling if telling is not None and last is not None and telling["step"] == last["step"] else last


def _reward(row: CompletionRow) -> float:
    return row["reward"] or 0.0


def _told(heading: str, row: CompletionRow) -> tuple[str, str, float | None]:
    return heading, _short(row["text"]), row.get("reward")


def _short(text: str) -> str:
    text = public_text(text)
    return text if len(text) <= LONGEST_SAMPLE else f"{text[:LONGEST_SAMPLE]} …"


# ── the base's licence ───────────────────────────────────────────────────────────────────────────────────────────────


def base_licence(model: str, id_: str) -> Licence | None:
    """The licence that the base's card names: the card in the folder `model`, else the Hub's, by its id. None where neither tells."""
    folder = local_folder(model)
    about = _front_matter(folder / "README.md") if folder else {}
    if not about.get("license") and "/" in id_:
        try:
            card = HfApi().model_info(id_, timeout=LICENCE_TIMEOUT_S).card_data
        except (HTTPError, OSError, ValueError):  # offline, gated or gone: the card then says nothing
            return None
        about = card.to_dict() if card else {}
    key = about.get("license")
    return Licence(str(key), about.get("license_name"), about.get("license_link")) if key else None


def _front_matter(card: Path) -> dict[str, Any]:
    try:
        _, top, _ = card.read_text(encoding="utf-8").split("---", 2)
        content = parse_yaml(top, "The model's card", "model")
    except (OSError, ValueError, UserError):
        return {}
    return content if isinstance(content, dict) else {}
