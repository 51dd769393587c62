"""Trains the run of this folder with TRL.

    uv run train.py                                      # one GPU; uv installs what the lines above name
    accelerate launch --num_processes 4 train.py         # four GPUs, where these packages are installed
    uv run train.py --max_steps 10 --report_to none      # any argument of `trl grpo` overrides grpo_config.yaml

It reads grpo_config.yaml (TRL's arguments) and settings.json (what TRL has no argument for), makes the rows with
dataset.py where that has not been done, and leaves the adapter, or the model, in output/. Beside what `trl grpo` does
it takes the prompts in GRPO Studio's order, leaves out prompts that are too long, follows GRPO Studio's learning rate,
and puts adapters on the layers that the settings name.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any


def take_folder(arguments: list[str]) -> Path:
    """The folder of this script, or that of --folder, which is taken out of the arguments: a job of Hugging Face copies
    the script alone."""
    if "--folder" not in arguments:
        return Path(__file__).resolve().parent
    place = arguments.index("--folder")
    _, folder = arguments.pop(place), arguments.pop(place)
    return Path(folder).resolve()


FOLDER = take_folder(sys.argv)
os.chdir(FOLDER)
sys.path.insert(0, str(FOLDER))

import dataset as rows_of_the_run  # noqa: E402
import rewards  # noqa: E402
import torch  # noqa: E402
import yaml  # noqa: E402
from accelerate import PartialState  # noqa: E402
from backend.data.problems import fitted  # noqa: E402
from backend.data.prompts import PromptStream  # noqa: E402
from backend.tools.toolbox import EnvironmentKind, run_tools  # noqa: E402
from backend.utils.errors import UserError  # noqa: E402
from backend.training.schedules import learning_rates  # noqa: E402
from datasets import Dataset, load_dataset  # noqa: E402
from reward_calls import EXECUTED  # noqa: E402
from torch.optim.lr_scheduler import LambdaLR  # noqa: E402
from transformers import (  # noqa: E402
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    EarlyStoppingCallback,
    TrainerCallback,
)
from trl import GRPOTrainer, get_peft_config, get_quantization_config  # noqa: E402
from trl.scripts.grpo import make_parser  # noqa: E402

REPORT = "GRPO_STUDIO_JOB"  # set in a job that GRPO Studio follows; begins the lines that it reads
GROUPS, GROUP_CHARACTERS = 4, 6000  # of the completions in such lines, which must stay short
CONFIG = FOLDER / "grpo_config.yaml"
SETTINGS = rows_of_the_run.settings()
SETTINGS.updates_per_step = SETTINGS.num_iterations * SETTINGS.steps_per_generation
TOOLS = run_tools(SETTINGS).open(EXECUTED)
PROMPTS_PER_STEP = SETTINGS.batch_size * SETTINGS.gradient_accumulation_steps * SETTINGS.steps_per_generation


def main() -> None:
    """Train, save, and answer the test prompts where the settings ask for it."""
    training, model = read_arguments()
    with PartialState().main_process_first():
        if PartialState().is_main_process and not rows_of_the_run.is_prepared():
            rows_of_the_run.prepare()
    tokenizer = AutoTokenizer.from_pretrained(
        SETTINGS.tokenizer or model.model_name_or_path,
        revision=None if SETTINGS.tokenizer else model.model_revision,
        padding_side="left",
        truncation_side="left",
    )
    train, steps = training_rows(Prompts(rows_of_the_run.TRAIN, tokenizer))
    if training.max_steps <= 0:
        training.max_steps = steps * SETTINGS.updates_per_step
    trainer = StudioTrainer(
        model=model.model_name_or_path,
        reward_funcs=list(rewards.FUNCTIONS),
        args=training,
        train_dataset=train,
        eval_dataset=evaluation_rows(training, tokenizer),
        processing_class=tokenizer,
        callbacks=callbacks(training),
        quantization_config=get_quantization_config(model),
        peft_config=adapters(model),
        tools=list(TOOLS.tools.values()),
        environment_factory=environment_factory(),
    )
    trainer.steps = max(1, training.max_steps // SETTINGS.updates_per_step)
    if os.environ.get(REPORT):
        trainer.add_callback(JobReport(trainer))
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_model(training.output_dir)
    if SETTINGS.test and rows_of_the_run.TEST.is_file():
        test = Prompts(rows_of_the_run.TEST, tokenizer).first(SETTINGS.test_batches * prompts_per_evaluation_batch())
        trainer.evaluate(test, metric_key_prefix="test")
    if hasattr(trainer, "end"):
        trainer.end()


class StudioTrainer(GRPOTrainer):
    """TRL's trainer with the learning rate of GRPO Studio, and metrics of each evaluation set under its name. `steps`:
    of the run, as GRPO Studio counts them."""

    steps = 1

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> LambdaLR:
        rate = learning_rates(SETTINGS, self.steps)
        own = optimizer or self.optimizer
        self.lr_scheduler = LambdaLR(own, lambda update: rate(update) / SETTINGS.learning_rate)
        return self.lr_scheduler

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL calls the reward of every set eval_reward; transformers' own metrics have the set's name, as in
        eval_more_runtime."""
        ended = next((key.removesuffix("_runtime") for key in logs if key.endswith("_runtime")), "eval")
        if name := ended.removeprefix("eval").lstrip("_"):
            own = self._metrics["eval"]
            self._metrics["eval"] = defaultdict(list, {f"{name}_{key}": values for key, values in own.items()})
        super().log(logs, start_time)


