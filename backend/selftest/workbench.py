"""What the checks of the self-test share: a temporary folder, and what earlier checks have made for later ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backend.spec.run_folder import RunFolder

if TYPE_CHECKING:
    from backend.run.parts import RunParts
    from backend.types import Group


@dataclass(slots=True)
class Workbench:
    """`folder` is empty at first, and deleted at the end. `parts` are the loaded demo, `groups` what it has sampled; both are set by
    the checks that make them."""

    folder: Path
    parts: RunParts | None = None
    groups: list[Group] = field(default_factory=list)

    @property
    def run(self) -> RunFolder:
        """The run whose step is learned and saved."""
        return RunFolder(self.folder / "runs" / "selftest")

    @property
    def loaded(self) -> RunParts:
        assert self.parts is not None, "the check that loads the demo comes first"
        return self.parts

    def settings(self) -> dict[str, Any]:
        """The demo's settings, for a single short step of one group."""
        from backend.spec.config import read
        from backend.spec.places import demo_config

        changes: dict[str, Any] = {
            "iters": 1, "batch_size": 1, "group_size": 4, "num_iterations": 1, "max_completion_length": 16,
            "learning_rate": 2e-5, "lr_schedule": "constant", "lr_warmup_steps": 0, "steps_per_eval": 0, "val_batches": 1,
        }  # fmt: skip
        return read(demo_config()) | changes
