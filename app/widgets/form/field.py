"""The base class of the editors of settings: a label above, the control, and notes and problems below."""

from __future__ import annotations

from typing import Any

from PySide6.QtCore import QEvent, QKeyCombination, QObject, Qt, Signal
from PySide6.QtGui import QKeyEvent, QKeySequence
from PySide6.QtWidgets import QApplication, QLabel, QLineEdit, QPlainTextEdit, QVBoxLayout, QWidget

from app import theme
from app.widgets.basic.controls import ElidedLabel, LinkButton, PathEdit
from app.widgets.basic.labels import PlainLabel
from app.widgets.basic.layout import row, set_style_property
from app.widgets.form.value_text import limits_text
from backend.config.config import SETTINGS
from backend.config.setting import Setting

HINTS: dict[str, str] = {
    "num_layers": "counted from the last",
    "rank": "of the adapter",
    "scale": "factor on the adapter",
    "dropout": "of the adapter",
    "dtype": "of the weights",
    "iters": "training steps",
    "epochs": "instead of iterations",
    "batch_size": "prompts per step",
    "gradient_accumulation_steps": "batches per update",
    "max_seq_length": "prompt and completion",
    "seed": "for all random numbers",
    "learning_rate": "step size",
    "lr_schedule": "learning rate over time",
    "steps_per_report": "lines in the terminal",
    "steps_per_eval": "steps per evaluation",
    "save_every": "steps per checkpoint",
    "val_batches": "batches per evaluation",
    "test_batches": "after the run",
    "fuse": "save a merged model",
    "prompt_feature": "column of prompts",
    "answer_feature": "column of answers",
    "type_feature": "column of problem types",
    "system_feature": "column of system prompts",
    "beta": "0 is off",
    "group_size": "completions per prompt",
    "max_completion_length": "tokens, at most",
    "temperature": "randomness of sampling",
    "top_p": "probability mass kept",
    "top_k": "tokens kept, 0 = all",
    "min_p": "relative to the best",
    "epsilon": "clip range",
    "epsilon_high": "upper clip range",
    "importance_sampling_level": "ratio per token/sequence",
    "advantage_baseline": "subtracted from rewards",
    "adam_epsilon": "added to the denominator",
    "eval_batch_size": "prompts at a time",
    "eval_delay": "steps before the first",
    "lora_alpha": "scale × rank",
    "lr_warmup_ratio": "share of updates",
    "map_function": "in the Python file",
    "max_prompt_length": "tokens, at most",
    "neftune_noise_alpha": "0 is off",
    "optimizer_bits": "of its state",
    "repetition_penalty": "1 is off",
    "presence_penalty": "0 is off",
    "frequency_penalty": "0 is off",
    "streaming": "read rows as needed",
    "validation_split": "of the train rows",
}
"""Setting → a few words beside its label."""

WHEN_EMPTY: dict[str, str] = {
    "answer_pattern": "such as #### (.*)",
    "best_metric": "reward",
    "chat_template_kwargs": "such as enable_thinking: false",
    "data_seed": "same as Seed",
    "dataset_config": "the default one",
    "delta": "off",
    "epsilon_high": "same as Epsilon",
    "eval_batch_size": "same as Batch",
    "eval_data": "one dataset per line, such as gsm8k: openai/gsm8k",
    "lm_studio_name": "not exported",
    "lora_alpha": "from Scale",
    "lora_keys": "all that can have adapters; or names such as q_proj, v_proj",
    "lr_final": "a fifth of the rate",
    "lr_warmup_ratio": "from Warm-up",
    "map_function": "none",
    "max_prompt_length": "no limit",
    "modules_to_save": "none; or names such as lm_head, embed_tokens",
    "num_generations_eval": "same as Group",
    "off_policy_mask_threshold": "off",
    "output_regex": "free; or a regular expression such as <answer>[0-9]+</answer>",
    "output_schema": "free; or a JSON schema, or the path of a file with one",
    "prompt_template": "the prompt column as it is; or text such as Solve: {question}",
    "reference_model_path": "the base model as it was before training",
    "report_to": "none; or csv, tensorboard, trackio, wandb",
    "reward_weights_final": "the weights at the last step, such as 1, 0.5",
    "run_name": "from model and date",
    "sampling_correction_min": "none",
    "stop": "none; or texts such as </answer>",
    "stop_when": "never; or conditions such as kl > 0.8, reward >= 2.5",
    "system_prompt": "none",
    "test_data": "the dataset's own test split",
    "own_optimizer": "set by the calling program",
    "own_schedule": "set by the calling program",
    "tokenizer": "the model's own",
    "hosts": "this machine alone",
    "tracker_project": "grpo-studio",
    "tracker_run_name": "same as the run folder",
    "valid_data": "the dataset's own valid split",
}
"""Setting → the placeholder of an empty editor."""


