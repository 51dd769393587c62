"""The event log: whole lines, one writer, and followers that miss and repeat nothing, whatever happens to the file."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backend.config.config import parse, problems
from backend.config.other_programs.into_trl import into_trl
from backend.runs import archive
from backend.runs import events as event_log_ends
from backend.runs.archive import CompletionTime, completion_time_of, seconds_per_completion
from backend.runs.events import METRICS, Event, EventLog, Follower, parse_line, read_events, truncate_file
from backend.runs.metric_names import (
    OCCASIONAL_METRICS,
    TRL_NAMES,
    by_set,
    known_metrics,
    our_name,
    parse_condition,
    prefixed,
    transformers_name,
    trl_metrics,
    with_our_name,
)
from backend.runs.run_folder import RunFolder, hold_lock, make_run_folder
from backend.runs.run_search import search
from backend.runs.sweep import parse_sweep
from tests.support import diaries
from tests.support.cases import cases
from tests.support.diaries import recording


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def put(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def line(**event: Any) -> bytes:
    return json.dumps(event, ensure_ascii=False).encode() + b"\n"


def steps(events: list[Event]) -> list[Any]:
    return [event.get("step") for event in events]


def test_nan_and_infinities_are_null_and_paths_are_text(path: Path) -> None:
    odd = {"kl": math.nan, "a": [math.inf, (1.0, -math.inf)], "p": Path("x/y"), 3: True}
    written = EventLog(path).write("of tomorrow", metrics=odd)
    assert b"NaN" not in path.read_bytes() and b"Infinity" not in path.read_bytes()
    (event,) = read_events(path)
    assert event["metrics"] == written["metrics"] == {"kl": None, "a": [None, [1.0, None]], "p": "x/y", "3": True}


def test_a_half_line_waits_for_its_newline(path: Path) -> None:
    follower = Follower(path)
    assert follower.read() == [] and not follower.restarted  # there is no file yet
    put(path, line(step=1) + b'{"step": 2, "tex')
    assert steps(follower.read()) == [1] and follower.offset == len(line(step=1))
    assert follower.read() == []
    put(path, b't": "x"}')
    assert follower.read() == []
    put(path, b"\n")
    assert follower.read() == [{"step": 2, "text": "x"}] and follower.read() == [] and not follower.restarted


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(st.text(max_size=30), max_size=8),
    cuts=st.lists(st.integers(0, 400), max_size=12),
    limit=st.integers(1, 50),
)
def test_each_line_of_a_growing_file_once(tmp_path: Path, texts: list[str], cuts: list[int], limit: int) -> None:
    path = tmp_path / "grown.jsonl"
    path.write_bytes(b"")
    data = b"".join(line(seq=i, text=text) for i, text in enumerate(texts))
    follower, received = Follower(path, limit=limit), []
    for begin, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(data)], strict=True):
        put(path, data[begin:end])
        while events := follower.read():
            received += events
            assert not follower.restarted
    assert received == [{"seq": i, "text": text} for i, text in enumerate(texts)]


def test_invalid_lines_and_unknown_kinds_are_skipped(path: Path) -> None:
    odd = [b"not json\n", b"[1, 2]\n", b"\xff\xfe\x00\n", b"\n", b"3\n", b"[" * 100_000 + b"\n", b'{"kind": 7}\n']
    put(path, line(step=1) + b"".join(odd) + line(kind="of tomorrow", step=2))
    follower = Follower(path)
    assert steps(follower.read()) == [1, 2]
    put(path, b"more rubbish\n")
    assert follower.read() == [] and not follower.restarted
    put(path, line(step=3))
    assert steps(follower.read()) == [3] and not follower.restarted


def event_log_of(path: Path, count: int) -> list[int]:
    """An event log of `count` steps, and its size after each."""
    sizes = []
    with path.open("ab") as file:
        for number in range(count):
            file.write(line(v=1, seq=number, t=float(number), kind="step", step=number))
            sizes.append(file.tell())
    return sizes


@pytest.mark.parametrize("shift", range(-30, 31, 3))
def test_a_file_truncated_and_grown_past_the_reader_restarts_it(path: Path, shift: int) -> None:
    """Between two reads, a resumed run may truncate the file and grow it past the reader's offset. The reader must then
    restart. Sequence numbers alone do not show it: the line after the offset may have the number that was expected."""
    sizes = event_log_of(path, 10)
    follower = Follower(path)
    follower.read()
    truncate_file(path, sizes[3])
    put(path, line(v=1, seq=4, t=50.0, kind="started", pad="x" * (60 + shift)))
    for number in range(5, 14):
        put(path, line(v=1, seq=number, t=50.0 + number, kind="step", step=number))
    events = follower.read()
    assert follower.restarted and [event["seq"] for event in events] == list(range(14))
    assert events[4]["kind"] == "started" and follower.read() == []


def test_a_deleted_file_restarts_the_reader_and_may_come_back(path: Path) -> None:
    event_log_of(path, 5)
    follower = Follower(path)
    follower.read()
    path.unlink()
    assert follower.read() == [] and follower.restarted and follower.offset == 0
    assert follower.read() == [] and not follower.restarted
    event_log_of(path, 2)
    assert len(follower.read()) == 2 and not follower.restarted


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "a-run")
    folder.path.mkdir()
    folder.config.write_text("model: owner/model\niters: 9\n")
    return folder


def test_the_summary_of_a_long_event_log_reads_its_ends(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    event_log = EventLog(run.events)
    event_log.write("started", iterations=20_000)
    for number in range(1, 20_001):
        event_log.append({"kind": "step", "step": number, "metrics": {"reward": number / 100}})
    event_log.write("finished", step=20_000, sentence="Finished after 20000 steps.")
    read = []
    monkeypatch.setattr(event_log_ends, "parse_line", lambda line: read.append(len(line)) or parse_line(line))
    result = archive.summary(run)
    assert (result.state, result.step, result.iterations, result.reward) == ("finished", 20_000, 20_000, 200.0)
    assert (result.name, result.model, result.sentence) == ("a-run", "owner/model", "Finished after 20000 steps.")
    assert sum(read) < 3 * event_log_ends.TAIL_BYTES < run.events.stat().st_size


def test_the_summary_finds_the_last_step_before_thousands_of_phases(run: RunFolder, monkeypatch: pytest.MonkeyPatch):
    """A long rollout or evaluation writes two phases a second: after six minutes the last step was farther from the end
    than the summary reads. A log of 300,000 notes took 25 s and half a gigabyte."""
    read = []
    monkeypatch.setattr(event_log_ends, "parse_line", lambda line: read.append(len(line)) or parse_line(line))
    event_log = EventLog(run.events)
    event_log.write("started", iterations=9)
    event_log.append({"kind": "step", "step": 1, "metrics": {"reward": 0.25}})
    for number in range(4000):
        event_log.append({"kind": "phase", "phase": "evaluating", "progress": number / 4000})
    result = archive.summary(run)
    assert (result.state, result.step, result.reward, result.iterations) == ("crashed", 1, 0.25, 9)
    assert sum(read) < 3 * event_log_ends.TAIL_BYTES < run.events.stat().st_size


@pytest.mark.parametrize("is_clone", [False, True])
def test_a_start_whose_time_is_none_is_summed_up(run: RunFolder, is_clone: bool) -> None:
    if is_clone:
        run.parent.write_text("{}")
    put(run.events, line(kind="started", t="noon", iterations=5) + line(kind="step", t=1.0, step=1))
    assert archive.summary(run).step == 1 and archive.summary(run).state == "crashed"


def test_a_state_follows_from_the_event_log_and_the_lock(run: RunFolder) -> None:
    def state() -> str:
        return archive.summary(run).state

    assert state() == "starting"
    event_log = EventLog(run.events)
    handle = hold_lock(run)
    event_log.write("phase", phase="loading")
    assert state() == "starting", "nothing has started before `started`"
    event_log.write("started", iterations=2)
    assert state() == "running"
    event_log.write("step", step=1, metrics=None)
    assert archive.summary(run).step == 1 and archive.summary(run).reward is None

    os.close(handle)
    assert state() == "crashed"
    for ending in ("failed", "stopped", "finished"):
        event_log.write(ending, step=1, sentence="So it ended.")
        assert state() == ending


RAW = {"model": "m", "data": "d", "steps_per_eval": 5, "eval_data": {"hard": "h", "very_hard": "v"}}
NAMED_ALIKE = """
num_tokens completions/mean_length completions/min_length completions/max_length completions/mean_terminated_length
completions/min_terminated_length completions/max_terminated_length rewards/r1_int_reward_func/mean reward reward_std
frac_reward_zero_std entropy kl clip_ratio/low_min clip_ratio/high_max cispo_clip_ratio vespo/phi_seq_mean
sampling/sampling_logp_difference/mean sampling/importance_sampling_ratio/max loss grad_norm learning_rate epoch
"""
LOGGED_BY_TRL = dict.fromkeys(NAMED_ALIKE.split()) | {
    "step_time": "time/step",
    "completions/clipped_ratio": "hit_max_tokens_ratio",
    "reward/r1_int_reward_func/mean": "rewards/r1_int_reward_func/mean",
    "reward/r1_int_reward_func/std": "rewards/r1_int_reward_func/std",
    "rewards/r1_int_reward_func": "rewards/r1_int_reward_func/mean",
    "reward_std_over_step": "reward_std",
    "clip_ratio": "clip_ratio_total",
    "clip_ratio/region_mean": "clip_ratio_total",
    "clip_ratio/low_mean": "clip_ratio_low",
    "clip_ratio/high_mean": "clip_ratio_high",
    "completion_length": "completions/mean_length",
}
"""What `GRPOTrainer` logs or documents, in this version or an earlier one → what it is here, None for the same."""
FUNCTION = {"reward_functions": ["r1_int_reward_func"]}


@cases(("name", "ours"), LOGGED_BY_TRL.items())
def test_whatever_a_user_names_may_have_trls_name(name: str, ours: str | None) -> None:
    """Conditions, the best metric, a sweep's, the search for runs; with the prefixes of trackers and transformers."""
    ours = ours or name
    stop = [f"{name} > 0.5", f"train/{name} > 0.5", f"eval_{name} > 0.5", f"eval/hard_{name} > 0.5"]
    config = parse(RAW | FUNCTION | {"stop_when": stop, "best_metric": f"eval_very_hard_{name}"})
    metrics = [parse_condition(text).metric for text in config.stop_when]
    assert metrics == [ours, ours, f"eval/{ours}", f"eval/hard/{ours}"]
    assert config.best_metric == f"eval/very_hard/{ours}"
    plan = {"base": RAW | FUNCTION, "over": {"learning_rate": [1e-5, 1e-4]}}
    for metric in (name, f"eval/{name}", f"eval_{name}"):
        assert parse_sweep(plan | {"metric": metric}).metric == ours
    for condition in (f"{name}>0.5", f"eval/{name}>0.5"):
        search(condition, known_metrics(["r1_int_reward_func"]))


