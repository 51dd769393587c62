"""Handlers that search Hugging Face, download from it and log in to it, by means of `backend.models`."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from backend.distributed.hosts_file import parse_hosts
from backend.models import inventory
from backend.runs.saved_weights import imported_folder
from backend.serve.questions import QuestionCall
from backend.utils.disk import room_on
from backend.utils.errors import UserError
from backend.utils.files import names_folder, resolved
from backend.utils.hub_cache import RepoType, hub_cache, local_folder


def hub_search(
    call: QuestionCall, words: str, repo_type: RepoType = "model", is_reward: bool = False
) -> dict[str, list[Any]]:
    """{found: [a result of `backend.models.hub.search`, …]}."""
    from backend.models.hub import search

    return {"found": search(words, repo_type, is_reward=is_reward)}


def hub_files(call: QuestionCall, id: str, repo_type: RepoType = "model") -> dict[str, Any]:
    """{commit, files: {name: bytes}, total, free bytes on disk}: the content of a download."""
    from backend.models.hub import plan

    found = plan(id, repo_type)
    total = sum(found.files.values())
    return {"commit": found.commit, "files": found.files, "total": total, "free": room_on(hub_cache())}


def download(call: QuestionCall, id: str, repo_type: RepoType = "model") -> dict[str, str]:
    """{place: folder}. Reports {done, total, phase}. A cancelled download keeps its partial files."""
    from backend.models.hub import download as fetch

    return {"place": str(fetch(id, repo_type, call))}


def discard(call: QuestionCall, id: str, repo_type: RepoType = "model") -> dict[str, int]:
    """Delete the partial files of an unfinished download. {freed: bytes}."""
    from backend.models.hub import discard as delete_partial

    return {"freed": delete_partial(id, repo_type)}


def hub_login(call: QuestionCall, token: str) -> dict[str, Any]:
    """Keep a token in the system's keychain. {name, organisations, can_write, source}: whose it is."""
    from backend.export.hub_upload import log_in

    return asdict(log_in(token))


def hub_account(call: QuestionCall) -> dict[str, Any]:
    """As `hub_login`; {source, problem} where nobody can say whose token it is; {} without a token."""
    from backend.export.hub_upload import find_token, whose

    token = find_token()
    try:
        return asdict(whose(token)) if token is not None else {}
    except UserError as error:
        return {"source": token.source if token is not None else "", "problem": error.faults[0].sentence}


def hub_hardware(call: QuestionCall) -> dict[str, list[Any]]:
    """{hardware: [a `backend.jobs.hub_jobs.Hardware` as a dict, …]}: GPUs for jobs, cheapest first."""
    from backend.jobs.hub_jobs import hardware

    return {"hardware": [asdict(each) for each in hardware()]}


def models(call: QuestionCall, paths: Sequence[str] = ()) -> dict[str, list[Any]]:
    """{found: [an InventoryItem as a dict, …]}, the bundled model last."""
    return _found(inventory.models(paths), "model")


def reward_models(call: QuestionCall, paths: Sequence[str] = ()) -> dict[str, list[Any]]:
    return {"found": [asdict(item) for item in inventory.reward_models(paths)]}


def datasets(call: QuestionCall, paths: Sequence[str] = ()) -> dict[str, list[Any]]:
    return _found(inventory.datasets(paths), "dataset")


def _found(items: list[inventory.InventoryItem], repo_type: RepoType) -> dict[str, list[Any]]:
    bundled = inventory.bundled(repo_type)
    others = [item for item in items if item.place != bundled.place]
    return {"found": [asdict(item) for item in (*others, bundled)]}


def model_facts(call: QuestionCall, name: str) -> dict[str, Any] | None:
    """The InventoryItem of a model's id or path; None where it is not on this machine, or not all of it."""
    folder, is_path = local_folder(name), names_folder(name)
    if folder is None or (not is_path and inventory.is_incomplete(folder)):
        return None
    return asdict(inventory.model_at(folder, "" if is_path else name, "folder" if is_path else "cache", name))


def check_machines(call: QuestionCall, hosts: Any, name: str, **wanted: Any) -> dict[str, Any]:
    """A MachineReport as a mapping; `hosts`: content of the hosts file `name`, `wanted`: backend, model, reward_file,
    copies. Reports {rank, stage, share}. A cancelled check leaves no process, and of a copy what has arrived."""
    from backend.distributed.machine_check import check_machines

    def reached(rank: int, stage: str, share: float | None) -> None:
        call.report({"rank": rank, "stage": stage, "share": share})

    return asdict(check_machines(parse_hosts(hosts, name), name, **wanted, reached=reached, check=call.check))


def import_adapter(call: QuestionCall, folder: str, model: str) -> dict[str, Any]:
    """{path: the new folder beside it, sentences}. Replaces an earlier import."""
    from backend.export.peft_files import import_adapter as carry

    def report(sentence: str, done: float | None = None) -> None:
        call.check()
        call.report({"sentence": sentence, "done": done})

    source = resolved(Path(folder))
    imported = carry(source, model, imported_folder(source), overwrite=True, progress=report)
    return {"path": str(imported.path), "sentences": imported.sentences}
