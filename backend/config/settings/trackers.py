"""Where a run's metrics and completions are written beside its event log."""

from __future__ import annotations

from pydantic import BaseModel

from backend.config.setting import setting


class TrackerFields(BaseModel):
    """Where a run's metrics and completions are written beside its event log: the fields of `backend.config.config.Config` about it."""

    # fmt: off
    report_to: list[str] = setting([], "output", "Report to", "Trackers that follow the run: csv, tensorboard, trackio, wandb; or none, or all "
                                   "that are installed. They slow nothing down, and send nothing over the network unless WANDB_MODE is online.",
                                   advanced=True)
    tracker_project: str = setting("", "output", "Tracker project", "The project in which trackio and wandb file the run. Empty means grpo-studio.",
                                   advanced=True)
    tracker_run_name: str = setting("", "output", "Tracker run name", "What trackers call the run. Empty means the name of its folder.",
                                    advanced=True)
    # fmt: on
