"""A run that several ranks share is the run of one process, in results, evaluations and the order of its data.

The ranks are threads that compute in turns, over the leader's and the worker's own code; other proofs start a process
for each, joined by mlx's ring or by MPI.
"""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.utils import load_tokenizer

from backend.config.config import parse
from backend.distributed.leader import load_leader_context
from backend.distributed.worker import work
from backend.runs.run_folder import RunFolder
from backend.trainer.control import Stopped
from backend.trainer.run_process import train
from tests.support import small_run
from tests.support.rank_threads import ThreadCollectives, connected, on_ranks, thread_channel
from tests.support.reward_models import write_reward_model
from tests.support.scripted_turns import script_turns
from tests.support.tool_tokenizers import call, tool_model
from tests.trainer.test_run_inputs import settings_with_pictures
from tests.trainer.test_supervised import labelled

SETTINGS: dict[str, Any] = (
    {"iters": 3, "batch_size": 4, "group_size": 3, "beta": 0.05, "top_k": 0, "top_p": 1.0}
    | {"optimizer": "sgd", "learning_rate": 0.1, "weight_decay": 0.0}
    | {"validation_split": 0.25, "steps_per_eval": 3, "val_batches": 1}
)
"""SGD, whose step is the gradient: AdamW would magnify rounding where a gradient is nearly 0."""
OF_TIME = ("time/", "process/", "machine/", "ranks/", "peak_memory_gb", "rollout_tokens_", "train_tokens_", "waiting_")
EXACT = (  # what is counted or scored; the other metrics are sums in float32, whose order differs
    *("reward", "completions/", "num_tokens", "epoch", "frac_"),
    *("learning_rate", "hit_max", "dynamic_sampling", "stage"),
)


RARE = "def rare(completions, completion_ids, **_):\n    return [float(sum(ids) % 9 == 0) for ids in completion_ids]\n"
"""A reward that few completions get, so that its adaptive weight rises."""


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    return small_run.settings_for(folder, **small_run.low_half(folder)) | SETTINGS | changes


def train_on_threads(raw: dict[str, Any], run: RunFolder, size: int, until: int = 10**9, changes: Any = None) -> Any:
    """Train, or resume with `changes`, on `size` ranks that are threads; with one as ever. → the trainer's Ending."""
    run.path.mkdir(parents=True, exist_ok=True)
    small_run.write_config(run.config, raw)

    def look() -> None:
        if until in small_run.steps(run):
            raise Stopped("the test asked for it")

    if size == 1:
        return train(parse(raw), run, command="a test", look=look, changes=changes)
    pairs = {rank: connected() for rank in range(1, size)}

    def of_rank(ranks: ThreadCollectives) -> Any:
        channel = thread_channel(ranks, pairs)
        try:
            if ranks.rank:
                return work(channel, ranks)
            load = partial(load_leader_context, channel, ranks, "threads")
            return train(parse(raw), run, command="a test", look=look, changes=changes, load=load)
        except BaseException as error:
            if ranks.rank:
                channel.fault(error)
            raise
        finally:
            channel.close()

    return on_ranks(size, of_rank)[0]


def without_figures(rows: list[Any]) -> list[Any]:
    """Texts, tokens, ends, scores and rewards; advantages to nine digits; nothing of single tokens."""
    for row in rows:
        for completion in row["completions"]:
            completion["advantage"] = round(completion["advantage"], 9)
            completion.pop("token_data", None)
            for turn in completion.get("turns", ()):
                for result in turn["results"]:
                    result.pop("seconds")
    return rows


def assert_same_run(one: RunFolder, other: RunFolder) -> None:
    assert [small_run.kinds(run)[-1] for run in (one, other)] == ["finished", "finished"]
    assert without_figures(small_run.rows(other)) == without_figures(small_run.rows(one))
    for kind in ("step", "eval"):
        expected, found = small_run.metrics(one, kind), small_run.metrics(other, kind)
        assert len(expected) == len(found) > 0
        for own, theirs in zip(expected, found, strict=True):
            assert_same_metrics(own, theirs)
    own, theirs = small_run.weights(one), small_run.weights(other)
    assert own.keys() == theirs.keys()
    for name, x in own.items():
        assert abs(x - theirs[name]).max() <= 1e-6, name


