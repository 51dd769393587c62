"""TRL's names over `backend.train`: a script for TRL's GRPOTrainer runs with `backend.trl` in place of `trl`.

Settings mean what they mean in TRL, with its defaults. A run is a folder like any other. What only PyTorch can take,
such as a loaded model, is refused by name.
"""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from backend.config.config import SETTINGS
from backend.config.other_programs.translation import PROGRAMS
from backend.rewards.calls import class_name
from backend.rewards.registry import REWARD_REGISTRY
from backend.trainer.library.training import TrainedRun, resume, train
from backend.utils.errors import UserError

__all__ = ["GRPOConfig", "GRPOTrainer"]

_TRL = next(program for program in PROGRAMS if program.key == "trl")
_SHARED = {word: SETTINGS[word].default for word in _TRL.words if word in SETTINGS and word != "steps_per_generation"}
"""Defaults of arguments that are settings here too; TRL derives the other one from the batch."""


class GRPOConfig:
    """Arguments of TRL's GRPOConfig, by name. Those that are not given read as TRL's defaults."""

    def __init__(self, output_dir: str | None = None, **arguments: Any) -> None:
        self.output_dir, self._arguments = output_dir, arguments

    def __getattr__(self, name: str) -> Any:
        arguments = self.__dict__.get("_arguments", {})
        known = {**_SHARED, **_TRL.defaults(arguments), **arguments}
        if name not in known:
            raise AttributeError(f"GRPOConfig has no argument {name!r}")
        return known[name]

    def to_dict(self) -> dict[str, Any]:
        """The arguments that were given, without `output_dir`."""
        return dict(self._arguments)


class GRPOTrainer:
    """TRL's GRPOTrainer on MLX: `train()` trains a run, in the folder `args.output_dir` if given. `model`: a Hub id or
    a folder. `reward_funcs`: one or several of callables, names of shipped functions, and ids of reward models.
    `train_dataset`, `eval_dataset`: rows with the column `prompt`. `processing_class`: a tokenizer, its id or its
    folder. `peft_config`: peft's LoraConfig, or a mapping of its words; without one all weights are trained.
    `optimizers`: an optimizer of MLX and a schedule, as `backend.train` takes them. `objects`: its `callbacks`,
    `tools`, `environment_factory` and `rollout_func`. Raises UserError."""

    def __init__(
        self,
        model: str,
        reward_funcs: Any = (),
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        *,
        peft_config: Any = None,
        optimizers: tuple[Any, Any] = (None, None),
        **objects: Any,
    ) -> None:
        if not isinstance(model, str | Path):
            raise UserError("model", f"The model is a Hub id or a folder here, not {class_name(model)}.")
        if isinstance(eval_dataset, Mapping):
            raise UserError("eval_dataset", "Several evaluation datasets are files under eval_data here; give one.")
        self.args = args or GRPOConfig()
        self._settings: dict[str, Any] = {
            "defaults": "theirs",
            "model_name_or_path": str(model),
            "num_generations": self.args.num_generations,
            "dataset_test_split": "valid",
            **self.args.to_dict(),
        }
        tokenizer = getattr(processing_class, "name_or_path", processing_class)
        if tokenizer is not None and str(tokenizer) != str(model):
            self._settings["tokenizer"] = str(tokenizer)
        if peft_config is not None:
            words = peft_config if isinstance(peft_config, Mapping) else peft_config.to_dict()
            self._settings["peft_config"] = {
                word: sorted(value) if isinstance(value, set) else getattr(value, "value", value)
                for word, value in words.items()
            }
        is_one = isinstance(reward_funcs, str) or not isinstance(reward_funcs, Sequence)
        given: Sequence[Any] = [reward_funcs] if is_one else reward_funcs
        shipped = {function: name for name, function in REWARD_REGISTRY.items()}
        self._functions = [shipped.get(each, each) if callable(each) else each for each in given]
        if any(str(each).startswith(("accuracy_reward", "cosine_scaled_reward")) for each in self._functions):
            self._settings.setdefault("answer_feature", "solution")  # as TRL's accuracy_reward has it
        splits = {"train": train_dataset, "valid": eval_dataset}
        self._dataset = {name: rows for name, rows in splits.items() if rows is not None}
        self._objects = {name: value for name, value in objects.items() if value is not None}
        self._objects |= {"optimizer": optimizers[0], "schedule": optimizers[1]}
        self.run: TrainedRun | None = None
        """The run once it has ended."""

    def train(self, resume_from_checkpoint: bool | str | None = None) -> TrainedRun:
        """Train, or continue the run in `args.output_dir` (True) or another. Raises as `backend.train`."""
        folder, functions = self.args.output_dir, self._functions or None
        if resume_from_checkpoint:
            run = resume_from_checkpoint if isinstance(resume_from_checkpoint, str) else folder or ""
            self.run = resume(run, reward_functions=functions, **self._objects)
        else:
            place = {"name": Path(folder).name, "runs_dir": Path(folder).absolute().parent} if folder else {}
            objects = {**self._objects, **place, "dataset": self._dataset or None}
            self.run = train(self._settings, reward_functions=functions, **objects)
        return self.run

    @property
    def log_history(self) -> list[dict[str, Any]]:
        return self.run.metrics if self.run else []

    def save_model(self, output_dir: str | None = None) -> Path:
        """The folder with what was trained, adapters or a whole model, copied to another `output_dir` if given."""
        if self.run is None:
            raise UserError("run", "There is nothing to save before train().")
        made = next(folder for name in ("model", "adapters") if (folder := self.run.folder / name).is_dir())
        if output_dir is None or Path(output_dir).absolute() == self.run.folder.absolute():
            return made
        return Path(shutil.copytree(made, output_dir, dirs_exist_ok=True))
