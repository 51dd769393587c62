"""Self-distillation: loss, gradient and texts are TRL's, and the teacher is the policy after the other prompt."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from backend.config.config import Config, parse
from backend.data.problems import PromptFormat
from backend.models.policy import load_policy
from backend.training.algorithms import build_learner
from backend.training.batch import Batch, pack
from backend.training.self_distillation import add_teacher_prompts, distillation_terms, teacher_weights
from backend.types import Completion, Group, Problem
from backend.utils.errors import UserError
from tests.support import small_run
from tests.support.small_settings import PLAIN_SGD, SMALL_LORA

TRL = json.loads((Path(__file__).parents[1] / "golden" / "self_distillation.json").read_text())
ON = {"distillation_weight": 0.5}


def config_of(**settings: Any) -> Config:
    return parse({"model": "none", "data": "none"} | ON | settings)


@pytest.mark.parametrize("case", TRL["cases"], ids=lambda case: case["name"])
def test_loss_and_gradient_are_trl_s(case: dict[str, Any]) -> None:
    """The last row has no teacher and counts all the same; masks begin and end inside rows."""
    mask, has_teacher = mx.array(TRL["mask"]), TRL["has_teacher"]
    rows = [Completion([5] * 6, [0.0] * 6, "", "eos", teacher_prompt=[1] * int(each)) for each in has_teacher]
    batch = replace(pack([Group(Problem(0, "", [], [1], ""), rows)], pad_id=0), mask_BT=mask)
    old = None if case["old"] is None else mx.array(case["old"])
    batch = replace(batch, old_logp_BT=old, teacher_logp_BT=mx.array(TRL["teacher_logp"]))
    batch = replace(batch, teacher_weight_BT=teacher_weights(batch))
    ids = mx.array(TRL["ids"])[..., None]

    def terms(logits: mx.array) -> tuple[mx.array, mx.array]:
        return distillation_terms(mx.take_along_axis(nn.log_softmax(logits), ids, -1)[..., 0], batch)

    (loss, mean), gradient = mx.value_and_grad(terms)(mx.array(TRL["student_logits"]))
    assert loss.item() == pytest.approx(case["loss"], abs=2e-5)
    assert (mean[0] / mean[1]).item() == pytest.approx(case["metric"], abs=2e-5)
    np.testing.assert_allclose(np.array(gradient), np.array(case["student_grad"]), atol=2e-5)


class Words:
    """A tokenizer whose ids are the words of all texts so far."""

    chat_template = ""

    def __init__(self) -> None:
        self.words: list[str] = []

    def encode(self, text: str) -> list[int]:
        start = len(self.words)
        self.words += text.split(" ")
        return [*range(start, len(self.words))]

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        return " ".join(f"answer {token}" if token < 1000 else self.words[token] for token in tokens)


def groups_of(case: dict[str, Any]) -> list[Group]:
    size, groups = case["group"], list[Group]()
    for start in range(0, len(case["rewards"]), size):
        problem = Problem(0, "", [{"role": "user", "content": f"Question {start // size}?"}], [1], "")
        groups.append(Group(problem, []))
        for i in range(start, start + size):
            logged = {"privileged_context": case["feedbacks"][i]} if case["feedbacks"] else {}
            completion = Completion([i], [0.0], "", "eos", reward=case["rewards"][i], logged=logged)
            groups[-1].completions.append(completion)
    return groups


def teacher_texts(groups: list[Group], config: Config, metrics: dict[str, float] | None = None) -> list[str | None]:
    tokenizer = Words()
    found = add_teacher_prompts(groups, config, tokenizer, PromptFormat.of(config))
    (metrics if metrics is not None else {}).update(found)
    prompts = [completion.teacher_prompt for group in groups for completion in group.completions]
    return [" ".join(tokenizer.words[token] for token in prompt) or None for prompt in prompts]


@pytest.mark.parametrize("case", TRL["build"], ids=str)
def test_the_teacher_reads_what_trl_s_reads(case: dict[str, Any]) -> None:
    settings = {key: case[key] for key in ("dont_reprompt_on_self_success", "include_environment_feedback")}
    config = config_of(success_reward_threshold=case["threshold"], **settings)
    metrics: dict[str, float] = {}
    assert teacher_texts(groups_of(case), config, metrics) == case["texts"]
    assert metrics["self_distillation/reprompted"] == pytest.approx(case["reprompted"])
    assert metrics["self_distillation/solved_groups"] == pytest.approx(case["solved_groups"])


def test_feedback_is_of_the_completion_then_of_the_row_and_what_does_not_fit_is_counted() -> None:
    config = config_of(include_environment_feedback=True, privileged_context_feature="hint")
    problem = Problem(0, "", [{"role": "user", "content": "Sum?"}], [1], "", row={"hint": "carry the one"})
    rows = [Completion([1], [0.0], "", "eos", logged=logged) for logged in ({"hint": "too long"}, {})]
    first, second = teacher_texts([Group(problem, rows)], config)
    assert first and second and "attempt:\n\ntoo long\n" in first and "attempt:\n\ncarry the one\n" in second
    assert [row.teacher_context for row in rows] == [{"feedback": "too long"}, {"feedback": "carry the one"}]
    metrics: dict[str, float] = {}
    narrow = config.model_copy(update={"max_seq_length": 15})  # the second prompt has 15 words
    rows = [replace(row, teacher_prompt=[], teacher_context={}) for row in rows]
    assert teacher_texts([Group(problem, rows)], narrow, metrics)[1] is None
    assert metrics["self_distillation/too_long"] == 0.5 == metrics["self_distillation/reprompted"]


@pytest.mark.parametrize(
    ("messages", "settings", "message"),
    [
        ([{"role": "assistant", "content": "Hm"}], {}, "the prompt of row 1 has none"),
        ([{"role": "user", "content": "Play"}], {"environment": "game.py::Game"}, "in several ways"),
    ],
)
def test_a_prompt_that_cannot_be_rendered_again_is_refused(
    messages: list[dict[str, Any]], settings: dict[str, Any], message: str
) -> None:
    """The second group has only the beginning of its prompts in common."""
    group = Group(Problem(0, "", messages, [0], ""), [Completion([1], [0.0], "", "eos", reward=1.0) for _ in range(2)])
    with pytest.raises(UserError, match=message):
        teacher_texts([group], config_of().model_copy(update=settings))


def random_batch(pad_id: int) -> Batch:
    """Three groups of three: the second has no advantage, a row in each no teacher; two share a teacher's prompt."""
    rng = np.random.default_rng(0)
    groups: list[Group] = []
    for index in range(3):
        group = Group(Problem(index, "", [], rng.integers(3, 320, 4 + index).tolist(), ""), [])
        shown = rng.integers(3, 320, 12 + 9 * index).tolist()
        for i in range(3):
            tokens = rng.integers(3, 320, rng.integers(1, 10)).tolist()
            prompt = [[], shown, shown if index else shown[:6]][i]
            advantage = float(rng.normal()) if index != 1 else 0.0
            row = Completion(tokens, [-5.8] * len(tokens), "", "eos", advantage=advantage, teacher_prompt=prompt)
            group.completions.append(row)
        groups.append(group)
    return pack(groups, pad_id=pad_id)


