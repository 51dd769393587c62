"""The machines of the form's run, and the check of them."""

import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from PySide6.QtCore import QObject, Signal

from app.state.consent import Consent
from app.state.draft import Draft
from app.state.messages import problems_to
from app.state.processes import Service
from backend.distributed.hosts_file import Host, HostsFile, choose_backend, parse_hosts, read_hosts, write_hosts
from backend.distributed.launcher import launch_command
from backend.distributed.machine_check import CheckedMachine, MachineReport
from backend.utils.errors import ConfigProblem, UserError
from backend.utils.places import runs_folder

THIS = "this Mac" if sys.platform == "darwin" else "this machine"
ALONE = f"T{THIS[1:]} alone"
FIRST = Host("127.0.0.1")
STAGES = {"reading": "Asking…", "read": "Answered", "copying": "Copying"}


class Machines(QObject):
    """The list of machines as it is edited, and the newest check of it."""

    changed = Signal()

    def __init__(
        self, draft: Draft, service: Callable[[], Service], consent: Consent, parent: QObject | None = None
    ) -> None:
        super().__init__(parent)
        self._draft, self._service, self._consent = draft, service, consent
        self.hosts: tuple[Host, ...] = ()  # none: this machine alone
        self._file = HostsFile(())
        self.is_edited = False
        self.problem = ""  # why the file cannot be read, or the list not be used
        self.report: MachineReport | None = None
        self.stages: dict[int, str] = {}  # rank → what the check is doing there
        self._request: int | None = None
        self._path = ""
        draft.changed.connect(self._on_setting)
        self.load()

    @property
    def path(self) -> str:
        return str(self._draft.value("hosts") or "").strip()

    def _on_setting(self, key: str) -> None:
        if key in ("", "hosts") and self.path != self._path:
            self.load()
        elif key == "distributed_backend":
            self._forget_check()

    def load(self) -> None:
        self._path, self.is_edited, self._file, self.problem = self.path, False, HostsFile(()), ""
        if self._path:
            with problems_to(partial(setattr, self, "problem")):
                self._file = read_hosts(self._path)
        self.hosts = self._file.hosts
        self._forget_check()

    @property
    def can_save(self) -> bool:
        return self.is_edited and not self.problem and all(host.ssh for host in self.hosts)

    def save(self, path: Path) -> None:
        """Write the list and make it the form's hosts file. Raises UserError."""
        hosts = parse_hosts(self.listed.to_json(), path.name)
        is_own = not self._path or self._consent.hosts.missing(self._path) is None
        write_hosts(path, hosts)
        # What the user has written here is allowed; a file of somebody else is asked about after an edit too.
        if is_own and (asked := self._consent.hosts.missing(str(path))) is not None:
            self._consent.hosts.allow(asked)
        self._file, self._path, self.is_edited, self.problem = hosts, str(path), False, ""
        self._draft.set("hosts", str(path))
        self._draft.problems_changed.emit()  # where the path is the same, its contents were mended
        self.changed.emit()

    def add(self) -> None:
        # RDMA devices lead from each machine to each other, and are unknown for a new one.
        self._edit(tuple(replace(host, rdma=()) for host in (*(self.hosts or (FIRST,)), Host(""))))

    def remove(self, rank: int) -> None:
        """Remove a machine, and the others' RDMA devices that led to it."""
        kept = self.listed.without(rank).hosts
        self._edit(kept if len(kept) > 1 else ())

    def change(self, rank: int, **fields: Any) -> None:
        host = replace(self.hosts[rank], **fields)
        if host != self.hosts[rank]:
            self._edit((*self.hosts[:rank], host, *self.hosts[rank + 1 :]))

    def _edit(self, hosts: tuple[Host, ...]) -> None:
        self.hosts, self.is_edited, self.problem = hosts, True, ""
        if hosts and all(host.ssh for host in hosts):  # not while a name is still to be typed
            with problems_to(partial(setattr, self, "problem")):
                parse_hosts(self.listed.to_json(), Path(self._path).name or "The list")
        self._forget_check()

    @property
    def listed(self) -> HostsFile:
        return replace(self._file, hosts=self.hosts)

    def summary(self) -> str:
        if not self.hosts:
            return ALONE
        others = [host.ssh or "a new one" for rank, host in enumerate(self.hosts) if not self.listed.is_here(rank)]
        if not others:
            return f"{len(self.hosts)} ranks on this machine"
        names = list(dict.fromkeys(others))
        return f"{len(self.hosts)} ranks: {', '.join([THIS, *names[:-1]])} and {names[-1]}"

    def short_command(self) -> str:
        words = self.command()
        pairs = zip(words, ["", *words], strict=False)
        return shlex.join([Path(word).name for word, before in pairs if "--env" not in (word, before) and word != "-P"])

    def command(self) -> list[str]:
        """Starts all ranks by hand; [] where nothing can."""
        if not self.hosts or not self._path or self.is_edited:
            return []
        wanted = str(self._draft.value("distributed_backend"))
        try:
            choice = choose_backend(self.listed, wanted, has_mpi=shutil.which("mpirun") is not None)
        except UserError:
            return []
        return launch_command(self.listed, Path(self._path).expanduser(), choice.backend, runs_folder() / "RUN")

    @property
    def is_checking(self) -> bool:
        return self._request is not None

    def machine(self, rank: int) -> CheckedMachine | None:
        return self.report.machines[rank] if self.report is not None and rank < len(self.report.machines) else None

    def check(self, *, copies: bool = False) -> None:
        """Check every machine, if the user allows the file; `copies` sends the model to those without it."""
        if self.is_checking or not self.hosts or not self._consent.obtain_hosts(self._path):
            return
        self.problem, self.stages = "", {}
        if not copies:
            self.report = None
        value = self._draft.value

        def on_report(answer: dict[str, Any]) -> None:
            self.report = MachineReport.from_dict(answer)
            self._end_request()

        self._request = self._service().ask(
            "check_machines",
            on_report,
            on_refused=self._on_refused,
            on_progress=self._on_progress,
            owner=self,
            hosts=self.listed.to_json(),
            name=Path(self._path).name or "The list",
            backend=value("distributed_backend"),
            model=str(value("model") or ""),
            reward_file=str(value("reward_functions_file") or ""),
            copies=copies,
        )
        self.changed.emit()

    def stop(self) -> None:
        if self._request is not None:
            self._service().cancel(self._request)
        self._end_request()

    def _on_refused(self, faults: list[ConfigProblem]) -> None:
        self.problem = faults[0].sentence
        self._end_request()

    def _on_progress(self, progress: dict[str, Any]) -> None:
        share = "" if progress["share"] is None else f" {100 * progress['share']:.0f} %"
        self.stages[progress["rank"]] = STAGES[progress["stage"]] + share
        self.changed.emit()

    def _end_request(self) -> None:
        self._request, self.stages = None, {}
        self.changed.emit()

    def _forget_check(self) -> None:
        self.report = None
        self.stop()
