"""The menus: a table of entries with text, shortcut, icon and slot, and what the entries of File and Help do."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from html import escape
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from PySide6.QtCore import QObject
from PySide6.QtGui import QAction, QActionGroup, QKeySequence
from PySide6.QtWidgets import QApplication, QMenu

from app import theme
from app.pages import PAGES
from app.state.guide import CONTENTS, GLOSSARY, place_of
from app.state.messages import problems_to
from app.state.presets import presets
from app.state.processes import ProcessOutcome, VerbProcess
from app.state.run_files import log_lines
from app.state.run_starter import START
from app.state.session import FORM
from app.widgets.basic.dialogs import SAVING, TextDialog, ask, open_file, open_folder, save_file
from app.widgets.basic.icons import icon
from app.widgets.basic.labels import key_name, place_about
from app.widgets.form.fields import field_of
from app.widgets.hub_dialogs import JobDialog
from app.widgets.menu_dialogs import AboutDialog, PresetPanel, ProblemDialog
from backend.config.config import Config, dump
from backend.runs.archive import raw_settings
from backend.utils import about, machine
from backend.utils.about import EMPTY, LOG_LINES, ProblemFacts, report
from backend.utils.command import backend_command

if TYPE_CHECKING:
    from app.state.run import Run
    from app.window import Window

STANDARD = QKeySequence.StandardKey
YAML = "Config (*.yaml)"


@dataclass(frozen=True, slots=True)
class Entry:
    """A menu entry. `slot` is a method of the window, or of its page `page`, which is then shown; "" does no more."""

    name: str
    text: str
    keys: str | QKeySequence.StandardKey
    slot: str
    icon: str = ""  # the name of our icon, for actions in the toolbar
    tip: str = ""
    page: str = ""
    is_off: bool = False  # until it is enabled


QUEUE_TIP = "Train what the form says when its turn comes"
MENUS: dict[str, tuple[Entry | None, ...]] = {  # none is a separator
    "File": (
        Entry("new", "New", STANDARD.New, "files.new"),
        Entry("open", "Open config…", STANDARD.Open, "files.open"),
        Entry("presets", "Presets…", "Ctrl+Shift+T", "files.show_presets"),
        None,
        Entry("save", "Save", STANDARD.Save, "files.save"),
        Entry("save_as", "Save as…", "Ctrl+Shift+S", "files.save_as"),
        Entry("export_for_trl", "Export for TRL…", "Ctrl+Alt+Shift+E", "files.export_for_trl"),
        Entry("train_there", "Train on Hugging Face…", "Ctrl+Alt+Shift+H", "files.train_on_hugging_face"),
        None,
        Entry("quit", "Quit", STANDARD.Quit, "close"),
    ),
    "Edit": (
        Entry("undo", "Undo", STANDARD.Undo, "undo", is_off=True),
        Entry("redo", "Redo", "Ctrl+Shift+Z", "redo", is_off=True),
        None,
        Entry("copy", "Copy", STANDARD.Copy, "copy"),
        Entry("copy_command", "Copy the command", "Ctrl+Shift+C", "files.copy_command"),
        None,
        Entry("find", "Find", STANDARD.Find, "find_text", tip="Text in completions, runs or the guide, else a setting"),
        None,
        Entry("preferences", "Preferences…", "Ctrl+,", "show_preferences"),
    ),
    "Run": (
        Entry("run", "Run", "Ctrl+R", "session.starter.start", "play", "Train what the form says"),
        Entry("queue_run", "Add to queue", "Ctrl+Shift+A", "session.starter.queue", "queue", QUEUE_TIP),
        Entry("pause", "Pause", "Ctrl+Shift+P", "pause", "pause", "Hold the run, or let it go on"),
        Entry("stop", "Stop", "Ctrl+.", "stop", "stop", "Save and end the run"),
        Entry("save_now", "Save now", "Ctrl+Shift+K", "save_now", "save", "Write a checkpoint now"),
        Entry("change_settings", "Change settings…", "Ctrl+Shift+J", "change_settings", page="monitor"),
        Entry("finish_step", "Stop after this step", "Ctrl+Alt+Shift+.", "finish_step", page="monitor"),
        Entry("stop_when", "Stop when…", "Ctrl+Alt+J", "stop_when", page="monitor"),
        None,
        Entry("switch_run", "Show another run…", "Ctrl+J", "switch_run"),
        Entry("resume", "Resume from the checkpoint", "Ctrl+Shift+R", "resume"),
        Entry("export", "Export…", "Ctrl+E", "export"),
        Entry("evaluate_run", "Evaluate the run", "Ctrl+Alt+E", "start", page="evaluate"),
        None,
        Entry("open_folder", "Open the run's folder", "Ctrl+Shift+O", "open_folder"),
        Entry("open_log", "Open the log", "Ctrl+L", "open_log"),
    ),
    "Rewards": (
        Entry("sample", "Sample completions", "Ctrl+D", "sample", page="rewards"),
        Entry("try_rows", "Try rewards on the chosen rows", "Ctrl+Shift+D", "try_rewards", page="dataset", is_off=True),
        Entry("read_completions", "Open completions…", "Ctrl+Alt+O", "source.read_completions", page="rewards"),
        Entry("paste_completions", "Paste completions", "Ctrl+Shift+V", "source.paste_completions", page="rewards"),
        None,
        Entry("score", "Score again", "Ctrl+Return", "bench.score", page="rewards", is_off=True),
        Entry("cancel", "Cancel", "Ctrl+Alt+.", "bench.cancel", page="rewards", is_off=True),
        None,
        Entry("keep_case", "Keep as case", "Ctrl+K", "keep_case", page="rewards", is_off=True),
        Entry("drop_case", "Remove the case", "Ctrl+Backspace", "drop_case", page="rewards", is_off=True),
        None,
        Entry("new_file", "New reward file…", "Ctrl+Alt+N", "new_file", page="rewards"),
        Entry("open_file", "Open reward file…", "Ctrl+Alt+R", "open_file", page="rewards"),
        Entry("save_file", "Save reward file and score", "Ctrl+Alt+S", "panel.save_file", page="rewards", is_off=True),
    ),
    "Chat": (
        Entry("load_chat", "Load or unload the model", "Ctrl+Alt+L", "load_button.click", page="chat", is_off=True),
        Entry("serve", "Serve to other programs…", "Ctrl+Alt+V", "serve_button.click", page="chat"),
        None,
        Entry("new_conversation", "Clear the chat", "Ctrl+Alt+C", "new_conversation", page="chat", is_off=True),
        Entry("stop_answer", "Stop the answer", "Ctrl+Shift+.", "chat.stop", page="chat", is_off=True),
        None,
        Entry("previous_prompt", "Previous prompt", "Ctrl+Alt+Up", "rows.previous.click", page="chat", is_off=True),
        Entry("next_prompt", "Next prompt", "Ctrl+Alt+Down", "rows.next.click", page="chat", is_off=True),
        Entry("random_prompt", "Random prompt", "Ctrl+Alt+Right", "rows.random.click", page="chat", is_off=True),
    ),
    "View": (
        *(Entry(page.key, page.title, page.shortcut, "", page=page.key) for page in PAGES),
        None,
        Entry("earlier", "Earlier completions", "Ctrl+[", "earlier.click", page="completions"),
        Entry("later", "Later completions", "Ctrl+]", "later.click", page="completions"),
        Entry("next_kind", "Next completion of the filter", "Ctrl+G", "bar.next.click", page="completions"),
        Entry(
            "prior_kind", "Previous completion of the filter", "Ctrl+Shift+G", "bar.previous.click", page="completions"
        ),
        None,
        Entry("next_group", "Next group of settings", "Ctrl+PgDown", "show_next_group", page="train"),
        Entry("previous_group", "Previous group of settings", "Ctrl+PgUp", "show_previous_group", page="train"),
        None,
        Entry("back", "Back in the guide", "Ctrl+Alt+Left", "go_back", page="guide"),
        None,
        Entry("sidebar", "Collapse sidebar", "Ctrl+B", "toggle_sidebar"),
        None,
    ),
    "Help": (
        Entry("help_here", "Help on this field", "F1", "help.show_help_here"),
        None,
        Entry("read_guide", "Guide", "Ctrl+?", "help.show_guide"),
        Entry("glossary", "Glossary", "Ctrl+Alt+G", "help.show_glossary"),
        Entry("shortcuts", "Keyboard shortcuts", "Ctrl+/", "help.show_shortcuts"),
        Entry("files", "What is stored where", "Ctrl+Alt+W", "help.show_files"),
        None,
        Entry("report", "Report a problem…", "Ctrl+Alt+P", "help.report_problem"),
        None,
        Entry("about", "About GRPO Studio", "Ctrl+Alt+I", "help.show_about"),
    ),
}
RUN_ACTIONS = ("run", "pause", "stop", "save_now")
THEMES = {"system": ("System", "Ctrl+Alt+0"), "light": ("Light", "Ctrl+Alt+1"), "dark": ("Dark", "Ctrl+Alt+2")}


class Menus(QObject):
    """The window's actions in `by_name`, its menus and its toolbar's icons. `recent` is the submenu of recent files."""

    def __init__(self, window: Window) -> None:
        super().__init__(window)  # so that its slots are disconnected when the window is deleted
        self._is_paused = False
        self.by_name: dict[str, QAction] = {}
        self._window = window
        menus = {title: window.menuBar().addMenu(title) for title in MENUS}
        for title, entries in MENUS.items():
            for entry in entries:
                menus[title].addAction(self._action(entry)) if entry else menus[title].addSeparator()
        self.recent = QMenu("Open recent", window)
        self.recent.aboutToShow.connect(self._fill_recent)  # every time: another window may have opened a file
        menus["File"].insertMenu(self["presets"], self.recent)
        themes = QActionGroup(window)
        for mode, (text, keys) in THEMES.items():
            action = self._action(Entry(f"theme {mode}", text, keys, ""), partial(window.set_theme, mode))
            action.setCheckable(True)
            action.setChecked(mode == theme.mode())
            menus["View"].addAction(action)
            themes.addAction(action)
        self["preferences"].setMenuRole(QAction.MenuRole.PreferencesRole)
        self["about"].setMenuRole(QAction.MenuRole.AboutRole)
        self.update_icons()
        history = window.session.draft.history
        history.canUndoChanged.connect(self["undo"].setEnabled)
        history.canRedoChanged.connect(self["redo"].setEnabled)
        # Bound methods are disconnected when the window is deleted; the history still emits after that. It also emits
        # while it is deleted itself, and can then not be asked for its texts.
        history.undoTextChanged.connect(self._name_undo)
        history.redoTextChanged.connect(self._name_redo)

    def __getitem__(self, name: str) -> QAction:
        return self.by_name[name]

    def update_icons(self) -> None:
        for entry in (entry for entries in MENUS.values() for entry in entries if entry and entry.icon):
            self[entry.name].setIcon(icon(entry.icon, theme.palette().accent_text if entry.name == "run" else None))
        self["pause"].setText("Resume" if self._is_paused else "Pause")
        self["pause"].setIcon(icon("play" if self._is_paused else "pause"))

    def show_state(self, state: str, *, is_remote: bool = False) -> None:
        """Enable the actions that a run in this state allows; "" is no run. `is_remote`: it is a Hugging Face job."""
        is_steered = not is_remote and state in ("running", "paused")
        enabled = dict.fromkeys(("pause", "save_now", "change_settings", "finish_step", "stop_when"), is_steered) | {
            "run": is_remote or state in ("", "reading", "queued", "finished", "stopped", "failed", "crashed"),
            "stop": state in ("starting", "running", "paused"),
            "resume": state in ("stopped", "failed", "crashed"),
            "export": state in ("finished", "stopped", "failed", "crashed"),
            "open_folder": bool(state),
            "open_log": bool(state),
        }
        self.set_enabled(enabled)
        self._is_paused = state == "paused"
        self.update_icons()

    def set_enabled(self, enabled: Mapping[str, bool]) -> None:
        for name, is_enabled in enabled.items():
            self[name].setEnabled(is_enabled)

    def _name_undo(self, what: str) -> None:
        self["undo"].setText(f"Undo {what}".strip().replace("&", "&&"))

    def _name_redo(self, what: str) -> None:
        self["redo"].setText(f"Redo {what}".strip().replace("&", "&&"))

    def _fill_recent(self) -> None:
        self.recent.clear()
        prefs = self._window.session.prefs
        existing = [path for path in map(Path, prefs.used("config")) if path.exists()]
        for path in existing:
            text = f"{path.name}  –  {path.parent}".replace("&", "&&")
            self.recent.addAction(text, partial(self._window.files.open_path, path))
        if existing:
            self.recent.addSeparator()
        clear = self.recent.addAction("Clear the list", partial(prefs.settings.remove, "used_config"))
        clear.setEnabled(bool(existing))

    def _action(self, entry: Entry, call: Callable[[], object] | None = None) -> QAction:
        action = QAction(entry.text, self._window)
        action.setShortcut(QKeySequence(entry.keys))
        keys = key_name(action.shortcut())
        action.setToolTip(f"{entry.tip or entry.text} ({keys})" if keys else entry.tip or entry.text)
        if call is None and entry.page:
            do, slot = (self._window.do_on_page, [entry.slot]) if entry.slot else (self._window.show_page, [])
            call = partial(do, entry.page, *slot)
        run = call or attrgetter(entry.slot)(self._window)
        # Not connected directly: `triggered` passes whether the action is checked, which our slots do not take.
        action.triggered.connect(lambda _checked: run())
        action.setIconVisibleInMenu(False)  # it would repeat what the toolbar shows
        action.setEnabled(not entry.is_off)
        self.by_name[entry.name] = action
        return action


class ConfigFiles(QObject):
    def __init__(self, window: Window) -> None:
        super().__init__(window)
        self._window, self.session = window, window.session

    def new(self) -> None:
        if self._may_replace_form():
            self.session.messages.withdraw(FORM, START)  # what they say is about the form that was there
            self.session.draft.reset()
            self._window.show_page("train")

    def open(self) -> None:
        types = "Config (*.yaml *.yml)"
        if path := open_file(self._window, "config", "Open config", types, self.session.draft.path):
            self.open_path(path)

    def open_path(self, path: Path) -> None:
        if self._may_replace_form():
            self.session.load_config(path)

    def show_presets(self) -> None:
        with problems_to(self.session.messages.say):
            panel = PresetPanel(presets(), self.session.draft.values(), self._window)
            panel.taken.connect(self.session.apply_preset)
            panel.open()

    def save(self) -> bool:
        return self.save_as(self.session.draft.path_to_save)

    def save_as(self, path: Path | None = None) -> bool:
        """Ask for a path unless one is given. False if it was cancelled or failed."""
        old, own = self.session.draft.path, self.session.draft.path_to_save
        path = path or save_file(self._window, "config", "Save config", own.name if own else "config.yaml", YAML, old)
        if path is None:
            return False
        with problems_to(self.session.messages.say):
            self.session.draft.save(path)
            self.session.prefs.remember(path)
            self.session.messages.say(f"Saved {path.name}.")
            return True
        return False

    def copy_command(self) -> None:
        QApplication.clipboard().setText(self.session.draft.command_text())
        self.session.messages.say("Copied the command that trains what the form says.")

    def export_for_trl(self) -> None:
        with problems_to(self.session.messages.say):
            text = dump(self.session.draft.config())
            if (parent := open_folder(self._window, "export", "Folder to put the folder for TRL into")) is None:
                return
            own = self.session.draft.path
            file = Path(tempfile.mkdtemp(prefix="for-trl-")) / f"{own.stem if own else 'settings'}.yaml"
            file.write_text(text, encoding="utf-8")
            command = backend_command("export", str(file), "--to", "trl", "--folder", str(parent), "--json")
            task = VerbProcess(command, self)
            task.done.connect(lambda outcome: self.show_trl_outcome(outcome, file))
            task.start()

    def train_on_hugging_face(self, settings: Config | None = None) -> None:
        """Ask for the machine of a job that trains these settings, or the form's, and submit it."""
        session = self.session
        if settings is None and not session.starter.check_form():
            return
        with problems_to(session.messages.say):
            settings = settings or session.draft.config()
            dialog = JobDialog(settings, session.service, self._window)
            dialog.submitted.connect(partial(session.starter.start_job, settings))
            dialog.open()

    def show_trl_outcome(self, outcome: ProcessOutcome, file: Path) -> None:
        shutil.rmtree(file.parent, ignore_errors=True)
        text = outcome.sentence
        if outcome.ok:
            exported = json.loads(outcome.output.splitlines()[-1])
            left = ", ".join(each["setting"] for each in exported["left_out"])
            text = f"Wrote {exported['path']}."
            text += f" Not carried over: {left}; its README.md says what stands in." if left else ""
        self.session.messages.say(text)

    def _may_replace_form(self) -> bool:
        if not self.session.draft.dirty:
            return True
        answer = ask(self._window, "Save the changes to this config?", "They are lost otherwise.", SAVING)
        return self.save() if answer == "save" else answer == "discard"


