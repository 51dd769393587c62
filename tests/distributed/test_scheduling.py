"""How a step is shared among ranks of unequal speed, what each waits, and when a rank counts as hung."""

import heapq
import io
import random
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import Mock

import numpy as np
import pytest

from backend.config.config import parse
from backend.distributed import messages, scheduling
from backend.distributed.leader import LEAST_S, TIMES, SharedSampling, detect_hangs
from backend.distributed.messages import SampledRound, SamplingOrder
from backend.distributed.ranks import LostRankError, RankInfo
from backend.distributed.scheduling import LearningReport, PromptScheduler, RankPaces, StepShares
from backend.engine.penalties import Penalties
from backend.sampling.grammar import Grammar
from backend.sampling.row_costs import RowCosts
from backend.sampling.sampler import Sampling
from backend.types import Completion, Group, Problem, ToolCall, ToolResult, Turn
from backend.utils.errors import UserError

Rounds = tuple[list[list[int]], float]  # the rounds of each rank, and the share of the time that the ranks waited


def simulated(seconds: Callable[[int, int], float], size: int, paces: RankPaces, prompts: int) -> Rounds:
    """`seconds(rank, completions)` is what a round of groups of 8 takes."""
    group = 8
    hand_out, now, idle = PromptScheduler(prompts, group, paces), 0.0, set(range(size))
    rounds: list[list[int]] = [[] for _ in range(size)]
    busy, ends = 0.0, list[tuple[float, int, int]]()
    handed = []
    while hand_out.left or ends:
        for rank in sorted(idle):
            if places := hand_out.take(rank, now):
                idle.remove(rank)
                handed += places
                rounds[rank].append(len(places))
                took = seconds(rank, len(places) * group)
                busy += took
                heapq.heappush(ends, (now + took, rank, len(places)))
        assert ends, "prompts are left, and nobody takes them"
        now, rank, count = heapq.heappop(ends)
        paces.observe(rank, count * group, seconds(rank, count * group))
        del hand_out.given[rank]
        idle.add(rank)
    assert handed == list(range(prompts))
    return rounds, 1 - busy / (size * now)


def steps(seconds: Callable[[int, int], float], size: int, prompts: int, count: int = 6) -> Rounds:
    """The last of several steps, after which the paces are known."""
    paces = RankPaces(size)
    return [simulated(seconds, size, paces, prompts) for _ in range(count)][-1]


@pytest.mark.parametrize("prompts", [16, 32, 64])
def test_a_rank_three_times_slower_waits_for_nobody_and_nobody_for_it(prompts: int) -> None:
    """An equal split would let the faster one wait for two thirds of its time."""
    noise = random.Random(prompts)
    rounds, waiting = steps(lambda rank, n: n * (3.0 if rank else 1.0) * noise.uniform(0.9, 1.1), 2, prompts)
    assert waiting <= 0.1
    assert 2.0 < sum(rounds[0]) / sum(rounds[1]) < 4.5


def test_everything_is_handed_out_at_once_where_a_round_costs_more_than_it_evens_out() -> None:
    """Decoding where the time is that of reading the weights: one completion takes as long as many."""
    rounds, waiting = steps(lambda rank, n: 10.0 + 0.01 * n, 2, 16)
    assert rounds == [[8], [8]] and waiting < 0.01


def test_a_rank_that_would_be_the_last_to_end_gets_nothing() -> None:
    """One pass over the weights takes the second machine longer than all of the step takes the first."""
    rounds, _ = steps(lambda rank, n: (50.0 if rank else 1.0) + 0.1 * n, 2, 8, count=3)
    assert rounds[1] == []


def sampled(rank: int, tokens: int, sampling_s: float, scoring_s: float) -> SampledRound:
    group = Group(Problem(0, "", [], [1], ""), [Completion([1] * tokens, [0.0] * tokens, "", "eos")])
    return SampledRound(rank, 0, [group], sampling_s, scoring_s)


def a_step(shares: StepShares, learned: tuple[int, int] = (300, 100)) -> dict[str, float]:
    """10 s of sampling, in which rank 0 is busy for 9 and rank 1 for 6; 5 s of learning, with 1 s and 2 s of waiting
    and 1 s of summing."""
    shares.add_sampling([sampled(0, 40, 4.0, 1.0), sampled(1, 30, 5.0, 1.0), sampled(0, 40, 4.0, 0.0)], 10.0, 3.0)
    reports = LearningReport(learned[0], 5.0, 1.0, 1.0, 1.0), LearningReport(learned[1], 5.0, 2.0, 1.0, 2.0)
    return shares.metrics(reports)


