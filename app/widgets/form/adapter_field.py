"""The field for trained adapters to start from: a folder, a file, or a run of the user's at its end or at a checkpoint."""

from __future__ import annotations

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QMenu, QPushButton, QVBoxLayout, QWidget

from app import theme
from app.widgets.basic.file_dialogs import open_file
from app.widgets.basic.labels_and_buttons import give_menu
from app.widgets.form.path_field import PathField
from backend.spec import weight_choices
from backend.spec.faults import Mistake
from backend.spec.run_folder import find_run
from backend.spec.runs.adapter_source import peft_folder, runs_with_adapters
from backend.spec.weight_choices import END


class AdapterField(PathField):
    """A path field whose Browse menu also lists the user's runs, and of each its end, its best checkpoint and the others. For an adapter of
    peft it shows a button that asks to import it.

    Signals:
        import_requested(folder) – the user wants the adapter of peft in this folder as one of mlx-lm's.
    """

    import_requested = Signal(str)

    def build(self) -> QWidget:
        self.import_button = QPushButton("Import for this model")
        self.import_button.setToolTip(
            "<p>It is written anew in mlx-lm's format, beside its folder, and compared by logits with what peft makes of it.</p>"
        )
        self.import_button.setAccessibleName("Import the adapter of peft for the model of this run")
        self.import_button.clicked.connect(self._request_import)
        self.import_button.hide()
        both = QWidget(self)
        column = QVBoxLayout(both)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(theme.SPACE)
        column.addWidget(super().build())
        column.addWidget(self.import_button, 0, Qt.AlignmentFlag.AlignLeft)
        self.control.textChanged.connect(self._offer_import)
        return both

    def tab_stops(self) -> list[QWidget]:
        return [*super().tab_stops(), self.import_button]

    def show_importing(self, sentence: str) -> None:
        """Show what the import is doing; "" when it has ended."""
        self.import_button.setEnabled(not sentence)
        self.show_note(sentence)

    def _offer_import(self) -> None:
        is_peft = peft_folder(str(self.value())) is not None
        self.import_button.setVisible(is_peft)
        self.show_note("An adapter of peft, as TRL and others train them." if is_peft else "")

    def _request_import(self) -> None:
        if (folder := peft_folder(str(self.value()))) is not None:
            self.import_requested.emit(str(folder))

    def _wire_browse(self) -> None:
        menu = QMenu(self.browse)
        menu.aboutToShow.connect(lambda: self._fill(menu))
        give_menu(self.browse, menu)

    def choose_file(self) -> None:
        kinds = "Adapters (*.safetensors)"
        self.take(str(open_file(self, self.setting.key, self.setting.label, kinds, self._near()) or ""))

    def _fill(self, menu: QMenu) -> None:
        menu.clear()
        menu.addAction("Folder…", self.choose_folder)
        menu.addAction("File…", self.choose_file)
        menu.addSection("Your runs")
        names = runs_with_adapters()
        for name in names:
            of_run = menu.addMenu(name.replace("&", "&&"))
            of_run.aboutToShow.connect(lambda of_run=of_run, name=name: self._fill_checkpoints(of_run, name))
        if not names:
            menu.addAction("None has adapters yet").setEnabled(False)

    def _fill_checkpoints(self, menu: QMenu, name: str) -> None:
        """One entry for each state of a run's weights."""
        menu.clear()
        try:
            found = weight_choices.choices(find_run(name))
        except Mistake:  # deleted since the menu was opened
            found = []
        for choice in found:
            text = name if choice.key == END else f"{name}@{choice.key}"
            menu.addAction(choice.label, lambda text=text: self.take(text))
