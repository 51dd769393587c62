"""What a chat is with: a run at one of its checkpoints, or a model that is no run. Reads settings and names; loads nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from backend.config.config import Config, parse
from backend.config.model_and_data_names import check_weights, model_source
from backend.runs.run_folder import RunFolder, find_run
from backend.runs.saved_weights import END, WeightChoice, find_choice
from backend.runs.steering import run_config
from backend.utils.errors import UserError
from backend.utils.files import names_folder
from backend.utils.text import shown_path


@dataclass(frozen=True, slots=True)
class ChatSource:
    """`config` holds the run's settings as they were at the step of `weights`; of a plain model it holds the defaults, with its name.
    `run` and `weights` are None for a plain model, which has a base and nothing trained."""

    name: str
    config: Config
    run: RunFolder | None = None
    weights: WeightChoice | None = None

    @property
    def has_two_models(self) -> bool:
        """Whether base and tuned share no weights: a run of full fine-tuning."""
        return self.run is not None and self.config.train_type == "full"


def find_source(name: str, checkpoint: str = "", runs_dir: Path | None = None) -> ChatSource:
    """A run by path or name, at its end or at `checkpoint`; else a model by folder or Hugging Face id. Raises UserError."""
    try:
        run = find_run(name, runs_dir)
    except UserError:
        return _model(name, checkpoint)
    weights = find_choice(run, checkpoint or END)
    return ChatSource(run.name, run_config(run, weights.step), run, weights)


def _model(name: str, checkpoint: str) -> ChatSource:
    try:
        check_weights(model_source(name, "model"), "model")
    except UserError as mistake:
        if names_folder(name):  # the sentence says what the folder lacks
            raise
        sentence = f"There is no run or model {shown_path(name, 60)}: no run of that name or path, no folder, no owner/name id on Hugging Face."
        raise UserError("model", sentence) from mistake
    if checkpoint:
        raise UserError("checkpoint", f"{shown_path(name, 100)} is a model and no run, so it has no checkpoints.")
    # Neither rows nor rewards: what is left are the settings of a prompt, at their defaults.
    return ChatSource(Path(name).name, parse({"model": name, "data": "-", "system_prompt": ""}))
