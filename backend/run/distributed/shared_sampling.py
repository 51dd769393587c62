"""The prompts of a step, or of an evaluation, sampled and scored by all ranks; the leader's side.

The leader samples rounds of its own and serves the workers between its decoding bursts, and while its reward functions run. Which rank
draws a completion changes nothing of it: random numbers are keyed by the prompt's and the completion's number.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from backend.run.distributed import group_wire
from backend.run.distributed.hand_out import HandOut, RankPaces
from backend.run.distributed.patience import limit_s
from backend.run.distributed.sampled_round import SampledRound, SamplingOrder, sample_round, score_round, unpacked_round
from backend.run.distributed.workers import Workers
from backend.run.step_parts import StepParts
from backend.types import Group, Problem

SERVING_S = 0.02
"""Seconds that the leader waits for a message before it looks at its own work again."""


class SharedSampling:
    """One sampling. After `run`: `groups` in the order of the problems, every round, the metrics that reward functions logged (means over
    the rounds by their completions), and `took_s`, the seconds that it took on `clock`."""

    def __init__(
        self,
        parts: StepParts,
        workers: Workers,
        paces: RankPaces,
        problems: Sequence[Problem],
        order: SamplingOrder,
        notes: list[str],
        scoring_limit_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`notes` takes sentences of the workers for the user. `scoring_limit_s`: how long the reward functions of a round may take."""
        self._parts, self._workers, self._paces, self._problems, self._order = parts, workers, paces, problems, order
        self._notes, self._scoring_limit_s, self._clock = notes, scoring_limit_s, clock
        size = len(workers.machines)
        self._hand_out = HandOut(len(problems), order.group_size, paces, size)
        self._idle = set(range(1, size))
        self._given: dict[int, tuple[int, float]] = {}
        """Rank → (completions of the round that it works on, when it got them)."""
        self.rounds: list[SampledRound] = []
        self.took_s = 0.0

    @property
    def groups(self) -> list[Group]:
        return [group for each in sorted(self.rounds, key=lambda each: each.start) for group in each.groups]

    @property
    def logged(self) -> dict[str, float]:
        totals: dict[str, float] = {}
        counts: dict[str, int] = {}
        for each in self.rounds:
            for name, value in (each.logged or {}).items():
                totals[name] = totals.get(name, 0.0) + value * each.completions
                counts[name] = counts.get(name, 0) + each.completions
        return {name: total / counts[name] for name, total in totals.items()}

    def run(self, poll: Callable[[float], None]) -> None:
        """`poll` is called with the share that is done, and may raise to stop."""
        began = self._clock()

        def serve_and_poll(wait_s: float = 0.0) -> None:
            self._serve(wait_s)
            poll(self._done / len(self._problems))

        self._give()
        while self._done < len(self._problems):
            if own := self._hand_out.take(0, self._clock()):
                self._sample_here(own, serve_and_poll)
            else:
                serve_and_poll(SERVING_S)
        self.took_s = self._clock() - began

    @property
    def _done(self) -> int:
        return sum(len(each.groups) for each in self.rounds)

    def _sample_here(self, places: range, serve_and_poll: Callable[[], None]) -> None:
        problems = self._problems[places.start : places.stop]
        own = sample_round(self._parts, self._order, 0, places.start, problems, lambda tokens: serve_and_poll())
        with ThreadPoolExecutor(1, "rewards") as pool:  # leaving it waits for the call that is running
            scoring = pool.submit(score_round, self._parts, self._order, own)
            while not scoring.done():
                self._serve(SERVING_S)
            scoring.result()
        self._take(own)

    def _serve(self, wait_s: float) -> None:
        """Take what workers have done, and give them more. Waits up to `wait_s` for a first message."""
        while (message := self._workers.receive(wait_s)) is not None:
            wait_s = 0.0
            assert message.kind == "sampled", message.kind
            machine = self._workers.machines[message.rank].called
            self._notes += [f"{machine}: {note}" for note in message.body["notes"]]
            self._idle.add(message.rank)
            del self._given[message.rank]
            self._take(unpacked_round(message.rank, message.body, message.arrays, self._problems))
            self._give()
        self._give_up_hung()

    def _give_up_hung(self) -> None:
        """Raise LostRank for a worker that answers, and whose round takes many times as long as its rounds do."""
        for rank, (count, since) in self._given.items():
            took_s, usual = self._clock() - since, self._paces.usual_s(rank, count)
            if usual is not None and took_s > limit_s(usual[0], is_seen=usual[1]) + self._scoring_limit_s:
                why = f"answers, but has worked on {count:,} completions for {took_s:.0f} s; {usual[0]:.1f} s are usual"
                self._workers.give_up(rank, why)

    def _take(self, done: SampledRound) -> None:
        self.rounds.append(done)
        self._paces.observe(done.rank, done.completions, done.seconds)
        self._hand_out.is_free(done.rank, self._clock())

    def _give(self) -> None:
        """A round to every worker that should have one now."""
        for rank in sorted(self._idle):
            if places := self._hand_out.take(rank, self._clock()):
                self._idle.remove(rank)
                problems = group_wire.packed_problems(self._problems[places.start : places.stop])
                order = {"order": self._order.to_dict(), "start": places.start, "problems": problems}
                self._workers.send(rank, "sample", order)
                self._given[rank] = (len(places) * self._order.group_size, self._clock())
