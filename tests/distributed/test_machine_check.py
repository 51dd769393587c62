"""The check of several machines: findings, failures of ssh and programs, a model's copy, nothing left running."""

import json
import shutil
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from mlx._distributed_utils.common import Hostfile

from backend.distributed import machine_check
from backend.distributed.hosts_file import (
    Host,
    HostsFile,
    choose_backend,
    first_host_problems,
    parse_hosts,
    read_hosts,
    write_hosts,
)
from backend.distributed.launcher import launch_command, rank_program, ssh_command
from backend.distributed.machine_check import (
    CheckedMachine,
    MachineFacts,
    MachineReport,
    check_machines,
    findings_of,
    require_machines,
)
from backend.utils.errors import UserError
from backend.utils.places import demo_folder, project_root
from tests.support.cases import cases
from tests.support.fake_hosts import FakeHosts
from tests.support.verbs import run_ok


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
    done = run_ok("machines", file, "--model", "demo/adder", "--copy", "--json")
    report = MachineReport.from_dict(json.loads(done.stdout.splitlines()[-1]))
    here, there = (machine.facts for machine in report.machines)
    assert here is not None and there is not None and here.model == there.model != ""
    assert (here.mlx, here.code, here.memory) == (there.mlx, there.code, there.memory)
    assert report.backend == "ring"
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
        require_machines(_file({"ssh": "mac-b", "program": "~/tool"}), "hosts.json")
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
        check_machines(two, "hosts.json", backend="ring", check=check)
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


def report_of(*others: MachineFacts) -> MachineReport:
    machines = [CheckedMachine(0, "127.0.0.1", "this machine", is_here=True, facts=MAC)]
    for rank, facts in enumerate(others, 1):
        machines.append(CheckedMachine(rank, f"mac-{rank}", f"mac-{rank}", facts=facts))
    return MachineReport("ring", machines)


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
    found = findings_of(report_of(replace(MAC, **changes)), "owner/name")
    assert [(finding.level, finding.rank) for finding in found] == ([(level, 1)] if level else [])
    assert all(says in finding.sentence and len(finding.sentence) <= 200 for finding in found)


def test_the_gravest_come_first_and_a_report_survives_json():
    report = report_of(replace(MAC, chip="Apple M1", mlx="0.1", grpo_studio="0"))
    report.findings = findings_of(report)
    assert [finding.level for finding in report.findings] == ["refuse", "warn", "info"]
    assert MachineReport.from_dict(json.loads(json.dumps(asdict(report)))) == report


TWO = [{"ssh": "127.0.0.1", "ips": ["192.168.0.1"]}, {"ssh": "anna@mac-b.local", "ips": ["192.168.0.2", "10.0.0.2"]}]
JACCL = {
    "backend": "jaccl",
    "envs": ["MLX_METAL_FAST_SYNCH=1"],
    "hosts": [
        {"ssh": "a", "ips": ["10.0.0.1"], "rdma": [None, "rdma_en2", ["rdma_en3", "rdma_en4"]]},
        {"ssh": "b", "ips": ["10.0.0.2"], "rdma": ["rdma_en2", None, "rdma_en3"]},
        {"ssh": "c", "ips": [], "rdma": [["rdma_en3", "rdma_en4"], "rdma_en3", None]},
    ],
}


@pytest.mark.parametrize("content", [TWO, JACCL, {"hosts": TWO}, [{"ssh": "127.0.0.1"}] * 4])
def test_a_file_means_what_mlx_launch_reads_in_it_before_and_after_it_is_written(tmp_path: Path, content: Any):
    file = tmp_path / "hosts.json"
    file.write_text(json.dumps(content))
    hosts = read_hosts(file)
    written = tmp_path / "written.json"
    write_hosts(written, hosts)
    assert read_hosts(written) == hosts
    for path in (file, written):
        theirs = Hostfile.from_file(path)
        assert (theirs.backend, tuple(theirs.envs)) == (hosts.backend, hosts.envs)
        assert [host.ssh_hostname for host in theirs.hosts] == [host.ssh for host in hosts.hosts]
        assert [host.rdma for host in theirs.hosts] == json.loads(json.dumps([host.rdma for host in hosts.hosts]))
    assert [host.ips for host in Hostfile.from_file(written).hosts] == [list(host.ips) for host in hosts.hosts]


