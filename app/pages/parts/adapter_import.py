"""The import of an adapter of peft from the form: asked of the service, told below the field, and chosen once it is there."""

from __future__ import annotations

from typing import Any

from PySide6.QtCore import QObject

from app.model.session import Session
from app.widgets.form.adapter_field import AdapterField
from backend.spec.faults import Fault


class AdapterImport(QObject):
    """Connects the field for adapters with the question `import_adapter`."""

    def __init__(self, session: Session, field: AdapterField) -> None:
        super().__init__(field)
        self._session, self._field = session, field
        field.import_requested.connect(self._start)

    def _start(self, folder: str) -> None:
        self._field.show_importing("Importing it.")
        self._session.service.ask(
            "import_adapter",
            self._on_imported,
            on_refused=self._on_refused,
            on_progress=lambda progress: self._field.show_importing(progress["sentence"]),
            owner=self._field,
            folder=folder,
            model=str(self._session.draft.value("model")),
        )

    def _on_imported(self, imported: dict[str, Any]) -> None:
        self._field.show_importing("")
        self._session.draft.use_adapter(imported["path"])
        self._field.show_note(" ".join(imported["sentences"]))

    def _on_refused(self, faults: list[Fault]) -> None:
        self._field.show_importing("")
        self._field.show_note(" ".join(fault.sentence for fault in faults), wrong=True)
