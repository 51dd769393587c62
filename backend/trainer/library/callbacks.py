"""What a program is told while it trains, and how it stops the run.

Callbacks are told what the event log has just been told: after the step, evaluation or checkpoint is whole. What one raises is kept until the
trainer next asks whether it should stop, which it does where nothing is lost: a step that was told is never half a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from backend.rewards.runner.error_text import class_name, describe_error
from backend.trainer.control import Stopped
from backend.trainer.library.trained_run import TrainedRun
from backend.utils.errors import UserError

_METHODS = ("on_step", "on_evaluation", "on_save", "on_end")
_LONGEST_ERROR = 110
"""Characters of the words for an error: the sentence around them names method, class and step."""


class StopTraining(Exception):
    """Raised by a callback to stop the run, saved, after the step it was told of. Its text completes “Stopped at step 20 because …”."""


class Callback:
    """Told of a run as it trains. Override what you need; each method may raise StopTraining, and any other exception ends the run as failed,
    saved, with a sentence that names the method."""

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is finished; `metrics` is what the event log has of it."""

    def on_evaluation(self, step: int, metrics: Mapping[str, float], split: str) -> None:
        """Held-out prompts were answered after `step`; `split` is "valid" or "test"."""

    def on_save(self, step: int, checkpoint: Path) -> None:
        """A checkpoint is complete on disk."""

    def on_end(self, run: TrainedRun) -> None:
        """The run has ended, however it did; its files are closed. StopTraining means nothing here."""


class CallbackCalls:
    """Calls the callbacks of one run. `folder`: the run's. Raises UserError for an object that has none of the methods."""

    def __init__(self, callbacks: Sequence[Any], folder: Path) -> None:
        for callback in callbacks:
            if not any(callable(getattr(callback, method, None)) for method in _METHODS):
                sentence = f"{class_name(callback)} has none of {', '.join(_METHODS)}; derive it from backend.Callback."
                raise UserError("callbacks", sentence)
        self._callbacks, self._folder = callbacks, folder
        self._resumed_from: int | None = None
        self._raised: Stopped | UserError | None = None

    def take(self, event: Mapping[str, Any]) -> None:
        """Tell what an event of the event log says. Never raises: `look` does."""
        kind, step = event["kind"], event.get("step", 0)
        if kind == "started":
            self._resumed_from = event.get("resumed_from")
        elif kind == "step":
            self._call("on_step", step, event["metrics"])
        elif kind == "eval":
            self._call("on_evaluation", step, event["metrics"], event.get("split", "valid"))
        elif (
            kind == "checkpoint" and step != self._resumed_from
        ):  # a resumed run repeats the event of what it begins from
            self._call("on_save", step, self._folder / event["path"])

    def look(self) -> None:
        """Raises Stopped or UserError for what a callback has raised since the last look."""
        raised, self._raised = self._raised, None
        if raised is not None:
            raise raised

    def end(self, run: TrainedRun) -> None:
        """Tell the end. Raises UserError for what a callback has raised now, or after the run's last look."""
        self._call("on_end", run)
        if isinstance(self._raised, UserError):
            self.look()

    def _call(self, method: str, *arguments: Any) -> None:
        for callback in self._callbacks:
            call: Callable[..., None] | None = getattr(callback, method, None)
            if call is None:
                continue
            try:
                call(*arguments)
            except StopTraining as stop:
                why = str(stop) or f"{method} of {class_name(callback)} asked for it"
                self._raised = self._raised or Stopped(why)
            except BaseException as error:  # SystemExit too: the run is to be saved first
                what = describe_error(error, None, _LONGEST_ERROR)
                self._raised = self._raised or UserError(
                    "callbacks", f"{method} of {class_name(callback)} raised {what}."
                )
