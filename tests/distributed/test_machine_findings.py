"""What the facts of two machines mean: every difference is one sentence with its level, and equal machines have none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from backend.distributed.machine_findings import findings_of
from backend.distributed.machine_report import COPY_LIMIT, CheckedMachine, LinkSpeed, MachineFacts, MachineReport

MAC = MachineFacts(
    machine="mac-a.local", system="macOS 26.2", chip="Apple M4 Max", device="gpu", memory=64 << 30, memory_free=50 << 30,
    memory_usable=45 << 30, disk_free=10**12, python="3.12.4", grpo_studio="0.1.0", code="abc", mlx="0.32.4", mlx_lm="0.32.2",
    has_mpi=True, rdma_devices=("rdma_en2",), model="d1", model_bytes=10**9,
)  # fmt: skip


def report_of(*others: MachineFacts, **about: Any) -> MachineReport:
    machines = [CheckedMachine(0, "127.0.0.1", "this machine", is_here=True, facts=MAC)]
    machines += [
        CheckedMachine(rank, f"mac-{rank}", f"mac-{rank}", facts=facts) for rank, facts in enumerate(others, 1)
    ]
    return MachineReport("ring", machines, **about)


def test_equal_machines_on_a_fast_connection_have_no_findings():
    assert findings_of(report_of(MAC, MAC, link=LinkSpeed(0.0002, 1e9)), "owner/name") == []


@pytest.mark.parametrize(
    ("changes", "level", "says"),
    [
        ({"grpo_studio": "0.0.9"}, "refuse", "has GRPO Studio 0.0.9, here is 0.1.0. Install the same version on both."),
        ({"code": "xyz"}, "warn", "the same version of GRPO Studio, but other source files"),
        ({"mlx": "0.31.0"}, "warn", "has mlx 0.31.0, here is 0.32.4"),
        ({"mlx_lm": "0.31.0"}, "warn", "has mlx-lm 0.31.0"),
        ({"python": "3.11.2"}, "info", "has Python 3.11.2"),
        ({"python": "3.12.9"}, None, ""),
        ({"system": "macOS 15.1"}, "info", "runs macOS 15.1, this machine macOS 26.2"),
        ({"chip": "Apple M1"}, "info", "another chip (Apple M1, here Apple M4 Max)"),
        ({"device": "cpu"}, "warn", "computes on the CPU, this machine on the GPU"),
        ({"memory": 48 << 30}, "info", "so mac-1 sets the limit"),
        ({"memory": 16 << 30}, "warn", "has 17.2 GB of memory, this machine 68.7 GB"),
        ({"memory": 128 << 30}, "info", "so this machine sets the limit"),
        ({"model": ""}, "warn", "will download it (1 GB) when the run starts. It can be copied from here (1 GB)."),
        ({"model": "d2"}, "refuse", "has other files of owner/name than this machine"),
        ({"model": "", "disk_free": 10**9}, "refuse", "lacks the model and the room for it: 1 GB are free, 3 GB needed"),
        ({"has_reward_file": False}, "info", "has no reward file, and needs none"),
    ],
)  # fmt: skip
def test_a_difference_is_one_sentence_with_its_level(changes: dict[str, Any], level: str | None, says: str):
    found = findings_of(report_of(replace(MAC, **changes)), "owner/name", model_is_hub_id=True)
    assert [(finding.level, finding.rank) for finding in found] == ([(level, 1)] if level else [])
    assert all(says in finding.sentence and len(finding.sentence) <= 200 for finding in found)


def test_what_the_backend_needs_must_be_on_every_machine():
    bare = replace(MAC, has_mpi=False, rdma_devices=())
    for backend, says in (("mpi", "has no mpirun"), ("jaccl", "shows no RDMA devices"), ("ring", "")):
        report = report_of(bare)
        report.backend = backend
        assert [says in finding.sentence for finding in findings_of(report)] == [True] * bool(says)


def test_a_large_model_is_not_copied_and_a_missing_folder_refused():
    report = report_of(replace(MAC, model=""))
    report.machines[0].facts = replace(MAC, model_bytes=COPY_LIMIT + 1)
    assert report.without_model == []
    (found,) = findings_of(report, "/models/large")
    assert (
        found.level == "refuse"
        and "has no folder /models/large. With 8 GB it is above the 8 GB that are copied" in found.sentence
    )
    assert report_of(replace(MAC, model="")).without_model == [1]


def test_a_slow_connection_is_a_warning_with_its_seconds():
    wifi = findings_of(report_of(MAC, link=LinkSpeed(0.03, 8e6)))
    assert [finding.level for finding in wifi] == ["warn", "warn"]
    assert "20 MB, takes 2.53 s to sum" in wifi[0].sentence and "30 ms" in wifi[1].sentence


def test_ranks_that_share_a_machine_are_told_once_and_compared_with_nothing():
    report = report_of()
    report.machines.append(
        CheckedMachine(1, "127.0.0.1", "this machine (rank 1)", is_here=True, facts=replace(MAC, memory=1))
    )
    (found,) = findings_of(report)
    assert found.level == "info" and "This machine is listed 2 times" in found.sentence


def test_the_gravest_come_first_and_a_report_survives_json():
    report = report_of(
        replace(MAC, python="3.9", mlx="0.1", grpo_studio="0"), link=LinkSpeed(0.001, 1e8, ((0, 1, 1e8), (1, 0, 9e7)))
    )
    report.findings = findings_of(report)
    assert [finding.level for finding in report.findings] == ["refuse", "warn", "info"]
    assert MachineReport.from_dict(report.to_dict()) == report
    assert report.link_sentence() == (
        "Over ring, a sum of one number takes 1 ms; large sums run at 100 MB/s; the gradient of a LoRA adapter (20 MB) takes 0.2 s. "
        "From rank to rank: 0 → 1 100 MB/s, 1 → 0 90 MB/s."
    )
