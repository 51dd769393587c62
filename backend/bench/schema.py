"""The file that `bench device` writes: the device, the versions, and one outcome for each task. Units are in the names.

Sizes are in gigabytes of 10⁹ bytes, rates in tokens a second, log-probabilities in nats. The file holds nothing of
its user: no name, no host, no path.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from backend.utils.whole_file import save_as

Precision = Literal["4-bit", "bf16", "4-bit float32", "float32"]
"""4-bit weights have scales and activations in bfloat16, as models on the Hub do, or in float32."""
Measure = Literal["prefill", "sampling", "learning", "gap", "launches", "switch"]
Ended = Literal["finished", "out of time", "interrupted"]

FORMAT = 1
"""Number of this format; a file of another is refused when it is read."""


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Qwen3Shape(Record):
    """The sizes of a Qwen3 with tied embeddings."""

    name: str
    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int


class Task(Record):
    """One measurement to take: of which model, of what, and on which workload. Lengths are in tokens."""

    shape: Qwen3Shape
    precision: Precision
    measure: Measure
    prompts: int = 1
    group_size: int = 8
    prompt: int
    completion: int = 1
    filters: bool = False
    """Whether sampling filters as the default settings do, or draws from the whole vocabulary."""
    kl: bool = False
    switch: str = ""
    """A name in `switches.SWITCHES`, for the measure `switch`."""
    most_rounds: int = 5

    @property
    def model_name(self) -> str:
        return f"{self.shape.name}, {self.precision}"

    @property
    def rows(self) -> int:
        return self.prompts * self.group_size

    @property
    def title(self) -> str:
        """The task in words, without the model."""
        match self.measure:
            case "sampling":
                return f"sampling, G {self.group_size}, {'default filters' if self.filters else 'no filters'}"
            case "learning":
                return f"learning, {'with KL' if self.kl else 'without KL'}"
            case "switch":
                return f"switch: {self.switch}"
            case _:
                return self.measure


# ── what is measured ─────────────────────────────────────────────────────────────────────────────────────────────────


class PrefillNumbers(Record):
    measure: Literal["prefill"] = "prefill"
    rounds: int
    tokens_per_s: float
    """Prompt tokens, of all prompts together."""


class SamplingNumbers(Record):
    measure: Literal["sampling"] = "sampling"
    rounds: int
    tokens_per_s: float
    """Completion tokens of all rows in the steady state: without prefill, and without tracing the step."""
    step_ms: float
    peak_gb: float
    estimate_gb: float
    reductions: list[str]
    """Where the memory plan held the workload down."""


class LearningNumbers(Record):
    measure: Literal["learning"] = "learning"
    rounds: int
    step_s: float
    tokens_per_s: float
    """Completion tokens."""
    peak_gb: float
    estimate_gb: float
    reductions: list[str]


class GapNumbers(Record):
    """|log p of the sampler − log p of the learner| over the sampled tokens, before any update."""

    measure: Literal["gap"] = "gap"
    tokens: int
    mean_nats: float
    p99_nats: float
    max_nats: float


class LaunchNumbers(Record):
    """Kernel launches of one decoding step, as versions before December 2026 counted them."""

    measure: Literal["launches"] = "launches"
    launches: dict[str, int]
    """By what computes the step: the model's own blocks, fused blocks, or these with kernels of our own."""
    by_kernel: dict[str, int]
    """Of the last of these."""


class SwitchNumbers(Record):
    """The same work with a technique on and off, in turns: medians."""

    measure: Literal["switch"] = "switch"
    rounds: int
    on_s: float
    off_s: float
    on_peak_gb: float
    off_peak_gb: float
    on_gap_nats: float | None = None
    """Mean gap of sampler and learner, where the switch is about it."""
    off_gap_nats: float | None = None


Numbers = Annotated[
    PrefillNumbers | SamplingNumbers | LearningNumbers | GapNumbers | LaunchNumbers | SwitchNumbers,
    Field(discriminator="measure"),
]


class Outcome(Record):
    """What became of a task: its numbers, or a sentence about why there are none."""

    task: Task
    at_s: float
    """Seconds after the start of the bench; a laptop that is warm is slower."""
    took_s: float
    numbers: Numbers | None
    error: str = ""


# ── the file ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Machine(Record):
    chip: str
    cores: int
    memory_gb: float
    working_set_gb: float | None
    """What Metal recommends at most; None without Metal."""
    system: str
    computes_on: Literal["gpu", "cpu"]


class BenchSettings(Record):
    minutes: float
    scale: str
    sampling: str
    """Temperature and default filters in words."""
    clock: Literal["wall", "CPU"]
    """Which seconds are measured: wall time on a GPU, on a CPU those of all threads of the process."""


class DeviceFile(Record):
    format: Literal[1] = FORMAT
    date: str
    machine: Machine
    versions: dict[str, str]
    settings: BenchSettings
    ended: Ended
    took_s: float
    outcomes: list[Outcome]
    unmeasured: list[str]
    """Tasks that there was no time for."""

    @property
    def file_name(self) -> str:
        """device-<chip>-<date>.json"""
        chip = re.sub(r"[^a-z0-9]+", "-", self.machine.chip.lower()).strip("-")
        return f"device-{chip}-{self.date}.json"

    def write(self, path: Path) -> None:
        """Replace the file at once, so that an end at any moment leaves a whole one. Raises DiskError."""
        save_as(path, self.model_dump_json(indent=1) + "\n")


def read(path: Path) -> DeviceFile:
    """Raises OSError, or ValueError for anything that is not such a file."""
    return DeviceFile.model_validate_json(path.read_text("utf-8"))
