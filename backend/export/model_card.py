"""Model card (README.md): facts read from the run, and the text made from them. Contains no local paths."""

import contextlib
import json
import re
import shlex
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from operator import itemgetter
from typing import Any

import yaml
from huggingface_hub import HfApi, ModelCardData
from huggingface_hub.constants import HUGGINGFACE_CO_URL_HOME
from jinja2 import Environment

from backend.config.config import SETTINGS, Config
from backend.config.setting import Choice
from backend.config.stages import first_step, scoring_of, stage_at
from backend.config.updates import OWN
from backend.export.exports import ExportFormat
from backend.export.originals import card_of
from backend.export.privacy import public_name, public_settings, public_text
from backend.export.writer import reads_images
from backend.rewards.catalogue import canonical_entry, metric_name
from backend.runs.archive import WorkClock, first_and_last_means
from backend.runs.completion_rows import CompletionRow, GroupRow, parse_group_row
from backend.runs.events import Event, read_events, step_of_end
from backend.runs.metric_names import MEASURES, measure_of
from backend.runs.run_folder import RunFolder
from backend.runs.run_record import as_markdown, read_parent
from backend.runs.saved_weights import find_checkpoint
from backend.runs.steering import Change, run_config
from backend.trainer.evaluation import evaluation_rows
from backend.trainer.evaluation.evaluation_rows import Decoding, EvaluatedRow, Evaluation, MeanWithInterval, number_text
from backend.utils.errors import UserError
from backend.utils.hub_cache import local_folder, split_revision
from backend.utils.machine import chip
from backend.utils.places import resources
from backend.utils.text import fenced, one_line

Curve = list[tuple[int, float]]

CURVES = {  # metric → title of its plot. The loss of GRPO means nothing to a reader
    "reward": "Reward",
    "distillation/divergence": "Divergence from the teacher, nats",
    "loss": "Loss, nats",
    "kl": "KL to the base model, nats",
    "completions/mean_length": "Completion length, tokens",
}
CURVES_FILE, SETTINGS_FILE = "curves.png", "training.yaml"
LONGEST_SAMPLE = 1200  # characters of a prompt or completion on the card
LICENCE_TIMEOUT_S = 10.0


RewardEnds = tuple[str, float, float | None, float | None]
"""A reward function, its weight, and its mean scores over the first and the last steps."""
CardSample = tuple[str, list[tuple[str, str, float | None]]]  # a prompt, and completions with heading and reward


@dataclass(frozen=True, slots=True)
class CardFacts:
    repo_id: str
    base: str  # a Hugging Face id, or a bare folder name
    dataset: str
    format: ExportFormat
    reads_images: bool
    config: Config  # settings at that step
    settings: str  # `config` as YAML without local paths
    step: int | None  # step of these weights
    changes: list[Change]  # changed settings up to that step, without local paths
    steps_before: int | None  # steps of the run that this one continued; None if it began with the base
    rewards: dict[str, list[RewardEnds]]  # by stage; "" for a run without stages. The last of each is the weighted sum.
    curves: dict[str, Curve]
    held_out: str  # what the evaluations during training found; "" without one
    evaluation: Evaluation | None
    samples: list[CardSample]
    licence: dict[str, str | None]  # the Hub's settings for it; {} if unknown
    seconds: float  # training time without loading and pauses
    device: str
    versions: dict[str, str]

    @property
    def library(self) -> str:
        if self.format.names == "mlx":
            return "mlx"
        return "peft" if self.format.kind == "adapter" else "transformers"


def is_hub_id(name: str) -> bool:
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name, re.ASCII) is not None


