"""Training on the sessions that an agent's own loop has recorded."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backend.config.config import parse
from backend.endpoint.recording import Answer, Recorder
from backend.endpoint.sessions import ROWS
from backend.models.policy import load_policy
from backend.rewards.functions.judge import session_reward
from backend.runs.events import read_events
from backend.sampling.rollout import Sampler
from backend.sampling.sampler import Sampling
from backend.sampling.turn_format import TurnFormat
from backend.types import Problem
from tests.support.small_run import QUICK, write_config, write_rows
from tests.support.tool_tokenizers import tool_model
from tests.support.verbs import call, refused, run_ok

WARM = Sampling(temperature=0.75)
SETTINGS = QUICK | {"temperature": 0.75, "max_completion_length": 100, "batch_size": 1, "iters": 2}
SETTINGS |= {"record_tokens": True, "scale_rewards": "none", "learning_rate": 1e-2}
SETTINGS |= {"reward_functions": ["session_reward"], "reward_weights": []}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, and below `sessions` two groups of two sessions of two requests each."""
    folder = tmp_path_factory.mktemp("sessions")
    policy = load_policy(parse(SETTINGS | {"model": str(tool_model(folder / "model")), "data": "-"}))
    sampler, turns = Sampler(policy, 6), TurnFormat(policy.tokenizer, {})
    recorder = Recorder(folder / "sessions", print)
    for number in range(4):
        name, group = f"session {number}", f"task {number // 2}"
        chat: list[dict[str, Any]] = [{"role": "user", "content": f"Count to {group}. Session {number}."}]
        for turn in range(2):
            ids = recorder.prompt(name, "tiny", chat, None, turns, lambda chat=chat: rendered(policy, chat))
            (answered,) = sampler.sample([Problem(0, "", [], ids, "")], 1, WARM, 5, 2 * number + turn)
            (completion,) = answered.completions
            reply = {"role": "assistant", "content": completion.text}
            recorder.add(name, chat, None, reply, Answer(ids, completion, WARM, "tiny"))
            chat = [*chat, reply, {"role": "user", "content": "Go on, please."}]
        recorder.reward(name, float(number % 2), group)
    run_ok("sessions", folder / "sessions")
    return folder


def rendered(policy: Any, chat: list[dict[str, Any]]) -> list[int]:
    return list(policy.tokenizer.apply_chat_template(chat, add_generation_prompt=True))


def train(recorded: Path, folder: Path, data: Path | None = None, **changes: Any) -> tuple[list[Any], list[Any]]:
    """(events, rows of completions.jsonl) of a run by the verb `train`."""
    raw = SETTINGS | {"model": str(recorded / "model"), "data": str(data or recorded / "sessions")} | changes
    run_ok("train", write_config(folder / "config.yaml", raw), "--name", "run", "--runs-dir", folder / "runs")
    run = folder / "runs" / "run"
    rows = [json.loads(line) for line in (run / "completions.jsonl").read_text().splitlines()]
    return list(read_events(run / "events.jsonl")), rows