def test_our_names_are_none_of_trls_for_something_else() -> None:
    known = known_metrics(["r1_int_reward_func"])
    assert {name: our_name(name) for name in known if our_name(name) != name} == {
        "completions/clipped_ratio": "hit_max_tokens_ratio"  # the event log has both, and they are the same number
    }
    assert {ours: our_name(theirs) for ours, theirs in TRL_NAMES.items()} == {ours: ours for ours in TRL_NAMES}
    assert set(TRL_NAMES) <= set(known) and len(set(TRL_NAMES.values())) == len(TRL_NAMES)


def test_a_name_that_is_none_of_trls_is_left_as_it_is() -> None:
    """A reward function may log any metric."""
    for name in ("eval_accuracy", "train/mine", "mine/own", "eval/mine", "", "eval_", "rewards/", "eval/"):
        assert our_name(name) == name
    assert with_our_name("  kl  > 0.50") == "  kl  > 0.50" and with_our_name("nonsense") == "nonsense"
    (fault,) = problems(RAW | FUNCTION | {"stop_when": ["step_tim > 5"]})
    assert fault.sentence == "There is no metric step_tim." or "Did you mean" in fault.sentence


@cases("name", diaries.names())
def test_every_metric_of_a_recorded_run_can_be_named(name: str) -> None:
    functions = recording(name).settings["reward_functions"]
    steps = [event["metrics"] for event in recording(name).events if event["kind"] == "step"]
    of_ranks = ("ranks/",)
    recorded = {metric for metrics in steps for metric in metrics if not metric.startswith(of_ranks)}
    assert recorded - set(known_metrics(functions)) == set()


