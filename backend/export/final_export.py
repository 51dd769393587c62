"""What a finished run exports by itself: the fused model, and LM Studio's copy."""

from __future__ import annotations

from backend.config.config import Config
from backend.export.export_run import Export, export_run, fuse_run
from backend.runs.events import EventLog
from backend.runs.run_folder import RunFolder
from backend.utils.errors import UserError


def fuses(config: Config) -> bool:
    """Whether there are adapters to fold into the base model at the end."""
    return config.fuse and config.train_type != "full"


def exports(config: Config) -> bool:
    """Whether a run with these settings exports anything."""
    return fuses(config) or bool(config.lm_studio_name)


def export_finished(config: Config, run: RunFolder, event_log: EventLog) -> None:
    """Export a finished run as its settings say. A fault of LM Studio's is a note, not a failure: the run has trained well and its
    model is saved."""
    if fuses(config):
        fuse_run(run)
    if not config.lm_studio_name:
        return
    try:
        exported = export_run(run, Export("lmstudio", config.lm_studio_name, keeps_equal=True))
    except UserError as mistake:
        sentence = " ".join(fault.sentence for fault in mistake.faults)
        event_log.write("note", level="warning", sentence=f"The model was not put into LM Studio. {sentence}")
    else:
        sentence = f"The model is in LM Studio as {config.lm_studio_name} ({exported.path})."
        event_log.write("note", level="info", sentence=sentence)
