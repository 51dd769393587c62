"""Rules about what a run uses up: memory, and its data."""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean

from backend.spec.distributed.hosts_file import MOST_HOSTS
from backend.spec.health.recent import LONG, WINDOW, MeanChange, Recent, known
from backend.spec.health.rule import Rule, Sign, Threshold

EXPLAINED = 1.1
"""Growth of the longest completion beyond which memory may well have grown with it."""


def memory_creeping(recent: Recent, threshold: float) -> Sign | None:
    peaks, at_first = recent.values("peak_memory_gb", LONG), known(recent.first, "peak_memory_gb")
    if len(peaks) < LONG or not at_first:
        return None
    before, now = fmean(at_first), fmean(peaks[-WINDOW:])
    if now <= threshold * before or not _rises_throughout(peaks) or _grew_with_completions(recent):
        return None
    return Sign(
        now,
        f"“Memory” has grown from {before:.3g} GB in the first steps to {now:.3g} GB, and still grows, though completions are no longer than "
        f"they were: something is kept from step to step.",
        limit=threshold * before,
    )


def _rises_throughout(values: list[float]) -> bool:
    third = len(values) // 3
    parts = [values[start : start + third] for start in (0, third, 2 * third)]
    changes = [MeanChange.between(early, late) for early, late in pairwise(parts)]
    return all(change is not None and change.is_clear and change.size > 0 for change in changes)


def _grew_with_completions(recent: Recent) -> bool:
    before, now = known(recent.first, "completions/max_length"), recent.values("completions/max_length")
    return bool(before and now) and fmean(now) > EXPLAINED * fmean(before)


def seen_often(recent: Recent, threshold: float) -> Sign | None:
    values = recent.values("epoch")
    if not values or values[-1] < threshold:
        return None
    held_out = [evaluation.reward for evaluation in recent.evaluations]
    if len(held_out) > 1 and max(held_out[-2:]) >= max(held_out):
        return None  # it still gets better on prompts that it has not seen
    tail = (
        f", and “Held-out reward” no longer rises ({held_out[-1]:.3g}, at best {max(held_out):.3g})."
        if len(held_out) > 1
        else "."
    )
    return Sign(
        values[-1],
        f"Every prompt has been sampled {values[-1]:.0f} times (from {threshold:.0f} times on a model may learn them by heart){tail}",
    )  # fmt: skip


def machines_wait(recent: Recent, threshold: float) -> Sign | None:
    share = recent.mean("waiting_share")
    if share is None or share <= threshold:
        return None
    waited = {
        rank: seconds for rank in range(MOST_HOSTS) if (seconds := recent.mean(f"ranks/{rank}/waiting")) is not None
    }
    # Who waits least is who the others wait for.
    slowest = min(waited, key=lambda rank: waited[rank]) if len(waited) > 1 else None
    whom = "" if slowest is None else f", mostly for rank {slowest}"
    return Sign(
        share,
        f"In the last {WINDOW} steps the machines have spent {share:.0%} of their time waiting for each other{whom} (limit {threshold:.0%}).",
    )


RESOURCE_RULES = (
    Rule(
        "memory_creeping", "Memory creeping up", "Memory", "peak_memory_gb",
        Threshold(1.25, f"the mean peak of {WINDOW} steps is more than this many times that of the run's first {WINDOW}, it rose from each third "
                  f"of the last {LONG} steps to the next, and the longest completion did not grow by more than 10 %",
                  "ours: peaks of a sound run vary with the longest completion, by a few per cent"),
        "Look for a reward function that keeps what it was given. Save, stop and resume: a new process starts with none of it.",
        memory_creeping, "reward_functions_file", needs=LONG,
    ),
    Rule(
        "seen_often", "Data seen too often", "Other", "epoch",
        Threshold(10.0, "the passes over the dataset are at least this many, and the newest two evaluations are not the best of the last eight",
                  "ours; few prompts do teach for many passes as long as held-out reward rises: arXiv:2504.20571"),
        "Take more prompts, or stop at the best checkpoint.",
        seen_often, "data", level="info",
    ),
    Rule(
        "machines_wait", "Machines waiting for each other", "Waiting", "waiting_share",
        Threshold(0.25, f"the mean over {WINDOW} steps of the share of a step that the ranks spend waiting for each other is above this",
                  "ours: a rank with half the speed and as much work would cost as much; work that is shared out in small rounds costs below 0.1"),
        "Take more prompts a step, so that there is work to share out. If one machine is many times slower, leave it out; if the sums take "
        "the time, use a cable.",
        machines_wait, "hosts",
    ),
)  # fmt: skip
