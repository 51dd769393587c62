"""The queue on the Runs page: the panel of waiting runs, connected to the session's queue."""

from __future__ import annotations

from pathlib import Path

from PySide6.QtWidgets import QVBoxLayout, QWidget

from app.model.session import Session
from app.widgets.runs.queue_panel import QueuePanel, QueueRow
from backend.spec.run_folder import RunFolder
from backend.spec.runs.archive import raw_settings
from backend.spec.runs.queue import is_fresh


class QueuePart(QWidget):
    """The panel, as large as the queue is long; nothing where nothing waits.

    Attributes:
        panel – the widget.
    """

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._session = session
        self._known: dict[Path, tuple[int, QueueRow]] = {}
        self.panel = QueuePanel()
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.addWidget(self.panel)
        queue, panel = session.queue, self.panel
        panel.moved.connect(lambda path, place: queue.move(RunFolder(path), place))
        panel.removed.connect(lambda path: queue.remove(RunFolder(path)))
        panel.edit_requested.connect(lambda path: session.waiting_settings_requested.emit(RunFolder(path)))
        panel.pause_requested.connect(queue.set_paused)
        panel.pause_after_failure_requested.connect(queue.set_pauses_after_failure)
        queue.changed.connect(self._show)
        self._show()

    def _show(self) -> None:
        queue = self._session.queue
        rows = [self._row(run) for run in queue.waiting]
        self.panel.show_queue(
            rows,
            queue.problem or self._status() if rows or queue.problem else "",
            is_paused=queue.now.is_paused,
            pauses_after_failure=queue.now.pauses_after_failure,
        )
        self.setVisible(self.panel.isVisibleTo(self))

    def _status(self) -> str:
        queue = self._session.queue
        if queue.now.is_paused:
            return "Paused: no other run is started."
        if queue.now.starting is not None:
            return f"After {queue.now.starting.name}, which trains now."
        return (
            "The first begins when the present run has ended." if self._session.is_training else "The first begins now."
        )

    def _row(self, run: RunFolder) -> QueueRow:
        """The run's row; its settings are read again when the file has changed."""
        try:
            written = run.config.stat().st_mtime_ns
        except OSError:
            written = -1
        known = self._known.get(run.path)
        if known is None or known[0] != written:
            settings = raw_settings(run)
            steps = settings.get("iters")
            model = str(settings.get("model", ""))
            known_steps = steps if isinstance(steps, int) and not isinstance(steps, bool) else None
            row = QueueRow(run.path, model, known_steps, has_begun=not is_fresh(run))
            known = self._known[run.path] = (written, row)
        return known[1]
