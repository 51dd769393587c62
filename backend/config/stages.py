"""The stages of a run: consecutive parts with settings and training rows of their own, beside those of the run."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from backend.config.checks import CheckedValues, cross_setting_faults
from backend.config.other_programs.translation import translate
from backend.config.setting import STAGE_DATA, STAGE_KEYS, STAGE_OWN, STAGE_SETTINGS
from backend.config.settings.model_and_data import DataFields
from backend.utils.errors import ConfigProblem, UserError
from backend.utils.text import SENTENCE, quote

Stages = Sequence[Mapping[str, Any]]

OF_DATASET = ("data", "dataset_config", "train_split")
TRAINING_SPLIT_ALONE: dict[str, Any] = {  # defaults of the splits that no stage reads
    key: DataFields.model_fields[key].get_default(call_default_factory=True)
    for key in ("valid_split", "test_split", "validation_split", "valid_data", "test_data", "eval_data")
}


def stage_at(stages: Stages, step: int | None) -> int:
    """Index of the stage of a step (from 1): the first before the first step, the last after the end and for None."""
    last = 0
    for index, stage in enumerate(stages):
        last += stage["iters"]
        if step is not None and step <= last:
            return index
    return len(stages) - 1


def first_step(stages: Stages, index: int) -> int:
    return 1 + sum(stage["iters"] for stage in stages[:index])


def stage_settings(values: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Settings other than data that a stage replaces in its run's `values`. Evaluations keep their size."""
    replaced = {key: value for key, value in values["stages"][index].items() if key in STAGE_SETTINGS}
    if "batch_size" in replaced and values["eval_batch_size"] is None:
        batches = values["gradient_accumulation_steps"] * values["steps_per_generation"]
        replaced["eval_batch_size"] = values["batch_size"] * batches
    if "group_size" in replaced and values["num_generations_eval"] is None:
        replaced["num_generations_eval"] = values["group_size"]
    return replaced


def stage_data(values: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Settings of the training rows that a stage replaces; of another dataset only the training split is read."""
    stage = values["stages"][index]
    replaced = {key: stage[key] for key in STAGE_DATA if key in stage and stage[key] != values[key]}
    return replaced | (TRAINING_SPLIT_ALONE if replaced.keys() & {*OF_DATASET} else {})


def stage_rows(values: Mapping[str, Any], index: int) -> dict[str, Any]:
    """What of `stage_data` changes the rows; {} if the stage trains on the rows of the run."""
    replaced = stage_data(values, index)
    made = ("prompt_template", "answer_pattern", "map_function")
    if replaced.keys() & {*OF_DATASET, *made}:
        return replaced
    if any(values[key] for key in made) and replaced.keys() & {"prompt_feature", "answer_feature"}:
        return replaced  # the columns that they write into
    return {}


def scoring_of(values: Mapping[str, Any], index: int) -> dict[str, Any]:
    stage = values["stages"][index]
    functions: list[str] = stage.get("reward_functions") or values["reward_functions"]
    weights: list[float] = stage.get("reward_weights") or []
    if not weights and not stage.get("reward_functions"):
        weights = values["reward_weights"]
    return {"reward_functions": functions, "reward_weights": weights}


def validated_stages(
    values: Mapping[str, Any], validate: Callable[[str, Any], Any]
) -> tuple[list[dict[str, Any]], list[ConfigProblem]]:
    """(the stages in our keys and valid values, their problems). `values` holds the run's valid settings."""
    stages, faults = list[dict[str, Any]](), list[ConfigProblem]()
    for number, stage in enumerate(values["stages"], 1):
        own = {str(key): value for key, value in stage.items() if key in STAGE_OWN and value not in (None, [])}
        read = translate({key: value for key, value in stage.items() if key not in STAGE_OWN})
        sentences, valid = [fault.sentence for fault in read.faults], dict[str, Any]()
        if strange := [key for key in read.values if key not in STAGE_KEYS]:
            what = f"There is {quote(strange[0], 40)}, which no stage can have of its own; it can have "
            sentences.append(f"{what}{', '.join((*STAGE_OWN, *STAGE_DATA[:1], *STAGE_SETTINGS))}.")
        if "iters" not in own:
            sentences.append("It needs iters, a whole number of steps above 0.")
        for key, value in (own | read.values).items():
            try:
                valid[key] = validate(key, value) if key in STAGE_KEYS else value
            except UserError as error:
                sentences += [fault.sentence for fault in error.faults]
        stages.append(valid)
        faults += [fault_of_stage(number, sentence) for sentence in sentences]
    with suppress(KeyError):  # a setting of the run that is needed is invalid, which is reported by itself
        whole = dict(values) | {"stages": stages}
        of_run = [] if faults else cross_setting_faults(whole)
        of_stages = [] if faults else [whole | stage_settings(whole, index) for index in range(len(stages))]
        for index, of_stage in enumerate(of_stages):
            has = of_stage | stage_data(whole, index) | scoring_of(whole, index)
            found = [fault for fault in cross_setting_faults(has) if fault not in of_run]
            found += faults_in_course(of_stages[index - 1], of_stage) if index else ()
            faults += [fault_of_stage(index + 1, fault.sentence) for fault in found]
    return stages, faults


def fault_of_stage(number: int, sentence: str) -> ConfigProblem:
    prefix = f"Stage {number}: "
    shown = quote(sentence, SENTENCE - len(prefix) - 1)
    return ConfigProblem("stages", prefix + shown + "." * shown.endswith("…"))


def faults_in_course(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[ConfigProblem]:
    """Problems of a change between two steps, of settings that would be fine in a new run."""
    if after.get("steps_per_eval") and not before.get("steps_per_eval"):
        sentence = "This run began without evaluations and has read no held-out prompts; clone it to add them."
        yield ConfigProblem("steps_per_eval", sentence)
    keys = ("beta", "log_kl", "ratio_against")
    is_full = before.get("train_type") == "full"
    is_warmed = bool(before.get("warmup_steps"))
    if not (is_full or is_warmed or before.get("modules_to_save")) or any(key not in before for key in keys):
        return
    if CheckedValues(**after).needs_reference and not CheckedValues(**before).needs_reference:
        weights = "the weights after its warm-up" if is_warmed else "its Modules to save"
        weights = "under full fine-tuning its weights" if is_full else weights
        what = f"This run began with Beta (KL weight) 0, so it keeps no reference model, and {weights} are overwritten"
        yield ConfigProblem("beta", f"{what}; clone the run to add one.")