def read_facts(
    run: RunFolder, repo_id: str, format_: ExportFormat, checkpoint: str, original: str | None = None
) -> CardFacts:
    """Raises UserError. `original`: the model whose weights are exported, if not the run's own."""
    events = list(read_events(run.events))
    steps = [event for event in events if event["kind"] == "step"]
    started = next((event for event in reversed(events) if event["kind"] == "started"), {})
    last_step = step_of_end(run) or (steps[-1].get("step") if steps else None)
    step = find_checkpoint(run, checkpoint).step if checkpoint else last_step
    config = run_config(run, step)
    evaluation, rows = _evaluation(run, step)
    base = split_revision(public_name(original or config.model))[0]
    is_kept = format_.names == "original" or find_spec("mlx_vlm") is not None  # the part that reads images
    parent, clock = read_parent(run), WorkClock()
    for event in events:
        clock.take(event)
    versions: dict[str, str] = started.get("versions") or {}
    # The system's own name, which may be a person's, is left out: “Apple M3 Max (GPU)”, “Linux (CPU)”.
    device = chip() or str(versions.get("platform", "")).partition("-")[0] or "unknown"
    return CardFacts(
        repo_id=repo_id,
        base=base,
        dataset=split_revision(public_name(config.data))[0],
        format=format_,
        reads_images=is_kept and (folder := local_folder(config.model)) is not None and reads_images(folder),
        config=config,
        settings=yaml.safe_dump(public_settings(config.model_dump(mode="json")), sort_keys=False, allow_unicode=True),
        step=step,
        changes=list(_changes(events, step)),
        steps_before=parent.step if parent is not None and not parent.warm else None,
        rewards={title: ends for title, ends in _rewards(config, steps, step) if ends[-1][2] is not None},
        curves={
            name: curve
            for name in CURVES
            if len(curve := _curve(steps, name)) > 1 and (name != "loss" or config.imitates)
        },
        held_out=_held_out(event for event in events if event["kind"] == "eval" and event["step"] <= (step or 0)),
        evaluation=evaluation,
        samples=list(_samples_of_rows(evaluation, rows)) if evaluation else list(_samples_of_training(run, step)),
        licence=base_licence(original or config.model, base),
        seconds=clock.seconds,
        device=f"{device} ({'GPU' if 'gpu' in str(started.get('device', '')) else 'CPU'})",
        versions={name: version for name, version in versions.items() if name != "platform"},
    )


def _rewards(config: Config, steps: list[Event], step: int | None) -> Iterator[tuple[str, list[RewardEnds]]]:
    last_step = step or 0
    for index in range(stage_at(config.stages, last_step) + 1) if config.stages else (0,):
        title, of_stage, entries, weights = "", steps, config.reward_functions, config.weights
        if config.stages:
            first, after = (first_step(config.stages, number) for number in (index, index + 1))
            title = f"Stage {index + 1}, steps {first} to {min(after - 1, last_step)}"
            of_stage = [event for event in steps if first <= event["step"] < after]
            scoring = scoring_of(config.model_dump(), index)
            entries, weights = scoring["reward_functions"], scoring["reward_weights"]
        names = [metric_name(canonical_entry(entry)) for entry in entries]
        ends: list[RewardEnds] = []
        for name, weight in [*zip(names, weights or [1.0] * len(names), strict=False), ("", 1.0)]:
            curve = _curve(of_stage, f"rewards/{name}/mean" if name else "reward")
            ends.append((public_text(name), float(weight), *first_and_last_means(value for _, value in curve)))
        yield title, ends


def _curve(steps: Iterable[Event], name: str) -> Curve:
    pairs = ((event.get("step"), (event.get("metrics") or {}).get(name)) for event in steps)
    return [(step, float(value)) for step, value in pairs if step is not None and value is not None]


def _held_out(evaluations: Iterable[Event]) -> str:
    if not (found := list(evaluations)):
        return ""
    measure = measure_of(found[-1]["metrics"])
    curve = _curve(found, measure)
    ends = [f"{number_text(value)} at step {step}" for step, value in dict([curve[0], curve[-1]]).items()]
    return f"On held-out prompts, the {MEASURES[measure]} was {' and '.join(ends)}."


def _changes(events: Iterable[Event], step: int | None) -> Iterator[Change]:
    for event in events:
        if event["kind"] != "change" or (step is not None and event["step"] > step):
            continue
        pairs = {key: pair for key, pair in event["settings"].items() if key in SETTINGS}
        old, new = (public_settings({key: pair[i] for key, pair in pairs.items()}) for i in (0, 1))
        yield Change(event["step"], {key: (old[key], new[key]) for key in old})


def _evaluation(run: RunFolder, step: int | None) -> tuple[Evaluation | None, list[EvaluatedRow]]:
    for path in evaluation_rows.evaluations_of(run):
        try:
            found = evaluation_rows.read_evaluation(path)
        except UserError:
            continue  # another program's file
        if found.subject.step == step and found.headline.difference is not None:
            return found, list(evaluation_rows.read_rows(path))
    return None, []


