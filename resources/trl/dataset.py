"""The rows of the run as TRL takes them: `python dataset.py` writes data/train.jsonl, data/validation.jsonl and
held_out/*.jsonl.

A row has `prompt` (chat messages), `answer` (text) and `row` (every column of the dataset, as JSON, for the reward
functions and environments). What is done to the rows is GRPO Studio's own code in backend/, with the settings of settings.json: the map
function, the prompt template, the answer pattern, system messages, and the share that is held out. Rows of local files
lie in source/; a dataset of Hugging Face is read from there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from backend.data.problems import PromptFormat, messages_of, problem_of
from backend.data.rows import RowSteps
from backend.data.rows import Splits, hold_out, row_name, stepped
from backend.data.rows import Found
from backend.rewards.resolve import load_reward_file
from backend.rewards.scoring import map_each
from backend.utils.errors import UserError

HERE = Path(__file__).resolve().parent
DATA, HELD_OUT = HERE / "data", HERE / "held_out"
TRAIN, VALIDATION, TEST = DATA / "train.jsonl", DATA / "validation.jsonl", HELD_OUT / "test.jsonl"


class Settings(SimpleNamespace):
    """settings.json: the settings of the run under their names in GRPO Studio."""

    def model_copy(self, *, update: dict[str, Any]) -> Settings:
        return Settings(**(vars(self) | update))


@cache
def settings() -> Settings:
    return Settings(**_about()["settings"])


@cache
def _about() -> dict[str, Any]:
    return json.loads((HERE / "settings.json").read_text(encoding="utf-8"))


def evaluation_sets() -> dict[str, Path]:
    """The named datasets that the run is also evaluated on: name → its prepared file."""
    return {name: HELD_OUT / f"{name}.jsonl" for name in _about()["evaluation_sets"]}


def prompt_format(name: str = "") -> PromptFormat:
    """How a row becomes a prompt; `name` of an evaluation set, which may have columns of its own."""
    own = _about()["evaluation_sets"].get(name, {}).get("settings", {})
    return PromptFormat.of(settings().model_copy(update=own))


def prepare() -> None:
    """Write the prepared files. Raises UserError with a sentence that names the row or the setting."""
    splits = Splits([])
    steps = RowSteps(settings(), _map_rows)
    for split, source in _about()["rows"].items():
        setattr(splits, split, stepped(_found(source), steps, split, splits.notes))
        splits.source[split] = source["source"]
    hold_out(splits, settings())
    for split, file in (("train", TRAIN), ("valid", VALIDATION), ("test", TEST)):
        _write(file, splits.rows(split), prompt_format(), splits.source.get(split, split))
    for name, about in _about()["evaluation_sets"].items():
        own = RowSteps(settings().model_copy(update=about["settings"]), _map_rows)
        rows = stepped(_found(about["rows"]), own, name, splits.notes)
        _write(evaluation_sets()[name], rows, prompt_format(name), about["rows"]["source"])
    for note in splits.notes:
        print(note)


def is_prepared() -> bool:
    return TRAIN.is_file()


def _found(source: dict[str, Any]) -> Found:
    """The rows of a split as they are stored."""
    if "file" in source:
        with (HERE / source["file"]).open(encoding="utf-8") as lines:
            return Found([json.loads(line) for line in lines], source["source"])
    import datasets

    splits = datasets.load_dataset(source["repo"], source["config"] or None, revision=source["revision"])
    name = next((name for name in source["names"] if name in splits), None)
    if name is None and source["is_needed"]:
        raise UserError("data", f"{source['repo']} has none of the splits {', '.join(source['names'])}.")
    return Found([dict(row) for row in splits[name]] if name else [], f"{source['repo']}, {name}")


def _map_rows(
    function: str, rows: Sequence[dict[str, Any]], where: Callable[[int], str]
) -> list[dict[str, Any] | None]:
    file = load_reward_file(HERE / settings().reward_functions_file)
    return map_each(file.map_functions[function], rows, file.path)


def _write(file: Path, rows: Iterable[dict[str, Any]], form: PromptFormat, source: str) -> None:
    """The prepared rows of a split; no file for a split without rows."""
    file.unlink(missing_ok=True)
    for index, row in enumerate(rows):
        problem = problem_of(index, row, messages_of(row, form, row_name(index, source)), [], form)
        text = json.dumps(row, ensure_ascii=False, default=str)
        line = {"prompt": problem.messages, "answer": problem.answer, "row": text}
        if form.environment_column:
            line["environment"] = form.environment_of(row)  # the name that TRL looks for
        file.parent.mkdir(exist_ok=True)
        with file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(line, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    prepare()
