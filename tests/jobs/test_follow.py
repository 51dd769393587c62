"""Runs that train as jobs of Hugging Face, against a Hub on this machine."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import yaml

from backend.export.export_run import Export, export_run
from backend.export.trained_weights import AdapterFiles, TrainedWeights
from backend.jobs import follow
from backend.jobs.job_file import read_job
from backend.runs.archive import summary
from backend.runs.completion_rows import parse_group_row
from backend.runs.events import read_events
from backend.runs.run_folder import RunFolder
from backend.utils.command import backend_command, backend_environment
from backend.utils.errors import UserError
from tests.support import job_script
from tests.support.hub_server import TOKEN, Fault, HubStandIn, Job
from tests.support.random_runs import PROMPT, furthest, write_run
from tests.support.verbs import call, refused

LINES = job_script.lines(4)
BY_EVENT = {"seq", "t", "mono", "pid", "command"}
STEPS = (1, 2, 3, 4)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "POLL_S", 0.02)
    monkeypatch.setattr(follow, "RETRY_S", 0.02)


@pytest.fixture
def trained(tmp_path: Path, config: Path) -> tuple[Path, mx.array]:
    """An adapter of PEFT onto the model of `config`, and the logits of both."""
    model = yaml.safe_load(config.read_text())["model"]
    logits = write_run(tmp_path / "other", model)
    exported = export_run(RunFolder(tmp_path / "other"), Export("folder", "peft", tmp_path / "exports", "peft", ""))
    return Path(exported.place), logits


def printing(hub: HubStandIn, adapter: Path | None = None, stage: str = "COMPLETED", message: str = "") -> None:
    """Make the Hub's jobs print LINES, and leave an adapter."""

    def work(job: Job) -> None:
        job.lines += LINES
        if adapter is not None:
            hub.put(job, adapter, "output")
        job.message, job.stage = message, stage

    hub.work = work


def submitted(config: Path, *more: str) -> tuple[Any, RunFolder]:
    result = call("job", config, "--flavor", "t4-small", "--yes", "--runs-dir", config.parent / "runs", *more)
    (run,) = (config.parent / "runs").glob("*")
    return result, RunFolder(run)


def events(run: RunFolder, *kinds: str) -> list[dict[str, Any]]:
    found = [event for event in read_events(run.events) if event["kind"] in kinds or not kinds]
    return [{key: value for key, value in event.items() if key not in BY_EVENT} for event in found]


def until(condition: Callable[[], object]) -> None:
    ends = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.05)


def test_a_job_is_a_run(hub: HubStandIn, config: Path, tmp_path: Path, trained: tuple[Path, mx.array]):
    """With a real process for the job: log, metrics, completions, and the adapter with its logits."""
    adapter, logits = trained

    def work(job: Job) -> None:
        folder = hub.folder_of(job, tmp_path / "job")
        command = [sys.executable, job_script.__file__, str(adapter), "4"]
        environment = os.environ | job.spec["environment"] | job.spec["secrets"]
        process = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        assert process.returncode == 0, process.stderr
        job.lines += process.stdout.splitlines()
        hub.put(job, folder / "output", "output")
        job.stage = "COMPLETED"

    hub.work = work
    result, run = submitted(config, "--timeout", "2.5")
    assert result.exit_code == 0, (result.output, result.exception)
    assert "Nvidia T4 - small: $0.40 an hour, $1.00 at most in 2.5 hours." in result.stderr
    job, (asked,) = read_job(run), (each.spec for each in hub.jobs.values())
    assert job is not None and (job.owner, job.flavor, job.usd_per_hour * job.timeout_h) == ("someone", "t4-small", 1.0)
    assert asked["timeoutSeconds"] == 9000 and asked["secrets"] == {"HF_TOKEN": TOKEN}
    assert asked["command"][:3] == ["uv", "run", "/run/train.py"] and asked["volumes"][0]["mountPath"] == "/run"
    assert f"{asked['volumes'][0]['source']}/{asked['volumes'][0]['path']}" == job.bucket

    (started,) = events(run, "started")
    assert (started["iterations"], started["device"][:8]) == (4, "t4-small")
    steps = events(run, "step")
    assert [step["step"] for step in steps] == [*STEPS]
    expected = {"loss": 0.25, "reward": 0.2, "reward_std": 0.2, "kl": 0.01, "time/step": 4.0}
    expected |= {"clip_ratio_total": 0.03, "rewards/low-half/mean": 1.0}
    assert steps[1]["metrics"] == expected | {"frac_reward_zero_std": 0.25, "frac_groups_without_signal": 0.25}
    valid, test = events(run, "eval")
    assert valid["metrics"] == {"reward": 0.6, "rewards/low-half/mean": 0.7}
    assert (valid["step"], valid["split"], test["split"], test["metrics"]) == (4, "valid", "test", {"reward": 0.8})
    assert events(run)[-1]["sentence"] == "Finished after 4 steps." and summary(run).state == "finished"
    assert "Installed 60 packages\n" in run.log.read_text() and follow.REPORT not in run.log.read_text()
    rows = [parse_group_row(line) for line in run.completions.read_bytes().splitlines()]
    assert [row and row["step"] for row in rows] == [*STEPS]
    assert rows[2] is not None and rows[2]["completions"][0]["rewards"] == {"low-half": 1.0, "length_target": 0.3}
    assert rows[2]["completions"][0]["reward"] == pytest.approx(1.15)

    files = AdapterFiles.within(run.adapters)
    model = Path(yaml.safe_load(config.read_text())["model"])
    ours: Any = TrainedWeights(model, str(model), model, files).open()(PROMPT)
    assert furthest(ours[0], logits) < 1e-4
    assert not [each for each in run.path.iterdir() if each.name.startswith(".")]
    assert call("resume", run.path).exit_code == 0 and len(hub.jobs) == 1