def _samples_of_rows(evaluation: Evaluation, rows: list[EvaluatedRow]) -> Iterator[CardSample]:
    how: Any = evaluation.headline.name
    changed = [(change, row) for row in rows if (change := evaluation_rows.change_of(row, how)) is not None]
    if not changed:
        return
    most = max(changed, key=lambda pair: pair[0])[1]
    others = [row for _, row in changed if row is not most]
    others.sort(key=lambda row: evaluation_rows.mean_reward((row[how] or {}).get("tuned", [])) or 0.0)
    for row in (most, *others[len(others) // 2 :][:1]):
        sides = row[how] or {}
        answers = {"Before training": sides.get("base"), "After training": sides.get("tuned")}
        yield _short(row["prompt"]), [_completion(heading, each[0]) for heading, each in answers.items() if each]


def _samples_of_training(run: RunFolder, step: int | None) -> Iterator[CardSample]:
    """Two completions of the last step, of a group whose rewards differ if there is one."""
    newest: list[GroupRow] = []
    with contextlib.suppress(OSError), run.completions.open("rb") as lines:
        for group in map(parse_group_row, lines):
            if group is not None and group.get("completions") and (step is None or group["step"] <= step):
                newest = [*(each for each in newest if each["step"] == group["step"]), group]
    differing = [group for group in newest if len({row.get("reward") for row in group["completions"]}) > 1]
    if not newest:
        return
    last = (differing or newest)[-1]
    scored = [(reward, row) for row in last["completions"] if (reward := row.get("reward")) is not None]
    if not scored:
        return
    scored.sort(key=itemgetter(0))
    best = max(scored, key=itemgetter(0))[1]
    median = statistics.median(reward for reward, _ in scored)
    typical = min(scored, key=lambda pair: abs(pair[0] - median))[1]
    shown = [_completion("Best of its group", best)]
    if typical["text"] != best["text"]:
        shown.append(_completion("Typical of its group", typical))
    yield _short(last["prompt"]), shown


def _completion(heading: str, row: CompletionRow) -> tuple[str, str, float | None]:
    return heading, _short(row["text"]), row.get("reward")


def _short(text: str) -> str:
    text = public_text(text)
    return text if len(text) <= LONGEST_SAMPLE else f"{text[:LONGEST_SAMPLE]} …"


def base_licence(model: str, id_: str) -> dict[str, str | None]:
    """The base model's licence as the Hub's settings, from its local card or the Hub; {} if unknown."""
    folder = local_folder(model)
    about = card_of(folder) if folder else dict[str, Any]()
    if not about.get("license") and "/" in id_:
        try:
            card = HfApi().model_info(id_, timeout=LICENCE_TIMEOUT_S).card_data
            about = card.to_dict() if card else {}
        except Exception:  # offline, gated, gone, or not the Hub's answer
            return {}
    return {key: about.get(key) for key in ("license", "license_name", "license_link")} if about.get("license") else {}


TAGS = {"mlx": ("mlx", "mlx-lm"), "transformers": ("transformers",), "peft": ("peft",)}  # tags by library


def model_card(facts: CardFacts) -> str:
    """The complete file with its metadata, from resources/model_card.md."""
    environment = Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    body = environment.from_string((resources() / "model_card.md").read_text(encoding="utf-8")).render(
        facts=facts,
        hub=HUGGINGFACE_CO_URL_HOME,
        is_hub_id=is_hub_id,
        settings_file=SETTINGS_FILE,
        curves_file=CURVES_FILE,
        reward_rows=_reward_rows,
        figure_rows=_figure_rows,
        loss_sentence=_loss_sentence(facts.config),
        method_table=_table(("", ""), _method_rows(facts), rest="---"),
        table=_table,
        code=_code,
        plain=_plain,
        fenced=fenced,
        number=number_text,
        json=lambda text: json.dumps(text, ensure_ascii=False),
        shell=lambda text: shlex.quote(one_line(text)),
    )
    adapters = [facts.config.train_type] if facts.config.train_type != "full" else []
    method = ["grpo", "reinforcement-learning"] if facts.config.learns_from_rewards else [facts.config.train_mode]
    # The Hub calls quantized what has its base's weights in fewer bits, untrained: 4 bits are a fine-tune here.
    relation = "adapter" if facts.format.kind == "adapter" else "finetune"
    base = {"base_model": facts.base, "base_model_relation": relation} if is_hub_id(facts.base) else {}
    metadata = ModelCardData(
        library_name=facts.library,
        pipeline_tag="image-text-to-text" if facts.reads_images else "text-generation",
        tags=[*TAGS[facts.library], *method, *adapters, "grpo-studio"],
        datasets=[facts.dataset] if is_hub_id(facts.dataset) else None,
        **facts.licence,  # pyright: ignore[reportArgumentType]
        **base,
    )
    return f"---\n{metadata.to_yaml()}\n---\n\n{body}"


def _reward_rows(ends: list[RewardEnds]) -> Iterator[tuple[str, ...]]:
    *functions, (_, _, start, end) = ends
    for name, weight, first, last in functions:
        yield _code(name), f"{weight:g}", number_text(first), number_text(last)
    yield "**weighted sum**", "", number_text(start), number_text(end)


def _figure_rows(decoding: Decoding) -> Iterator[tuple[str, ...]]:
    before, after = (decoding.sides[name].figures for name in ("base", "tuned"))
    assert decoding.difference is not None
    sides = (before, after, decoding.difference)
    yield ("**Reward**", *(_interval(side.reward) for side in sides))
    for name in before.rewards:
        yield (_code(name), *(_interval(side.rewards.get(name)) for side in sides))
    for k in before.pass_at:
        yield (f"pass@{k}", *(_interval(side.pass_at.get(k), percent=True) for side in sides))
    yield ("Tokens of a completion", *(_interval(side.tokens) for side in sides))
    if any(side.cut_off.value for side in sides):
        yield ("Cut off at the length limit", *(_interval(side.cut_off, percent=True) for side in sides))


def _interval(found: MeanWithInterval | None, *, percent: bool = False) -> str:
    if found is None or found.value is None:
        return "–"
    ends = [found.value] if found.low is None or found.high is None else [found.value, found.low, found.high]
    shown = [f"{100 * end:.3g}\u00a0%" if percent else number_text(end) for end in ends]
    return shown[0] if len(shown) == 1 else f"{shown[0]}\u00a0({shown[1]}\u00a0…\u00a0{shown[2]})"


def _method_rows(facts: CardFacts) -> list[tuple[str, str]]:
    config, kl = facts.config, ""
    if config.kl_estimator != "k3" and config.beta:
        kl = f", estimator: {_choice('kl_estimator', config.kl_estimator).label.lower()}"
    # An optimizer or schedule of the program that trained is named as it is.
    optimizer = f"; {_plain(config.own_optimizer)}" if config.optimizer == OWN else ""
    rate = f"{config.learning_rate:g}, {config.lr_schedule}"
    rate = _plain(config.own_schedule) if config.lr_schedule == OWN else rate
    steps = f"{facts.step or '–'} × {config.batch_size}"
    if facts.seconds < 90:
        time = f"{facts.seconds:.0f} s"
    elif facts.seconds < 5400:
        time = f"{facts.seconds / 60:.0f} min"
    else:
        time = f"{facts.seconds / 3600:.1f} h"
    sampled = [
        ("Steps × prompts × completions", f"{steps} × {config.group_size}"),
        ("Longest completion", f"{config.max_completion_length} tokens"),
    ]
    return [
        *([("Steps × rows", steps)] if config.learns_labels else sampled),
        ("Learning rate", f"{rate}{optimizer}"),
        *([("KL coefficient β", f"{config.beta:g}{kl}")] if config.learns_from_rewards else []),
        ("Seed", str(config.seed)),
        ("Time", f"{time} on {_plain(facts.device)}"),
        ("Versions", _plain(", ".join(f"{name} {version}" for name, version in facts.versions.items())) or "–"),
    ]


def _choice(key: str, value: str) -> Choice:
    return next(choice for choice in SETTINGS[key].choices if choice.value == value)


def _loss_sentence(config: Config) -> str:
    loss = _choice("grpo_loss_type", config.grpo_loss_type)
    level = _choice("importance_sampling_level", config.importance_sampling_level)
    ratio = f", with importance ratios by {level.label.lower()}" if level.value != "token" else ""
    if config.ratio_against == "reference":
        ratio += ", with importance ratios against the reference model"
    number = loss.paper.removeprefix("arXiv:")
    paper = f"[{loss.paper}](https://arxiv.org/abs/{number})" if number != loss.paper else loss.paper
    return f"The loss is {loss.label} ({paper}){ratio}: {loss.sentence[0].lower()}{loss.sentence[1:]}"


def _code(text: str) -> str:
    name, delimiter = one_line(text), "`"
    while delimiter in name:
        delimiter += "`"
    return f"`{name}`" if delimiter == "`" else f"{delimiter} {name} {delimiter}"


def _plain(text: str) -> str:
    return re.sub(r"[\\`\[\]<>&!]", r"\\\g<0>", one_line(text))


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]], rest: str = "---:") -> str:
    return as_markdown([head, *rows], rest).removesuffix("\n")