@cases(
    ("content", "says"),
    [
        ([], "it names no hosts."),
        (3, "hosts: must be a list"),
        ({"hosts": TWO, "backends": "ring"}, "backends: is no key"),
        ([{"ssh": "a"}] * 65, "at most 64"),
        (["mac-a", "mac-b"], "host 1"),
        ([{"ips": ["10.0.0.1"]}], "host 1, ssh: is missing"),
        ([{"ssh": "-oProxyCommand=touch /tmp/x"}], "host 1, ssh: must be a machine's name"),
        ([{"ssh": "a"}, {"ssh": "b", "ip": ["10.0.0.1"]}], "host 2, ip: is no key"),
        ([{"ssh": "a"}, {"ssh": "b", "ips": ["mac-b"]}], "host 2, ips: must be an IPv4 address"),
        ([{"ssh": "a", "ips": "10.0.0.1"}], "host 1, ips: must be a list"),
        ([{"ssh": "a", "rdma": [None]}, {"ssh": "b"}], "must have one entry for each of the 2 hosts"),
        ([{"ssh": "a", "rdma": ["rdma_en2", None]}, {"ssh": "b"}], "and null for itself"),
        ([{"ssh": "a", "rdma": [None, "a b"]}, {"ssh": "b"}], "must be a device such as rdma_en2"),
        ([{"ssh": "a", "program": "/tmp/evil"}], "host 1 is this machine, so it can have no program"),
        ([{"ssh": "a"}, {"ssh": "localhost", "folder": "/tmp/evil"}], "host 2 is this machine"),
        ([{"ssh": "a", "folder": "a\nb"}], "host 1, folder: must be a path"),
        ({"hosts": TWO, "backend": "gloo"}, "backend: Input should be"),
        ({"hosts": TWO, "envs": ["1A=x"]}, "envs: must have entries such as NAME=value"),
    ],
)
def test_an_error_names_the_file_and_the_entry(content: Any, says: str):
    with pytest.raises(UserError) as caught:
        parse_hosts(content, "two macs.json")
    fault = caught.value.faults[0]
    assert fault.setting == "hosts" and len(fault.sentence) <= 200
    assert fault.sentence.startswith("two macs.json: ") and says in fault.sentence


VARIABLES = (
    "PYTHONPATH PATH LD_PRELOAD DYLD_INSERT_LIBRARIES MLX_MPI_LIBNAME NCCL_NET_PLUGIN NCCL_CONF_FILE HF_ENDPOINT "
    "HF_TOKEN OMPI_MCA_plm_rsh_agent OMPI_MCA_mca_component_path GRPO_STUDIO_LAUNCH XMLX_A"
)


@cases("name", VARIABLES.split())
def test_no_variable_of_a_hosts_file_loads_code_or_leads_to_another_server(name: str):
    with pytest.raises(UserError, match=f"envs: cannot set {name}"):
        parse_hosts({"hosts": TWO, "envs": [f"{name}=x"]}, "f")


def test_the_first_host_must_be_this_machine_and_every_fault_is_told_at_once_without_secrets():
    with pytest.raises(UserError) as caught:
        parse_hosts({"hosts": [{"ssh": ""}, {"ssh": "b", "ips": [1]}], "envs": ["MY KEY=hunter2"]}, "f")
    assert len(caught.value.faults) == 3 and "hunter2" not in str(caught.value)
    there = parse_hosts([{"ssh": "mac-a", "ips": ["192.0.2.7"]}, {"ssh": "mac-b"}], "f")
    (fault,) = first_host_problems(there, "f")
    assert "192.0.2.7 is not an address of it" in fault.sentence
    for first in ({"ssh": "mac-a"}, {"ssh": "mac-a", "ips": ["127.0.0.1"]}, {"ssh": "127.0.0.1", "ips": ["192.0.2.7"]}):
        assert not first_host_problems(parse_hosts([first, {"ssh": "mac-b"}], "f"), "f")


