"""A worker whose heartbeats go on and whose main thread does not is given up after many times what its work usually takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from backend.distributed.channel import CollectiveWatch
from backend.distributed.faults import LostRank
from backend.distributed.hand_out import RankPaces
from backend.distributed.leader import LEAST_S, TIMES, UNSEEN_TIMES, HangDetector, Leader, SharedSampling
from backend.distributed.rank_info import RankInfo
from backend.distributed.step_shares import LearningReport, SamplingOrder
from backend.types import Problem


class SilentWorkers:
    """Workers that answer nothing; `late` are those that have not begun a collective."""

    def __init__(self, size: int, late: tuple[int, ...] = ()) -> None:
        self.machines = [RankInfo(rank, f"mac-{rank}") for rank in range(size)]
        self.late = late

    def send(self, *_: Any) -> None: ...

    send_to_all = send

    def receive(self, timeout: float | None = None) -> None:
        return None

    def check(self) -> None: ...

    def behind(self) -> list[int]:
        return [*self.late]

    def give_up(self, rank: int, why: str) -> NoReturn:
        raise LostRank.of(self.machines[rank], why)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def sampling(paces: RankPaces, clock: Clock, scoring_s: float = 0.0) -> SharedSampling:
    problems = [Problem(number, "", [], [1], "") for number in range(8)]
    order = SamplingOrder(1, 0, 0, 0, 4, {})
    return SharedSampling(SimpleNamespace(), SilentWorkers(2), paces, problems, order, [], scoring_s, clock)  # pyright: ignore


@pytest.mark.parametrize(("seen", "times"), [((1,), TIMES), ((0,), UNSEEN_TIMES)])
def test_a_round_that_never_ends_is_that_of_a_rank_that_hangs(seen: tuple[int, ...], times: float) -> None:
    paces, clock = RankPaces(2), Clock()
    for rank in seen:
        paces.observe(rank, 16, 8.0)
    work = sampling(paces, clock, scoring_s=60.0)
    work._give()
    (count, _), usual_s = work._given[1], work._given[1][0] / 2
    for clock.now in (0.0, LEAST_S, LEAST_S + times * usual_s + 59):
        work._serve(0.0)
    clock.now = LEAST_S + times * usual_s + 61
    with pytest.raises(
        LostRank,
        match=rf"mac-1 \(rank 1\) answers, but has worked on {count} completions for \d+ s; {usual_s:.1f} s are usual",
    ) as lost:
        work._serve(0.0)
    assert lost.value.rank == 1 and len(lost.value.faults[0].sentence) <= 200


def test_while_nobodys_pace_is_known_nobody_is_late() -> None:
    clock = Clock()
    work = sampling(RankPaces(2), clock)
    work._give()
    clock.now = 1e6
    work._serve(0.0)


def test_a_rank_that_does_not_come_to_an_update_is_given_up_and_one_that_sums_is_not() -> None:
    ranks = SimpleNamespace(rank=0, size=3, waiting=None)
    for late in ((), (2,)):
        leader = Leader(SilentWorkers(3, late), ranks, "ring")  # pyright: ignore[reportArgumentType]
        with leader.detect_hangs(leader.learning):
            ranks.waiting(1e6)  # the first step: nothing is usual
        leader.learning.observe(2.0)
        with leader.detect_hangs(leader.learning):
            ranks.waiting(LEAST_S + TIMES * 2 - 1)
            if not late:
                ranks.waiting(1e6)  # all have begun the sum: `collective_watch` judges that
                continue
            with pytest.raises(
                LostRank,
                match=r"mac-2 \(rank 2\) answers, but the others have waited 141 s for it to compute; a step took 2.0 s",
            ) as lost:
                ranks.waiting(LEAST_S + TIMES * 2 + 1)
            assert len(lost.value.faults[0].sentence) <= 200
    ranks.waiting(1e6)  # outside of a step that is learned, nobody is judged


def test_a_worker_that_does_not_tell_of_its_last_update_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    from backend.distributed import leader as module

    clock = Clock()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock, perf_counter=clock))
    leader = Leader(SilentWorkers(2), SimpleNamespace(rank=0, size=2), "ring")  # pyright: ignore[reportArgumentType]
    leader.learning.observe(1.0)
    looked = iter([0.0, 100.0, 129.0, 131.0])

    def receive(timeout: float | None = None) -> None:
        clock.now = next(looked)

    monkeypatch.setattr(leader.workers, "receive", receive)
    with pytest.raises(LostRank, match=r"mac-1 \(rank 1\) answers"):
        leader.learned_by_workers()
    assert clock.now == 131.0


def test_the_longest_step_is_what_is_usual() -> None:
    patience = HangDetector()
    assert not patience.overdue(1e9)
    for seconds in (3.0, 30.0, 4.0):
        patience.observe(seconds)
    assert not patience.overdue(LEAST_S + TIMES * 30) and patience.overdue(LEAST_S + TIMES * 30 + 1)
    report = LearningReport(tokens=1, seconds=9.0, waited_s=4.0, summed_s=2.0, peak_gb=0.0)
    assert report.busy_s == pytest.approx(3.0)


def test_who_is_behind_is_told_by_the_heartbeats() -> None:
    group = SimpleNamespace(entered=7, left=6, failure="", pending_bytes=0, bandwidth=0.0)
    watch = CollectiveWatch(group)
    for rank, entered in ((1, 7), (2, 6), (3, 4)):
        watch.take(rank, {"entered": entered, "left": entered, "failure": ""})
    assert watch.behind() == [3, 2]
