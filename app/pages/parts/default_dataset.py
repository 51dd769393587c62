"""The offer below an empty Dataset field: the dataset that MLX LoRA Studio's guide begins with, in one click, with its size."""

from __future__ import annotations

from typing import Any

from PySide6.QtWidgets import QWidget

from app.model.session import Session
from app.widgets.basic.controls import LinkButton
from app.widgets.form.path_field import PathField
from app.widgets.picker.picker_rows import size_text
from backend.spec import first_choices
from backend.spec.hub_cache import is_dataset_cached


class DefaultDatasetOffer(LinkButton):
    """A link that chooses the dataset, and then says in the field's note what a run will download; hidden while one is chosen."""

    def __init__(self, session: Session, field: PathField, parent: QWidget | None = None) -> None:
        super().__init__(f"Use {first_choices.DATASET}: {first_choices.DATASET_ABOUT}", parent)
        self._session, self._field = session, field
        self.clicked.connect(self._take)
        session.draft.changed.connect(self._on_changed)
        self._on_changed("")

    def _take(self) -> None:
        self._session.use_data(first_choices.DATASET)
        if not is_dataset_cached(first_choices.DATASET):
            self._session.service.ask(
                "hub_files",
                self._show_size,
                on_refused=lambda _faults: self._show_note("it will be downloaded when the run starts."),
                owner=self._field,
                id=first_choices.DATASET,
                repo_type="dataset",
            )

    def _show_size(self, answer: dict[str, Any]) -> None:
        self._show_note(f"{size_text(answer['total'])} will be downloaded when the run starts.")

    def _show_note(self, what: str) -> None:
        if self._is_chosen():
            self._field.show_note(f"Not on this machine: {what}")

    def _is_chosen(self) -> bool:
        return self._session.draft.value("data") == first_choices.DATASET

    def _on_changed(self, key: str) -> None:
        if key in ("", "data"):
            self.setVisible(not str(self._session.draft.value("data") or "").strip())
            if not self._is_chosen():
                self._field.show_note("")
