"""Completions of a few rows by the model as a run begins with it, for trying rewards. Keeps the model in memory."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from backend.config.config import Config
from backend.data.preview import open_dataset
from backend.data.problems import PromptFormat, fitting_problem
from backend.data.rows import check_columns
from backend.models.policy import load_policy, load_start
from backend.runs.saved_weights import find_adapter
from backend.sampling.conversations import Tools
from backend.sampling.rollout import Sampler
from backend.sampling.sampler import Sampling
from backend.tools.host import NO_TOOLS, ToolHost
from backend.trainer.memory.plan import dtype_here
from backend.types import Group
from backend.utils.errors import UserError

Report = Callable[[dict[str, Any]], None]

WITHOUT_REFERENCE = {  # settings under which no reference is loaded
    "beta": 0.0,
    "log_kl": False,
    "sync_ref_model": False,
    "reference_model_path": "",
    "ratio_against": "old",
}

SMALLEST_MODEL = WITHOUT_REFERENCE | {  # load as little as possible: one fresh adapter changes no output (B = 0)
    "train_type": "lora",
    "num_layers": 1,
    "rank": 1,
    "lora_keys": [],
    "modules_to_save": [],
    "grad_checkpoint": False,
}

ADAPTER_SHAPE = ("train_type", "num_layers", "rank", "scale", "lora_keys", "modules_to_save")


@dataclass(frozen=True, slots=True)
class Pick:
    """Which rows of the training split: `count` of them from the first on or at random, or these `numbers`, from 1."""

    how: Literal["first", "random", "numbers"] = "random"
    count: int = 8
    numbers: tuple[int, ...] = ()

    def order(self, rows: int, seed: int) -> list[int]:
        """Indices of candidate rows, in order: more than `count`, because some may prove too long. Raises UserError."""
        if self.how == "numbers":
            missing = next((number for number in self.numbers if not 1 <= number <= rows), None)
            if missing is not None or not self.numbers:
                reason = f"There is no row {missing}" if missing is not None else "No row is named"
                raise UserError("rows", f"{reason}; the dataset's rows are 1 to {rows:,}.")
            return [number - 1 for number in self.numbers]
        if self.how == "first":
            return list(range(rows))
        return random.Random(f"tryout {seed}").sample(range(rows), rows)


class TrialSampler:
    """Samples, and caches the loaded model by the settings that it depends on."""

    def __init__(self) -> None:
        self._loaded: tuple[Any, Sampler] | None = None

    def sample(
        self,
        config: Config,
        pick: Pick,
        group_size: int,
        seed: int,
        report: Report = lambda progress: None,
        check: Callable[[], None] = lambda: None,
        tools: ToolHost | None = None,
    ) -> list[Group]:
        """Completions of each picked row. `report` takes {"phase", "done"?, "of"?}; `check` may raise to stop."""
        report({"phase": "reading the dataset"})
        dataset = open_dataset(config)
        check()
        report({"phase": "loading the model"})
        sampler = self._sampler_of(config)
        check()
        rows, source = dataset.rows("train"), dataset.source_of("train")
        if faults := check_columns(rows, config, source):
            raise UserError(faults)
        order, schemas = pick.order(len(rows), seed), tools.schemas if tools else NO_TOOLS
        prompt_format, tokenizer = PromptFormat.of(config, schemas), sampler.policy.tokenizer
        fitting = (fitting_problem(index, rows[index], tokenizer, prompt_format, source) for index in order)
        count = len(order) if pick.how == "numbers" else pick.count
        problems = list(islice((problem for problem in fitting if problem is not None), count))
        if not problems:
            sentence = "Every picked prompt is longer than what Max Seq leaves beside the completion."
            raise UserError("max_seq_length", sentence)
        most_tokens = len(problems) * group_size * config.max_completion_length

        def poll(tokens: int) -> None:
            check()
            report({"phase": "sampling", "done": tokens, "of": most_tokens})

        poll(0)
        sampler.max_tokens, sampler.stop = config.max_completion_length, tuple(config.stop)
        sampler.tools = Tools.of(config, tools, tokenizer)
        return sampler.sample(problems, group_size, Sampling.of(config), seed, 0, poll)

    def _sampler_of(self, config: Config) -> Sampler:
        names = (config.model, config.tokenizer)
        depends = (config.quantization, config.dtype, config.device, config.image_max_pixels)
        key = (*names, *map(_last_written, names), *depends)
        if config.adapter:
            weights = str(find_adapter(config.adapter).weights)
            key = (*key, weights, _last_written(weights), *(repr(getattr(config, name)) for name in ADAPTER_SHAPE))
        if self._loaded is None or self._loaded[0] != key:
            self._loaded = None  # free the old model's memory first
            smallest = WITHOUT_REFERENCE if config.adapter else SMALLEST_MODEL
            policy = load_policy(config.model_copy(update=smallest | {"dtype": dtype_here([config])[0]}))
            if config.adapter:
                load_start(policy, config, config.adapter)
            self._loaded = key, Sampler(policy, config.max_completion_length)
        return self._loaded[1]


def _last_written(name: str) -> float:
    if not name:
        return 0.0
    path = Path(name).expanduser()
    files = [path, *path.glob("*")] if path.is_dir() else [path]
    return max((file.stat().st_mtime for file in files if file.exists()), default=0.0)
