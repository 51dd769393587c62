"""TRL 1.16's own tests of tools and environments (tests/test_grpo_trainer.py), against `backend.train`: the same tools,
environments and completions, and what TRL asserts of them."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.utils import load_tokenizer

import backend
from backend import TrainedRun
from backend.runs.run_folder import RunFolder
from backend.utils.errors import UserError
from tests.support.scripted_turns import script_turns
from tests.support.tool_tokenizers import call, tool_model

PROMPTS = [{"prompt": [{"role": "user", "content": f"What is better than {word}?"}]} for word in ("ugly", "implicit")]


def multiply_tool(a: int, b: int) -> int:
    """
    Multiplies two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The product of the two integers.
    """
    return a * b


async def async_multiply_tool(a: int, b: int) -> int:
    """
    Asynchronously multiplies two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The product of the two integers.
    """
    return a * b


class Counter:
    def __init__(self) -> None:
        made.append(self)

    def reset(self, **kwargs: Any) -> None:
        self.count = 0
        rows.append(kwargs)

    def increment(self, step: int) -> int:
        """
        Increment the internal counter.

        Args:
            step: Value to add to the counter.

        Returns:
            The updated counter value.
        """
        self.count += step
        return self.count


class ScoredCounter(Counter):
    def get_reward(self) -> float:
        return float(self.count)


class Echo:
    def reset(self, **kwargs: Any) -> str:
        rows.append(kwargs)
        return "Echo."

    def shout(self, text: str) -> str:
        """
        Shout the given text.

        Args:
            text: Text to shout.

        Returns:
            The text in upper case.
        """
        shouted.append(text)
        return text.upper()


made: list[Counter] = []
rows: list[dict[str, Any]] = []
shouted: list[str] = []
Train = Callable[..., TrainedRun]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tool_model(tmp_path_factory.mktemp("tool model") / "model")


@pytest.fixture
def train(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """Trains with completions of these turns, and checks that every adapter has changed."""
    for seen in (made, rows, shouted):
        seen.clear()
    settings: dict[str, Any] = {"model": str(model), "iters": 1, "batch_size": 1, "max_seq_length": 4096, "beta": 0.0}
    settings |= {"steps_per_eval": 0, "num_layers": -1, "learning_rate": 0.1, "max_completion_length": 300}
    settings["fuse"] = False

    def run(turns: list[list[str]], group_size: int = 3, iters: int = 1, **of_train: Any) -> TrainedRun:
        script_turns(monkeypatch, load_tokenizer(model), turns)
        own = {"group_size": group_size, "iters": iters} | of_train.pop("settings", {})
        trained = backend.train(settings | own, runs_dir=tmp_path / "runs", **of_train)
        weights = mx.load(str(RunFolder(trained.folder).adapters / "adapters.safetensors"))
        assert all(mx.abs(x).max().item() > 0 for x in weights.values()), "A weight has not changed."
        return trained

    return run


def length(completions: list[Any], **kwargs: Any) -> list[float]:
    return [float(len(completion[-1]["content"])) for completion in completions]


def test_train_with_tools(train: Train) -> None:
    """Of three completions one calls a tool, and one another with a wrong argument name."""
    turns = [[call("async_multiply_tool", a=3, b=4), "Done!"], [call("multiply_tool", a=3, c=4), "Done!"], ["None"]]
    run = train(turns, tools=[multiply_tool, async_multiply_tool], dataset=PROMPTS, reward_functions=[length])
    assert run.metrics[-1]["loss"] is not None
    assert run.metrics[-1]["tools/call_frequency"] == pytest.approx(2 / 3)
    assert run.metrics[-1]["tools/failure_frequency"] == pytest.approx(1 / 2)


def test_train_with_multiple_environments(train: Train) -> None:
    dataset = [{"environment": name} for name in ("counter", "echo")]
    turns = [[call("increment", step=1), "Done!"], ["I won't"], [call("shout", text="hi"), "Done!"], ["Done!"]]
    factories = {"counter": Counter, "echo": Echo}
    seen: list[Any] = []

    def kinds(completions: list[Any], environments: list[Any], environment: list[str], **kwargs: Any) -> list[float]:
        seen.extend(zip(environment, map(type, environments), strict=True))
        return [float(len(completion)) for completion in completions]

    both = {"batch_size": 2, "data_seed": next(seed for seed in range(9) if first_is_counter(seed))}
    run = train(turns, 2, dataset=dataset, environment_factory=factories, reward_functions=[kinds], settings=both)
    assert set(seen) == {("counter", Counter), ("echo", Echo)}
    assert sum(each.count for each in made) == 1 and shouted == ["hi"]
    assert run.metrics[-1]["tools/call_frequency"] == pytest.approx(2 / 4)
    assert run.metrics[-1]["tools/failure_frequency"] == 0.0
    assert len(rows) == 5, "one of them before the model is loaded"
    assert all("environment" not in row for row in rows)


def first_is_counter(seed: int) -> bool:
    """Whether the first of two rows is taken first with this seed."""
    import random

    return random.Random(f"{seed} 0").sample(range(2), 2)[0] == 0


def test_train_with_unknown_environment_raises(train: Train) -> None:
    dataset = [row | {"environment": "unknown"} for row in PROMPTS]
    with pytest.raises(UserError, match="not among the environments"):
        train([["x"]], dataset=dataset, environment_factory={"counter": Counter}, reward_functions=[length])


COUNTING = [[call("increment", step=1), "Done!"], [call("decrement", step=2), "Done!"], ["I won't increment"]]


def test_train_with_environment_factory(train: Train) -> None:
    run = train(COUNTING, iters=2, environment_factory=Counter, reward_functions=[length])
    assert run.metrics[-1]["tools/call_frequency"] == pytest.approx(2 / 3)
    assert run.metrics[-1]["tools/failure_frequency"] == pytest.approx(1 / 2)
    assert sorted(each.count for each in made) == [0, 0, 1], "made once each, and reset for the second step"


def test_train_with_environment_owned_reward(train: Train) -> None:
    run = train(COUNTING, iters=2, environment_factory=ScoredCounter)
    assert run.metrics[-1]["rewards/ScoredCounter/mean"] == pytest.approx(1 / 3)
    assert run.metrics[-1]["reward"] == pytest.approx(1 / 3)


def test_environment_owned_reward_mixed_environments(train: Train) -> None:
    """Two names of one class are one column, and rows of another environment have no score in it."""
    factories = {"scored": ScoredCounter, "scored2": ScoredCounter, "plain": Counter}
    dataset, step = [{"environment": name} for name in factories], {"batch_size": 3}
    run = train(COUNTING, dataset=dataset, environment_factory=factories, reward_functions=[length], settings=step)
    groups = [row for row in completions_of(run) if row["completions"][0]["rewards"]["ScoredCounter"] is not None]
    assert len(groups) == 2
    assert [each["rewards"]["ScoredCounter"] for each in groups[0]["completions"]] == [1.0, 0.0, 0.0]
    means = {name.split("/")[1]: x for name, x in run.metrics[-1].items() if re.match("rewards/.*/mean", name)}
    assert list(means) == ["length", "ScoredCounter"], "beside the program's own"


def completions_of(run: TrainedRun) -> list[dict[str, Any]]:
    import json

    return [json.loads(line) for line in RunFolder(run.folder).completions.read_text().splitlines()]


def test_no_reward_source_raises(train: Train) -> None:
    with pytest.raises(UserError, match="reward"):
        train([["x"]], environment_factory=Counter, reward_functions=[])


def test_dataset_required_without_environment(train: Train) -> None:
    with pytest.raises(UserError, match="dataset"):
        train([["x"]], reward_functions=[length])


def test_multiple_environments_without_dataset_raises(train: Train) -> None:
    with pytest.raises(UserError, match="dataset"):
        train([["x"]], environment_factory={"a": Counter, "b": Echo}, reward_functions=[length])


def test_train_with_environment_owned_data(train: Train) -> None:
    class GuessTheWord:
        def reset(self, **kwargs: Any) -> str:
            return "Guess the 5-letter word."

    run = train([["a"], ["aa"], ["aaa"]], iters=2, environment_factory=GuessTheWord, reward_functions=[length])
    assert [row["prompt"] for row in completions_of(run)] == ["Guess the 5-letter word."] * 2


def test_train_with_malformed_tool_calls(train: Train) -> None:
    broken = [
        '<tool_call>\n{"arguments": {"a": 3, "b": 4}}\n</tool_call>',
        '<toolcall>\n{"arguments": {"a": 3, "b": 4}}\n</toolcall>',
        '<tool_call>\n{"arguments": {a: 3, b: 4}}\n</tool_call>',
    ]
    turns = [[text, "A second turn."] for text in broken]
    run = train(turns, tools=[multiply_tool], dataset=PROMPTS, reward_functions=[length])
    assert run.metrics[-1]["tools/call_frequency"] == 0
    assert [each["text"] for each in completions_of(run)[0]["completions"]] == broken


def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """Each prompt is answered by the run's own sampler; a note of three tokens that is not the model's follows."""
    ids = [trainer.processing_class.apply_chat_template(prompt, add_generation_prompt=True) for prompt in prompts]
    made = trainer.generate(ids)
    return {
        "prompt_ids": ids,
        "completion_ids": [[*tokens, 70, 71, 72] for tokens, _ in made],
        "logprobs": [[*logps, 0.0, 0.0, 0.0] for _, logps in made],
        "env_mask": [[1] * len(tokens) + [0] * 3 for tokens, _ in made],
        "score": [float(number % 3) for number in range(len(ids))],
    }


def test_generate_prefers_rollout_func(train: Train) -> None:
    def scored(completion_ids: list[list[int]], score: list[float], **kwargs: Any) -> list[float]:
        assert all(ids[-3:] == [70, 71, 72] for ids in completion_ids)
        return score

    told = {"record_tokens": True, "max_completion_length": 8}
    run = train(
        [["Yes."], ["No."], ["Why?"]], rollout_func=rollout, dataset=PROMPTS, reward_functions=[scored], settings=told
    )
    assert run.metrics[-1]["rewards/scored/mean"] == 1.0
    for each in completions_of(run)[0]["completions"]:
        assert each["token_data"]["mask"][-3:] == [0, 0, 0]
        assert each["tokens"] == len(each["token_data"]["mask"]) - 3
    with pytest.raises(UserError, match=r"backend\.resume"):
        backend.resume(run.folder, reward_functions=[scored], changes={"iters": 2})


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        ({"prompt_ids": [[1]], "completion_ids": [[2]]}, "rollout_func must return keys"),
        ({"prompt_ids": [[1]], "completion_ids": [[2]], "logprobs": [[0.0]]}, "a list of 3 prompt_ids"),
        ({key: [[1]] * 3 for key in ("prompt_ids", "completion_ids")} | {"logprobs": [[]] * 3}, "of 1 tokens"),
    ],
)
def test_generate_rollout_func_raises_when_required_keys_are_missing(
    train: Train, returned: dict[str, Any], says: str
) -> None:
    with pytest.raises(UserError, match=says):
        train([[""]], rollout_func=lambda prompts, trainer: returned, dataset=PROMPTS, reward_functions=[length])


def test_a_stop_while_a_rollout_func_generates_is_a_stop(train: Train, model: Path, tmp_path: Path) -> None:
    def asked(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        found = rollout(prompts, trainer)
        (next((tmp_path / "runs").iterdir()) / "control").write_text("stop")
        trainer.generate(found["prompt_ids"])
        raise AssertionError("the stop was not seen")

    settings = {"model": str(model), "iters": 2, "batch_size": 1, "max_seq_length": 4096, "max_completion_length": 8}
    given: dict[str, Any] = {"dataset": PROMPTS, "reward_functions": [length], "runs_dir": tmp_path / "runs"}
    assert backend.train(settings | {"steps_per_eval": 0}, rollout_func=asked, **given).ending == "stopped"
    with pytest.raises(UserError, match="leave out rollout_func"):
        backend.train(settings, rollout_func=asked, tools=[multiply_tool], **given)
    with pytest.raises(UserError, match="rollout_func does; choose None"):
        backend.train(settings | {"rollout_quantization": "8"}, rollout_func=asked, **given)