def test_what_leaves_has_trls_names_and_comes_back_as_ours() -> None:
    ours = {*METRICS, *OCCASIONAL_METRICS}
    left = trl_metrics(dict.fromkeys(ours))
    assert {"step_time", "completions/clipped_ratio", "reward_std"} <= set(left)
    back = {our_name(name) for name in prefixed("train", left)}
    assert back == ours - {"completions/clipped_ratio"}
    back = {our_name(name) for name in prefixed("hard", trl_metrics({"time/step": 1, "kl": 1}))}
    assert back == {"eval/hard/time/step", "eval/hard/kl"}


def test_evaluation_sets_are_told_apart() -> None:
    metrics = {"kl": 1, "completions/clipped_ratio": 2, "hard/kl": 3, "very_hard/rewards/a/mean": 4}
    others = {"hard": {"kl": 3}, "very_hard": {"rewards/a/mean": 4}}
    assert by_set(metrics, list(others)) == others | {"valid": {"kl": 1, "completions/clipped_ratio": 2}}
    cut_off = transformers_name("eval/hard/hit_max_tokens_ratio", ["hard"])
    assert cut_off == "eval_hard_completions/clipped_ratio"
    assert transformers_name("eval/reward", ["hard"]) == "eval_reward"
    words = into_trl(parse(RAW | FUNCTION | {"best_metric": "eval/hard/time/step"})).words
    assert words["metric_for_best_model"] == "eval_hard_step_time"


