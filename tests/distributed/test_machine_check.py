"""The check of several machines: findings, failures of ssh and programs, a model's copy, nothing left running."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from backend.__main__ import app
from backend.distributed import machine_check
from backend.distributed.hosts_file import HostsFile, parse_hosts
from backend.distributed.machine_check import CheckProgress, Wanted, check_machines, require_machines
from backend.distributed.machine_report import CheckedMachine, LinkSpeed, MachineFacts, MachineReport, findings_of
from backend.utils.errors import UserError
from backend.utils.places import demo_folder
from tests.support.cases import cases
from tests.support.fake_hosts import FakeHosts


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHosts:
    return FakeHosts(tmp_path, monkeypatch)


def _file(*others: dict[str, Any]) -> HostsFile:
    return parse_hosts([{"ssh": "127.0.0.1"}, *({"ips": ["127.0.0.1"]} | other for other in others)], "hosts.json")


def test_check_of_two_machines(hosts: FakeHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One whole check, through the verb: it is the costly one."""
    home = hosts.add("mac-b", noise="Last login: yesterday\n")
    # An id of the Hub, in this machine's cache under a revision.
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    revision = tmp_path / "cache" / "models--demo--adder" / "snapshots" / "abc123"
    shutil.copytree(demo_folder("model"), revision)
    file = tmp_path / "hosts.json"
    file.write_text(json.dumps(_file({"ssh": "mac-b"}).to_json()))
    done = CliRunner().invoke(app(), ["machines", str(file), "--model", "demo/adder", "--copy", "--json"])
    assert done.exit_code == 0, done.output
    report = MachineReport.from_dict(json.loads(done.stdout.splitlines()[-1]))
    here, there = (machine.facts for machine in report.machines)
    assert here is not None and there is not None and here.model == there.model != ""
    assert (here.mlx, here.code, here.memory) == (there.mlx, there.code, there.memory)
    assert report.backend == "ring" and report.link is not None
    assert 0 < report.link.latency_s < 1 and report.link.bytes_per_second > 1e6
    assert report.link.ranks == 2 and "A sum of one number takes" in report.link_sentence()
    copied = home / "huggingface" / "hub" / "models--demo--adder"
    assert (copied / "refs" / "main").read_text() == "abc123"
    for path in revision.iterdir():
        assert (copied / "snapshots" / "abc123" / path.name).read_bytes() == path.read_bytes()
    assert not hosts.processes()


@pytest.mark.parametrize(
    ("refusal", "tool", "says"),
    [
        ("anna@mac-b: Permission denied (publickey).\n", "", "refuses your key. Put it there with: ssh-copy-id mac-b"),
        ("Host key verification failed.\n", "", "Connect once by hand: ssh mac-b"),
        ("ssh: connect to host mac-b port 22: Connection refused\n", "", "Turn on Remote Login there"),
        ("something\x1b[31m else\n", "", r"was not reached within 8 s: something\x1b[31m else."),
        ("", "", "has no ~/tool. Install GRPO Studio there"),
        ("", "echo 'No module named backend' >&2; exit 1", "has no GRPO Studio, or an older one"),
        ("", "echo 'dyld: bad image' >&2; exit 134", "could not start GRPO Studio: dyld: bad image."),
        ("", 'echo \'grpo-studio {"error": "OSError: disk"}\'; cat', "reports: OSError: disk"),
    ],
)
def test_an_unreachable_machine_has_advice(hosts: FakeHosts, refusal: str, tool: str, says: str):
    home = hosts.add("mac-b", **({"refusal": refusal} if refusal else {}))
    if tool:
        (home / "tool").write_text(f"#!/bin/sh\n{tool}\n")
        (home / "tool").chmod(0o755)
    with pytest.raises(UserError) as caught:
        require_machines(_file({"ssh": "mac-b", "program": "~/tool"}), "hosts.json", Wanted())
    (fault,) = caught.value.faults
    assert fault.setting == "hosts" and fault.sentence.startswith("mac-b ") and says in fault.sentence
    assert len(fault.sentence) <= 200
    assert not hosts.processes()


class GivenUp(Exception): ...


def test_a_check_that_is_given_up_ends_at_once_and_leaves_nothing(hosts: FakeHosts, monkeypatch: pytest.MonkeyPatch):
    for name in ("mac-b", "mac-c"):
        hosts.add(name, hang="")
    monkeypatch.setattr(machine_check, "GRACE_S", 0.1)

    began = time.monotonic()

    def check() -> None:
        if time.monotonic() - began > 0.3:
            raise GivenUp

    two = _file({"ssh": "mac-b"}, {"ssh": "mac-c"})
    with pytest.raises(GivenUp):
        check_machines(two, "hosts.json", Wanted("ring"), CheckProgress(check=check))
    assert time.monotonic() - began < 5
    assert not hosts.processes()