def assert_same_metrics(one: dict[str, Any], other: dict[str, Any]) -> None:
    differ = one.keys() ^ other.keys()
    assert not [name for name in differ if not name.startswith(OF_TIME)]
    for name, x in one.items():
        if name.startswith(OF_TIME):
            continue
        if x is None or name.startswith(EXACT):
            assert other[name] == x, name
        else:
            assert math.isclose(other[name], x, rel_tol=1e-4, abs_tol=2e-5), (name, x, other[name])


def assert_shared_run_equals_one(folder: Path, raw: dict[str, Any], size: int) -> RunFolder:
    one, shared = RunFolder(folder / "one"), RunFolder(folder / "shared")
    train_on_threads(raw, one, 1)
    train_on_threads(raw, shared, size)
    assert_same_run(one, shared)
    return shared


def test_two_ranks_make_the_run_of_one(tmp_path: Path) -> None:
    stages = [{"iters": 2, "temperature": 1.0}, {"iters": 1, "reward_functions": ["r1_int"], "scale_rewards": "batch"}]
    raw = settings(tmp_path, num_iterations=2, record_tokens=True, stages=stages)
    shared = assert_shared_run_equals_one(tmp_path, raw, 2)
    (started,) = small_run.events(shared, "started")
    assert started["ranks"] == 2 and started["distributed_backend"] == "threads"
    assert [machine["machine"] for machine in started["machines"]] == ["thread-0", "thread-1"]
    for step in small_run.metrics(shared, "step"):
        assert step["ranks/0/prompts"] + step["ranks/1/prompts"] == 4
        assert 0 <= step["waiting_share"] <= 1 and step["time/gradient_sum"] > 0
        for rank in (0, 1):
            assert step[f"ranks/{rank}/memory"] > 0 and step[f"ranks/{rank}/waiting"] >= 0
        assert max(step[f"ranks/{rank}/learn_tokens_per_second"] for rank in (0, 1)) > 0
    tokens = [completion["token_data"] for row in small_run.rows(shared) for completion in row["completions"]]
    assert tokens and all("learned_logp" in each for each in tokens), "the records of another rank's rows are missing"


def test_the_leader_scores_with_reward_models(tmp_path: Path) -> None:
    names = ["low_half", str(write_reward_model(tmp_path / "rm"))]
    raw = settings(tmp_path, iters=2, steps_per_eval=2) | {"reward_functions": names}
    shared = assert_shared_run_equals_one(tmp_path, raw, 2)
    rewards = [completion["rewards"] for row in small_run.rows(shared) for completion in row["completions"]]
    assert len({each["rm"] for each in rewards}) > 3 and all(each.keys() == {"low_half", "rm"} for each in rewards)


GAME = """
class Game:
    def reset(self, **row):
        self.total = 0
        return f" It begins at {len(row['prompt'])}."

    def add(self, number: int) -> int:
        \"\"\"
        Adds to the total.

        Args:
            number: What to add.

        Returns:
            The total.
        \"\"\"
        self.total += number
        return self.total

    def get_reward(self) -> float:
        return float(self.total)
"""


@pytest.mark.proof
def test_ranks_play_in_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "game.py").write_text(GAME)
    model = tool_model(tmp_path / "model")
    turns = [[call("add", number=2) + call("add", number=3), call("add", number=1), "Six."], [call("add", n=1), "?"]]
    script_turns(monkeypatch, load_tokenizer(model), [*turns, ["No."]])
    small_run.write_rows(tmp_path / "rows.jsonl", 8)
    raw = settings(tmp_path, model=str(model), environment=f"{tmp_path}/game.py::Game", steps_per_eval=1)
    raw |= {"max_completion_length": 500, "max_seq_length": 2000, "iters": 1}
    raw |= {"distillation_weight": 0.5, "success_reward_threshold": 5.0}
    shared = assert_shared_run_equals_one(tmp_path, raw, 2)
    for row in small_run.rows(shared):
        assert [completion["rewards"]["Game"] for completion in row["completions"]] == [6.0, 0.0, 0.0]
        assert row["prompt"].endswith(".") and " It begins at " in row["prompt"]
    (step,) = small_run.metrics(shared, "step")
    assert step["self_distillation/reprompted"] == 2 / 3, "the first completion alone is solved"
    assert step["tools/call_frequency"] == 4 / 3 and step["tools/failure_frequency"] == 1 / 4


