"""Fills the form's field of tools: from the source text and, once that is allowed, as the model reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from PySide6.QtCore import QObject, QTimer

from app.state.session import Session
from app.widgets.basic.layout import configure
from app.widgets.form.tools_field import EXACT, FROM_SOURCE, ToolsField
from backend.tools.catalogue import ListedTool, listed_tools, with_exact
from backend.tools.host import ToolSchemas
from backend.utils.errors import ConfigProblem, UserError

SOURCES = ("tools_file", "environment", "mcp_servers")
ASKED = (*SOURCES, "tools", "environment_column", "tool_timeout", "reward_isolation", "reward_network")
SETTLE_MS = 300


class ToolsPart(QObject):
    def __init__(self, session: Session, field: ToolsField) -> None:
        super().__init__(field)
        self._session, self._field = session, field
        self._listed: list[ListedTool] = []
        self._asked: dict[str, Any] = {}
        self._exact: ToolSchemas | None = None
        self._problem = ""
        self._timer = configure(QTimer(self, singleShot=True, interval=SETTLE_MS), timeout=self.refresh)
        session.draft.changed.connect(lambda key: (not key or key in ASKED) and self._timer.start())
        field.shown.connect(self.refresh)
        field.load_requested.connect(self.load)
        self.refresh()

    def refresh(self) -> None:
        """Read the sources again, and ask for the model's schemas where the code is allowed to run."""
        settings = self._settings()
        try:
            self._listed, problem = listed_tools(settings), ""
        except UserError as error:
            self._listed, problem = [], error.faults[0].sentence
        has_sources = any(settings[key] for key in SOURCES) and not problem
        if settings != self._asked:
            self._asked, self._exact, self._problem = {}, None, ""
            if has_sources and self._field.isVisible() and not self._session.consent.is_missing(settings):
                self._ask(settings)
        self._show(problem, has_sources=has_sources)

    def load(self) -> None:
        """Ask for the model's schemas, after asking for consent."""
        settings = self._settings()
        if self._session.consent.obtain(settings):
            self._ask(settings)
            self._show("", has_sources=True)

    def _settings(self) -> dict[str, Any]:
        return {key: self._session.draft.value(key) for key in ASKED}

    def _show(self, problem: str, *, has_sources: bool) -> None:
        listed = with_exact(self._listed, self._exact) if self._exact is not None else self._listed
        is_loading = bool(self._asked) and self._exact is None and not self._problem
        status = EXACT if self._exact is not None else "Loading…" if is_loading else FROM_SOURCE if has_sources else ""
        loads = has_sources and self._exact is None and not is_loading
        self._field.show_tools(listed, status, problem or self._problem, loads=loads)

    def _ask(self, settings: dict[str, Any]) -> None:
        self._asked = settings

        def answered(exact: ToolSchemas | None, problem: str) -> None:
            if settings == self._asked:  # else they have changed since
                self._exact, self._problem = exact, problem
                self._show("", has_sources=True)

        def on_refused(faults: Sequence[ConfigProblem]) -> None:
            answered(None, " ".join(fault.sentence for fault in faults))

        self._session.service.ask(
            "tools",
            lambda answer: answered(ToolSchemas(**answer), ""),
            on_refused=on_refused,
            owner=self._field,
            settings=settings,
            trusted=self._session.consent.code.fingerprints(settings),
        )
