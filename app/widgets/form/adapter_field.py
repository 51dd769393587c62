"""The field for trained adapters to start from: a folder, a file, or a run of the user's at its end or at a checkpoint."""

from __future__ import annotations

from PySide6.QtWidgets import QMenu

from app.widgets.basic.file_dialogs import open_file
from app.widgets.basic.labels_and_buttons import give_menu
from app.widgets.form.path_field import PathField
from backend.spec import weight_choices
from backend.spec.faults import Mistake
from backend.spec.places import find_run
from backend.spec.runs.adapter_source import runs_with_adapters
from backend.spec.weight_choices import END


class AdapterField(PathField):
    """A path field whose Browse menu also lists the user's runs, and of each its end, its best checkpoint and the others."""

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