def shown(messages: Any) -> str:
    """The text of messages, or of a completion that is text."""
    return messages if isinstance(messages, str) else "\n".join(str(message["content"]) for message in messages)


class JobReport(TrainerCallback):
    """Prints steps, metrics and some completions as lines of JSON."""

    def __init__(self, trainer: StudioTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.tell(state, updates=state.max_steps)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if "loss" in logs:
            for group in self.groups():
                self.tell(state, update=state.global_step, group=group)
            if torch.cuda.is_available():
                logs = {**logs, "peak_memory_gb": torch.cuda.max_memory_allocated() / 1e9}
                torch.cuda.reset_peak_memory_stats()
        self.tell(state, update=state.global_step, logs=logs)

    def groups(self) -> list[dict[str, Any]]:
        """The first groups of the newest completions, with long texts cut."""
        logged, size = self.trainer._logs, self.trainer.num_generations
        most, count = GROUP_CHARACTERS // (size + 1), GROUPS * size
        rewards = {name: list(scores)[:count] for name, scores in logged["rewards"].items()}
        prompts, texts, advantages = (list(logged[name])[:count] for name in ("prompt", "completion", "advantages"))
        completions = [
            {
                "text": shown(text)[:most],
                "advantage": advantages[place],
                "rewards": {k: v[place] for k, v in rewards.items()},
            }
            for place, text in enumerate(texts)
        ]
        starts = range(0, len(texts), size)
        return [{"prompt": shown(prompts[at][-1:])[:most], "completions": completions[at : at + size]} for at in starts]

    @staticmethod
    def tell(state: Any, **report: Any) -> None:
        if state.is_world_process_zero:
            print(REPORT, json.dumps(report, default=float), flush=True)


def environment_factory() -> Any:
    """What makes an environment; a mapping where the rows name theirs; None for a run without."""
    types = {kind.type: type_for_trl(kind.type) for kind in TOOLS.kinds.values()}
    factories = {name: partial(new_environment, kind, types[kind.type]) for name, kind in TOOLS.kinds.items()}
    return factories.get("") or factories or None


def type_for_trl(kind: Any) -> type:
    """The class, whose `reset` gets the columns of the dataset, and whose `close` TRL does not take for a tool."""

    def reset(self: Any, row: str, **_: Any) -> Any:
        columns = json.loads(row)
        if isinstance(SETTINGS.environment, dict):
            del columns[SETTINGS.environment_column]
        return kind.reset(self, **columns)

    return type(kind.__name__, (kind,), {"reset": reset, "close": None})


def new_environment(kind: EnvironmentKind, its_type: type) -> Any:
    environment = kind.make()
    if hasattr(environment, "close"):
        atexit.register(environment.close)
    environment.__class__ = its_type
    return environment


# ── arguments ────────────────────────────────────────────────────────────────────────────────────────────────────────


def read_arguments() -> tuple[Any, Any]:
    """(training, model): grpo_config.yaml, for this many processes and this machine, with the command line over it."""
    words = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    _spread(words, PartialState().num_processes)
    if not torch.cuda.is_available():
        print("There is no CUDA here: transformers samples in place of vLLM, on the CPU.")
        words |= {"use_vllm": False, "use_cpu": True}
        _for_transformers(words)
    parser = make_parser()
    if unknown := parser.set_defaults_with_config(**words):
        raise SystemExit(f"This TRL does not know these arguments of grpo_config.yaml: {' '.join(unknown[::2])}.")
    _, training, model, _ = parser.parse_args_and_config(sys.argv[1:])
    training.shuffle_dataset = False  # the order is GRPO Studio's, below
    own = training.model_init_kwargs or {}
    named = {"revision": model.model_revision, "attn_implementation": model.attn_implementation, "dtype": model.dtype}
    training.model_init_kwargs = {**named, **own}
    return training, model


def _spread(words: dict[str, Any], processes: int) -> None:
    """Give each process its part of an update, so that it has as many completions as on one."""
    for word in ("gradient_accumulation_steps", "per_device_train_batch_size"):
        if words[word] % processes == 0:
            words[word] //= processes
            if word == "gradient_accumulation_steps":
                words["steps_per_generation"] //= processes
            return
    print(
        f"An update cannot be divided among {processes} processes: each has all of it, "
        f"and so {processes} times as many completions."
    )


def _for_transformers(words: dict[str, Any]) -> None:
    """Take out the sampling options that vLLM alone has, and say so."""
    options = words.get("generation_kwargs") or {}
    lost = [name for name in ("presence_penalty", "frequency_penalty", "stop") if options.pop(name, None)]
    lost += ["held output"] if words.pop("vllm_structured_outputs_regex", None) else []
    if lost:
        print(f"transformers samples without {', '.join(lost)}.")
    words["generation_kwargs"] = options or None


def adapters(model: Any) -> Any:
    """PEFT's configuration; on the last layers alone where the settings say so. None for full fine-tuning."""
    config = get_peft_config(model)
    if config is not None and SETTINGS.num_layers > 0:
        about = AutoConfig.from_pretrained(model.model_name_or_path, revision=model.model_revision)
        count = about.get_text_config().num_hidden_layers
        config.layers_to_transform = list(range(max(0, count - SETTINGS.num_layers), count))
        if config.target_modules == "all-linear":  # under that word PEFT does not look at the layers
            config.target_modules = linear_layers(about)
    return config


def linear_layers(about: Any) -> set[str]:
    """The last parts of the names of all linear layers but the output layer."""
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(about)
    head = empty.get_output_embeddings()
    linears = [(name, layer) for name, layer in empty.named_modules() if isinstance(layer, torch.nn.Linear)]
    return {name.rpartition(".")[2] for name, layer in linears if layer is not head}


def callbacks(training: Any) -> list[Any]:
    if not SETTINGS.early_stopping_patience or training.eval_strategy == "no":
        return []
    return [EarlyStoppingCallback(SETTINGS.early_stopping_patience, SETTINGS.early_stopping_min_delta)]


# ── rows ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Prompts(Sequence[int | None]):
    """The prompts of a prepared file, each looked at when it is asked for: its number, or None for one that is too
    long. As GRPO Studio does it, a prompt that is too long is left out or cut on the left."""

    def __init__(self, file: Path, tokenizer: Any, name: str = "") -> None:
        self._rows = load_dataset("json", data_files=str(file), split="train")
        form = replace(rows_of_the_run.prompt_format(name), tools=TOOLS.schemas)
        self._tokenizer, self._form = _Tokenizer(tokenizer), form
        self._where = file.stem
        self._chats: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        if index not in self._chats:
            stored = self._rows[index]
            messages = [{"role": message["role"], "content": message["content"]} for message in stored["prompt"]]
            row = json.loads(stored["row"])
            chat, tokens = fitted(messages, row, self._tokenizer, self._form, f"row {index + 1} of {self._where}")
            self._chats[index] = chat if isinstance(tokens, list) else None
        return None if self._chats[index] is None else index

    def chosen(self, numbers: Sequence[int]) -> Dataset:
        """These rows, each as often as it is named."""
        unique = {number: place for place, number in enumerate(dict.fromkeys(numbers))}
        lines = [{**self._rows[number], "prompt": self._chats[number]} for number in unique]
        return Dataset.from_list(lines).select([unique[number] for number in numbers])

    def first(self, count: int) -> Dataset:
        """The first rows that fit, `count` of them; all where it is below 0."""
        numbers: list[int] = []
        for index in range(len(self)):
            if len(numbers) == count:
                break
            if self[index] is not None:
                numbers.append(index)
        return self.chosen(numbers)


class _Tokenizer:
    """transformers' tokenizer, whose apply_chat_template returns token ids as GRPO Studio expects them."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.chat_template = tokenizer.chat_template

    def apply_chat_template(self, messages: Any, **options: Any) -> Any:
        return self._tokenizer.apply_chat_template(messages, **({"return_dict": False} | options))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def training_rows(prompts: Prompts) -> tuple[Dataset, int]:
    """(the rows in the order in which the run takes them, its steps)."""
    if not any(prompts[index] is not None for index in range(len(prompts))):
        raise UserError("max_seq_length", "Every prompt is too long: none leaves room for a completion.")
    steps = SETTINGS.iters
    if SETTINGS.epochs:
        fitting = sum(prompts[index] is not None for index in range(len(prompts)))
        steps = -(-SETTINGS.epochs * fitting // PROMPTS_PER_STEP)  # rounded up
    seed = SETTINGS.seed if SETTINGS.data_seed is None else SETTINGS.data_seed
    return prompts.chosen(PromptStream(prompts, seed).take(steps * PROMPTS_PER_STEP)), steps


def prompts_per_evaluation_batch() -> int:
    return SETTINGS.eval_batch_size or PROMPTS_PER_STEP


def evaluation_rows(training: Any, tokenizer: Any) -> Any:
    """The held-out rows of an evaluation: a dataset, or several by name. None, and no evaluation, without any."""
    if training.eval_strategy == "no":
        return None
    count = SETTINGS.val_batches * prompts_per_evaluation_batch()
    files = {"": rows_of_the_run.VALIDATION} | rows_of_the_run.evaluation_sets()
    found = {name: Prompts(file, tokenizer, name).first(count) for name, file in files.items() if file.is_file()}
    if not found:
        print("There are no held-out rows, so nothing is evaluated.")
        training.eval_strategy, training.eval_on_start, training.load_best_model_at_end = "no", False, False
        return None
    if list(found) == [""]:
        return found[""]
    named = {name or "valid": rows for name, rows in found.items()}
    training.metric_for_best_model = _of_a_set(training.metric_for_best_model, list(named))
    return named


def _of_a_set(metric: str | None, names: list[str]) -> str | None:
    """A metric of evaluations with the name of its set in it; of the first set where it names none."""
    if metric is None:
        return None
    name, slash, rest = metric.removeprefix("eval_").partition("/")
    return f"eval_{name}_{rest}" if slash and name in names else f"eval_{names[0]}_{metric.removeprefix('eval_')}"


if __name__ == "__main__":
    main()
