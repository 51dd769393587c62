"""Trial completions for the reward bench, and what it says of their scores."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from backend.config.config import Config, parse
from backend.models import policy as policy_module
from backend.rewards.findings import Sample, Scores, verdicts
from backend.trainer import trial_sampling
from backend.trainer.trial_sampling import Pick, TrialSampler
from backend.utils.errors import UserError
from tests.support import small_run
from tests.support.vision_models import picture, tiny_vision_model


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
    """As the run's first step would: another adapter, or one that was written since, gives other completions, and none
    the base's."""
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


def sample(*functions: Scores, sizes=(4, 4), texts=None, **about) -> Sample:
    count = sum(sizes)
    rows = [[(each.weight, each.given[i]) for each in functions if each.given] for i in range(count)]
    rewards = [sum(weight * x for weight, x in row if x is not None) if row else None for row in rows]
    return Sample(sizes, texts or [f"{TAGGED}{i}" for i in range(count)], rewards, functions, **about)


def function_scores(given, name="f", weight=1.0, **about) -> Scores:
    return Scores(name, about.pop("label", name.capitalize()), weight, given, **about)


def sentences_of(scored: Sample) -> list[str]:
    return [finding.sentence for finding in verdicts(scored)]


MIXED = [0.0, 1.0, 0.5, 0.0, 1.0, 1.0, 0.0, 0.5]


@pytest.mark.parametrize(
    ("functions", "about", "advice"),
    [
        # A weighted sum that is constant although its parts vary is easily overlooked (trl#3857).
        ([(MIXED, "a"), (MIXED, "b", -1.0)], {}, "A and B differ, but weighted they cancel out: change a weight."),
        ([([0.5] * 4,)], {"sizes": (4,), "texts": ["same"] * 4}, "They are the same text throughout: raise the temper"),
        ([([1.0] * 4,)], {"sizes": (4,)}, "Every function gives all it can: take harder prompts."),
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
    empty = verdicts(sample(silent, function_scores(MIXED), answers=["", ""]))
    assert empty[0].advice == "The dataset's answers are empty: choose the Answer column on Train."
