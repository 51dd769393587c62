"""The editors of a judge's arguments: what is bundled, found on this machine or chosen, and the key of a server."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import QObject, Signal
from PySide6.QtWidgets import QInputDialog, QLineEdit, QMenu, QWidget

from app.state.judges import LOCAL, JudgeServers, address_of, is_remote
from app.widgets.basic.controls import ComboBox, ListedEdit
from app.widgets.basic.dialogs import open_file
from app.widgets.basic.labels import button, label, show_text
from app.widgets.basic.layout import configure, row
from app.widgets.basic.number_format import counted
from backend.judges.rubric import bundled_rubrics, read_rubric

RUBRICS = "Rubrics (*.toml *.json)"
CHOICES = {
    "mode": {"group": "A group together", "single": "Each answer alone"},
    "when_unreachable": {"pause": "Pause the run", "skip": "Go on without its scores"},
}
IN_THE_RUN = "The run loads this model itself and shares its memory with it."


class JudgeFields(QObject):
    """Makes the editors, and says in `note` what it knows about the server."""

    model_wanted = Signal(object)  # takes the chosen id or folder
    edit_wanted = Signal()

    def __init__(self, servers: JudgeServers, parent: QWidget) -> None:
        super().__init__(parent)
        self.servers = servers
        self.edit = button("Edit…", self.edit_wanted.emit, tip="Change the rubric, or make one of your own")
        self.note = label(role="muted", wrap=True)
        self.key = button("Key…", self._ask_key, tip="The server's key, which is kept in the keychain")
        self.fields: dict[str, QLineEdit | ComboBox] = {}
        self.line = row((self.note, 1), self.key)
        servers.changed.connect(self.show_note)

    def editor(self, name: str) -> QLineEdit | ComboBox | None:
        """The editor of this parameter, None for the usual one."""
        if name in CHOICES:
            return ComboBox(items=CHOICES[name])
        fill = {"rubric": self._list_rubrics, "url": self._list_servers, "model": self._list_models}.get(name)
        return ListedEdit(fill) if fill is not None else None

    def use(self, fields: dict[str, QLineEdit | ComboBox]) -> None:
        """These editors are on show; none while the current row is no judge."""
        self.fields = fields
        if fields:
            self.servers.refresh()
        self.show_note()

    @property
    def url(self) -> str:
        field = self.fields["url"]
        assert isinstance(field, QLineEdit)
        return field.text().strip() or field.placeholderText()

    def show_note(self) -> None:
        if not self.fields:
            self.note.hide()
            self.key.hide()
            return
        url, server, address = self.url, self.servers.at(self.url), address_of(self.url)
        first = "required" if url == LOCAL else server["models"][0] if server and server["models"] else "the first"
        configure(self.fields["model"], placeholderText=first)
        if url == LOCAL:
            text = IN_THE_RUN
        elif server is not None:
            text = f"{server['name']} answers at {address} with {counted(len(server['models']), 'model')}."
        elif is_remote(url):
            text = f"Prompts and completions are sent to {address}."
        elif self.servers.found is None:
            text = "Looking for servers on this machine…"
        else:
            text = f"Nothing answers at {address}. Start the server there, or choose one of the list."
        show_text(self.note, text)
        self.key.setVisible(is_remote(url))

    def _list_rubrics(self, menu: QMenu, take: Callable[[str], object]) -> None:
        for name, path in bundled_rubrics().items():
            menu.addAction(read_rubric(str(path)).title or name, lambda name=name: take(name))
        menu.addSeparator()
        menu.addAction("File…", lambda: take(str(open_file(menu, "rubric", "Open rubric", RUBRICS) or "")))

    def _list_servers(self, menu: QMenu, take: Callable[[str], object]) -> None:
        self.servers.refresh()  # for the next time
        for server in self.servers.found or ():
            text = f"{server['name']}, {address_of(server['url'])}, {counted(len(server['models']), 'model')}"
            menu.addAction(text, lambda url=server["url"]: take(url))
        if not self.servers.found:
            menu.addAction("No server answers on this machine").setEnabled(False)
        menu.addSeparator()
        menu.addAction("Load a model in the run", lambda: take(LOCAL))

    def _list_models(self, menu: QMenu, take: Callable[[str], object]) -> None:
        server = self.servers.at(self.url)
        for model in server["models"] if server is not None else ():
            menu.addAction(model, lambda model=model: take(model))
        if self.url == LOCAL:
            menu.addAction("Choose a model…", lambda: self.model_wanted.emit(take))
        elif server is None:
            menu.addAction("The server has not said which it has").setEnabled(False)

    def _ask_key(self) -> None:
        address, hidden = address_of(self.url), QLineEdit.EchoMode.Password
        text = f"The key for {address}, kept in the system's keychain. An empty one is deleted."
        key, is_given = QInputDialog.getText(self.note.window(), "Key of the judge's server", text, hidden)
        if is_given:
            self.servers.store_key(self.url, key, self.note.setText)
