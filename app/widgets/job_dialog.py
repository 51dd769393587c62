"""The dialog that trains on a machine of Hugging Face, with prices, a time-out, and the most that it costs."""

from collections.abc import Mapping
from typing import Any

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QWidget

from app import theme
from app.state.processes import Service
from app.widgets.basic.controls import ComboBox, ElidedLabel, NumberEdit
from app.widgets.basic.dialogs import Dialog
from app.widgets.basic.labels import button, label, plain_tip, show_text
from app.widgets.basic.layout import column, grid, row, set_shown, wrap_in_card
from app.widgets.basic.number_format import dollars
from app.widgets.basic.tables import BaseTable, Column, TextsModel
from app.widgets.form.value_text import value_label
from app.widgets.upload_dialog import Account, HubAccount
from backend.config.config import SETTINGS, Config
from backend.config.other_programs.into_trl import into_trl, require_grpo
from backend.utils.errors import ConfigProblem

HOURS = "6"
INTRO = (
    "TRL trains on a rented machine. Your data and reward files go into a private bucket; log, charts and adapter come "
    "back into the run, which you can stop from here."
)
ANONYMOUS = "Not logged in. Jobs need an account, which pays for them."


class JobDialog(Dialog):
    """Asks for the machine of a run with these settings. Raises UserError for those that TRL cannot train."""

    submitted = Signal(str, float, str)  # flavor, hours, owner

    def __init__(self, config: Config, service: Service, parent: QWidget | None = None) -> None:
        require_grpo(config)
        left_out = into_trl(config).left_out
        super().__init__("Train on Hugging Face", parent, (620, 640))
        self._hardware: list[Mapping[str, Any]] = []
        model, data = (value_label(SETTINGS[key], getattr(config, key)) for key in ("model", "data"))
        what = ElidedLabel(colour="text", text=f"{model} on {data}")
        names = ", ".join(SETTINGS[left.setting].label for left in left_out)
        tip = plain_tip("\n".join(f"{SETTINGS[left.setting].label}: {left.instead}" for left in left_out))
        missing = label(f"Not carried over: {names}." if names else "", role="muted", wrap=True, toolTip=tip)
        self.model = TextsModel(self)
        gpu = (Column("GPU", 130), Column("GPU memory", 100))
        self.model.columns = (Column("Machine"), *gpu, Column("Per hour", 90, True))
        self.table = BaseTable(model=self.model, single=True, name="Hardware")
        self.table.selectionModel().selectionChanged.connect(self._show)
        self.table.activated.connect(self._submit)
        self.state = label("Asking Hugging Face for its hardware…", role="muted", wrap=True)
        tip = "The job is ended after this time, whatever it has done"
        self.hours = NumberEdit("h", text=HOURS, width=96, name="Time-out", tip=tip, textChanged=self._show)
        self.owner = ComboBox(name="Paid by", length=16)
        self.account = HubAccount(service)
        self.most, self.sum = label(font=theme.title_font()), label(role="muted", wrap=True)
        self.submit = button("Submit", self._submit, primary=True)
        self._owner_name = label("Paid by", role="muted", buddy=self.owner)
        hours_name = label("Time-out", role="muted", buddy=self.hours)
        fields = ((hours_name, row(self.hours, None)), (self._owner_name, row(self.owner, None)))
        cost = row((column(self.most, self.sum, spacing=2), 1), button("Cancel", self.reject), self.submit)
        parts = (what, label(INTRO, role="muted", wrap=True), missing, (wrap_in_card(self.table), 1), self.state)
        column(*parts, grid(fields, stretch=1), self.account, cost, into=self, spacing=12, margins=2 * theme.SPACE)
        set_shown(missing, bool(names))
        self.account.found.connect(self._list_owners)
        self.account.can_write_changed.connect(self._show)
        self.account.ask(ANONYMOUS)

        def refuse(problems: list[ConfigProblem]) -> None:
            self.state.setText(problems[0].sentence)

        service.ask("hub_hardware", self._show_hardware, on_refused=refuse, owner=self)
        self._show()

    def _show_hardware(self, answer: dict[str, Any]) -> None:
        self._hardware = answer["hardware"]
        names = ("title", "accelerator", "memory")
        rows = [(*(str(each[name]) for name in names), dollars(each["usd_per_hour"])) for each in self._hardware]
        self.model.set_rows(rows)
        show_text(self.state, "" if rows else "Hugging Face offers no GPU now.")
        if rows:
            self.table.selectRow(0)
            self.table.setFocus()

    def _list_owners(self, account: Account) -> None:
        names = [account["name"], *account["organisations"]] if account else []
        self.owner.fill({name: name for name in names})
        for part in (self._owner_name, self.owner):
            set_shown(part, bool(names))

    @property
    def _chosen(self) -> Mapping[str, Any] | None:
        rows = self.table.selected_rows()
        return self._hardware[rows[0]] if rows else None

    @property
    def _time_out(self) -> float | None:
        try:
            hours = float(self.hours.text().replace(",", "."))
        except ValueError:
            return None
        return hours if 0 < hours < 1000 else None

    def _show(self) -> None:
        chosen, hours = self._chosen, self._time_out
        if chosen is not None and hours is not None:
            price = chosen["usd_per_hour"]
            self.most.setText(f"At most {dollars(price * hours)}")
            self.sum.setText(f"{hours:g} h at {dollars(price)} an hour; a run that ends earlier costs less.")
        else:
            self.most.setText("")
            self.sum.setText("The time-out is a number of hours." if hours is None else "")
        self.owner.setEnabled(self.owner.count() > 1)
        self.submit.setEnabled(chosen is not None and hours is not None and self.account.can_write)

    def _submit(self) -> None:
        chosen, hours = self._chosen, self._time_out
        if chosen is not None and hours is not None and self.submit.isEnabled():
            self.accept()
            self.submitted.emit(chosen["name"], hours, self.owner.currentData())
