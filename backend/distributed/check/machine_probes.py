"""The processes that a check holds on the machines, from this end: one `Probe` for each rank, and why one could not be reached, in words."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any

from backend.distributed.check.machine_verbs import MARKER, PROBE
from backend.distributed.hosts_file import CONNECT_S, HostsFile, rank_environment, rank_program, ssh_command
from backend.utils.child_process import ChildEnded, ChildProcess, ChildTimeout
from backend.utils.command import backend_environment
from backend.utils.text import quote

FACTS_S = 45.0
"""How long a machine may take to answer: the connection, and Python starting from a cold disk."""
GRACE_S = 2.0
OF_SSH = 255
"""ssh's exit code for an error of its own."""
NOT_FOUND, NO_PROGRAM = 127, 126

_SSH_SAYS = (
    ("Permission denied", "refuses your key. Put it there with: ssh-copy-id {ssh}"),
    (
        "Host key verification failed",
        "is not known to ssh yet. Connect once by hand and answer its question: ssh {ssh}",
    ),
    (
        "REMOTE HOST IDENTIFICATION",
        "has another host key than the one ssh knows. If that is right, forget it: ssh-keygen -R {ssh}",
    ),
    (
        "Could not resolve",
        "is no name that this machine can resolve. Look at the hosts file, or at both machines' network.",
    ),
    ("Connection refused", "accepts no ssh. Turn on Remote Login there (System Settings, General, Sharing)."),
    ("timed out", "does not answer. It may be asleep, switched off, or on another network."),
    ("No route to host", "does not answer. It may be asleep, switched off, or on another network."),
)
"""What ssh writes → the rest of a sentence that begins with the machine."""


class NotReached(Exception):
    """A machine, or the connection between several, does not do what a run needs; the message is a sentence."""


class Abandoned(Exception):
    """Another rank has failed, so this one's answer would never come."""


class Probe:
    """The process of one rank's machine."""

    def __init__(self, hosts: HostsFile, rank: int, check: Callable[[], None]) -> None:
        """`check` is called while an answer is waited for, and may raise to give up."""
        self.rank = rank
        self.abandon = threading.Event()
        self._check, self._host, self._is_here = check, hosts.hosts[rank], hosts.is_here(rank)
        program, variables = rank_program(self._host, PROBE), rank_environment(self._host)
        command = program if self._is_here else ssh_command(self._host, program, variables)
        self._child = ChildProcess(
            command, grace_s=GRACE_S, environment=backend_environment() if self._is_here else dict(os.environ), marker=MARKER
        )  # fmt: skip

    def ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """The answer to a request. Raises NotReached, Abandoned, and whatever the check raises."""
        try:
            answer = self._child.request(request, timeout_s, self._poll)
        except ChildTimeout:
            raise NotReached(f"{self._begin} has not answered for {timeout_s:.0f} s.") from None
        except ChildEnded as ended:
            raise NotReached(self._why(ended)) from None
        except (json.JSONDecodeError, OSError) as error:
            raise NotReached(f"{self._begin} could not be asked: {quote(error)}.") from None
        if "error" in answer:
            raise NotReached(f"{self._begin} reports: {quote(answer['error'], 120)}.")
        return answer

    def end(self) -> None:
        self._child.stop()

    def _poll(self) -> None:
        self._check()
        if self.abandon.is_set():
            raise Abandoned

    @property
    def _begin(self) -> str:
        return "This machine" if self._is_here else quote(self._host.ssh, 40)

    def _why(self, ended: ChildEnded) -> str:
        """A sentence about a process that has ended in place of answering."""
        name, said = self._begin, ended.stderr
        if ended.exit_code == OF_SSH and not self._is_here:
            for pattern, rest in _SSH_SAYS:
                if pattern.lower() in said.lower():
                    return f"{name} {rest.format(ssh=self._host.ssh)}"
            return f"{name} was not reached within {CONNECT_S} s: {quote(_last(said) or 'ssh gave no reason', 100)}."
        if ended.exit_code in (NOT_FOUND, NO_PROGRAM):
            missing = quote(self._host.program, 80) if self._host.program else "Python where this machine has its own"
            return f"{name} has no {missing}. Install GRPO Studio there, or name its program in the hosts file."
        if "No module named" in said or "No such command" in said:
            return f"{name} has no GRPO Studio, or an older one, where it was looked for. Name its program or folder in the hosts file."
        return f"{name} could not start GRPO Studio: {quote(_last(said) or str(ended), 110)}."


def in_parallel(work: Callable[[Probe], None], probes: Sequence[Probe]) -> None:
    """`work` for every probe at once. The first exception, such as a cancellation, ends the others' processes and is raised."""
    if not probes:
        return
    with ThreadPoolExecutor(len(probes), thread_name_prefix="machine") as threads:
        futures = [threads.submit(work, probe) for probe in probes]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
        except BaseException:
            for probe in probes:
                probe.abandon.set()
            raise


def _last(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""
