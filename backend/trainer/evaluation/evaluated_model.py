"""What an evaluation evaluates: a run at one of its checkpoints, or a model that is no run's, and the settings to do it with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from backend.config.config import Config
from backend.config.model_and_data_names import check_weights, model_source
from backend.runs.archive import summary
from backend.runs.checkpoints.checkpoint import Checkpoint, all_checkpoints
from backend.runs.events import step_of_end
from backend.runs.run_folder import RunFolder, find_run
from backend.runs.saved_weights import find_checkpoint
from backend.runs.steering import run_config
from backend.runs.weight_choices import END
from backend.trainer.evaluation.evaluation_rows import Subject, config_digest
from backend.trainer.trial_sampling import SMALLEST_MODEL, WITHOUT_REFERENCE
from backend.utils.errors import UserError
from backend.utils.hub_cache import local_folder

MODEL_KEYS = (
    "model", "tokenizer", "quantization", "dtype", "train_type", "num_layers", "rank", "scale", "dropout", "lora_keys",
    "lora_alpha", "use_rslora", "modules_to_save",
)  # fmt: skip
"""Settings that a run's checkpoint fits; another config cannot change them."""


@dataclass(frozen=True, slots=True)
class EvaluatedModel:
    """`config` has the settings to load the model, read the data and score. A model that is no run's has neither `run` nor
    `checkpoint`. `step` is the step whose reward functions and weights score, of `steps` in all."""

    config: Config
    run: RunFolder | None
    checkpoint: Checkpoint | None
    steps: int

    @property
    def step(self) -> int:
        return self.checkpoint.state.step if self.checkpoint is not None else self.steps

    def subject(self) -> Subject:
        return Subject(
            model=self.config.model,
            run=self.run.name if self.run is not None else None,
            step=self.checkpoint.state.step if self.checkpoint is not None else None,
            train_type=self.config.train_type if self.run is not None else None,
            config_sha256=config_digest(self.config),
        )


def find_evaluated(name: str, config: Config | None, runs_dir: Path | None = None, which: str = END) -> EvaluatedModel:
    """The run `name`, a path or a name in the runs folder, at the checkpoint `which`; else the model `name`, a folder or an id.

    `config` gives data, rewards and sampling in place of the run's own settings; a model needs it. Raises UserError.
    """
    try:
        run = find_run(name, runs_dir)
    except UserError as no_run:
        return _model(name, config, no_run)
    if run.is_locked():
        raise UserError("run", f"The run {run.name} is being trained; evaluate it once it has ended, or stop it first.")
    saved = _checkpoint(run, which)
    own = run_config(run, saved.state.step)
    settings = own if config is None else config.model_copy(update={key: getattr(own, key) for key in MODEL_KEYS})
    steps = summary(run).iterations or own.iters
    return EvaluatedModel(settings.model_copy(update=WITHOUT_REFERENCE), run, saved, steps)


def _model(name: str, config: Config | None, no_run: UserError) -> EvaluatedModel:
    """A model that is no run's. `no_run` says why it is none."""
    if config is None and local_folder(name) is None:
        raise no_run
    source = model_source(name, "model")
    if config is None:
        raise UserError("config", f"{name} is a model and no run: give the settings too, evaluate {name} CONFIG.yaml.")
    check_weights(source, "model")
    settings = config.model_copy(update=SMALLEST_MODEL | {"model": name, "quantization": "none"})
    return EvaluatedModel(settings, None, None, config.iters)


def _checkpoint(run: RunFolder, which: str) -> Checkpoint:
    """The checkpoint that `which` names: end, which is the last unless the run has left another, last, best, or a step. Raises UserError
    naming those there are."""
    if which == END:
        left = step_of_end(run)
        which = "last" if left is None else str(left)
    step = find_checkpoint(run, which).step
    return next(saved for saved in all_checkpoints(run) if saved.state.step == step)