@pytest.mark.parametrize(
    "settings",
    [{}, {"teacher_model_kind": "base"}, {"num_iterations": 2}, {"train_type": "full"}, {"dropout": 0.1}],
    ids=str,
)
def test_the_teacher_is_the_policy_after_its_own_prompt_in_any_split(model: Path, settings: dict[str, Any]) -> None:
    raw = SMALL_LORA | PLAIN_SGD | ON | {"model": str(model), "beta": 0.0, "batch_size": 3, "group_size": 3}
    config, weights = parse(raw | {"learning_rate": 0.05} | settings), list[dict[str, np.ndarray]]()
    for tokens in (1, 10_000):
        policy = load_policy(config)
        learner = build_learner(policy, config, 1, micro_batch_tokens=tokens)
        batch = random_batch(policy.pad_id)
        parts: Any = learner.algorithm
        found = parts.optimizer_batch(batch, learner.forward)
        assert sum(len(part.batch) for part in found) == (9 if policy.reference else 8)  # one row has no signal
        for part in found:
            prompts, logps = batch.teacher_prompts, np.array(part.batch.teacher_logp_BT)
            for i, row in enumerate(part.batch.row_B.tolist()):
                own = part.batch.completion_BT[i, : part.batch.length_B[i].item()].tolist()
                expected: Any = 0.0
                if prompts[row]:
                    logits = policy.model(mx.array([prompts[row] + own]))[0, -len(own) - 1 : -1] / config.temperature
                    expected = np.array(nn.log_softmax(logits))[range(len(own)), own]
                np.testing.assert_allclose(logps[i, : len(own)], expected, atol=1e-4)
        metrics = learner.learn(batch)
        assert np.isfinite(metrics["self_distillation/loss"])
        weights.append({name: np.array(x) for name, x in policy.trainable().items()})
    if "dropout" not in settings:
        for name, x in weights[0].items():
            np.testing.assert_allclose(weights[1][name], x, atol=2e-6)


def test_the_loss_is_the_mix_and_kl_keeps_its_weight(model: Path) -> None:
    """At weight 1 the policy term is gone; at weight w each has its share."""
    raw = SMALL_LORA | PLAIN_SGD | {"model": str(model), "batch_size": 3, "group_size": 3, "beta": 0.1}
    losses, kls = dict[float, float](), set[float]()
    for weight in (0.0, 0.25, 1.0):
        config = parse(raw | {"distillation_weight": weight})
        policy = load_policy(config)
        batch = random_batch(policy.pad_id)
        if not weight:
            batch = replace(batch, teacher_prompts=())
        for name, x in policy.trainable().items():  # away from the reference
            policy.assign(policy.trainable() | {name: x + 0.02})
        learner = build_learner(policy, config, 1)
        metrics = learner.learn(batch)
        losses[weight] = metrics["loss"]
        kls.add(metrics["kl"])
    assert len(kls) == 1 and min(kls) > 0
    assert losses[0.25] == pytest.approx(0.75 * losses[0.0] + 0.25 * losses[1.0], abs=1e-6)


def test_a_run_with_self_distillation_resumes_to_the_last_bit(tmp_path: Path) -> None:
    """Rewards are graded, so that random completions are solved; every reprompted row says what its teacher saw."""
    raw = small_run.settings_for(tmp_path, **small_run.low_half(tmp_path), success_reward_threshold=0.5, **ON)
    raw |= {"save_every": 9, "num_iterations": 2, "learning_rate": 1e-3, "beta": 0.05, "group_size": 3}
    whole = small_run.resumed_and_whole(raw, tmp_path, 2)
    lines = [json.loads(line) for line in whole.completions.read_text().splitlines()]
    shown = [each.get("teacher_context") for line in lines for each in line["completions"]]
    metrics = [event["metrics"] for event in small_run.events(whole, "step")]
    shares = [each["self_distillation/reprompted"] for each in metrics]
    assert sum(shares) / len(shares) == pytest.approx(sum(map(bool, shown)) / len(shown)) and any(shown)
    assert all(each is None or each["solution_of"] in range(3) for each in shown)
