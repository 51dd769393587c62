"""Handler of the check of several machines, by means of `backend.distributed.machine_check`."""

from __future__ import annotations

from typing import Any

from backend.distributed.hosts_file import parse_hosts
from backend.serve.question_call import QuestionCall


def check_machines(request: dict[str, Any], call: QuestionCall) -> dict[str, Any]:
    """{hosts: the content of a hosts file, name, backend, model, reward_file, copies} → a MachineReport as a mapping.

    Reports {rank, stage, share}. A cancelled check leaves no process on any machine, and of a copy what has arrived.
    """
    from backend.distributed.machine_check import CheckProgress, Wanted, check_machines

    name = str(request["name"])
    hosts = parse_hosts(request["hosts"], name)
    wanted = Wanted(request["backend"], request["model"], request["reward_file"], bool(request["copies"]))

    def reached(rank: int, stage: str, share: float | None) -> None:
        call.report({"rank": rank, "stage": stage, "share": share})

    return check_machines(hosts, name, wanted, CheckProgress(reached, call.check)).to_dict()