def test_rows_are_split_by_the_speeds_of_learning_once_they_are_known() -> None:
    shares = StepShares()
    assert shares.speeds([1.0, 2.0]) == [1.0, 2.0], "before the first update those of sampling"
    a_step(shares)
    assert shares.speeds([1.0, 2.0]) == [100.0, 50.0]
    a_step(shares, (600, 100))
    assert shares.speeds([1.0, 2.0]) == [150.0, 50.0]
    a_step(shares, (600, 0))
    assert shares.speeds([1.0, 2.0]) == pytest.approx([175.0, 55.0]), "a rank without rows may have become faster"
    shares = StepShares()
    a_step(shares, (600, 0))
    assert shares.speeds([1.0, 2.0]) == [1.0, 2.0]


def silent_workers(size: int) -> Any:
    """Workers that answer nothing."""
    machines = [RankInfo(rank, f"mac-{rank}") for rank in range(size)]

    def give_up(rank: int, why: str) -> NoReturn:
        raise LostRankError(machines[rank], why)

    return Mock(machines=machines, give_up=give_up, **{"receive.return_value": None, "slowest.return_value": size - 1})


def sampling(paces: RankPaces, clock: Callable[[], float], scoring_s: float = 0.0) -> SharedSampling:
    problems = [Problem(number, "", [], [1], "") for number in range(8)]
    config = SimpleNamespace(reward_timeout=scoring_s, reward_functions=["length"])
    context: Any = SimpleNamespace(workers=silent_workers(2), paces=paces, config=config)
    return SharedSampling(context, SamplingOrder(problems, 1, 0.0, 0, 0, 4, []), clock)


@pytest.mark.parametrize("seen", [0, 1])
def test_a_round_that_never_ends_is_that_of_a_rank_that_hangs(seen: int) -> None:
    paces, clock = RankPaces(2), SimpleNamespace(now=0.0)
    paces.observe(seen, 16, 8.0)
    work = sampling(paces, lambda: clock.now, scoring_s=60.0)
    work._give()
    count, _ = work._scheduler.given[1]
    usual_s = count / 2
    for clock.now in (0.0, LEAST_S, LEAST_S + TIMES * usual_s + 59):
        work._serve(0.0)
    clock.now = LEAST_S + TIMES * usual_s + 61
    with pytest.raises(
        LostRankError,
        match=rf"mac-1 \(rank 1\) answers, but has worked on {count} completions for \d+ s; {usual_s:.1f} s are usual",
    ) as lost:
        work._serve(0.0)
    assert lost.value.rank == 1 and len(lost.value.faults[0].sentence) <= 200


