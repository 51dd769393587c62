"""The tools that the model may call: a table with ticks, and the schema of one as the model reads it."""

import json
from collections.abc import Sequence
from html import escape
from typing import Any

from PySide6.QtCore import Qt, QTimer, Signal
from PySide6.QtGui import QColor, QFont, QShowEvent
from PySide6.QtWidgets import QWidget

from app import theme
from app.state.processes import Service
from app.state.session import Session
from app.widgets.basic.controls import LinkButton, ProseEdit
from app.widgets.basic.labels import button, label, show_text
from app.widgets.basic.layout import column, configure, holder, row, set_shown, set_style_property
from app.widgets.basic.tables import BaseTable, Column, Index, RowsModel
from app.widgets.form.fields import Field
from app.widgets.reward_delegates import TickDelegate
from backend.tools.catalogue import ListedTool, listed_tools
from backend.tools.host import ToolSchemas
from backend.utils.errors import UserError

USE, TOOL, DOES, PARAMETERS, ORIGIN = range(5)
MOST_ROWS, JSON_LINES = 8, 12
NOTHING = "None. Choose a file of functions, an environment, or MCP servers."
FROM_SOURCE = "Read from the tools file without running it. Tools of environments and servers appear once loaded."
EXACT = "These are the schemas that the model reads."
NOT_FOUND = "The tools file has no function of this name."
SOURCES = ("tools_file", "environment", "mcp_servers")
ASKED = (*SOURCES, "tools", "environment_column", "tool_timeout", "reward_isolation", "reward_network")
ASK_MS = 300


class ToolModel(RowsModel):
    columns = (
        Column("Use", 44),
        Column("Tool", 148),
        Column("What it does"),
        Column("Parameters", 176),
        Column("From", 108),
    )
    toggled = Signal(str)  # name
    rows: Sequence[ListedTool]
    chosen: Sequence[str] = ()

    def is_ticked(self, tool: ListedTool) -> bool:
        return not self.chosen or not tool.is_optional or tool.name in self.chosen

    def text(self, row: ListedTool, column: int) -> str | None:
        parameters = ", ".join(name for name, *_ in row.parameters) or ("none" if "parameters" in row.schema else "")
        return (None, row.name, row.description, parameters, row.origin)[column]

    def colour(self, row: ListedTool, column: int) -> QColor:
        colours = theme.palette()
        if not row.origin:
            return colours.warning
        return colours.text if column == TOOL and self.is_ticked(row) else colours.muted

    def font(self, row: ListedTool, column: int) -> QFont | None:
        return theme.mono_font(theme.CAPTION) if column in (TOOL, PARAMETERS) else theme.caption_font()

    def extra(self, row: ListedTool, index: Index, role: int) -> Any:
        if index.column() != USE or not row.is_optional:  # the tools of environments and servers are always used
            return None
        if role == Qt.ItemDataRole.CheckStateRole:
            return Qt.CheckState.Checked if self.is_ticked(row) else Qt.CheckState.Unchecked
        if role == Qt.ItemDataRole.AccessibleTextRole:
            return f"{row.name}, {'used' if self.is_ticked(row) else 'not used'}"
        return None

    def setData(self, index: Index, value: Any, role: int = Qt.ItemDataRole.EditRole) -> bool:
        self.toggled.emit(self.rows[index.row()].name)
        return True


class ToolTable(BaseTable):
    def __init__(self, model: ToolModel, parent: QWidget) -> None:
        about = "Space ticks a function."
        super().__init__(parent, model=model, name="Tools", single=True, accessibleDescription=about)
        self.setItemDelegateForColumn(USE, TickDelegate(self))

    def fit_columns(self) -> None:
        self.setColumnHidden(PARAMETERS, self.width() < theme.scaled(640))


