"""The check over a network that is one: two network namespaces with a cable between them, then the cable slowed, then cut. Needs root on Linux."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_hosts import FakeHosts

NEEDED = ("ip", "tc")
pytestmark = [
    pytest.mark.proof,
    pytest.mark.skipif(
        sys.platform != "linux" or os.geteuid() != 0 or not all(map(shutil.which, NEEDED)),
        reason="needs root, ip and tc",
    ),
]
ONE, TWO = "10.77.0.1", "10.77.0.2"


def system(line: str) -> None:
    subprocess.run(line.split(), check=True, capture_output=True)


@pytest.fixture
def cable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[FakeHosts, Path, str, str]]:
    """(hosts, hosts file, namespace of this machine, of mac-b), joined by a veth pair."""
    here, there = f"grpo-a{os.getpid()}", f"grpo-b{os.getpid()}"
    hosts = FakeHosts(tmp_path, monkeypatch)
    hosts.add("mac-b", namespace=there)
    file = tmp_path / "hosts.json"
    file.write_text(json.dumps([{"ssh": "mac-a", "ips": [ONE]}, {"ssh": "mac-b", "ips": [TWO]}]))
    try:
        for name in (here, there):
            system(f"ip netns add {name}")
            system(f"ip -n {name} link set lo up")
        system(f"ip -n {here} link add grpo0 type veth peer name grpo0 netns {there}")
        for name, address in ((here, ONE), (there, TWO)):
            system(f"ip -n {name} addr add {address}/24 dev grpo0")
            system(f"ip -n {name} link set grpo0 up")
        yield hosts, file, here, there
    finally:
        for name in (here, there):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def check(namespace: str, file: Path) -> tuple[dict[str, Any], float]:
    """The verb's report, and its seconds."""
    began = time.monotonic()
    command = ["ip", "netns", "exec", namespace, sys.executable, "-P", "-m", "backend", "machines", str(file), "--json"]
    root = Path(__file__).parents[3]
    done = subprocess.run(command, cwd=root, env=os.environ | {"PYTHONPATH": str(root)}, capture_output=True, text=True)
    assert done.returncode in (0, 2), done.stderr
    return json.loads(done.stdout.splitlines()[-1]), time.monotonic() - began


def test_a_cable_a_slow_one_and_none(cable: tuple[FakeHosts, Path, str, str]):
    hosts, file, here, there = cable
    report, seconds = check(here, file)
    print(f"veth: {report['link']} in {seconds:.1f} s")
    assert report["link"]["bytes_per_second"] > 5e7 and not report["findings"]

    # 1 MB/s one way: a sum waits for the slower direction, and the two are told apart.
    system(f"tc -n {there} qdisc add dev grpo0 root tbf rate 8mbit burst 32kb latency 400ms")
    report, seconds = check(here, file)
    print(f"1 MB/s from mac-b: {report['link']} in {seconds:.1f} s")
    rates = {(of, to): rate for of, to, rate in report["link"]["neighbours"]}
    assert 0.3e6 < report["link"]["bytes_per_second"] < 1.3e6
    assert rates[1, 0] < 1.5e6 < 1e7 < rates[0, 1]
    assert [finding["level"] for finding in report["findings"]][:1] == ["warn"]

    # Cut: ssh still answers here, so the sum itself has to give up.
    system(f"ip -n {there} link set grpo0 down")
    report, seconds = check(here, file)
    print(f"cut: {report['findings']} in {seconds:.1f} s")
    assert report["link"] is None and seconds < 60
    assert [finding["level"] for finding in report["findings"]] == ["refuse"]
    assert "could not sum over ring" in report["findings"][0]["sentence"]
    assert not hosts.processes()