FORM = {"model": "a/b", "train_type": "lora", "max_completion_length": 512, "num_layers": 16}
FORM |= {"grad_checkpoint": False, "num_iterations": 1}


def run_of(name: str, seconds: list[float], **settings: object) -> RunFolder:
    run = make_run_folder(name)
    sizes = {"group_size": 4, "batch_size": 2, "gradient_accumulation_steps": 1}
    run.config.write_text(yaml.safe_dump(sizes | FORM | settings))
    event_log = EventLog(run.events)
    for step, time_s in enumerate(seconds):
        event_log.write("step", step=step, metrics={"time/step": time_s})
    event_log.close()
    return run


def test_the_time_of_a_completion_is_the_median_step_over_its_completions():
    known = completion_time_of(run_of("one", [90.0, 8.0, 16.0, 8.0]))
    assert known is not None and known.seconds == 12.0 / 8


def test_runs_that_share_more_settings_decide_the_forecast():
    known = [CompletionTime(FORM, seconds) for seconds in (5.0, 7.0)]
    known += [CompletionTime(FORM | {"max_completion_length": 64}, 1.0), CompletionTime(FORM | {"model": "c/d"}, 99.0)]
    assert seconds_per_completion(FORM, known) == 6.0
    assert seconds_per_completion(FORM | {"max_completion_length": 64}, known) == 1.0
    assert seconds_per_completion(FORM | {"train_type": "full"}, known) == 6.0


def test_no_forecast_for_a_model_with_no_or_few_steps():
    broken = run_of("broken", [1.0] * 5)
    broken.config.write_text("a: [")
    runs = (broken, run_of("short", [1.0, 1.0]), make_run_folder("empty"))
    assert [completion_time_of(run) for run in runs] == [None] * 3
    assert seconds_per_completion(FORM, []) is None
