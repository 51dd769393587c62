"""A run over two hosts that are network namespaces, joined by a cable: the cable is slowed, then cut. Needs root on
Linux."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.fake_hosts import FakeHosts
from tests.support.network_cable import NetworkCable, needs_namespaces, network_cable
from tests.support.rank_runs import RankRuns, differences, processes_of

pytestmark = [pytest.mark.proof, needs_namespaces]


@dataclass(frozen=True, slots=True)
class TwoHosts:
    """This machine and mac-b, and the cable between them. `hosts` is the file that lists them."""

    cable: NetworkCable
    ssh: FakeHosts
    runs: RankRuns
    hosts: Path


@pytest.fixture
def two_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoHosts]:
    with network_cable(78) as cable:
        ssh = FakeHosts(tmp_path, monkeypatch)
        ssh.add("mac-b", namespace=cable.there)
        runs = RankRuns(tmp_path, prefix=("ip", "netns", "exec", cable.here))
        hosts = runs.hosts_file(
            [{"ssh": "127.0.0.1", "ips": [cable.address_here]}, {"ssh": "mac-b", "ips": [cable.address_there]}]
        )
        yield TwoHosts(cable, ssh, runs, hosts)
        assert not ssh.processes(), "nothing is left on the other host"


@pytest.mark.parametrize("ssh_is_cut_too", [False, True])
def test_a_cable_that_is_cut_ends_the_run_in_time(two_hosts: TwoHosts, ssh_is_cut_too: bool) -> None:
    whole = two_hosts.runs.train("whole", None)
    assert whole.wait(300) == 0, whole.output.read_text()
    live = two_hosts.runs.train("cut", two_hosts.hosts)
    live.wait_for_step(5)
    (info,) = [each for each in live.events("started")[0]["machines"] if each["rank"] == 1]
    assert (info["machine"], info["address"]) == ("mac-b", two_hosts.cable.address_there)
    two_hosts.cable.cut()
    if ssh_is_cut_too:
        (two_hosts.ssh.folder / "mac-b" / "hang").touch()
    began = time.monotonic()
    assert live.wait(60) == 2, live.output.read_text()
    took = time.monotonic() - began
    print(f"ended {took:.1f} s after the cut: {live.events()[-1]['sentence']}")
    assert took < 30 and not processes_of(live.run)
    last = live.events()[-1]
    assert last["kind"] == "failed" and "mac-b (rank 1) has not answered for 12 seconds" in last["sentence"]
    assert live.saved_step() == live.last_step() >= 5
    refused = two_hosts.runs.resume("cut")
    assert refused.wait(120) == 2, "the machine cannot be reached"
    (two_hosts.ssh.folder / "mac-b" / "hang").unlink(missing_ok=True)
    two_hosts.cable.mend()
    again = two_hosts.runs.resume("cut")
    assert again.wait(300) == 0, again.output.read_text()
    assert not differences(live.run, whole.run)


def test_a_run_goes_on_without_a_machine_whose_cable_is_cut(two_hosts: TwoHosts) -> None:
    whole = two_hosts.runs.train("whole", None)
    assert whole.wait(300) == 0, whole.output.read_text()
    live = two_hosts.runs.train("lost", two_hosts.hosts, on_lost_rank="go_on")
    live.wait_for_step(5)
    two_hosts.cable.cut()
    assert live.wait(300) == 0, live.output.read_text()
    assert [event["ranks"] for event in live.events("started")][-1] == 1
    assert any("The run goes on without it" in event["sentence"] for event in live.events("note"))
    assert not differences(live.run, whole.run)


def test_a_cable_of_1_mb_a_second_is_slow_and_no_fault(two_hosts: TwoHosts) -> None:
    whole = two_hosts.runs.train("whole", None)
    assert whole.wait(300) == 0, whole.output.read_text()
    for end in (two_hosts.cable.here, two_hosts.cable.there):
        two_hosts.cable.slow("8mbit", end)
    live = two_hosts.runs.train("slow", two_hosts.hosts, batch_size=4)
    assert live.wait(500) == 0, live.output.read_text()
    assert not differences(live.run, whole.run)
    sums = [event["metrics"]["time/gradient_sum"] for event in live.events("step")]
    print(f"seconds a step for the gradient's sum at 1 MB/s: {json.dumps(sums)}")
