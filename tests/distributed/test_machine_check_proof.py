"""The check over a network that is one: two network namespaces with a cable between them, then the cable slowed, then
cut. Needs root on Linux."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_hosts import FakeHosts
from tests.support.network_cable import NetworkCable, needs_namespaces, network_cable

pytestmark = [pytest.mark.proof, needs_namespaces]


def check(namespace: str, file: Path) -> tuple[dict[str, Any], float]:
    """The verb's report, and its seconds."""
    began = time.monotonic()
    command = ["ip", "netns", "exec", namespace, sys.executable, "-P", "-m", "backend", "machines", str(file), "--json"]
    root = Path(__file__).parents[3]
    done = subprocess.run(command, cwd=root, env=os.environ | {"PYTHONPATH": str(root)}, capture_output=True, text=True)
    assert done.returncode in (0, 2), done.stderr
    return json.loads(done.stdout.splitlines()[-1]), time.monotonic() - began


def test_a_cable_a_slow_one_and_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "hosts.json"
    with network_cable(77) as cable:
        hosts = FakeHosts(tmp_path, monkeypatch)
        hosts.add("mac-b", namespace=cable.there)
        addresses = {"mac-a": cable.address_here, "mac-b": cable.address_there}
        file.write_text(json.dumps([{"ssh": name, "ips": [address]} for name, address in addresses.items()]))
        check_cable(cable, file)
        assert not hosts.processes()


def check_cable(cable: NetworkCable, file: Path) -> None:
    """The check of the two hosts of `file`: as they are, then over a slow cable, then over one that is cut."""
    report, seconds = check(cable.here, file)
    print(f"veth: {report['link']} in {seconds:.1f} s")
    assert report["link"]["bytes_per_second"] > 5e7 and not report["findings"]

    # 1 MB/s one way: a sum waits for the slower direction, and the two are told apart.
    cable.slow("8mbit", cable.there)
    report, seconds = check(cable.here, file)
    print(f"1 MB/s from mac-b: {report['link']} in {seconds:.1f} s")
    rates = {(of, to): rate for of, to, rate in report["link"]["neighbours"]}
    assert 0.3e6 < report["link"]["bytes_per_second"] < 1.3e6
    assert rates[1, 0] < 1.5e6 < 1e7 < rates[0, 1]
    assert [finding["level"] for finding in report["findings"]][:1] == ["warn"]

    # Cut: ssh still answers here, so the sum itself has to give up.
    cable.cut()
    report, seconds = check(cable.here, file)
    print(f"cut: {report['findings']} in {seconds:.1f} s")
    assert report["link"] is None and seconds < 60
    assert [finding["level"] for finding in report["findings"]] == ["refuse"]
    assert "could not sum over ring" in report["findings"][0]["sentence"]
