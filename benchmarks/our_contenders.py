"""Our engine as a contender, called as the trainer calls it, with everything on or with one technique switched off."""

import contextlib
from pathlib import Path

from backend.config.config import Config, parse
from backend.engine.device import release_cached_buffers
from backend.models.policy import load_policy
from backend.sampling.rollout import Sampler
from backend.sampling.sampler import Sampling
from backend.training.advantages import advantages
from backend.training.algorithms import build_learner
from backend.training.batch import pack
from backend.types import Completion, Group, Problem
from benchmarks import ablation
from benchmarks.contender import RANK, RATE, SCALE, Contender, picture, prompt_ids, reward
from benchmarks.stopwatch import Stopwatch
from benchmarks.workloads import Case

MANY = 10**6  # updates that the learning rate schedule expects: more than any benchmark takes


def contender(name: str) -> Contender:
    """ "ours", or "ours, without " and a technique. Raises KeyError for an unknown one."""
    switches = {"ours": contextlib.nullcontext, **ablation.SWITCHES, **ablation.GPU_SWITCHES}
    off = switches[name.removeprefix("ours, without ")]

    def run(case: Case, folder: Path, stopwatch: Stopwatch) -> None:
        with off():
            (decoding_steps if case.work == "decode" else steps)(case, folder, stopwatch)

    return run


def settings(case: Case, folder: Path) -> Config:
    """The settings that all contenders share: LoRA on every projection, Adam, one update per rollout."""
    return parse(
        {
            "model": str(folder),
            "data": str(folder),
            "num_layers": -1,
            "rank": RANK,
            "scale": SCALE,
            "optimizer": "adam",
            "learning_rate": RATE,
            "batch_size": case.prompts,
            "group_size": case.group_size,
            "beta": case.beta,
            "max_completion_length": case.completion,
            "max_seq_length": case.prompt + case.completion,
            "temperature": case.temperature,
            "top_p": case.top_p,
            "top_k": 0,
        }
    )


def problems(case: Case, number: int, folder: Path = Path()) -> list[Problem]:
    """`folder`: of the model, which has the pictures."""
    found = [Problem(i, "", [], ids, "") for i, ids in enumerate(prompt_ids(case, number))]
    for i, problem in enumerate(found if case.image else []):
        image = {"type": "image", "image": picture(case, folder, i, number)}
        problem.messages = [{"role": "user", "content": [image]}]
    return found


def sample(rollout: Sampler, case: Case, number: int = 0, folder: Path = Path()) -> list[Group]:
    """The rollout of step `number`."""
    asked, sampling = problems(case, number, folder), Sampling(case.temperature, case.top_p)
    return rollout.sample(asked, case.group_size, sampling, 0, number * case.prompts)


def steps(case: Case, folder: Path, stopwatch: Stopwatch) -> None:
    """Whole steps, or the rollout or the training of each alone, the latter on random completions of full length."""
    config = settings(case, folder)
    policy = load_policy(config)
    rollout = learner = None
    if case.work != "train":
        rollout = Sampler(policy, case.completion)
    if case.work != "rollout":
        learner = build_learner(policy, config, MANY, micro_batch_tokens=case.micro_batch)
    for number in stopwatch.steps():
        if rollout is not None:
            groups = sample(rollout, case, number, folder)
            stopwatch.lap("rollout")
            score_groups(groups)
        else:
            groups = random_groups(case, number)
            stopwatch.restart()
        if learner is not None:
            release_cached_buffers()  # as between sampling and learning of a run
            learner.learn(pack(groups, pad_id=policy.pad_id))
            stopwatch.lap("train")
        stopwatch.done(sum(len(completion.tokens) for group in groups for completion in group.completions))


def decoding_steps(case: Case, folder: Path, stopwatch: Stopwatch) -> None:
    """Decoding steps: the difference between a rollout of all tokens and one of a single token."""
    policy = load_policy(settings(case, folder))
    short, long = Sampler(policy, 1), Sampler(policy, case.completion)
    for number in stopwatch.steps():
        for phase, rollout in (("first", short), ("rollout", long)):
            sample(rollout, case, number, folder)
            stopwatch.lap(phase)
        decoding_s = stopwatch.phases["rollout"]["s"] - stopwatch.phases["first"]["s"]
        stopwatch.done(case.rows * case.completion, decode_s=decoding_s / (case.completion - 1))


def score_groups(groups: list[Group]) -> None:
    """Set rewards and advantages."""
    completions = [completion for group in groups for completion in group.completions]
    rewards = [[reward(completion.text)] for completion in completions]
    values, _ = advantages(rewards, len(groups[0].completions))
    for completion, value in zip(completions, values.tolist(), strict=True):  # pyright: ignore
        completion.advantage = value


def random_groups(case: Case, number: int) -> list[Group]:
    """Groups of random completions of full length, scored: the input of training, without a rollout."""
    import numpy as np

    rng = np.random.default_rng((11, number))
    groups = []
    for problem in problems(case, number):
        ids = rng.integers(2, case.vocab, (case.group_size, case.completion)).tolist()
        uniform = [-float(np.log(case.vocab))] * case.completion
        completions = [Completion(row, list(uniform), str(i), "length") for i, row in enumerate(ids)]
        groups.append(Group(problem, completions))
    score_groups(groups)
    return groups