def _hosts(count: int, **about: Any) -> HostsFile:
    return HostsFile(tuple(Host(f"m{rank}", (f"10.0.0.{rank + 1}",)) for rank in range(count)), **about)


@cases(
    ("hosts", "wanted", "mpi", "cuda", "backend"),
    [
        (_hosts(1), "auto", True, False, "ring"),
        (_hosts(2), "auto", True, False, "ring"),
        (_hosts(3), "auto", True, False, "mpi"),
        (_hosts(3), "ring", True, False, "ring"),
        (_hosts(2, backend="mpi"), "auto", True, False, "mpi"),
        (_hosts(2, backend="mpi"), "ring", True, False, "ring"),
        (_hosts(2), "auto", True, True, "nccl"),
        (parse_hosts({**JACCL, "backend": ""}, "f"), "auto", False, False, "jaccl"),
    ],
)
def test_the_backend_suits_the_machines(hosts: HostsFile, wanted: str, mpi: bool, cuda: bool, backend: str):
    choice = choose_backend(hosts, wanted, has_mpi=mpi, has_cuda=cuda)
    assert choice.backend == backend and f"over {'a ' if choice.why.count('a ring') else ''}{backend}" in choice.why


@cases(
    ("hosts", "wanted", "says"),
    [
        (_hosts(3), "auto", "3 ranks need MPI"),
        (_hosts(2), "mpi", "mpirun is not installed"),
        (_hosts(2), "jaccl", "none from host 1 to host 2"),
        (_hosts(2, backend="jaccl-ring"), "auto", "none from host 1 to host 2"),
        (_hosts(2), "nccl", "no CUDA device"),
        (HostsFile((Host("a", ("10.0.0.1",)), Host("b"))), "auto", "host 2 has no ips"),
        (HostsFile((Host("a"), Host("b", ("10.0.0.1",)))), "nccl", "an address of the first host"),
    ],
)
def test_what_a_backend_lacks_is_a_mistake(hosts: HostsFile, wanted: str, says: str):
    with pytest.raises(UserError, match=says) as caught:
        choose_backend(hosts, wanted, has_mpi=False)
    assert [fault.setting for fault in caught.value.faults] == ["distributed_backend"]
    assert all(len(fault.sentence) <= 200 for fault in caught.value.faults)


def test_a_rank_s_program_is_that_of_its_machine():
    here, root = [sys.executable, "-P", "-m", "backend", "rank"], str(project_root())
    assert rank_program(Host("b"), "rank") == (here, {"PYTHONPATH": root})
    tool = Host("b", program="~/.local/bin/grpo-studio-backend")
    assert rank_program(tool, "rank") == ([tool.program, "rank"], {})
    checkout = Host("b", program="/opt/py", folder="/opt/grpo")
    there = ["/opt/py", "-P", "-m", "backend", "rank"]
    assert rank_program(checkout, "rank") == (there, {"PYTHONPATH": "/opt/grpo"})
    line = ssh_command(tool, ["~/my bin/x", "--run", "~"], {"A": "b c"})[-1]
    assert line == """exec env 'A=b c' "$HOME"/'my bin/x' --run '~'"""


def test_the_command_to_copy_starts_every_rank():
    line = launch_command(parse_hosts(TWO, "f"), Path("h.json"), "ring", Path("/runs/one"))
    assert line[0].endswith("mlx.launch")
    assert line[1:5] == ["--hostfile", "h.json", "--backend", "ring"]
    assert line[line.index("--") + 1 :] == [*rank_program(Host(""), "rank")[0], "--run", "/runs/one"]
    hosts = parse_hosts({"hosts": [*TWO, TWO[0]], "envs": ["MLX_A=b"]}, "f")
    mpi = launch_command(hosts, Path("h.json"), "mpi", Path("/runs/one"))
    assert mpi[:5] == ["mpirun", "-np", "3", "--host", "localhost:2,anna@mac-b.local:1"]
    assert "MLX_A=b" in mpi and mpi[-2:] == ["--run", "/runs/one"]
