"""One run, live or reopened: reads its folder a slice at a time and says when there is news.

Everything it knows comes from the diary, the lock and the files beside them, so a page cannot tell a run that this
window started from one found in the archive. It starts no process and writes nothing but control words.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
from PySide6.QtCore import QObject, QTimer, Signal

from app.model.completion_index import CompletionIndex
from app.model.run_state import LIVE, RunState, State, state_of
from backend.spec.archive import STARTUP_GRACE_S, may_be_starting
from backend.spec.completions import GroupRow
from backend.spec.config import DEFAULT_REWARDS, read
from backend.spec.events import Event, Follower
from backend.spec.faults import Mistake
from backend.spec.places import RunFolder
from backend.spec.rewards.catalog import metric_name, split_names

LIVE_MS, IDLE_MS, BEHIND_MS = 250, 1000, 4
"""Between looks at the folder: of a live run, of one that has ended, while there is more to read than one look takes."""
SLICE = 96 << 10
"""Bytes of diary parsed in one go: about 3 ms."""
BUDGET_S = 0.015
"""Reading time a look may take before the event loop gets its turn."""
LOG_TAIL = 64 << 10
_SETTING = re.compile(r"^[a-z_]+: ")


class Run(QObject):
    """A run folder being followed.

    Signals:
        changed – new events were read; at most about four times a second.
        state_changed(str) – another state; see `app.model.run_state.State`.
        restarted – the diary was cut back (a resume) and is being read from its start; forget what was shown.
    """

    changed = Signal()
    state_changed = Signal(str)
    restarted = Signal()

    def __init__(self, folder: RunFolder, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.folder = folder
        self._record = RunState()
        self._follower = Follower(folder.events, limit=SLICE)
        self._index = CompletionIndex(folder.completions)
        self._state: State = "starting"
        self._caught_up = False
        self._news = False
        self._last_changed = 0.0
        self._stop_said = False
        self._expected_until: float | None = None
        self._config: tuple[int, dict[str, Any]] = (-1, {})
        self._reward_names: tuple[Any, list[str]] = (None, [])
        self._timer = QTimer(self)
        self._timer.timeout.connect(self.look)
        self._timer.start(0)

    def close(self) -> None:
        """Stop following; the trainer is not touched."""
        self._timer.stop()

    # ── what the run is doing ───────────────────────────────────────────────────────────────────

    @property
    def state(self) -> State:
        return self._state

    @property
    def is_live(self) -> bool:
        return self._state in LIVE

    @property
    def caught_up(self) -> bool:
        """Whether the diary was read to its end; false for the first moments of a long one."""
        return self._caught_up

    @property
    def step(self) -> int:
        """The newest step whose metrics were read; 0 before the first."""
        return self._record.step

    @property
    def iterations(self) -> int | None:
        told = self._record.iterations or self.config.get("iters")
        return told if isinstance(told, int) and not isinstance(told, bool) else None

    @property
    def phase(self) -> str:
        return self._record.phase

    @property
    def phase_progress(self) -> float | None:
        """Share of the phase that is done, 0 to 1, where the trainer says."""
        return self._record.phase_progress

    @property
    def elapsed_s(self) -> float:
        """Seconds of work; loading and pauses are not counted."""
        return self._record.elapsed_s(time.time() if self.is_live else None)

    @property
    def eta_s(self) -> float | None:
        """Seconds of work left, or None while nobody can say."""
        return self._record.eta_s(time.time()) if self.is_live else None

    @property
    def started(self) -> Event | None:
        """The `started` event: model, device, versions."""
        return self._record.started

    @property
    def ending(self) -> Event | None:
        return self._record.ending

    @property
    def notes(self) -> list[Event]:
        return list(self._record.notes)

    @property
    def health(self) -> list[Event]:
        return list(self._record.health)

    @property
    def problem(self) -> str:
        """Why a failed or crashed run came to nothing, as one sentence; empty for every other."""
        if self._state == "failed":
            told = (self.ending or {}).get("sentence")
            return _sentences(told) if isinstance(told, str) and told else "The run failed; the log may tell why."
        if self._state != "crashed":
            return ""
        when = f"after step {self.step}" if self.step else "before its first step"
        said = next((line.strip() for line in reversed(self.log_tail(20)) if line.strip()), "")
        return f"The training process ended {when} without saying why." + (f" Its last words: {said}" if said else "")

    def say(self, word: str) -> None:
        """Leave a control word (pause, resume, save, stop) for the trainer. Raises Mistake when that cannot be done."""
        try:
            self.folder.say(word)
        except OSError as error:
            raise Mistake("run", f"{self.folder.path} cannot be written: {error.strerror}.") from None
        self._stop_said = self._stop_said or word == "stop"
        self.look()

    def relaunched(self) -> None:
        """Somebody has just started a process for this run: it counts as starting until that process holds the lock."""
        self._stop_said = False
        self._expected_until = time.monotonic() + STARTUP_GRACE_S
        self.look()

    # ── numbers ─────────────────────────────────────────────────────────────────────────────────

    def names(self) -> list[str]:
        """Every metric met so far."""
        return self._record.steps.names()

    @property
    def span(self) -> tuple[int, int] | None:
        """The first and the newest step, or None before there is one."""
        return self._record.steps.span

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(steps `[n]`, values `[n]` with NaN in gaps), read-only; empty for a metric that never came."""
        return self._record.steps.get(name)

    def eval_names(self) -> list[str]:
        return self._record.evals.names()

    def eval_series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """As `series`, of the held-out evaluations."""
        return self._record.evals.get(name)

    @property
    def tested(self) -> dict[str, Any]:
        """Metrics of the test split, measured once at the end; empty where that is off."""
        return self._record.tested

    def latest(self, name: str) -> float | None:
        return self._record.steps.latest(name)

    def first(self, name: str) -> float | None:
        return self._record.steps.first(name)

    @property
    def checkpoint(self) -> int | None:
        """The step of the newest checkpoint; None when a resume would have to start over."""
        return newest_checkpoint(self.folder)

    # ── files ───────────────────────────────────────────────────────────────────────────────────

    @property
    def config(self) -> dict[str, Any]:
        """The raw settings of config.yaml; empty while it cannot be read."""
        stamp = _stamp(self.folder.config)
        if stamp != self._config[0]:
            try:
                self._config = (stamp, read(self.folder.config))
            except Mistake:
                self._config = (stamp, {})
        return self._config[1]

    @property
    def reward_names(self) -> list[str]:
        """Reward functions in the order of the config, then any that only the diary names: places are colours."""
        config, names = self.config, self.names()
        key = (self._config[0], len(names))
        if key != self._reward_names[0]:
            met = [name.split("/")[1] for name in names if name.startswith("rewards/") and name.count("/") == 2]
            self._reward_names = (key, list(dict.fromkeys([*_configured_rewards(config), *met])))
        return self._reward_names[1]

    def log_tail(self, n: int = 200) -> list[str]:
        """The last `n` lines of log.txt; of a progress line, its last state."""
        text = _tail(self.folder.log, LOG_TAIL).decode("utf-8", errors="replace")
        lines = text.removesuffix("\n").split("\n") if text else []
        return [line.rstrip("\r").rpartition("\r")[2] for line in lines[-n:]]

    def completion_steps(self) -> list[int]:
        """Steps that have completions, rising."""
        return self._index.steps()

    def groups(self, step: int | None = None) -> list[GroupRow]:
        """The rows of completions.jsonl at a step (the newest by default), in the order written; [] for none."""
        return self._index.rows(step)

    # ── following ───────────────────────────────────────────────────────────────────────────────

    def look(self) -> None:
        """Read what is new, within the budget, and say so. The timer calls it; calling it oftener does no harm."""
        locked = self.folder.is_locked()  # before reading: who lets go of the lock has written everything
        deadline = time.perf_counter() + BUDGET_S
        self._caught_up = self._read_diary(deadline)
        more_rows = self._index.advance()
        while more_rows and time.perf_counter() < deadline:
            more_rows = self._index.advance()
        if self._caught_up:
            self._judge(locked)
        self._announce()
        behind = not self._caught_up or more_rows
        self._timer.setInterval(BEHIND_MS if behind else LIVE_MS if self.is_live else IDLE_MS)

    def _read_diary(self, deadline: float) -> bool:
        """Whether the end was reached before the deadline."""
        while True:
            place = self._follower.offset
            events = self._follower.read()
            if self._follower.restarted:
                self._forget()
            for event in events:
                self._record.take(event)
            self._news = self._news or bool(events)
            if not events and self._follower.offset == place:
                return True
            if time.perf_counter() > deadline:
                return False

    def _forget(self) -> None:
        self._record.clear()
        self._index.clear()
        self._stop_said = False
        self.restarted.emit()

    def _judge(self, locked: bool) -> None:
        young = self._is_young(locked)
        if young and self._expected_until is not None:
            self._record.begin_again()  # what was read so far, an ending perhaps, is the old process's
        state = state_of(self._record, locked=locked, young=young, stop_said=self._stop_said)
        if state not in LIVE:
            self._stop_said = False
        elif self._stop_said and locked:
            self._insist()
        if state != self._state:
            self._state = state
            self._news = True
            self.state_changed.emit(state)

    def _insist(self) -> None:
        """Say stop again where it was said too early: a trainer deletes the words it finds when it starts."""
        heard = self._record.stopping or self.folder.control.exists() or self.folder.control_taken.exists()
        if not heard:
            self.folder.say("stop")

    def _is_young(self, locked: bool) -> bool:
        """Whether a process that nobody has heard of yet may still be coming."""
        if locked:
            self._expected_until = None
        if self._expected_until is not None:
            return time.monotonic() < self._expected_until
        return self._record.is_empty and may_be_starting(self.folder)

    def _announce(self) -> None:
        moment = time.monotonic()
        if self._news and (moment - self._last_changed) * 1000 >= LIVE_MS * 0.9:
            self._news, self._last_changed = False, moment
            self.changed.emit()


def newest_checkpoint(folder: RunFolder) -> int | None:
    """The step of the newest whole checkpoint of a run, by the names of its folders; None for none."""
    names = [path.parent.name for path in folder.checkpoints.glob("*/state.json")]
    return max((int(name) for name in names if name.isdigit()), default=None)


def _sentences(told: str) -> str:
    """Faults as sentences alone: the setting that stands before each is for programs, and named in the sentence."""
    return " ".join(_SETTING.sub("", line) for line in told.splitlines())


def _configured_rewards(config: dict[str, Any]) -> list[str]:
    named = config.get("reward_functions") or list(DEFAULT_REWARDS)
    return [metric_name(name) for name in split_names(named)] if isinstance(named, str | list) else []


def _stamp(path: Path) -> int:
    """When the file was last written, in nanoseconds; 0 when there is none."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _tail(path: Path, most: int) -> bytes:
    """The last whole lines of a file, at most about `most` bytes."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - most))
            text = file.read(most)
    except OSError:
        return b""
    return text if size <= most else text.partition(b"\n")[2]