@pytest.mark.proof
@pytest.mark.parametrize(
    "changes",
    [
        *({"scale_rewards": scale} for scale in ("batch", "none")),
        {"multi_objective_aggregation": "normalize_then_sum"},
        {"advantage_baseline": "leave_one_out"},
        {"steps_per_generation": 2, "batch_size": 2, "gradient_accumulation_steps": 2},
        {"sampling_correction": "sequence_truncate", "top_k": 20, "top_p": 0.9},
        {"dynamic_sampling": True, "dynamic_sampling_rounds": 3, "group_size": 2, "max_completion_length": 2},
        {"repetition_penalty": 1.3, "neftune_noise_alpha": 5.0},
        {"train_type": "full", "learning_rate": 0.01},
        {"test": True, "test_data": "test.jsonl", "load_best_at_end": True, "save_every": 1, "steps_per_eval": 1},
        {"batch_size": 1, "group_size": 5},
        {"output_regex": "[a-z ]{1,5}"},
        {"distillation_weight": 0.5, "success_reward_threshold": 0.5, "num_iterations": 2, "dynamic_sampling": True},
        # Weights change after the tenth step. Until then rounding must not grow so far that another token is drawn.
        {"reward_weight_schedule": "adaptive", "iters": 12, "learning_rate": 0.01, "seed": 1},
    ],
    ids=str,
)
def test_ranks_make_the_run_of_one_whatever_the_settings(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Losses and what else is of the learner alone: tests/training/test_over_ranks.py."""
    small_run.write_rows(tmp_path / "test.jsonl", 5)
    (tmp_path / "rare.py").write_text(RARE)
    if "test_data" in changes:
        changes = changes | {"test_data": str(tmp_path / "test.jsonl")}
    if changes.get("reward_weight_schedule") == "adaptive":
        changes = changes | {"reward_functions": ["low_half", f"{tmp_path}/rare.py::rare"]}
    shared = assert_shared_run_equals_one(tmp_path, settings(tmp_path, **changes), 2)
    if changes.get("reward_weight_schedule") == "adaptive":
        assert small_run.metrics(shared, "step")[-1]["reward_weights/rare"] > 1


@pytest.mark.proof
def test_ranks_see_the_same_pictures(tmp_path: Path) -> None:
    raw = settings_with_pictures(tmp_path) | SETTINGS | {"iters": 2, "batch_size": 3, "val_batches": -1}
    rows = [json.loads(line) for line in Path(raw["data"]).read_text().splitlines()]
    rows[-1]["image"] = "pictures/a.png"
    Path(raw["data"]).write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert_shared_run_equals_one(tmp_path, raw, 2)


@pytest.mark.proof
def test_a_run_goes_on_with_other_numbers_of_ranks(tmp_path: Path) -> None:
    """2 → 1 → 4: nothing is sampled twice or left out; all state and changed settings go on."""
    raw = settings(tmp_path, iters=6, optimizer="adamw", learning_rate=1e-4, save_every=2, steps_per_eval=2)
    raw |= {"sync_ref_model": True, "ref_model_sync_steps": 2, "reward_weight_schedule": "adaptive"}
    one, shared = RunFolder(tmp_path / "one"), RunFolder(tmp_path / "shared")
    changes = {"temperature": 0.7, "learning_rate": 5e-5, "entropy_coef": 0.01}
    for run, sizes in ((one, (1, 1, 1)), (shared, (2, 1, 4))):
        for size, until, changed in zip(sizes, (2, 4, 6), ({}, changes, {}), strict=True):
            ending = train_on_threads(raw, run, size, until if until < 6 else 10**9, changed)
            assert ending.kind == ("stopped" if until < 6 else "finished") and ending.step == until
    assert small_run.steps(shared) == [1, 2, 3, 4, 5, 6]
    assert_same_run(one, shared)


def test_labels_are_imitated_on_all_ranks(tmp_path: Path) -> None:
    raw = labelled(tmp_path, iters=4, optimizer="sgd", learning_rate=0.1, weight_decay=0.0, steps_per_eval=4)
    alone, shared = RunFolder(tmp_path / "alone"), RunFolder(tmp_path / "shared")
    for run, size in ((alone, 1), (shared, 2)):
        assert train_on_threads(raw, run, size).kind == "finished"
    for kind in ("step", "eval"):
        for one, two in zip(small_run.metrics(alone, kind), small_run.metrics(shared, kind), strict=True):
            assert [two[name] for name in ("loss", "entropy")] == pytest.approx([one["loss"], one["entropy"]], abs=1e-5)
