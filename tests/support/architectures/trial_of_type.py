"""All trials of one model type, in the order in which a user would meet them, as one outcome."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from backend.models import architectures
from backend.models.architectures import UNTRAINABLE
from backend.utils.errors import UserError
from tests.support.architectures import trials
from tests.support.architectures.outcome import FINE_TUNES, Outcome


def try_type(arch: str, work: Path) -> Outcome:
    """Try `arch` within the folder `work`."""
    if arch in UNTRAINABLE:
        return _still_untrainable(arch, work)
    outcome = Outcome()
    try:
        folder = trials.tiny_model(work / "models", arch)
    except Exception as error:
        return Outcome(failures=[f"making it: {_where(error)}"])
    if sentence := trials.refused(folder, "lora"):
        return Outcome(refusal=sentence)

    def attempt(what: str, trial: Callable[[], Any]) -> Any:
        try:
            return trial()
        except UserError:
            raise
        except Exception as error:
            outcome.failures.append(f"{what}: {_where(error)}")
            return None

    for name, value in (attempt("describing it", lambda: trials.describe(folder)) or {}).items():
        setattr(outcome, name, value)
    if not trials.refused(folder, "full"):
        attempt("gradients", lambda: trials.check_gradients(folder))
    attempt("a run", lambda: trials.run_and_resume(folder, work / "run"))
    for train_type in FINE_TUNES:
        try:
            attempt(train_type, lambda kind=train_type: trials.learn(folder, kind))
        except UserError as mistake:
            outcome.refused[train_type] = " ".join(fault.sentence for fault in mistake.faults).replace(
                str(folder), arch
            )
    return outcome


def _still_untrainable(arch: str, work: Path) -> Outcome:
    refusal = architectures.refusal({"model_type": arch}, ["model.safetensors", "tokenizer.json"])
    try:
        folder = trials.tiny_model(work / "models", arch)
        if not trials.refused(folder, "lora"):
            trials.run_and_resume(folder, work / "run")
            return Outcome(refusal, failures=["It is in UNTRAINABLE, and a run of it works."])
    except (Exception, SystemExit):  # it cannot be made, or its run fails: so it says
        pass
    return Outcome(refusal)


def _where(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''} ({Path(last.filename).name}:{last.lineno})"
