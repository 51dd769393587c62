"""`python -m backend.bench.child`: measures one random model, in a process of its own, over JSON lines.

Each line is {"task", "allowance_s"}, and its answer {"numbers"} or {"error"}, a sentence. After an error that is not a UserError
the parent starts another process: an error of the device may leave nothing usable behind.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from backend.engine.cpu import blas
from backend.utils.child_process import answer, claim_stdout, requests
from backend.utils.errors import UserError

VERB = "device-bench"
"""The word for this process in a bundled app."""


def main() -> None:
    out = claim_stdout()
    blas.prepare()
    from backend.bench.measures import ModelBench

    with tempfile.TemporaryDirectory() as folder:
        bench = ModelBench(Path(folder))
        for request in requests():
            answer(out, answer_to(bench, request))


def answer_to(bench: Any, request: dict[str, Any]) -> dict[str, Any]:
    import mlx.core as mx

    from backend.bench.schema import Task
    from backend.engine.model_probe import describe_error
    from backend.trainer.machine import gpu_error

    try:
        numbers = bench.take(Task.model_validate(request["task"]), request["allowance_s"])
        mx.synchronize()  # a GPU error is raised by the next call that waits for the device
        return {"numbers": numbers.model_dump()}
    except UserError as mistake:
        return {"error": " ".join(fault.sentence for fault in mistake.faults), "is_usable": True}
    except Exception as error:  # of any kind: the engine, mlx and Metal raise here, and the next task goes on
        known = gpu_error(error)
        happened = f"{known.happened} " if known else ""
        return {"error": f"{happened}{describe_error(error)}.", "is_usable": False}


if __name__ == "__main__":
    main()