def follower(hub: HubStandIn, config: Path) -> subprocess.Popen[str]:
    """The verb in a process of its own."""
    words = ("job", str(config), "--flavor", "t4-small", "--yes", "--runs-dir", str(config.parent / "runs"))
    environment = backend_environment() | {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0"}
    quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(backend_command(*words), env=environment, text=True, **quiet)  # type: ignore[call-overload]


def test_a_killed_follower_goes_on(hub: HubStandIn, config: Path, trained: tuple[Path, mx.array]):
    """With completions of no step yet, and after a step. Nothing that it left or sent has the token."""
    go_on, goes_further = threading.Event(), threading.Event()

    def work(job: Job) -> None:
        job.lines += LINES[:3]
        goes_further.wait(60)
        job.lines += LINES[3:5]
        go_on.wait(60)
        job.lines += LINES[5:]
        hub.put(job, trained[0], "output")
        job.stage = "COMPLETED"

    hub.work = work
    process, runs = follower(hub, config), config.parent / "runs"
    until(lambda: [*runs.glob("*/completions.jsonl")])
    (run,) = map(RunFolder, runs.glob("*"))
    until(lambda: len(run.completions.read_bytes().splitlines()) == 1)
    early = RunFolder(shutil.copytree(run.path, runs / "early"))  # as a kill would have left it
    goes_further.set()
    until(lambda: events(run, "step"))
    command_lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    process.send_signal(signal.SIGKILL)
    process.wait()
    run.say("stop")  # which nobody has read
    go_on.set()
    for each in (run, early):
        assert not events(each, "finished", "stopped", "failed")
        result = call("resume", each.path)
        assert result.exit_code == 0, result.output
    (submitted,) = hub.jobs.values()
    assert TOKEN not in json.dumps(submitted.spec | {"secrets": None})
    sent = [data for files in hub.buckets.values() for _, _, data in files.values()]
    files = [file.read_bytes() for file in runs.rglob("*") if file.is_file()]
    assert not [content for content in (*command_lines, *files, *sent) if TOKEN.encode() in content]
    assert any(b"t4-small" in line for line in command_lines)
    assert len(files) > 10 and len(sent) > 10 and hub.token_leaks == 0

    printing(hub, trained[0])
    call("job", config, "--flavor", "t4-small", "--yes", "--runs-dir", runs, "--name", "whole")
    whole, kinds = RunFolder(runs / "whole"), ("started", "step", "eval", "health", "finished")
    for each in (run, early):
        assert events(each, *kinds) == events(whole, *kinds)
        assert each.completions.read_bytes() == whole.completions.read_bytes()
        assert each.log.read_text().count("Installed 60 packages") == 1


def test_stop_cancels_and_keeps_a_checkpoint(hub: HubStandIn, config: Path, trained: tuple[Path, mx.array]):
    def work(job: Job) -> None:
        job.lines += LINES[:8]
        hub.put(job, trained[0], "output/checkpoint-2")
        (run,) = map(RunFolder, (config.parent / "runs").glob("*"))
        until(lambda: events(run, "step"))
        run.say("pause")
        until(lambda: events(run, "command"))
        run.say("stop")

    hub.work = work
    result, run = submitted(config)
    assert result.exit_code == 3 and [job.stage for job in hub.jobs.values()] == ["CANCELED"]
    notes = [event["sentence"] for event in events(run, "note")]
    assert "A job cannot pause: it trains on until it has ended or is stopped." in notes
    ending = events(run)[-1]
    assert ending["kind"] == "stopped" and ending["sentence"].startswith("Stopped at step 2: the job was cancelled.")
    assert "Its newest checkpoint is here." in ending["sentence"] and (run.adapters / "adapters.safetensors").exists()


def test_a_job_that_fails(hub: HubStandIn, config: Path):
    printing(hub, None, "ERROR", "Job timeout")
    result, run = submitted(config)
    ending = events(run)[-1]
    assert (result.exit_code, ending["kind"], ending["step"]) == (2, "failed", 4)
    assert ending["sentence"].startswith("The job has failed at step 4: Job timeout.\n")
    assert ending["sentence"].endswith("\n{'loss': '0.125'}")


def test_an_adapter_that_does_not_come_is_fetched_later(hub: HubStandIn, config: Path, trained: tuple[Path, mx.array]):
    printing(hub, trained[0])
    hub.faults.append(Fault("GET /api/buckets/.*/tree", 500, 30))
    result, run = submitted(config)
    assert result.exit_code == 2 and "resume the run to fetch them again" in events(run)[-1]["sentence"]
    hub.faults.clear()
    refused("resume", run.path, "--set", "iters=9")
    assert call("resume", run.path).exit_code == 0
    assert [event["kind"] for event in events(run, "step", "failed", "finished")] == ["step"] * 4 + ["finished"]


def test_a_log_that_may_not_be_read(hub: HubStandIn, config: Path):
    hub.faults.append(Fault("GET /api/jobs/.*/logs", 403, 9, "no read access"))
    result, run = submitted(config)
    sentence = events(run)[-1]["sentence"]
    assert result.exit_code == 2 and "resume the run to follow it again" in sentence and TOKEN not in sentence


@pytest.mark.parametrize(
    "changes, options, sentence",
    [
        ({"train_mode": "sft"}, [], "train_mode: The folder is for TRL's GRPO"),
        ({}, ["--flavor", "a100"], "flavor: .*choose one of t4-small, a10g-small\\."),
        ({}, ["--timeout", "0"], "timeout: The time-out must be more than 0 hours"),
        ({}, ["--owner", "elsewhere"], "owner: The bucket elsewhere/jobs-artifacts is public"),
    ],
)
def test_refused_before_anything_is_uploaded(
    hub: HubStandIn, config: Path, changes: dict[str, Any], options: list[str], sentence: str
):
    hub.public_buckets.add("elsewhere/jobs-artifacts")
    config.write_text(yaml.safe_dump(yaml.safe_load(config.read_text()) | changes))
    arguments = ["job", config, "--flavor", "t4-small", "--yes", "--runs-dir", config.parent / "runs", *options]
    result = call(*arguments)
    assert result.exit_code == 2 and re.search(sentence, result.stderr), result.output
    assert not hub.jobs and not any(hub.buckets.values())


@pytest.fixture
def run(config: Path) -> RunFolder:
    """A folder that the window made."""
    made = RunFolder(config.parent / "runs" / "mine")
    made.path.mkdir(parents=True)
    made.config.write_text(config.read_text())
    return made


def test_a_folder_that_the_window_made(hub: HubStandIn, run: RunFolder, trained: tuple[Path, mx.array]):
    """And an outage of the log."""
    printing(hub, trained[0])
    hub.faults.append(Fault("GET /api/jobs/.*/logs", 503, 2))
    assert call("job", "--run", run.path, "--flavor", "t4-small", "--yes").exit_code == 0
    assert summary(run).state == "finished" and len(events(run, "step")) == 4
    assert sum("its log is tried again" in note["sentence"] for note in events(run, "note")) == 1
    assert "has begun already" in refused("job", "--run", run.path, "--flavor", "t4-small", "--yes")


def test_a_stop_before_the_job_starts(hub: HubStandIn, run: RunFolder):
    words = iter(["stop"])  # once: the stand-in answers in several threads
    hub.on_moment = lambda number: [run.say(word) for word in words] if hub.buckets and not hub.jobs else None
    assert call("job", "--run", run.path, "--flavor", "t4-small", "--yes").exit_code == 3
    assert events(run)[-1]["sentence"] == "Stopped before the job was submitted." and not hub.jobs


def test_hardware_verb(hub: HubStandIn):
    """Machines with one GPU, the cheapest first."""
    listed = call("job", "--hardware").stdout
    assert listed.index("t4-small") < listed.index("a10g-small")
    assert "cpu-basic" not in listed and "h200x2" not in listed
    cheap, dear = json.loads(call("job", "--hardware", "--json").stdout)["hardware"]
    assert (cheap["usd_per_hour"], dear["usd_per_hour"]) == (0.4, 1.0)
    assert dear.items() >= {"title": "Nvidia A10G - small", "accelerator": "A10G", "memory": "24 GB"}.items()
    hub.faults.append(Fault("jobs/hardware", 503, 9))
    assert "error of its own (503)" in refused("job", "--hardware")


def test_a_file_that_describes_no_job(tmp_path: Path):
    run = RunFolder(tmp_path)
    run.job.write_text('{"id": "6a1"}')
    with pytest.raises(UserError, match="does not describe a job"):
        read_job(run)
