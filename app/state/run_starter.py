"""Starts, queues and resumes runs, after checks and consent."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.state.memory import GB, MemoryParts, memory_parts_of
from app.state.messages import Offer, problems_to
from app.state.processes import start_detached
from app.state.run_files import live_run
from app.state.run_summary import count_text
from backend.config import config
from backend.runs.events import check_format
from backend.runs.run_folder import RunFolder, default_run_name, make_run_folder
from backend.runs.run_names import name_of, new_label
from backend.runs.run_record import change_notes
from backend.runs.steering import run_config
from backend.runs.sweep_results import SweepFolder, all_sweeps
from backend.utils.command import backend_command
from backend.utils.disk import replace_file
from backend.utils.errors import ConfigProblem, UserError

if TYPE_CHECKING:
    from app.state.session import Session

START = "start"


class RunStarter:
    """Starts training processes. The window sets `confirm_over_memory`: may a run start that does not fit?"""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.confirm_over_memory: Callable[[MemoryParts], bool] = lambda _memory_parts: False

    def start(self) -> None:
        session = self._session
        session.messages.withdraw(START)
        if self.is_busy() or not self._is_ready():
            return
        with problems_to(self._say_of_form):
            folder = make_folder(session.draft.config(), session.draft.as_yaml())
            start_detached(backend_command("train", "--run", str(folder.path)), folder)
            session.launched = folder
            session.open_run(folder.path)
            session.page_requested.emit("monitor")

    def start_job(self, settings: config.Config, flavor: str, hours: float, owner: str) -> None:
        """Train a run with these settings on this machine of Hugging Face, which `owner` pays."""
        session = self._session
        session.messages.withdraw(START)
        with problems_to(self._say_of_form):
            if self._may_run_code(settings.model_dump()):
                folder = make_folder(settings, config.dump(settings))
                options = ("--flavor", flavor, "--timeout", f"{hours:g}", "--owner", owner, "--yes")
                start_detached(backend_command("job", "--run", str(folder.path), *options), folder)
                session.open_run(folder.path)
                session.page_requested.emit("monitor")

    def queue(self) -> None:
        session = self._session
        session.messages.withdraw(START)
        with problems_to(self._say_of_form):
            if self._is_ready():
                self._add_to_queue(make_folder(session.draft.config(), session.draft.as_yaml()))

    def resume(self, folder: RunFolder, *options: str) -> None:
        session = self._session
        session.messages.withdraw(START)
        if not folder.is_remote and self.is_busy(Offer("Add to the queue", partial(self.queue_existing, folder))):
            return
        with problems_to(self._say):
            if not self._may_continue(folder, contacts_hosts="--hosts" not in options):  # the user has chosen those
                return
            start_detached(backend_command("resume", str(folder.path), *options), folder)
            if not folder.is_remote:
                session.launched = folder
            if session.run is None or session.run.folder.path != folder.path:
                session.open_run(folder.path)
            assert session.run is not None
            session.run.expect_process()
            session.page_requested.emit("monitor")

    def queue_existing(self, folder: RunFolder) -> None:
        self._session.messages.withdraw(START)
        with problems_to(self._say):
            if self._may_continue(folder):
                self._add_to_queue(folder)

    def _add_to_queue(self, folder: RunFolder) -> None:
        if self._session.queue.add(folder):
            self._session.message.emit(f"{name_of(folder)} waits in the queue.")

    def memory_parts(self) -> MemoryParts | None:
        """The memory that a run of the form needs; None if unknown."""
        try:
            settings = self._session.draft.config()
        except UserError:
            return None
        counts, columns = self._session.dataset.counts, self._session.dataset.columns
        longest = counts.longest if counts is not None and counts.lengths else None
        return memory_parts_of(settings, longest, has_images=not {"image", "images"}.isdisjoint(columns))

    def _say(self, text: str, holds: Callable[[], bool] | None = None, offer: Offer | None = None) -> None:
        self._session.messages.say(text, START, holds, offer)

    def _say_of_form(self, text: str) -> None:
        self._say(text, self._session.while_form_stays())

    def is_busy(self, offer: Offer | None = None) -> bool:
        """A run or a sweep trains here already, whoever started it; the window says so, with the offer."""
        session, advice = self._session, "first, or let it finish; a run can wait in the queue."
        if session.is_training:
            self._say(f"One run at a time: stop the present run {advice}", lambda: session.is_training, offer)
            return True
        other = next(filter(SweepFolder.is_locked, all_sweeps()), None) or live_run()
        if other is not None:
            name = f"The sweep {other.name}" if isinstance(other, SweepFolder) else name_of(other)
            session.messages.say(
                f"{name} is training: stop it {advice}", offer=offer
            )  # nothing says when that has ended
        return other is not None

    def _is_ready(self) -> bool:
        draft = self._session.draft
        return (
            self.check_form()
            and self._fits_memory()
            and self._may_run_code(draft.values())
            and self._may_use_hosts(str(draft.value("hosts") or ""))
        )

    def check_form(self) -> bool:
        """False, and the first problem is shown, if the form has any."""
        if problems := self._problems():
            more = len(problems) - 1
            rest = f" There {'is' if more == 1 else 'are'} {count_text(more, 'more problem')}." if more else ""
            self._session.show_setting(problems[0].setting)
            self._say(problems[0].sentence + rest, lambda: self._problems() == problems)
        return not problems

    def _problems(self) -> list[ConfigProblem]:
        return [*self._session.draft.problems(), *self._session.dataset.problems()]

    def _fits_memory(self) -> bool:
        parts = self.memory_parts()
        if parts is None or parts.fits:
            return True
        if self.confirm_over_memory(parts):
            # The trainer makes the same estimate, and would refuse the run for it.
            self._session.draft.set("memory_limit", math.ceil(parts.total / GB))
            return True
        self._say_of_form(f"Not started. {parts.sentence}")
        return False

    def _may_continue(self, folder: RunFolder, *, contacts_hosts: bool = True) -> bool:
        check_format(folder)  # before its settings, of which a newer version may have others
        hosts = run_config(folder).hosts if contacts_hosts else ""
        return self._may_run_code(config.read(folder.config), folder.path) and self._may_use_hosts(hosts)

    def _may_run_code(self, settings: Mapping[str, Any], folder: Path | None = None) -> bool:
        consent, draft = self._session.consent, self._session.draft
        is_allowed = consent.obtain(settings, base=folder)
        if not is_allowed:
            text = "The code was not allowed to run, so nothing was started."
            self._say(text, lambda: consent.is_missing(draft.values()))
        return is_allowed

    def _may_use_hosts(self, hosts: str) -> bool:
        consent = self._session.consent
        is_allowed = consent.obtain_hosts(hosts)
        if not is_allowed:
            text = "The machines of the hosts file may not be contacted, so nothing was started."
            self._say(text, lambda: consent.hosts.missing(hosts) is not None)
        return is_allowed


def make_folder(settings: config.Config, text: str) -> RunFolder:
    """A new run folder with `text`, the YAML of its settings. Raises UserError."""
    name = settings.run_name or default_run_name(settings.model, settings.train_type, settings.train_mode)
    folder = make_run_folder(name)
    replace_file(folder.config, text)
    if not settings.run_name:
        change_notes(folder, label=new_label(folder))
    return folder
