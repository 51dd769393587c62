"""`import` writes a file of another program as one of ours; `check` says what was made of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from backend.__main__ import app
from backend.config.config import load, parse, problems, read
from backend.config.other_programs.files import import_file

VERBS = app()
HERE = Path(__file__).parent

TRL_FILE = """\
model_name_or_path: owner/model
dataset_name: owner/rows
output_dir: out
learning_rate: 1e-6
lr_scheduler_type: linear
gradient_accumulation_steps: 4
max_steps: 200
reward_funcs: [accuracy_reward]
use_vllm: true
"""


def call(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(VERBS, list(words))
    return result.exit_code, result.stdout, result.stderr


def test_a_file_for_trl_becomes_one_of_ours_with_trls_defaults(tmp_path: Path) -> None:
    (tmp_path / "trl.yaml").write_text(TRL_FILE)
    code, said, missing = call("import", str(tmp_path / "trl.yaml"), "--output", str(tmp_path / "ours.yaml"))
    assert (code, missing) == (0, "") and "is a file for TRL; written to" in said
    config, text = load(tmp_path / "ours.yaml"), (tmp_path / "ours.yaml").read_text()
    assert (config.batch_size, config.gradient_accumulation_steps, config.group_size) == (1, 4, 8)
    assert (config.learning_rate, config.lr_schedule, config.lr_final, config.iters) == (1e-6, "linear", 0.0, 200)
    assert (config.beta, config.grpo_loss_type, config.train_type, config.seed) == (0.0, "dapo", "full", 42)
    for line in (
        "# Not in the file; what TRL takes:",
        "#   beta: 0.0",
        "# Not carried over:",
        "#   use_vllm: completions are sampled",
        "# Read as:",
        "#   max_steps → iters: 200",
    ):
        assert line in text
    assert "epochs" not in text, "max_steps is given"


def test_a_file_for_mlx_lm_lora_keeps_its_own_lora_parameters(tmp_path: Path) -> None:
    (tmp_path / "theirs.json").write_text(
        json.dumps({"train": True, "model": "a/b", "data": "c/d", "lora_parameters": {"rank": 4}})
    )
    (tmp_path / "ours.yaml").write_text(import_file(tmp_path / "theirs.json").text)
    config = load(tmp_path / "ours.yaml")
    assert (config.rank, config.scale, config.num_layers, config.optimizer, config.iters) == (4, 10.0, -1, "adam", 100)


@pytest.mark.parametrize("file", sorted(HERE.glob("*_*.yaml")), ids=lambda path: path.stem)
def test_every_file_is_imported_without_an_unknown_key(file: Path, tmp_path: Path) -> None:
    if file.stem == "users_example":  # a file of ours
        return
    imported = import_file(file)
    (tmp_path / "ours.yaml").write_text(imported.text)
    needed = dict.fromkeys({"model", "data"} & {fault.setting for fault in imported.missing}, "given/later")
    ours = read(tmp_path / "ours.yaml") | needed
    assert not problems(ours) and parse(read(file) | needed) == parse(ours), "trained as it is, it is the same run"


def test_paths_are_found_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "rewards.py").write_text("def mine(completions, **_): return [0.0] * len(completions)\n")
    text = "model_name_or_path: model\ndataset_name: a/b\nreward_funcs: lib.rewards.mine\n"
    (tmp_path / "trl.yaml").write_text(text)
    (tmp_path / "ours.yaml").write_text(import_file(tmp_path / "trl.yaml").text)
    config = load(tmp_path / "ours.yaml")
    assert config.model == str(tmp_path / "model")
    assert config.reward_functions == [f"{tmp_path / 'lib' / 'rewards.py'}::mine"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("group_size: 4\n", "has no word of TRL, mlx-lm-lora or mlx-grpo alone"),
        ("- a\n", "must hold settings as “key: value” lines."),
        (TRL_FILE + "eval_strategy: hour\n", "eval_strategy: eval_strategy must be no, steps or epoch, not hour"),
        (TRL_FILE + "num_generation: 4\n", "There is no setting num_generation. Did you mean num_generations?"),
        (TRL_FILE + "temperature: 0\n", "temperature: Temp must be above 0, not 0."),
    ],
)
def test_what_cannot_be_imported_is_a_sentence_and_writes_nothing(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text(text)
    code, said, faults = call("import", str(tmp_path / "theirs.yaml"), "-o", str(tmp_path / "ours.yaml"))
    assert (code, said) == (2, "") and says in faults
    assert not (tmp_path / "ours.yaml").exists()


def test_what_a_script_names_and_its_arguments_do_not_is_still_to_be_given(tmp_path: Path) -> None:
    (tmp_path / "args.yaml").write_text("num_generations: 8\n")
    code, _, missing = call("import", str(tmp_path / "args.yaml"))
    assert code == 0 and missing.splitlines()[0] == "Still to be given before it can be trained:"
    assert [line.split(":")[0] for line in missing.splitlines()[1:]] == ["model", "data", "reward_functions"]


def test_check_says_on_stderr_what_was_made_of_each_word_and_keeps_stdout_to_its_list(tmp_path: Path) -> None:
    (tmp_path / "trl.yaml").write_text(TRL_FILE + "save_strategy: hour\n")
    code, said, told = call("check", str(tmp_path / "trl.yaml"), "--json")
    assert code == 2
    assert [fault["setting"] for fault in json.loads(said)] == ["save_strategy"]
    assert told.startswith("This is a file for TRL.") and "max_steps: read as iters: 200." in told
    assert "use_vllm: without effect here: completions are sampled" in told