def changed_rows(recorded: Path, folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """The recorded rows, each of their completions changed."""
    rows = [json.loads(line) for line in (recorded / "sessions" / ROWS).read_text().splitlines()]
    for row in rows:
        for each in row["recorded"]:
            change(each)
    (folder / ROWS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_first_step_learns_from_the_recorded_ids_at_ratio_one(recorded: Path, tmp_path: Path) -> None:
    valid = write_rows(tmp_path / "valid.jsonl", 2)
    changes = {"steps_per_eval": 2, "val_batches": 1, "valid_data": str(valid), "sampling_correction": "auto"}
    events, rows = train(recorded, tmp_path, **changes)
    steps = [event["metrics"] for event in events if event["kind"] == "step"]
    ratio = "sampling/importance_sampling_ratio"
    first, second = ((step[f"{ratio}/min"], step[f"{ratio}/max"]) for step in steps)
    assert steps[0]["sampling/logp_gap/mean"] < 1e-5 < steps[1]["sampling/logp_gap/mean"]
    assert max(second) - min(second) > 1e-3
    assert abs(np.array(first) - 1).max() < 1e-4
    for completion in (each for row in rows for each in row["completions"]):
        assert completion["reward"] in (0.0, 1.0) and abs(completion["advantage"]) == 0.5
        assert 0 in completion["token_data"]["mask"]
    for data in (completion["token_data"] for completion in rows[0]["completions"]):
        own = np.array(data["mask"]) > 0
        np.testing.assert_allclose(np.array(data["learned_logp"])[own], np.array(data["logp"])[own], atol=1e-4)
    evaluated = [event["metrics"] for event in events if event["kind"] == "eval"]
    assert evaluated[-1]["completions/mean_length"] > 6  # sampled as usual
    notes = [event["sentence"] for event in events if event["kind"] == "note"]
    assert sum("groups: 1." in note and "token_truncate" in note for note in notes) == 1


def test_only_what_the_model_wrote_has_a_gradient(recorded: Path, tmp_path: Path) -> None:
    def disturb(each: dict[str, Any]) -> None:
        each["logps"] = [logp if own else -9.0 for logp, own in zip(each["logps"], each["mask"], strict=True)]

    def unmask(each: dict[str, Any]) -> None:
        each["mask"] = [1] * len(each["mask"])

    def adapters(name: str, change: Callable[[dict[str, Any]], None], mode: str = "auto") -> bytes:
        (tmp_path / name).mkdir()
        data = changed_rows(recorded, tmp_path / name, change)
        train(recorded, tmp_path / name, data, sampling_correction=mode)
        return (tmp_path / name / "runs/run/adapters/adapters.safetensors").read_bytes()

    # The automatic correction weighs tokens of later steps.
    made = [adapters("disturbed", disturb), adapters("as it is", lambda each: None, "token_truncate")]
    made += [adapters("unmasked", unmask), adapters("uncorrected", lambda each: None, "none")]
    assert made[0] == made[1] and made[0] not in made[2:]


@pytest.mark.parametrize(
    ("setting", "value", "sentence"),
    [
        ("group_size", 3, "There are 2 recorded completions in row 1 of "),
        ("temperature", 1.0, "recorded at the temperature 0.75; set it to that."),
        ("max_completion_length", 8, "set it to that or more."),
        ("max_prompt_length", 2, "Every prompt is longer than Max prompt (2 tokens)"),
        ("hosts", "hosts.json", "Recorded sessions are trained on by one machine; leave hosts out."),
    ],
)
def test_settings_must_fit_what_was_recorded(
    recorded: Path, tmp_path: Path, setting: str, value: Any, sentence: str
) -> None:
    raw = SETTINGS | {"model": str(recorded / "model"), "data": str(recorded / "sessions"), setting: value}
    if setting == "hosts":
        raw["hosts"] = str(tmp_path / "hosts.json")
        (tmp_path / "hosts.json").write_text('[{"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}]')
    line = refused("train", write_config(tmp_path / "config.yaml", raw), "--runs-dir", tmp_path / "runs")
    assert setting in line and sentence in line


def test_ids_of_another_model_are_refused(recorded: Path, tmp_path: Path) -> None:
    def other_model(each: dict[str, Any]) -> None:
        each["tokens"][0] = 9999

    folder = changed_rows(recorded, tmp_path, other_model)
    raw = SETTINGS | {"model": str(recorded / "model"), "data": str(folder)}
    result = call("train", write_config(tmp_path / "config.yaml", raw), "--runs-dir", tmp_path / "runs")
    assert result.exit_code == 2 and "The token 9,999 in row" in result.stderr


def test_without_a_posted_reward_session_reward_has_no_opinion() -> None:
    assert session_reward(["p"] * 2, ["c"] * 2, [""] * 2) == [None, None]
    assert session_reward(["p"] * 2, ["c"] * 2, [""] * 2, session_reward=[0.5, None]) == [0.5, None]
