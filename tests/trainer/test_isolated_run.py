"""Runs whose reward functions have a process of their own, which is the default; trial completions for the reward
bench, and what it says of their scores."""

import os
from itertools import islice
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from backend.cli.common import logging_to
from backend.config.config import Config, parse
from backend.models import policy as policy_module
from backend.rewards.allowed_code import allow_named
from backend.rewards.bench import FunctionScores, ScoredSample, verdicts
from backend.runs.run_folder import RunFolder
from backend.trainer import trial_sampling
from backend.trainer.trial_sampling import Pick, TrialSampler
from backend.types import Completion, Group, Problem
from backend.utils.errors import UserError
from tests.support import small_run
from tests.support.small_run import events, notes
from tests.support.vision_models import picture, tiny_vision_model

REWARDS = """
import os
from backend.rewards import register_reward_function

@register_reward_function("low")
def low(completion_ids):
    return [sum(token < 160 for token in ids) / len(ids) for ids in completion_ids]

@register_reward_function("gone")
def gone(completions, trainer_state):
    if trainer_state.step == 2:
        os._exit(0)
    return [0.0] * len(completions)

@register_reward_function("where")
def where(completions, log_metric):
    log_metric("pid", os.getpid())
    return [0.0] * len(completions)
"""


@pytest.fixture
def raw(tmp_path: Path):
    """Makes settings of a short run with these functions."""

    def make(*names: str, **changes: Any) -> dict[str, Any]:
        file = tmp_path / "mine.py"
        file.write_text(REWARDS)
        about = {"reward_functions": list(names), "reward_weights": [], "reward_functions_file": str(file)}
        return small_run.settings_for(tmp_path, **about, **{"reward_isolation": "process", **changes})

    return make


def test_a_run_is_the_same_in_either_place_and_says_where_nothing_is_kept_apart(raw, tmp_path: Path) -> None:
    runs = {place: RunFolder(tmp_path / place) for place in ("process", "thread")}
    for place, run in runs.items():
        evaluated = {"validation_split": 0.5, "val_batches": 1, "steps_per_eval": 1}
        settings = raw("low", "where", reward_isolation=place, iters=2, **evaluated)
        assert small_run.train_here(settings, run).kind == "finished"
    process, thread = runs.values()
    assert process.completions.read_bytes() == thread.completions.read_bytes()
    rewards = [[event["metrics"]["reward"] for event in events(run, "eval")] for run in (process, thread)]
    assert rewards[0] == rewards[1] and len(rewards[0]) == 3
    pids = [{event["metrics"]["pid"] for event in events(run, "step")} for run in (process, thread)]
    assert len(pids[0]) == 1 and pids[0] != pids[1] == {os.getpid()}, "one process for the whole run"
    assert any("inside the trainer's own process" in note for note in notes(thread))
    assert not any("inside the trainer's own process" in note for note in notes(process))


