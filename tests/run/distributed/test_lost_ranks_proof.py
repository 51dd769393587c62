"""A run over two hosts that are network namespaces, joined by a cable: the cable is slowed, then cut. Needs root on Linux."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.fake_hosts import FakeHosts
from tests.support.rank_runs import RankRuns, differences, processes_of

pytestmark = [
    pytest.mark.proof,
    pytest.mark.skipif(
        sys.platform != "linux" or os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc"))),
        reason="needs root, ip and tc",
    ),
]
ONE, TWO = "10.78.0.1", "10.78.0.2"


def system(line: str) -> None:
    subprocess.run(line.split(), check=True, capture_output=True)


@dataclass(frozen=True, slots=True)
class Cable:
    """Two hosts and what joins them. `hosts` is the file that lists them."""

    here: str
    there: str
    ssh: FakeHosts
    runs: RankRuns
    hosts: Path

    def cut(self) -> None:
        system(f"ip -n {self.there} link set grpo0 down")

    def mend(self) -> None:
        system(f"ip -n {self.there} link set grpo0 up")

    def slow(self, rate: str) -> None:
        for name in (self.here, self.there):
            system(f"tc -n {name} qdisc add dev grpo0 root tbf rate {rate} burst 32kbit latency 400ms")


@pytest.fixture
def cable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cable]:
    here, there = f"grpo-c{os.getpid()}", f"grpo-d{os.getpid()}"
    ssh = FakeHosts(tmp_path, monkeypatch)
    ssh.add("mac-b", namespace=there)
    runs = RankRuns(tmp_path, prefix=("ip", "netns", "exec", here))
    hosts = runs.hosts_file([{"ssh": "127.0.0.1", "ips": [ONE]}, {"ssh": "mac-b", "ips": [TWO]}])
    try:
        for name in (here, there):
            system(f"ip netns add {name}")
            system(f"ip -n {name} link set lo up")
        system(f"ip -n {here} link add grpo0 type veth peer name grpo0 netns {there}")
        for name, address in ((here, ONE), (there, TWO)):
            system(f"ip -n {name} addr add {address}/24 dev grpo0")
            system(f"ip -n {name} link set grpo0 up")
        yield Cable(here, there, ssh, runs, hosts)
        assert not ssh.processes(), "nothing is left on the other host"
    finally:
        for name in (here, there):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.mark.parametrize("ssh_is_cut_too", [False, True])
def test_a_cable_that_is_cut_ends_the_run_in_time(cable: Cable, ssh_is_cut_too: bool) -> None:
    whole = cable.runs.train("whole", None)
    assert whole.wait(300) == 0, whole.output.read_text()
    live = cable.runs.train("cut", cable.hosts)
    live.wait_for_step(5)
    (info,) = [each for each in live.events("started")[0]["machines"] if each["rank"] == 1]
    assert (info["machine"], info["address"]) == ("mac-b", TWO)
    cable.cut()
    if ssh_is_cut_too:
        (cable.ssh.folder / "mac-b" / "hang").touch()
    began = time.monotonic()
    assert live.wait(60) == 2, live.output.read_text()
    took = time.monotonic() - began
    print(f"ended {took:.1f} s after the cut: {live.events()[-1]['sentence']}")
    assert took < 30 and not processes_of(live.run)
    last = live.events()[-1]
    assert last["kind"] == "failed" and "mac-b (rank 1) has not answered for 12 seconds" in last["sentence"]
    assert live.saved_step() == live.last_step() >= 5
    refused = cable.runs.resume("cut")
    assert refused.wait(120) == 2, "the machine cannot be reached"
    (cable.ssh.folder / "mac-b" / "hang").unlink(missing_ok=True)
    cable.mend()
    again = cable.runs.resume("cut")
    assert again.wait(300) == 0, again.output.read_text()
    assert not differences(live.run, whole.run)


def test_a_run_goes_on_without_a_machine_whose_cable_is_cut(cable: Cable) -> None:
    whole = cable.runs.train("whole", None)
    assert whole.wait(300) == 0, whole.output.read_text()
    live = cable.runs.train("lost", cable.hosts, on_lost_rank="go_on")
    live.wait_for_step(5)
    cable.cut()
    assert live.wait(300) == 0, live.output.read_text()
    assert [event["ranks"] for event in live.events("started")][-1] == 1
    assert any("The run goes on without it" in event["sentence"] for event in live.events("note"))
    assert not differences(live.run, whole.run)


def test_a_cable_of_1_mb_a_second_is_slow_and_no_fault(cable: Cable) -> None:
    whole = cable.runs.train("whole", None)
    assert whole.wait(300) == 0, whole.output.read_text()
    cable.slow("8mbit")
    live = cable.runs.train("slow", cable.hosts, batch_size=4)
    assert live.wait(500) == 0, live.output.read_text()
    assert not differences(live.run, whole.run)
    sums = [event["metrics"]["time/gradient_sum"] for event in live.events("step")]
    print(f"seconds a step for the gradient's sum at 1 MB/s: {json.dumps(sums)}")
