"""Jobs of Hugging Face, against a Hub on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from backend.jobs.job_file import JobFile, read_job, write_job
from backend.runs.run_folder import RunFolder
from backend.serve.hub_questions import hub_hardware
from backend.serve.questions import QuestionCall
from backend.utils.errors import UserError
from tests.support.hub_server import Fault, HubStandIn

JOB = JobFile("6a1", "someone", "t4-small", 2.5, 0.4, "http://127.0.0.1/jobs/someone/6a1", "someone/jobs/a", 1.8e9)


def test_hardware_with_one_gpu_cheapest_first(hub: HubStandIn):
    answer = hub_hardware(QuestionCall())
    assert [(each["name"], each["usd_per_hour"]) for each in answer["hardware"]] == [
        ("t4-small", 0.4),
        ("a10g-small", 1.0),
    ]
    title = {"title": "Nvidia A10G - small", "accelerator": "A10G", "memory": "24 GB"}
    assert answer["hardware"][1].items() >= title.items()


def test_hardware_of_a_broken_hub(hub: HubStandIn):
    hub.faults.append(Fault("jobs/hardware", 503, 9))
    with pytest.raises(UserError, match=r"^flavor: .*error of its own \(503\)"):
        hub_hardware(QuestionCall())


def test_job_file(tmp_path: Path):
    run = RunFolder(tmp_path)
    assert read_job(run) is None
    write_job(run, JOB)
    assert read_job(run) == JOB and JOB.most_usd == 1.0
    run.job.write_text(json.dumps({"id": "6a1"}))
    with pytest.raises(UserError, match="does not describe a job"):
        read_job(run)