def test_a_function_that_ends_its_process_ends_the_run_saved(raw, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    ending = small_run.train_here(raw("low", "gone", iters=3), run)
    assert (ending.kind, ending.step, ending.exit_code) == ("failed", 2, 2)
    assert ending.sentence.removeprefix("reward_functions: ").startswith(
        "The reward function gone of mine.py, line 9, ended the process it ran in (exit code 0)."
    )
    assert events(run, "failed")[0]["sentence"] == ending.sentence and events(run, "checkpoint")[-1]["step"] == 2


def test_a_resumed_run_says_that_its_reward_file_is_another_now(raw, tmp_path: Path) -> None:
    """The steps before and after are no more comparable, and whoever edited the file may not have meant this run."""
    run, mine = RunFolder(tmp_path / "run"), tmp_path / "mine.py"

    def go_on(iters: int) -> list[str]:
        settings = raw("low", reward_isolation="thread", iters=iters)
        mine.write_text(text)
        assert small_run.train_here(settings, run).kind == "finished"
        return [sentence for sentence in notes(run) if "mine.py" in sentence]

    text = REWARDS
    assert go_on(1) == [] and go_on(2) == []
    text += "# mended"
    (sentence,) = go_on(3)
    assert sentence.startswith("mine.py has changed since this run was trained last: the steps up to 2 were scored")
    assert go_on(4) == [sentence] and len(sentence) <= 200, "and not again"


STRICT = """
import time
import backend.rewards

def inner(text):
    {inner}

@backend.rewards.register_reward_function("strict")
def strict(prompts, completions, answer, types=None):
    try:
        [inner("abc") for _ in completions]
    except ValueError as error:
        raise RuntimeError("cannot score") from error
"""
RAISES = 'raise ValueError("no digits in " + text[:3] + chr(27) + "[31m")'
HANGS = "while True: time.sleep(0.01)"
WAITS = """
import asyncio
import backend.rewards

async def inner():
    await asyncio.Event().wait()

@backend.rewards.register_reward_function("strict")
async def strict(prompts, completions, answer, types=None):
    await inner()
"""


@pytest.mark.parametrize("isolation", ["process", "thread"])
@pytest.mark.parametrize(
    ("text", "says", "logged"),
    [
        (WAITS, "strict of mine.py, line 8, was still running after 1 s (reward_timeout).", "in strict|in inner"),
        (
            STRICT.format(inner=HANGS),
            "strict of mine.py, line 8, was still running after 1 s (reward_timeout).",
            "in inner|in strict",
        ),
        (
            STRICT.format(inner=RAISES),
            "strict of mine.py raised RuntimeError: cannot score (mine.py, line 13).",
            "line 6, in inner|ValueError: no digits in abc|The above exception was the direct cause|line 13, in strict",
        ),
    ],
    ids=["waits", "hangs", "raises"],
)
def test_log_says_where_a_reward_hangs_or_raises(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], isolation: str, text: str, says: str, logged: str
) -> None:
    """The user's own frames and the cause; the event log and the terminal have one sentence."""
    file, run = tmp_path / "mine.py", RunFolder(tmp_path / "run")
    file.write_text(text)
    run.path.mkdir()
    about = {"reward_functions_file": str(file), "reward_isolation": isolation, "reward_timeout": 1}
    raw = small_run.settings_for(tmp_path, reward_functions=["strict"], reward_weights=[], **about)
    allow_named(raw)
    with logging_to(run):
        ending = small_run.train_here(raw, run)
    assert (ending.kind, ending.exit_code) == ("failed", 2) and "\n" not in ending.sentence
    assert ending.sentence.endswith(f"{says} The traceback is in log.txt.")
    log = run.log.read_text()
    assert all(line in log for line in logged.split("|"))
    assert chr(27) not in log and "Traceback" not in capsys.readouterr().err
    assert "still running" in says or "calls.py" not in log


