"""What can be killed: a run, a sweep, a queue, an export, a clone, an evaluation. Each is done from nothing, and gone on with."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any, ClassVar

import yaml

from backend.runs.events import has_finished
from backend.runs.queue import QueueFile
from backend.runs.run_folder import RunFolder
from backend.runs.sweeps.sweep_results import find_sweep, read_results
from tests.support.small_run import write_config
from tests.torture.drawn_settings import Inputs
from tests.torture.preload import Blow
from tests.torture.warm import Ended, WarmProcess


class Work:
    """Something that the backend does in a home folder, with random settings."""

    weight: ClassVar[float]
    """How often it is drawn."""
    can_be_steered: ClassVar[bool] = False
    leaves_processes: ClassVar[bool] = False
    """Whether processes may outlive the one that is killed."""

    def __init__(self, inputs: Inputs, random: Random, warm: WarmProcess) -> None:
        self.inputs, self.warm = inputs, warm
        self.raw: dict[str, Any] = inputs.draw(random)
        self.choose(random)

    def choose(self, random: Random) -> None:
        """Draw what the settings do not hold."""

    def prepare(self, home: Path) -> None:
        """Fill a new home."""
        (home / ".lmstudio" / "models").mkdir(parents=True)
        (home / "runs").mkdir()
        write_config(home / "config.yaml", self.raw)

    def command(self, home: Path) -> list[str | Path]:
        """The command line that begins, or goes on."""
        raise NotImplementedError

    def is_done(self, home: Path) -> bool:
        raise NotImplementedError

    def do(self, home: Path, trace: Path | None) -> Ended:
        """Without a break."""
        return self.warm.run(*self.command(home), home=home, trace=trace)

    def go_on(self, home: Path, kill_after_s: float | None, blow: Blow | None) -> Ended:
        return self.warm.run(*self.command(home), home=home, kill_after_s=kill_after_s, blow=blow)

    def __str__(self) -> str:
        told = (
            "adapter",
            "save_only_model",
            "load_best_at_end",
            "best_metric",
            "train_type",
            "grpo_loss_type",
            "num_iterations",
            "iters",
            "save_every",
            "stages",
            "fuse",
        )
        return f"{type(self).__name__} { ({key: self.raw[key] for key in told if key in self.raw}) }"


class Run(Work):
    """A run to its end, exports included."""

    weight = 14
    can_be_steered = True

    def command(self, home: Path) -> list[str | Path]:
        run = home / "runs" / "mine"
        return ["resume", run] if (run / "config.yaml").exists() else ["train", home / "config.yaml"]

    def is_done(self, home: Path) -> bool:
        return has_finished(RunFolder(home / "runs" / "mine"))


class Sweep(Work):
    """Four runs in turns, of which half are given up."""

    weight = 2

    def choose(self, random: Random) -> None:
        self.raw |= {
            "steps_per_eval": 1,
            "iters": random.randint(3, 4),
            "stages": [],
            "lm_studio_name": "",
            "run_name": "",
        }
        self.raw |= {"early_stopping_patience": 0, "save_only_model": False}
        del self.raw["stages"]

    def prepare(self, home: Path) -> None:
        super().prepare(home)
        sweep = {
            "name": "rates", "base": self.raw, "search": "grid", "over": {"learning_rate": [1e-4, 1e-3]}, "seeds": [0, 1],
            "halving": {"first_rung": 2, "keep": 0.5}, "round_steps": 1,
        }  # fmt: skip
        (home / "sweep.yaml").write_text(yaml.safe_dump(sweep), encoding="utf-8")

    def command(self, home: Path) -> list[str | Path]:
        if (home / "runs" / "sweeps" / "rates" / "sweep.yaml").exists():
            return ["sweep", "rates", "--resume"]
        return ["sweep", home / "sweep.yaml"]

    def is_done(self, home: Path) -> bool:
        folder = find_sweep("rates", home / "runs")
        results = read_results(folder) if folder else None
        return results is not None and results.state == "finished"


class Trained(Work):
    """Something that is done with a finished run, which is trained first."""

    def prepare(self, home: Path) -> None:
        super().prepare(home)
        self.raw |= {"fuse": False, "lm_studio_name": "", "early_stopping_patience": 0}
        write_config(home / "config.yaml", self.raw)
        trained = self.warm.run("train", home / "config.yaml", home=home)
        assert trained.code == 0, trained.output


class Export(Trained):
    """A finished run's model, in any format, once more where it was there already."""

    weight = 2

    def choose(self, random: Random) -> None:
        self._to = random.choice(["lmstudio", "folder"])
        formats = ["full", "8bit", "bf16", "original", "gguf-f16"]
        self._format = random.choice(formats if self.raw["train_type"] == "full" else [*formats, "adapter", "peft"])
        if self._to == "lmstudio" and self._format in ("adapter", "peft"):
            self._format = "full"
        self._again = random.random() < 0.3

    def prepare(self, home: Path) -> None:
        super().prepare(home)
        (home / "exports").mkdir()
        if self._again:
            before = self.warm.run(*self.command(home), home=home)
            assert before.code == 0, before.output

    def command(self, home: Path) -> list[str | Path]:
        where = ["--folder", home / "exports"] if self._to == "folder" else []
        return [
            "export",
            "mine",
            "--to",
            self._to,
            "--name",
            "tortured",
            "--format",
            self._format,
            "--overwrite",
            *where,
        ]

    def do(self, home: Path, trace: Path | None) -> Ended:
        return self._marked(home, super().do(home, trace))

    def go_on(self, home: Path, kill_after_s: float | None, blow: Blow | None) -> Ended:
        return self._marked(home, super().go_on(home, kill_after_s, blow))

    def is_done(self, home: Path) -> bool:
        """Not by the model alone: whoever killed an export does it again."""
        return self._marker(home).exists()

    def _marker(self, home: Path) -> Path:
        return home / "exports" / "done"

    def _marked(self, home: Path, ended: Ended) -> Ended:
        if ended.code == 0:
            self._marker(home).touch()
        return ended

    def __str__(self) -> str:
        return f"{super().__str__()} to {self._to} as {self._format}{' again' if self._again else ''}"


