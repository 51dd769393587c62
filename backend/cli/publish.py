"""`export RUN --to hub`: prepare, preview and upload a model, with progress for people or the window."""

from __future__ import annotations

import re
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from rich.markdown import Markdown
from rich.panel import Panel
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from backend.cli.common import tell, tell_json
from backend.cli.consoles import new_console
from backend.export.build import Progress as BuildProgress
from backend.export.export_run import Export
from backend.export.hub_upload import Uploaded, find_token, need_token, whose
from backend.export.publishing import PreparedUpload, prepare_upload, send
from backend.runs.run_folder import RunFolder
from backend.utils.errors import UserError

EVERY_S = 0.2
"""Minimum seconds between byte progress lines."""


@dataclass(frozen=True, slots=True)
class Publication:
    """What to publish, and where. `repo` may omit the owner; the token's account is the default."""

    export: Export
    repo: str
    private: bool = True


def preview(run: RunFolder, what: Publication, progress: BuildProgress, *, as_json: bool) -> None:
    """Prepare, and show what an upload would send. Uploads nothing."""
    account, problem = _account()
    repo = full_repo_id(run, what.repo, account)
    prepared = prepare_upload(run, repo, what.export, progress)
    if as_json:
        about = prepared.to_dict() | {"private": what.private, "account": account, "account_problem": problem}
        print_json({"preview": about})
    else:
        _show(prepared, what, account, problem)


def publish(run: RunFolder, what: Publication, progress: BuildProgress, *, as_json: bool) -> None:
    """Upload the model, preparing it first if needed."""
    token = need_token()
    account = None if "/" in what.repo else asdict(whose(token))
    prepared = prepare_upload(run, full_repo_id(run, what.repo, account), what.export, progress)
    size, files = prepared.bytes, len(prepared.files())
    how = {"private": what.private, "overwrite": what.export.overwrite}
    if as_json:
        done = send(prepared, token, _ByteLines(), **how)
        print_json(
            {
                "path": str(run.path),
                "place": done.url,
                "bytes": size,
                "commit": done.commit,
                "sentences": [_sentence(done, files)],
            }
        )
        return
    with _ByteBar() as bar:
        done = send(prepared, token, bar, **how)
    tell(_sentence(done, files), file=sys.stderr)
    tell(done.url)


def full_repo_id(run: RunFolder, repo: str, account: dict[str, Any] | None) -> str:
    """owner/name, by default the account and the run's name. Raises UserError if no owner is known."""
    if "/" in repo:
        return repo
    if account is None:
        raise UserError("repo", "Whose repository? Write owner/name, or log in first with `hub login`.")
    return f"{account['name']}/{repo or re.sub(r'[^A-Za-z0-9._-]+', '-', run.name).strip('-.')}"


def _account() -> tuple[dict[str, Any] | None, str]:
    """Return (account, "") or (None, reason)."""
    token = find_token()
    if token is None:
        return None, "You are not logged in to Hugging Face."
    try:
        return asdict(whose(token)), ""
    except UserError as mistake:
        return None, mistake.faults[0].sentence


def _sentence(done: Uploaded, files: int) -> str:
    return f"{files} files are there as one commit, {done.commit[:7]}."


# ── on a terminal ────────────────────────────────────────────────────────────────────────────────────────────────────


def _show(prepared: PreparedUpload, what: Publication, account: dict[str, Any] | None, problem: str) -> None:
    console = new_console()
    console.print(Panel(Markdown(prepared.card.split("---\n", 2)[-1]), title="README.md", title_align="left"))
    console.print(prepared.card.split("---\n", 2)[1], highlight=False, markup=False, style="dim")
    table = Table(box=None, header_style="dim")
    table.add_column("file")
    table.add_column("size", justify="right")
    for name, size in prepared.files():
        table.add_row(name, _size(size))
    console.print(table)
    visible = "private" if what.private else "public"
    console.print(
        f"\n{_size(prepared.bytes)} would go to {prepared.repo_id}, {visible}. Nothing has been sent.", highlight=False
    )
    console.print(f"Logged in as {account['name']} ({account['source']})." if account else problem, highlight=False)
    console.print(f"The card can be edited: {prepared.folder / 'README.md'}", highlight=False, soft_wrap=True)


class _ByteBar:
    def __init__(self) -> None:
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=new_console(stderr=True),
        )
        self._task: TaskID | None = None

    def __enter__(self) -> _ByteBar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, sentence: str, done: int | None = None, total: int | None = None) -> None:
        if done is None:
            self._bar.console.print(sentence, highlight=False)
            return
        if self._task is None:
            self._task = self._bar.add_task(sentence.rstrip("."), total=total)
        self._bar.update(self._task, completed=done)


class _ByteLines:
    """Prints byte progress as JSON lines for the window."""

    def __init__(self) -> None:
        self._last = 0.0

    def __call__(self, sentence: str, done: int | None = None, total: int | None = None) -> None:
        if done is None or not total:
            print_json({"progress": sentence, "done": None})
        elif time.monotonic() - self._last > EVERY_S or done == total:
            self._last = time.monotonic()
            words = f"{sentence.rstrip('.')}: {_size(done)} of {_size(total)}."
            print_json({"progress": words, "done": round(done / total, 4), "bytes": done, "total": total})


def _size(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"


def print_json(content: dict[str, Any]) -> None:
    tell_json(content)