class HelpMenu(QObject):
    """`qt_messages`: the last warnings of Qt, for a report."""

    def __init__(self, window: Window) -> None:
        super().__init__(window)
        self._window, self.session = window, window.session
        self.qt_messages: Collection[str] = ()

    def show_guide(self, place: str = CONTENTS) -> None:
        origin = self._window.current_page
        self._window.show_page("guide")
        guide = self._window.pages["guide"]
        guide.show_place(place, origin if origin != "guide" else "")
        guide.view.setFocus()

    def show_help_here(self) -> None:
        """Show what the guide says about the field, chart or finding with the focus."""
        focused = QApplication.focusWidget()
        field = field_of(focused)
        place = place_of("setting", field.setting.key) if field is not None else place_about(focused)
        self.show_guide(place or CONTENTS)

    def show_glossary(self) -> None:
        self.show_guide(GLOSSARY)

    def show_files(self) -> None:
        self.show_guide("../runs.md#stored")

    def show_shortcuts(self) -> None:
        def plain(action: QAction) -> str:
            return escape(action.text().replace("&", ""))  # KDE marks keys in the texts of menus

        parts = []
        for top in self._window.menuBar().actions():
            entries = top.menu().actions()  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
            rows = [action for action in entries if not action.shortcut().isEmpty()]
            if rows:
                parts.append(f"<h3>{plain(top)}</h3><table width='100%' cellpadding='3'>")
            for row in rows:
                keys = f"<b>{escape(key_name(row.shortcut()))}</b>"
                parts.append(f"<tr><td>{plain(row)}</td><td align='right'>{keys}</td></tr>")
            parts.append("</table>" if rows else "")
        TextDialog("Keyboard shortcuts", "".join(parts), self._window).show()

    def show_about(self) -> None:
        computes = machine.chip() if machine.has_gpu() else ""
        device = f"GPU of {computes}" if computes else "GPU" if machine.has_gpu() else "CPU"
        AboutDialog(about.versions() | {"Computes on": device}, about.components(), self._window).open()

    def report_problem(self, problem: ProblemFacts | None = None) -> None:
        """Show the report of this problem, or of the helper process's last failure, or an empty one."""
        if self._window.findChild(ProblemDialog) is not None:
            return  # the first of several faults that follow from each other is the one to report
        problem = problem or self.session.last_fault or ProblemFacts(settings=self.session.draft.values())
        title = problem.sentence if problem.sentence != EMPTY else "What happened?"
        ProblemDialog(title, report(problem), self._window).show()

    def report_caught(self, sentence: str, trace: str) -> None:
        self.report_problem(ProblemFacts(sentence, trace, list(self.qt_messages), self.session.draft.values()))

    def report_run(self, run: Run) -> None:
        trace = str((run.data.ending or {}).get("traceback") or "")
        log = log_lines(run.folder.log, LOG_LINES)
        self.report_problem(ProblemFacts(run.problem, trace, log, raw_settings(run.folder)))