class Field(QWidget):
    """The editor of one setting. Subclasses create the control and convert between its content and the raw value."""

    edited = Signal(str, object)  # key, raw value
    wide = False
    control: QWidget

    def __init__(self, setting: Setting, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setting = setting
        self._problem: QLabel | None = None
        self._note: QLabel | None = None
        self._remedy: LinkButton | None = None
        self._column = QVBoxLayout(self)
        self._column.setContentsMargins(0, 0, 0, 0)
        self._column.setSpacing(3)
        self._column.setAlignment(Qt.AlignmentFlag.AlignTop)
        self.label = PlainLabel(setting.label, self)
        self.label.setProperty("role", "muted")
        self.hint = ElidedLabel(parent=self, font=theme.caption_font())
        self.hint.setText(HINTS.get(setting.key, ""))
        self.hint.setVisible(bool(self.hint.text()))  # an empty one would widen its column
        stretch = [None] if self.hint.isHidden() else []
        self._column.addLayout(row(self.label, (self.hint, 1), *stretch, spacing=6))
        self._column.addWidget(self.build())
        if setting.key in WHEN_EMPTY and isinstance(self.control, QLineEdit | QPlainTextEdit):
            self.control.setPlaceholderText(WHEN_EMPTY[setting.key])
        self.label.setBuddy(self.control)
        description = " ".join([setting.help, limits_text(setting)]).strip()
        self.control.setAccessibleName(setting.label)
        self.control.setAccessibleDescription(description)
        for widget in (self.label, self.control):
            widget.setToolTip(f"<p>{description}</p>")  # rich text wraps; plain text would be one long line
        if not isinstance(self.control, PathEdit):
            self.control.setAcceptDrops(False)  # the window handles dropped files
        if setting.note:
            self.show_note(setting.note)
        if setting.stays_visible and setting.when is not None:
            key, values = setting.when
            self._remedy = LinkButton(
                f"Turn on {SETTINGS[key].label}",
                self,
                on_click=lambda: self.edited.emit(key, values[0]),
                tip=f"<p>{setting.label} is used while {SETTINGS[key].label} is on.</p>",
                name=f"Turn on {SETTINGS[key].label}, which {setting.label} belongs to",
            )
            self._remedy.setFont(theme.caption_font())
            self._remedy.hide()
            self._column.addWidget(self._remedy, 0, Qt.AlignmentFlag.AlignLeft)

    def build(self) -> QWidget:
        """Create `control`; returns the control or a widget that contains it."""
        raise NotImplementedError

    def tab_stops(self) -> list[QWidget]:
        return [self.control] if self._remedy is None else [self.control, self._remedy]

    def value(self) -> Any:
        raise NotImplementedError

    def set_control_value(self, raw: Any) -> None:
        raise NotImplementedError

    def show_value(self, raw: Any) -> None:
        """Show `raw`, unless it is shown already: setting the same text would move the cursor while the user types."""
        # The types too: 1 == 1.0 == True, and the text "1" is not the number.
        if not (type(self.value()) is type(raw) and self.value() == raw):
            self.set_control_value(raw)

    def show_note(self, sentence: str, *, wrong: bool = False) -> None:
        """Show a caption below the field; `wrong` gives it the colour of problems, "" hides it."""
        self._note = self._show_caption(self._note, sentence, "problem" if wrong else "muted")

    def show_problem(self, sentence: str) -> None:
        """Show a problem below the control and mark the control; "" removes both."""
        self._problem = self._show_caption(self._problem, sentence, "problem")
        set_style_property(self.control, "problem", bool(sentence))

    def show_warning(self, sentence: str) -> None:
        """Show a remark on a valid value below the control, unless there is a problem."""
        if not self.control.property("problem"):
            self._problem = self._show_caption(self._problem, sentence, "muted")

    def show_idle(self, is_idle: bool) -> None:
        """Disable the control while another setting leaves it without effect, and show the link that turns that on."""
        self.control.setEnabled(not is_idle)
        if self._remedy is not None:
            self._remedy.setVisible(is_idle)

    def _show_caption(self, caption: QLabel | None, sentence: str, role: str) -> QLabel | None:
        if caption is None and sentence:
            caption = PlainLabel(wordWrap=True)
            caption.setFont(theme.caption_font())
            self._column.addWidget(caption)
        if caption is not None:
            caption.setText(sentence)
            set_style_property(caption, "role", role)
            caption.setVisible(bool(sentence))
        return caption

    def emit_edited(self, *_: object) -> None:
        self.edited.emit(self.setting.key, self.value())


class LineField(Field):
    """A field with a line edit."""

    control: QLineEdit

    def build(self) -> QWidget:
        self.control = self.line()
        self.control.textEdited.connect(self.emit_edited)
        return self.control

    def line(self) -> QLineEdit:
        return QLineEdit(self)

    def value(self) -> Any:
        return self.control.text()

    def set_control_value(self, raw: Any) -> None:
        self.control.setText(self.text_of(raw))
        self.control.setCursorPosition(0)  # else a long text is scrolled to its end

    def text_of(self, raw: Any) -> str:
        return "" if raw is None else str(raw)


class UndoKeys(QObject):
    """Gives the undo and redo shortcuts to the window's menu while a field has the focus."""

    REDO = QKeyCombination(Qt.KeyboardModifier.ControlModifier | Qt.KeyboardModifier.ShiftModifier, Qt.Key.Key_Z)
    """Our menu's redo shortcut, also on platforms where the standard one is another."""

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        app = QApplication.instance()
        assert isinstance(app, QApplication)
        app.focusChanged.connect(self._follow)

    def _follow(self) -> None:
        # The slot ignores the signal's arguments: PySide must not wrap a widget that is half destroyed.
        focused = QApplication.focusWidget()
        field = field_of(focused)
        if focused is not None and field is not None and field.control is focused:
            focused.installEventFilter(self)

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if event.type() == QEvent.Type.ShortcutOverride and isinstance(event, QKeyEvent):
            keys = QKeySequence.StandardKey
            if event.matches(keys.Undo) or event.matches(keys.Redo) or event.keyCombination() == self.REDO:
                event.ignore()
                return True
        return super().eventFilter(watched, event)


def field_of(widget: QWidget | None) -> Field | None:
    while widget is not None and not isinstance(widget, Field):
        widget = widget.parentWidget()
    return widget