def test_a_copy_overwrites_nothing_of_the_users(tmp_path: Path, hosts: FakeHosts):
    home = hosts.add("mac-b")
    two = _file({"ssh": "mac-b"})
    model = tmp_path / "model"
    shutil.copytree(demo_folder("model"), model)
    target = home / "model"
    target.mkdir()
    (target / "chapter.txt").write_text("precious")
    with pytest.raises(UserError, match="There is another folder"):
        machine_check.place(str(target), "", ["config.json"], 10)
    assert machine_check.place(str(home / "new"), "", ["config.json"], 10) == home / "new"
    with pytest.raises(UserError, match="mac-b could not take the model"):
        machine_check.copy_model(str(model), two, 1)  # both homes are on one disk: the folder is there already


def test_a_model_that_cannot_be_copied(monkeypatch: pytest.MonkeyPatch, hosts: FakeHosts):
    two = _file({"ssh": "mac-b"})
    with pytest.raises(UserError, match="is not on this machine"):
        machine_check.copy_model("no/such", two, 1)
    hosts.add("mac-b", refusal="Permission denied\n")
    with pytest.raises(UserError, match="mac-b could not take the model: mac-b refuses your key"):
        machine_check.copy_model(str(demo_folder("model")), two, 1)
    assert not hosts.processes()
    monkeypatch.setattr(machine_check, "COPY_LIMIT", 1000)
    with pytest.raises(UserError, match="larger than the 1,000 bytes"):
        machine_check.copy_model(str(demo_folder("model")), two, 1)


FACTS: dict[str, Any] = (
    {"machine": "mac-a.local", "system": "macOS 26.2", "chip": "Apple M4 Max", "device": "gpu"}
    | {"memory": 64 << 30, "memory_free": 50 << 30, "memory_usable": 45 << 30, "disk_free": 10**12}
    | {"python": "3.12.4", "grpo_studio": "0.1.0", "code": "abc", "mlx": "0.32.4", "mlx_lm": "0.32.2", "has_mpi": True}
    | {"rdma_devices": ("rdma_en2",), "model": "d1", "model_bytes": 10**9}
)
MAC = MachineFacts(**FACTS)


def report_of(*others: MachineFacts, **about: Any) -> MachineReport:
    machines = [CheckedMachine(0, "127.0.0.1", "this machine", is_here=True, facts=MAC)]
    for rank, facts in enumerate(others, 1):
        machines.append(CheckedMachine(rank, f"mac-{rank}", f"mac-{rank}", facts=facts))
    return MachineReport("ring", machines, **about)


@cases(
    ("changes", "level", "says"),
    [
        ({"grpo_studio": "0.0.9"}, "refuse", "has GRPO Studio 0.0.9, here is 0.1.0. Install the same version on both."),
        ({"code": "xyz"}, "warn", "other source files of the same GRPO Studio"),
        ({"mlx": "0.31.0"}, "warn", "has mlx 0.31.0, here is 0.32.4"),
        ({"mlx_lm": "0.31.0"}, "warn", "has mlx-lm 0.31.0"),
        ({"chip": "Apple M1"}, "info", "another chip (Apple M1, here Apple M4 Max)"),
        ({"device": "cpu"}, "warn", "computes on the CPU, this machine on the GPU"),
        ({"memory": 48 << 30}, "info", "so mac-1 sets the limit"),
        ({"memory": 16 << 30}, "warn", "has 17.2 GB of memory, this machine 68.7 GB"),
        ({"memory": 128 << 30}, "info", "so this machine sets the limit"),
        ({"model": ""}, "warn", "will download it (1 GB) when the run starts. It can be copied from here (1 GB)."),
        ({"model": "d2"}, "refuse", "has other files of owner/name than this machine"),
        ({"model": "", "disk_free": 10**9}, "refuse", "lacks the model and the room for it: 1 GB are free, 3 GB"),
        ({"has_reward_file": False}, "info", "has no reward file: its text is sent"),
    ],
)
def test_a_difference_is_one_sentence_with_its_level(changes: dict[str, Any], level: str | None, says: str):
    found = findings_of(report_of(replace(MAC, **changes)), "owner/name", model_is_hub_id=True)
    assert [(finding.level, finding.rank) for finding in found] == ([(level, 1)] if level else [])
    assert all(says in finding.sentence and len(finding.sentence) <= 200 for finding in found)


def test_the_gravest_come_first_and_a_report_survives_json():
    report = report_of(replace(MAC, chip="Apple M1", mlx="0.1", grpo_studio="0"), link=LinkSpeed(0.001, 1e8))
    report.findings = findings_of(report)
    assert [finding.level for finding in report.findings] == ["refuse", "warn", "info"]
    assert MachineReport.from_dict(report.to_dict()) == report
    assert report.link_sentence() == (
        "A sum of one number takes 1 ms; large sums run at 100 MB/s; "
        "the gradient of a LoRA adapter (20 MB) takes 0.2 s."
    )
