"""A GPU that fails where a test says: evaluations raise what mlx raises on a Mac, and so do all later ones."""

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

SITE = Path(__file__).with_name("failing_gpu_site")
# Environment variable with the path of a JSON file: the failures to come, each [place, step, text]
VARIABLE = "FAILING_GPU"

METAL = "[METAL] Command buffer execution failed: "
INTERACTIVITY = METAL + "Impacting Interactivity (0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)"
OUT_OF_MEMORY = METAL + "Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)"
IGNORED = (
    METAL
    + "Ignored (for causing prior/excessive GPU errors) (00000004:kIOGPUCommandBufferCallbackErrorSubmissionsIgnored)"
)

# The functions, by file, whose evaluations fail, and what they do
NAMES = {("rollout.py", "sample"): "sampling", ("learner.py", "update"): "learning"}
NAMES |= {("learner.py", "_apply"): "update", ("checkpoint.py", "snapshot"): "saving"}

WRAPPED = ("eval", "async_eval", "synchronize")

Failures = list[list[Any]]  # each [place, step, text]


class FailingGpu:
    """Wraps an evaluation."""

    def __init__(self, pending: Failures, save: Callable[[], object] = lambda: None) -> None:
        self.pending, self.save = pending, save
        self.is_broken = False

    def wrap(self, evaluate: Callable[..., Any]) -> Callable[..., Any]:
        def evaluate_or_fail(*arrays: Any) -> Any:
            place, step, is_emergency = whereabouts()
            if self.is_broken and not is_emergency:
                raise RuntimeError(IGNORED)
            for failure in self.pending:
                if failure[:2] == [place, step]:
                    self.pending.remove(failure)
                    self.save()
                    self.is_broken = True
                    raise RuntimeError(failure[2])
            return evaluate(*arrays)

        return evaluate_or_fail


def whereabouts() -> tuple[str, int, bool]:
    """The place of NAMES and the step that this call comes from, and whether it is that of a save without the GPU."""
    place, step, is_emergency = "", 0, False
    for frame, _ in traceback.walk_stack(sys._getframe()):  # the innermost first
        function = frame.f_code.co_filename.rpartition(os.sep)[2], frame.f_code.co_name
        place = place or NAMES.get(function, "")
        if function in (("trainer.py", "step"), ("trainer.py", "after_step")):
            step = frame.f_locals["step"]
        is_emergency |= function == ("trainer.py", "save_without_gpu")
    return place, step, is_emergency


def install(monkeypatch: Any, failures: Failures) -> FailingGpu:
    """In this process, for one test."""
    gpu = FailingGpu(failures)
    for name in WRAPPED:
        monkeypatch.setattr(mx, name, gpu.wrap(getattr(mx, name)))
    return gpu


def environment(base: dict[str, str], file: Path, failures: Failures) -> dict[str, str]:
    """`base`, for a child process whose GPU fails so."""
    file.write_text(json.dumps(failures))
    path = os.pathsep.join([str(SITE), *filter(None, [base.get("PYTHONPATH")])])
    return base | {VARIABLE: str(file), "PYTHONPATH": path}


def install_from_environment() -> None:
    """In a child process, for good: each failure happens once, whichever process of the run meets it."""
    file = Path(os.environ[VARIABLE])
    failures: Failures = json.loads(file.read_text())
    gpu = FailingGpu(failures, lambda: file.write_text(json.dumps(failures)))
    for name in WRAPPED:
        setattr(sys.modules["mlx.core"], name, gpu.wrap(getattr(mx, name)))
