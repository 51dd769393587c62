"""Evaluation on prompts that the policy does not train on: mean rewards, and greedy accuracy."""

from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

from backend.rewards.calls import Poll, wait_on
from backend.sampling.conversations import tool_metrics
from backend.sampling.rollout import Sampler
from backend.sampling.sampler import Sampling
from backend.training.advantages import advantage_values
from backend.training.batch import completion_metrics
from backend.training.variety import variety_metrics
from backend.types import Group, Problem

EVAL_SEED = 0x6576616C  # seed of held-out completions, the same at every evaluation ("eval" in ASCII)

FORWARD_SHARE = 1 / 8  # of an evaluation's completions, read once more for `entropy` and `kl`
LEAST_FORWARD_ROWS, FORWARD_ROWS = 4, 32  # limits of that

Score = Callable[[list[Group], Poll], object]  # fills in scores; calls its second argument while it waits


def evaluation_metrics(groups: Sequence[Group], names: Sequence[str], weights: Sequence[float]) -> dict[str, float]:
    """Rewards, lengths and variety of scored groups of one size, without spreads for groups of one."""
    completions = [completion for group in groups for completion in group.completions]
    scores = [[completion.scores[name] for name in names] for completion in completions]
    size = len(groups[0].completions)
    metrics = advantage_values(scores, size, weights=weights, names=names)[1] if names else {}
    if size == 1 and names:
        for name in ("frac_reward_zero_std", "frac_groups_without_signal"):
            metrics.pop(name, None)
    lengths = {name: value for name, value in completion_metrics(groups).items() if name != "num_tokens"}
    return metrics | lengths | variety_metrics(groups) | tool_metrics(groups)


def scored_groups(
    rollout: Sampler,
    problems: Sequence[Problem],
    score: Score,
    *,
    sampling: Sampling,
    group_size: int,
    batch_size: int,
    seed: int = EVAL_SEED,
    poll: Callable[[float], None] = lambda done: None,
    overlap_scoring: bool = True,
    finished: Callable[[Group], None] | None = None,
) -> list[Group]:
    """`group_size` completions of every problem, scored, in order; `batch_size` problems are sampled together. With
    `overlap_scoring` a thread scores one batch while the next one is sampled, unless their tools and environments are
    in the process that scores. `poll` takes the fraction done and may raise to stop; `finished` as in `Sampler.sample`.
    The random numbers depend on `seed` and the place in `problems` alone."""
    groups, batch = list[Group](), list[Problem]()
    expected = 0.0  # tokens of the batch that is sampled
    tokens, scoring, is_given_up = 0, list[Future[object]](), False

    def poll_scoring() -> None:
        if is_given_up:
            raise CancelledError

    def report(sampled_tokens: int) -> None:
        share = min(sampled_tokens / expected, 1.0) if expected else 0.0
        poll((len(groups) + share * len(batch)) / len(problems))

    with ThreadPoolExecutor(1, "held-out rewards") as pool:
        try:
            for start in range(0, len(problems), batch_size):
                batch = list(problems[start : start + batch_size])
                # A batch as long as the ones before: without any, nobody knows how long completions are.
                expected = tokens / len(groups) * len(batch) if groups else 0.0
                sampled = rollout.sample(batch, group_size, sampling, seed, start, report, finished)
                if overlap_scoring and rollout.tools is None:
                    for future in scoring[-1:]:
                        future.result()  # one batch at a time; raises what it has raised
                    scoring.append(pool.submit(score, sampled, poll_scoring))
                else:
                    score(sampled, wait_on)
                tokens += sum(len(completion.tokens) for group in sampled for completion in group.completions)
                groups += sampled
            for future in scoring[-1:]:
                future.result()
        except BaseException:
            is_given_up = True  # the call that is running ends at its next poll
            raise
    return groups


def sample_of(groups: Sequence[Group]) -> list[Group]:
    """The first completion of some groups, spread evenly: FORWARD_SHARE of the completions within the limits."""
    completions = sum(len(group.completions) for group in groups)
    most = min(FORWARD_ROWS, max(LEAST_FORWARD_ROWS, round(FORWARD_SHARE * completions)))
    return [Group(group.problem, group.completions[:1]) for group in groups[:: -(-len(groups) // most)]]
