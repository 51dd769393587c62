"""The hosts file: read as mlx.launch reads it, errors name file and entry, the backend suits it; the commands."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from mlx._distributed_utils.common import Hostfile

from backend.distributed.commands import launch_command, program_environment, rank_program, shell_words
from backend.distributed.hosts_file import (
    Host,
    HostsFile,
    choose_backend,
    first_host_problem,
    parse_hosts,
    read_hosts,
    write_hosts,
)
from backend.utils.errors import UserError
from backend.utils.places import project_root
from tests.support.cases import cases

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
        ([], "at least 1"),
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


def test_every_fault_of_a_file_is_told_at_once_and_no_secret_of_its_variables():
    with pytest.raises(UserError) as caught:
        parse_hosts({"hosts": [{"ssh": ""}, {"ssh": "b", "ips": [1]}], "envs": ["MY KEY=hunter2"]}, "f")
    assert len(caught.value.faults) == 3
    assert "hunter2" not in str(caught.value)


def test_the_first_host_must_be_this_machine():
    there = parse_hosts([{"ssh": "mac-a", "ips": ["192.0.2.7"]}, {"ssh": "mac-b"}], "f")
    fault = first_host_problem(there, "f")
    assert fault is not None and "192.0.2.7 is not an address of it" in fault.sentence
    for first in ({"ssh": "mac-a"}, {"ssh": "mac-a", "ips": ["127.0.0.1"]}, {"ssh": "127.0.0.1", "ips": ["192.0.2.7"]}):
        assert first_host_problem(parse_hosts([first, {"ssh": "mac-b"}], "f"), "f") is None


def _hosts(count: int, **about: Any) -> HostsFile:
    return HostsFile(tuple(Host(f"m{rank}", (f"10.0.0.{rank + 1}",)) for rank in range(count)), **about)


@cases(
    ("hosts", "wanted", "mpi", "cuda", "backend"),
    [
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
    assert (rank_program(Host("b"), "rank"), program_environment(Host("b"))) == (here, {"PYTHONPATH": root})
    tool = Host("b", program="~/.local/bin/grpo-studio-backend")
    assert (rank_program(tool, "rank"), program_environment(tool)) == ([tool.program, "rank"], {})
    checkout = Host("b", program="/opt/py", folder="/opt/grpo")
    assert rank_program(checkout, "rank") == ["/opt/py", "-P", "-m", "backend", "rank"]
    assert program_environment(checkout) == {"PYTHONPATH": "/opt/grpo"}
    assert shell_words(["~/my bin/x", "--run", "~"]) == """"$HOME"/'my bin/x' --run '~'"""


def test_the_command_to_copy_starts_every_rank():
    line = launch_command(parse_hosts(TWO, "f"), Path("h.json"), "ring", Path("/runs/one"))
    assert line[0].endswith("mlx.launch")
    assert line[1:5] == ["--hostfile", "h.json", "--backend", "ring"]
    assert line[line.index("--") + 1 :] == [*rank_program(Host(""), "rank"), "--run", "/runs/one"]
    hosts = parse_hosts({"hosts": [*TWO, TWO[0]], "envs": ["MLX_A=b"]}, "f")
    mpi = launch_command(hosts, Path("h.json"), "mpi", Path("/runs/one"))
    assert mpi[:5] == ["mpirun", "-np", "3", "--host", "localhost:2,anna@mac-b.local:1"]
    assert "MLX_A=b" in mpi and mpi[-2:] == ["--run", "/runs/one"]
