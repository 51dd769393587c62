"""A check of the self-test, its outcome, and the loop that runs one after the other."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from backend.runs.run_folder import RunFolder
from backend.utils.about import without_private

if TYPE_CHECKING:
    from backend.trainer.run_context import RunContext
    from backend.types import Group


# What the checks of the self-test share: a temporary folder, and what earlier checks have made for later ones.


@dataclass(slots=True)
class Workbench:
    """`folder` is empty at first, and deleted at the end. `parts` are the loaded demo, `groups` what it has sampled; both are set by
    the checks that make them."""

    folder: Path
    parts: RunContext | None = None
    groups: list[Group] = field(default_factory=list)

    @property
    def run(self) -> RunFolder:
        """The run whose step is learned and saved."""
        return RunFolder(self.folder / "runs" / "selftest")

    @property
    def loaded(self) -> RunContext:
        assert self.parts is not None, "the check that loads the demo comes first"
        return self.parts

    def settings(self) -> dict[str, Any]:
        """The demo's settings, for a single short step of one group."""
        from backend.config.config import read
        from backend.utils.places import demo_config

        changes: dict[str, Any] = {
            "iters": 1, "batch_size": 1, "group_size": 4, "num_iterations": 1, "max_completion_length": 16,
            "learning_rate": 2e-5, "lr_schedule": "constant", "lr_warmup_steps": 0, "steps_per_eval": 0, "val_batches": 1,
        }  # fmt: skip
        return read(demo_config()) | changes


# ── check ────────────────────────────────────────────────────────────────────────────────────────────────────────────

State = Literal["ok", "failed", "skipped"]


class CheckFailed(Exception):
    """What was computed is not what it should be; the message is one sentence."""


class CheckSkipped(Exception):
    """The check cannot run here; the message says why."""


@dataclass(frozen=True, slots=True)
class Check:
    """`run` tries one thing and returns a sentence about it. It raises CheckFailed, CheckSkipped, or whatever the tried code raises.
    `needs` names the checks whose results it uses."""

    name: str
    run: Callable[[Workbench], str]
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckResult:
    """How a check ended. `traceback` is that of an exception that nobody expected, else ""; neither text names the user or the home."""

    name: str
    state: State
    sentence: str
    seconds: float
    traceback: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def run_checks(checks: Sequence[Check], workbench: Workbench) -> Iterator[CheckResult]:
    """Run the checks in order; one whose needs were not met is skipped, and a failure ends none of the others."""
    passed: set[str] = set()
    for check in checks:
        missing = [name for name in check.needs if name not in passed]
        if missing:
            result = CheckResult(
                check.name, "skipped", f"It needs what did not work before: {', '.join(missing)}.", 0.0
            )
        else:
            result = _run(check, workbench)
        if result.state == "ok":
            passed.add(check.name)
        yield result


def _run(check: Check, workbench: Workbench) -> CheckResult:
    began = time.perf_counter()
    state: State
    state, trace = "ok", ""
    try:
        sentence = check.run(workbench)
    except CheckSkipped as skipped:
        state, sentence = "skipped", str(skipped)
    except CheckFailed as failed:
        state, sentence = "failed", str(failed)
    except Exception as error:
        state, trace = "failed", traceback.format_exc()
        sentence = f"{type(error).__name__}: {error}"
    seconds = round(time.perf_counter() - began, 2)
    private = (str(workbench.folder),)
    return CheckResult(
        check.name, state, without_private(sentence, private), seconds, without_private(trace, private).strip()
    )