class Clone(Trained):
    """A clone of a finished run, and its own training."""

    weight = 2

    def choose(self, random: Random) -> None:
        self._warm = random.random() < 0.6
        self.raw.pop("stages", None)
        self.raw["test"] = False

    def command(self, home: Path) -> list[str | Path]:
        if (home / "runs" / "copy" / "config.yaml").exists():
            return ["resume", "copy"]
        how = "--warm" if self._warm else "--cold"
        return ["clone", "mine", how, "--name", "copy", "--set", f"iters={self.raw['iters'] + 2}", "--start"]

    def is_done(self, home: Path) -> bool:
        return has_finished(RunFolder(home / "runs" / "copy"))

    def __str__(self) -> str:
        return f"{super().__str__()}, {'warm' if self._warm else 'cold'}"


class Evaluate(Trained):
    """A comparison before and after training."""

    weight = 1

    def command(self, home: Path) -> list[str | Path]:
        return ["evaluate", "mine", "--split", "valid", "--name", "held", "--n", "2"]

    def is_done(self, home: Path) -> bool:
        return (home / "runs" / "mine" / "evaluations" / "held.json").exists()


class Queue(Work):
    """A run that waits its turn. Its trainer is a process apart, which may outlive the queue's, and is killed some seconds later."""

    weight = 0.4
    leaves_processes = True

    def command(self, home: Path) -> list[str | Path]:
        run, queue = RunFolder(home / "runs" / "mine"), QueueFile(home / "runs")
        if run.has_event_log and not queue.holds(run):
            return ["resume", "mine"]
        return ["queue", "run"] if queue.holds(run) else ["queue", "add", home / "config.yaml"]

    def do(self, home: Path, trace: Path | None) -> Ended:
        added = super().do(home, trace)
        return super().do(home, trace) if added.code == 0 else added

    def is_done(self, home: Path) -> bool:
        return has_finished(RunFolder(home / "runs" / "mine"))


WORKS: dict[str, type[Work]] = {work.__name__.lower(): work for work in (Run, Sweep, Export, Clone, Evaluate, Queue)}
"""By their names."""