def test_an_idle_rank_gets_what_another_would_end_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 is expected to end all prompts first, and is a thousand times slower than that."""
    paces, inbox = RankPaces(2), list[Any]()
    for rank, seconds in enumerate((1.0, 100.0)):
        paces.observe(rank, 4, seconds)

    def sample_round(parts: Any, rank: int, order: SamplingOrder, poll: Any) -> SampledRound:
        groups = [Group(problem, [Completion([1], [0.0], "", "eos")] * 4) for problem in order.problems]
        return SampledRound(rank, order.start, groups, sampling_s=(1000.0, 100.0)[rank] * len(groups))

    def send(rank: int, kind: str, order: SamplingOrder) -> None:
        body = {"done": sample_round(None, rank, order, None), "notes": []}
        inbox.append(SimpleNamespace(rank=rank, body=body))

    monkeypatch.setattr(scheduling, "sample_round", sample_round)
    monkeypatch.setattr(scheduling, "score_round", lambda *_: None)
    work = sampling(paces, lambda: 0.0)
    workers: Any = work._workers
    workers.send, workers.receive, work._context.notes = send, lambda wait_s: inbox.pop() if inbox else None, []
    polls = [None] * 100
    work.run(lambda share: polls.pop())
    assert [each.rank for each in work.rounds] == [0, 1] and len(work.groups) == 8


def test_a_rank_that_does_not_come_to_an_update_is_given_up() -> None:
    ranks, workers = Mock(), silent_workers(3)
    with detect_hangs(workers, ranks, 0.0):
        ranks.waiting(3000)  # the first step: nothing is usual
    with detect_hangs(workers, ranks, 2.0):
        ranks.waiting(LEAST_S + TIMES * 2 - 1)
        with pytest.raises(LostRankError, match="others have waited 141 s for it to compute; a step took 2") as lost:
            ranks.waiting(LEAST_S + TIMES * 2 + 1)
        assert lost.value.rank == 2
    ranks.waiting(1e6)  # outside of a step that is learned, nobody is judged


def sent(value: Any) -> Any:
    """Through the frames of the control channel."""
    stream = io.BytesIO(messages.encode("a test", {"it": value}))
    kind, body = messages.decode(lambda count: bytearray(stream.read(count)))
    assert kind == "a test"
    return body["it"]


ROW = (
    {"text": "é\udce9\0", "none": None, "big": 2**80, "nan": 0.1, "list": [1, [True, {"a": b"\0\xff"}]]}
    | {"when": datetime(2026, 1, 2, tzinfo=UTC), "day": date(2026, 1, 2), "price": Decimal("1.10")}
    | {"messages": [{"role": "user", "content": "x"}]}
)


def test_problem_keeps_every_column_with_its_type() -> None:
    problem = Problem(7, "What?", [{"role": "user", "content": "What?"}], [5, 6], "42", "sum", ROW)
    received = sent(problem)
    assert received == problem
    assert [type(x) for x in received.row.values()] == [type(x) for x in ROW.values()]


def test_column_that_cannot_travel_is_named() -> None:
    with pytest.raises(UserError, match="column picture holds a set"):
        messages.check_sendable({"picture": [{1}]})


def test_scored_groups_arrive_as_they_were() -> None:
    numbers = np.random.default_rng(0).normal(size=5).astype(np.float32).tolist()
    scored = Completion([3, 4, 5], numbers[:3], "abc", "eos", [-0.5, 0.0, -1.0], scores={"f": 0.1, "g": None})
    scored.reward, scored.advantage = 0.1, 1 / 3
    empty = Completion([], [], "", "length", scores={"f": float("nan"), "g": 1.0}, logged={"note": "hm"})
    masked = Completion([6, 7], numbers[3:], "d", "string", mask=[1, 0], log_held=[-0.25, 0.0], reward=3.0)
    call, result = ToolCall("add", {"a": [1, {"b": None}]}), ToolResult("add", "3", failed=True, seconds=0.5)
    masked.turns, masked.conversation = [Turn("d", [call], 1, [result], 1)], 7
    groups = [Group(Problem(0, "a", [], [1, 2], "x"), [scored, empty]), Group(Problem(1, "b", [], [], "y"), [masked])]
    assert repr(sent(groups)) == repr(groups)


def test_what_a_model_is_computed_with_arrives_as_it_was() -> None:
    sampling = Sampling(0.5, penalties=Penalties(1.2), grammar=Grammar("regex", "a*"))
    config, costs = parse({"model": "m", "data": "d", "stages": [{"iters": 2}]}), RowCosts(((1, 0.5), (8, 1.0)))
    value = {"sampling": sampling, "config": config, "costs": costs, "rest": (1, "two", None)}
    assert sent(value) == value


def test_reward_files_move_to_the_worker(tmp_path: Path) -> None:
    """Two files of one name from two folders, in the setting of the file, in entries, and in a stage."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        source = f"# {folder}\r\ndef f(completions, **_):\n    return [0.0]\n"
        (tmp_path / folder / "own.py").write_text(source, newline="")
    entry, file = f"{tmp_path}/a/own.py::f(name=first)", f"{tmp_path}/b/own.py"
    raw = {"model": "m", "data": "d", "reward_functions": [entry, "r1_int"], "reward_functions_file": file}
    raw |= {"tools_file": file, "environment": {"own": f"{file}::f"}}
    config = parse(raw | {"stages": [{"iters": 1, "reward_functions": [f"{file}::f"]}, {"iters": 1}]})
    files = messages.write_reward_code(sent(messages.reward_code(config)), tmp_path / "worker")
    moved = messages.with_reward_files(config, files)
    first, second = moved.reward_functions[0].removesuffix("::f(name=first)"), moved.reward_functions_file
    assert Path(first).read_bytes().startswith(b"# a\r\n") and Path(second).read_bytes().startswith(b"# b\r\n")
    assert moved.reward_functions[1] == "r1_int"
    assert moved.tools_file == second and moved.environment == {"own": f"{second}::f"}
    assert moved.stages[0]["reward_functions"] == [f"{second}::f"]
    assert str(tmp_path / "worker") in first and str(tmp_path / "worker") in second