class ToolsField(Field):
    """Edits the names of the chosen functions; none chosen means all."""

    wide = True
    control: ToolTable
    _session: Session | None = None

    def build(self) -> QWidget:
        self._chosen: list[str] | Any = []
        self._listed: Sequence[ListedTool] = ()
        self._asked: dict[str, Any] = {}
        self._exact: ToolSchemas | None = None
        self._refusal = ""
        self.model = ToolModel(self)
        self.control = ToolTable(self.model, self)
        self.model.toggled.connect(self._toggle)
        self.control.selectionModel().currentRowChanged.connect(self._show_schema)
        rich = Qt.TextFormat.RichText
        self.schema = label(role="muted", wrap=True, selectable=True, textFormat=rich, font=theme.caption_font())
        font = theme.mono_font(theme.CAPTION)
        self.json = ProseEdit(JSON_LINES, self, name="JSON schema", readOnly=True, font=font, visible=False)
        self.status = label(font=theme.caption_font(), wrap=True)
        self.show_json = LinkButton("Show JSON", self, on_click=self._turn_json, font=theme.caption_font())
        tip = "Loads the files and servers, if you allow that, and shows the schemas that the chat template gets"
        self.load = button("Show what the model reads", self._load, tip=tip)
        self.tab_stops += [self.show_json, self.load]
        foot = row((self.status, 1), self.show_json, self.load, spacing=2 * theme.SPACE)
        return holder(column(self.control, self.schema, self.json, foot, spacing=6))

    def follow(self, session: Session) -> None:
        """List the tools of this session's form."""
        self._session = session
        timer = configure(QTimer(self, singleShot=True, interval=ASK_MS), timeout=self.refresh)
        session.draft.changed.connect(lambda key: (not key or key in ASKED) and timer.start())
        self.refresh()

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self.refresh()

    def value(self) -> Any:
        return self._chosen

    def set_control_value(self, raw: Any) -> None:
        self._chosen = raw
        self._show_tools()

    def refresh(self) -> None:
        if self._session is None:
            return
        settings = {key: self._session.draft.value(key) for key in ASKED}
        if settings != self._asked:
            self._asked, self._exact, self._refusal = {}, None, ""
        try:
            self._listed, problem = listed_tools(settings, self._exact), ""
        except UserError as error:
            self._listed, problem = [], error.faults[0].sentence
        self._show_tools()
        can_load = any(settings[key] for key in SOURCES) and not problem
        if can_load and not self._asked and self.isVisible() and not self._session.consent.is_missing(settings):
            self._ask(self._session.service, settings)
        is_exact = self._exact is not None
        is_loading = bool(self._asked) and not is_exact and not self._refusal
        status = EXACT if is_exact else "Loading…" if is_loading else FROM_SOURCE if can_load else NOTHING
        problem = problem or self._refusal
        set_style_property(self.status, "role", "problem" if problem else "muted")
        show_text(self.status, problem or status)
        set_shown(self.load, can_load and not is_exact and not is_loading)

    def _load(self) -> None:
        assert self._session is not None
        settings = {key: self._session.draft.value(key) for key in ASKED}
        if self._session.consent.obtain(settings):
            self._ask(self._session.service, settings)
            self.refresh()

    def _ask(self, service: Service, settings: dict[str, Any]) -> None:
        self._asked = settings

        def answered(exact: ToolSchemas | None, problem: str) -> None:
            if settings == self._asked:  # else they have changed since
                self._exact, self._refusal = exact, problem
                self.refresh()

        service.ask(
            "tools",
            lambda answer: answered(ToolSchemas(**answer), ""),
            on_refused=lambda faults: answered(None, " ".join(fault.sentence for fault in faults)),
            owner=self,
            settings=settings,
        )

    def _show_tools(self) -> None:
        chosen = self._chosen if isinstance(self._chosen, list) else []
        known, place = {tool.name for tool in self._listed}, max(0, self.control.currentIndex().row())
        schemas = ({"name": name, "description": NOT_FOUND} for name in chosen if name not in known)
        self.model.chosen = chosen
        self.model.set_rows([*self._listed, *(ListedTool(schema, "", is_optional=True) for schema in schemas)])
        rows = self.model.rowCount()
        self.control.fit_rows(MOST_ROWS)
        set_shown(self.control, rows > 0)
        if rows:
            self.control.selectRow(min(place, rows - 1))
        self._show_schema()

    def _toggle(self, name: str) -> None:
        names = [tool.name for tool in self._listed if tool.is_optional]
        used = [each for each in names if (each in (self._chosen or names)) != (each == name)]
        if used:  # the last one stays: without a choice all are used
            self._chosen = [] if used == names else used
            self._show_tools()
            self.emit_edited()

    def _turn_json(self) -> None:
        set_shown(self.json, self.json.isHidden())
        self._show_schema()

    def _show_schema(self, *_: object) -> None:
        tool: ListedTool | None = self.control.selected_row
        is_known = tool is not None and "parameters" in tool.schema
        set_shown(self.schema, is_known)
        set_shown(self.show_json, is_known)
        self.show_json.setText("Show JSON" if self.json.isHidden() else "Hide JSON")
        if tool is None or not is_known:
            self.json.hide()
            return
        lines = [f'<tr><td colspan="3"><b>{escape(tool.name)}</b>: {escape(tool.description)}</td></tr>']
        for cells in tool.parameters:
            lines.append(f"<tr>{''.join(f'<td style=padding-right:14px>{escape(cell)}</td>' for cell in cells)}</tr>")
        self.schema.setText(f"<table>{''.join(lines)}</table>")
        self.json.setPlainText(json.dumps(tool.schema, indent=2, ensure_ascii=False))
