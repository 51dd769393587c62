"""The trials of a type in a process of its own, with a limit on its time and memory."""

import multiprocessing
import os
import resource
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

from tests.support.architectures.outcome import Outcome

LIMIT_S, LIMIT_BYTES = 180, 8 << 30  # wall seconds and address space of one type's process


def try_apart(arch: str) -> Outcome:
    """The outcome of `arch`; a process that crashes or runs into a limit is a failure."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.architectures.preloaded"])
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory(prefix="grpo-studio-architecture-") as folder:
        child = context.Process(target=_try_here, args=(arch, Path(folder), theirs))
        child.start()
        theirs.close()
        try:
            return ours.recv() if ours.poll(LIMIT_S) else Outcome(failures=[f"It took more than {LIMIT_S} s."])
        except EOFError:
            child.join()
            return Outcome(failures=[f"Its process ended with code {child.exitcode}."])
        finally:
            child.kill()
            child.join()


def _try_here(arch: str, folder: Path, answer: Connection) -> None:
    from tests.support.architectures.trials import try_type

    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
    os.environ["GRPO_STUDIO_RUNS"], os.environ["GRPO_STUDIO_PREFS"] = f"{folder}/runs", f"{folder}/prefs"
    answer.send(try_type(arch, folder))