def test_a_trial_loads_the_model_alone_and_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ratio against the reference once made a trial load a reference that sampling never reads."""
    loaded: list[Config] = []
    monkeypatch.setattr(trial_sampling, "load_policy", lambda raw: loaded.append(raw) or policy_module.load_policy(raw))
    config = parse(small_run.settings_for(tmp_path, ratio_against="reference", beta=0.1))
    sampler = TrialSampler()
    first, again = (sampler.sample(config, Pick("first", 2), 2, 0) for _ in range(2))
    assert [config.needs_reference for config in loaded] == [False]
    texts = [[completion.text for group in groups for completion in group.completions] for groups in (first, again)]
    assert texts[0] == texts[1] and len(texts[0]) == 4


def test_a_trial_reads_the_pictures_of_its_rows(tmp_path: Path) -> None:
    """At the size of the settings, also where the model is still in memory."""
    data, pictures = tmp_path / "rows.jsonl", [picture(tmp_path / f"{seed}.png", seed=seed) for seed in (0, 1)]
    data.write_text("".join(f'{{"prompt": "Count.", "answer": "1", "image": "{seed}.png"}}\n' for seed in (0, 1)))
    model = str(tiny_vision_model(tmp_path / "model"))
    raw = small_run.settings_for(tmp_path, model=model, data=str(data))
    sampler = TrialSampler()
    first, second = sampler.sample(parse(raw), Pick("first", 2), 2, 0)
    assert [group.problem.images for group in (first, second)] == [pictures[:1], pictures[1:]]
    assert first.problem.tokens == second.problem.tokens
    assert first.completions[0].logps != second.completions[0].logps
    small, _ = sampler.sample(parse(raw | {"image_max_pixels": 1024}), Pick("first", 2), 2, 0)
    assert len(small.problem.tokens) < len(first.problem.tokens)


def test_a_trial_samples_with_the_adapter_that_the_run_starts_from(tmp_path: Path) -> None:
    """As the run's first step does: another adapter, or one written since, gives other completions, none the base's."""
    raw = small_run.settings_for(tmp_path)
    adapter = tmp_path / "adapters.safetensors"
    sampler = TrialSampler()

    def texts(**changes: Any) -> list[str]:
        (group,) = sampler.sample(parse(raw | changes), Pick("first", 1), 4, 0)
        return [completion.text for completion in group.completions]

    def write(seed: int) -> None:
        arrays = policy_module.load_policy(parse(raw)).trainable()
        mx.random.seed(seed)
        mx.save_safetensors(str(adapter), {name: mx.random.normal(array.shape) for name, array in arrays.items()})

    base = texts()
    write(0)
    adapted = texts(adapter=str(adapter))
    assert adapted != base and texts(adapter=str(adapter)) == adapted and texts() == base
    write(1)
    os.utime(adapter, (1, 1))
    assert texts(adapter=str(adapter)) not in (adapted, base)
    with pytest.raises(UserError, match="does not fit this run"):
        sampler.sample(parse(raw | {"adapter": str(adapter), "rank": 4}), Pick("first", 1), 4, 0)


TAGGED = "<think>so</think><answer>4</answer>"


def sample(*functions: FunctionScores, sizes=(4, 4), texts=None, answer="4", **about) -> ScoredSample:
    completions = [Completion([], [], text, "eos") for text in texts or [f"{TAGGED}{i}" for i in range(sum(sizes))]]
    for i, completion in enumerate(completions):
        row = [(each.weight, each.given[i]) for each in functions if each.given]
        completion.reward = sum(weight * x for weight, x in row if x is not None) if row else None
    rest = iter(completions)
    groups = [Group(Problem(n, "", [], [], answer), [*islice(rest, size)]) for n, size in enumerate(sizes)]
    return ScoredSample(groups, functions, **about)


def function_scores(given, name="f", weight=1.0, **about) -> FunctionScores:
    return FunctionScores(name, about.pop("label", name.capitalize()), weight, given, **about)


def sentences_of(scored: ScoredSample) -> list[str]:
    return [finding.sentence for finding in verdicts(scored)]


MIXED = [0.0, 1.0, 0.5, 0.0, 1.0, 1.0, 0.0, 0.5]


@pytest.mark.parametrize(
    ("functions", "about", "advice"),
    [
        # A weighted sum that is constant although its parts vary is easily overlooked (trl#3857).
        ([(MIXED, "a"), (MIXED, "b", -1.0)], {}, "A and B differ, but weighted they cancel out: change a weight."),
        ([([0.5] * 4,)], {"sizes": (4,), "texts": ["same"] * 4}, "They are the same text throughout: raise the temper"),
        ([([1.0] * 4,)], {"sizes": (4,)}, "Every function gives them the same: take harder prompts, or finer scores."),
    ],
)
def test_no_signal_comes_with_its_likely_reason(functions: Any, about: dict[str, Any], advice: str) -> None:
    found = verdicts(sample(*(function_scores(*each) for each in functions), **about))
    assert next(finding.advice for finding in found if finding.code == "no_signal").startswith(advice)


@pytest.mark.parametrize(
    ("given", "group_size", "share", "has_advice"),
    [
        ([1.0, 0.0, 1.0, 0.0] * 2, 8, 93, False),
        ([1.0] * 4 + [0.0] * 4, 8, 61, True),  # one prompt always solved, one never
        ([1.0] * 4 + [0.0] * 4, 2, 24, True),
    ],
)
def test_the_signal_expected_over_the_dataset(
    given: list[float], group_size: int, share: int, has_advice: bool
) -> None:
    found = {each.code: each for each in verdicts(sample(function_scores(given), group_size=group_size))}
    expected = f"Over the whole dataset about {share}% of the groups of {group_size} would have a signal."
    assert found["expected_signal"].sentence == expected and bool(found["expected_signal"].advice) == has_advice
    assert "expected_signal" not in {each.code for each in verdicts(sample(function_scores(given)))}


def test_a_function_that_never_fires_names_the_missing_text() -> None:
    silent = function_scores([0.0] * 8, "r1_accuracy_reward_func", label="Accuracy", looks_for=("<answer>",))
    assert "Accuracy never fires: the model writes no <answer>." in sentences_of(
        sample(silent, function_scores(MIXED), texts=["plain"] * 8)
    )
    assert "Accuracy never fires: 8 of 8 completions have <answer>, and none is what it wants." in sentences_of(
        sample(silent, function_scores(MIXED))
    )
    empty = verdicts(sample(silent, function_scores(MIXED), answer=""))
    assert empty[0].advice == "The dataset's answers are empty: choose the Answer column on Train."
