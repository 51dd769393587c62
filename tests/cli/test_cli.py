"""The command line: bad input is refused in one sentence with exit code 2 and leaves no file; everything else works.

Verbs run in this process (typer's CliRunner) unless the test is about the process itself.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from backend.cli.training import new_run, read_settings
from backend.config.config import load
from backend.rewards.catalogue import DEFAULT_REWARDS
from backend.runs.archive import summary
from backend.runs.events import EventLog, read_events
from backend.runs.run_folder import RunFolder, all_runs, hold_lock
from backend.utils.command import backend_environment
from tests.support import small_run
from tests.support.verbs import call, refused, run_ok


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The runs folder, which does not exist yet; the working directory is an empty folder."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("GRPO_STUDIO_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


def config(inputs: Path, folder: Path, **changes: Any) -> Path:
    return small_run.write_config(folder / "config.yaml", small_run.settings_for(inputs, **changes))


@pytest.fixture(scope="module")
def broken(inputs: Path) -> Path:
    """A folder with models and files that cannot be used."""
    folder = inputs / "broken"
    for name in ("weightless", "quantised"):
        shutil.copytree(inputs / "model", folder / name)
    (folder / "weightless" / "model.safetensors").unlink()
    about = json.loads((folder / "quantised" / "config.json").read_text())
    about["quantization"] = {"bits": 4, "group_size": 32}
    (folder / "quantised" / "config.json").write_text(json.dumps(about))
    rows = {"empty": "", "no-answer": '{"prompt": "x", "solution": "y"}\n', "no-prompt": '{"question": "x"}\n'}
    for name, text in rows.items():
        (folder / f"{name}.jsonl").write_text(text)
    (folder / "mine.py").write_text("x = 1\ndef f(:\n")
    return folder


def _reward(name: str) -> dict[str, Any]:
    return {"reward_functions": [name], "reward_weights": []}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"model": "/nowhere/model"}, "model: There is no model /nowhere/model: it is neither a folder nor an"),
    ({"model": "BROKEN/weightless"}, "holds no weights: model*.safetensors is missing."),
    ({"model": "BROKEN/quantised", "quantization": 8}, "is quantised already; choose None to train"),
    ({"model": "BROKEN/quantised", "rollout_quantization": "8"}, "is quantised already; choose None to train"),
    ({"data": "/nowhere/rows.jsonl"}, "data: There is no file or folder /nowhere/rows.jsonl."),
    ({"data": "BROKEN/empty.jsonl"}, "has no rows to train on."),
    ({"data": "BROKEN/no-answer.jsonl", **_reward("r1_accuracy")}, "answer_feature: There is no column answer; "),
    ({"data": "BROKEN/no-prompt.jsonl"}, "prompt_feature: There is no column prompt; "),
    ({"max_seq_length": 7}, "max_seq_length: Every prompt is longer than the 1 token that Max Seq leaves"),
    ({"test": True}, "test: Evaluate test split is on, and "),
    (_reward("r1_acuracy_reward_func"), "function r1_acuracy_reward_func; the nearest is r1_accuracy_reward_func, and"),
    ({"reward_functions_file": "BROKEN/mine.py"}, "a syntax error on line 2"),
    ({"reward_functions_file": "/nowhere/mine.py"}, "There is no file /nowhere/mine.py."),
]


@pytest.mark.parametrize(("raw", "says"), BAD, ids=range(len(BAD)))
def test_bad_input_leaves_no_file(
    raw: dict[str, Any], says: str, inputs: Path, broken: Path, runs: Path, tmp_path: Path
) -> None:
    file = config(inputs, tmp_path, **raw)
    file.write_text(file.read_text().replace("BROKEN", str(broken)))
    before = sorted(tmp_path.rglob("*"))
    message = refused("train", file)
    assert says in message and refused("check", file) == message
    assert sorted(tmp_path.rglob("*")) == before and not runs.exists()


def test_train_without_a_file(inputs: Path, runs: Path) -> None:
    settings = small_run.settings_for(inputs) | {"iters": 1, "fuse": False}
    model, data = settings.pop("model"), settings.pop("data")
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in settings.items()}
    changes = [f"--set={key}={text}" for key, text in texts.items()]
    run_ok("train", "--model", model, "--data", data, *changes)
    (run,) = runs.iterdir()
    assert (load(run / "config.yaml").model, load(run / "config.yaml").iters) == (model, 1)
    both = ("config.yaml", "--run", run)
    for arguments in ((), ("--data", data), ("--model", model, "--run", run), ("config.yaml", "--model", model), both):
        assert "Give a YAML file, --model with --data, or --run" in refused("train", *arguments)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_trainer_listens_stops_a_run(
    number: signal.Signals, inputs: Path, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        signal.raise_signal(number)

    monkeypatch.setattr("backend.trainer.run_process.train", interrupted)
    result = call("train", config(inputs, tmp_path), "--name", "early")
    assert result.exit_code == 3 and "Stopped before its first step." in result.stderr
    assert summary(RunFolder(runs / "early")).state == "stopped"


def test_two_demos_at_once_are_refused(runs: Path) -> None:
    assert refused("demo", "--tools", "--images").startswith("images: ") and not runs.exists()


def test_a_place_where_no_folder_can_be_made_is_refused(inputs: Path, runs: Path, tmp_path: Path) -> None:
    file = config(inputs, tmp_path)
    (tmp_path / "file").write_text("a file")
    for folder in (tmp_path / "file", tmp_path / "file" / "deeper"):
        message = refused("train", file, "--runs-dir", folder)
        assert message == f"runs_dir: The runs folder {folder} cannot be written: Not a directory."
    assert (tmp_path / "file").read_text() == "a file"
    for name in ("../up", "x" * 200):
        assert refused("train", file, "--name", name).startswith("run_name: The run folder name m")
    assert not runs.exists()


def test_check_prints_every_fault_at_once(inputs: Path, tmp_path: Path) -> None:
    for raw, named in (
        ({"temperature": 0, "group_size": 1, "unknown": 1}, ["unknown", "group_size", "temperature"]),
        ({"model": "/nowhere", "reward_functions": ["a", "b"]}, ["model", "data", *["reward_functions"] * 2]),
    ):
        result = call("check", config(inputs, tmp_path, data="/nowhere.jsonl", **raw))
        assert [line.partition(":")[0] for line in result.stderr.splitlines()] == named and result.exit_code == 2


def test_check_tells_remarks_and_with_json_a_list_of_faults(inputs: Path, tmp_path: Path) -> None:
    assert json.loads(run_ok("check", config(inputs, tmp_path), "--json").stdout) == []
    fine, few = run_ok("check", config(inputs, tmp_path)).stdout.splitlines()
    assert fine == "Nothing is wrong with these settings." and few.startswith("data: There are 8 different prompts:")
    remarked = run_ok("check", config(inputs, tmp_path, learning_rate=0.1, temperature=5)).stdout.splitlines()
    assert remarked[0] == fine and remarked[1].startswith("learning_rate: This is unusually large")
    assert remarked[2].startswith("temperature: This is unusually large")
    result = call("check", config(inputs, tmp_path, temperature=0), "--json")
    assert result.exit_code == 2 and result.stderr == ""
    assert json.loads(result.stdout) == [{"setting": "temperature", "sentence": "Temp must be above 0, not 0."}]


def test_check_says_how_varied_and_how_long_the_prompts_are(inputs: Path, tmp_path: Path) -> None:
    said = run_ok("check", config(inputs, tmp_path), "--prompts").stdout
    assert "Prompts: 8 rows" in said and "5% up to " in said and "There are 8 different prompts" in said
    both = json.loads(run_ok("check", config(inputs, tmp_path), "--prompts", "--json").stdout)
    assert both["faults"] == [] and both["prompts"]["rows"] == 8
    (tmp_path / "unanswered.jsonl").write_text('{"prompt": "x", "answer": ""}\n{"prompt": "y", "answer": null}\n')
    unanswered = config(inputs, tmp_path, data=str(tmp_path / "unanswered.jsonl"), **_reward("r1_accuracy"))
    assert "data: No row has an answer in the column answer, with" in run_ok("check", unanswered).stdout
    broken = call("check", config(inputs, tmp_path, temperature=0), "--prompts", "--json")
    assert json.loads(broken.stdout)["faults"][0]["setting"] == "temperature"


MINE = '''
from mlx_lm_lora.trainer.grpo_reward_functions import register_reward_function

@register_reward_function("shout")
def shout(prompts, completions, answer, types=None):
    """1.0 for capitals."""
    return [float(text.isupper()) for text in completions]

@register_reward_function("silent")
def silent(prompts, completions, answer, types=None):
    print("nothing to say")
    return [None for _ in completions]

@register_reward_function("broken")
def broken(prompts, completions, answer, types=None):
    return [1 / 0 for _ in completions]
'''


def test_reward_functions_are_listed_without_being_run(tmp_path: Path) -> None:
    built_in = [function["name"] for function in json.loads(run_ok("rewards", "list", "--json").stdout)]
    assert built_in[:5] == list(DEFAULT_REWARDS)
    (tmp_path / "mine.py").write_text(MINE + f"\nopen({str(tmp_path / 'was run')!r}, 'w')\n")
    listed = json.loads(run_ok("rewards", "list", "--file", tmp_path / "mine.py", "--json").stdout)
    assert [function["name"] for function in listed] == [*built_in, "shout", "silent", "broken"]
    assert listed[-3]["scores"] == "1.0 for capitals." and not (tmp_path / "was run").exists()
    assert "shout" in run_ok("rewards", "list", "--file", tmp_path / "mine.py").stdout
    (tmp_path / "bad.py").write_text("def f(:")
    assert "syntax error on line 1" in refused("rewards", "list", "--file", tmp_path / "bad.py")


@pytest.fixture
def bench(tmp_path: Path) -> Callable[..., list[object]]:
    """Command-line arguments that score two completions with functions of a user's file."""
    (tmp_path / "mine.py").write_text(MINE)
    rows = [{"prompt": "p", "completion": "LOUD", "answer": "1"}, {"prompt": "p", "completion": "soft", "answer": "1"}]
    (tmp_path / "given.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def arguments(*names: str, **more: Any) -> list[object]:
        raw = {"reward_functions_file": "mine.py", "reward_functions": list(names)} | more
        file = small_run.write_config(tmp_path / "rewards.yaml", raw)
        return ["rewards", "score", file, "--completions", tmp_path / "given.jsonl"]

    return arguments


def test_score_prints_scores_and_weighted_rewards(bench: Callable[..., list[object]]) -> None:
    """Of the settings only those of the rewards matter: there is no model and no dataset here."""
    output = run_ok(*bench("shout", "silent", reward_weights=[2.0, 1.0], temperature=0), "--json").stdout.splitlines()
    rows = [{"scores": {"shout": score, "silent": None}, "reward": 2 * score} for score in (1.0, 0.0)]
    assert json.loads(output[-1]) == {"rows": rows}
    changed = ("--set", "reward_weights=[2.0, 1.0]", "--set", "temperature=0", "--json")
    assert run_ok(*bench("shout", "silent"), *changed).stdout.splitlines()[-1] == output[-1]
    assert "no setting reward_wights" in refused(*bench("shout"), "--set", "reward_wights=1")
    assert run_ok(*bench("shout", "silent")).stdout == "1  shout 1  silent –\n0  shout 0  silent –\n"
    silent = run_ok(*bench("silent"))
    assert silent.stdout == "–  silent –\n–  silent –\n" and silent.stderr.startswith("nothing to say\n")


def test_scoring_and_refusing_import_no_mlx(bench: Callable[..., list[object]]) -> None:
    """Advantages once came from a module that imports mlx: 0.4 s of waiting for a result that takes milliseconds.
    `check` once imported what counts tokens before it opened the file."""
    code = f"""
import sys
from contextlib import suppress
from backend.__main__ import app
app()({list(map(str, bench("shout")))!r}, standalone_mode=False)
with suppress(SystemExit):
    app()(["check", "/nowhere.yaml"], standalone_mode=False)
print(*sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], env=backend_environment(), capture_output=True, text=True)
    *scores, modules = done.stdout.splitlines()
    assert scores == ["1  shout 1", "0  shout 0"] and "There is no file /nowhere.yaml" in done.stderr, done.stderr
    heavy = {"mlx", "mlx_lm", "numpy", "transformers", "datasets", "huggingface_hub", "tokenizers", "sympy"}
    assert not heavy & {name.split(".")[0] for name in modules.split()}


def test_score_refuses_in_one_sentence(bench: Callable[..., list[object]], tmp_path: Path) -> None:
    assert "The reward function broken of mine.py raised ZeroDivisionError" in refused(*bench("broken"), "--json")
    assert "There is no reward function shuot; the nearest is shout" in refused(*bench("shuot"))
    assert "There is no setting reward_weight" in refused(*bench("shout", reward_weight=[1.0]))
    assert "Reward weights: 2, reward functions: 1 (shout)" in refused(*bench("shout", reward_weights=[1, 2]))
    (tmp_path / "given.jsonl").write_text('{"prompt": "p"}\n')
    assert "Line 1 of " in refused(*bench("shout"))
    (tmp_path / "given.jsonl").unlink()
    assert refused(*bench("shout")).startswith("completions: ")


def test_train_list_resume_and_score_a_named_run(inputs: Path, runs: Path, tmp_path: Path) -> None:
    assert json.loads(run_ok("runs", "--json").stdout) == []
    assert run_ok("runs").stdout == f"There are no runs yet in {runs}.\n"
    file = config(inputs, tmp_path, num_iterations=2)
    output = run_ok("train", file, "--name", "mine", "--set", "iters=2", "--set", "learning_rate=1e-4").stdout
    run = RunFolder(runs / "mine")
    lines = output.splitlines()
    assert lines[0] == str(run.path) and lines[-1] == "Finished after 2 steps." and "step 2" not in lines
    settings = load(run.config)
    assert (settings.iters, settings.learning_rate, settings.run_name) == (2, 1e-4, "mine")
    assert small_run.kinds(run) == ["started", "step", "step", "checkpoint", "finished"]
    assert "Finished after 2 steps." not in run.log.read_text() and "BLAS" in run.log.read_text()

    (row,) = json.loads(run_ok("runs", "--json").stdout)
    assert (row["name"], row["state"], row["step"], row["iterations"]) == ("mine", "finished", 2, 2)
    assert row["sentence"] == "Finished after 2 steps." and "mine" in run_ok("runs").stdout

    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    assert "The run mine has finished; there is nothing to resume." in run_ok("resume", "mine").stdout
    assert "The run mine exists already" in refused("train", file, "--name", "mine", "--set", "iters=9")
    assert "The run mine has an event log already" in refused("train", "--run", run.path)
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before

    scored = run_ok("rewards", "score", run.config, "--completions", run.completions, "--json").stdout.splitlines()
    rows = [row for line in run.completions.read_text().splitlines() for row in json.loads(line)["completions"]]
    as_trained = [{"scores": row["rewards"], "reward": row["reward"]} for row in rows]
    assert json.loads(scored[-1])["rows"] == as_trained


def test_runs_without_a_name_get_a_folder_each_and_a_stream_is_the_event_log(
    inputs: Path, runs: Path, tmp_path: Path
) -> None:
    """The demo measures accuracy after training; Ctrl-C must end that too."""
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    folders = {run_ok("train", config(inputs, tmp_path, iters=1)).stdout.splitlines()[0] for _ in range(2)}
    assert all(Path(folder).name.startswith(f"{inputs.name}-lora-grpo-") for folder in folders)
    assert len(folders) == len(list(all_runs())) == 2
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    output = run_ok("train", config(inputs, tmp_path), "--name", "streamed", "--stream").stdout.splitlines()
    assert [json.loads(line) for line in output] == list(read_events(runs / "streamed" / "events.jsonl"))


def test_train_run_trains_in_a_folder_that_the_window_made(inputs: Path, runs: Path, tmp_path: Path) -> None:
    file = config(inputs, runs / "made", iters=1)
    run_ok("train", "--run", file.parent)
    assert small_run.kinds(RunFolder(file.parent))[-1] == "finished"
    (runs / "bare").mkdir()
    bare = ("train", "--run", runs / "bare")
    assert "holds no config.yaml" in refused(*bare)
    assert "--set, --name, --hosts and --runs-dir go with a YAML file" in refused(*bare, "--name", "x")
    young = RunFolder(config(inputs, runs / "young", iters=1).parent)
    run_ok("resume", "young")
    assert small_run.steps(young) == [1], "without a checkpoint it starts over"


def test_faults_of_a_folder_that_the_window_made_are_in_its_event_log(inputs: Path, runs: Path) -> None:
    """The window sees nothing but the folder."""
    file = config(inputs, runs / "made", temperature=0, group_size=1)
    result = call("train", "--run", file.parent)
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 2
    (event,) = read_events(runs / "made" / "events.jsonl")
    assert (event["kind"], event["step"]) == ("failed", 0)
    says = [
        "group_size: GRPO compares the completions of a prompt with each other; set Group to at least 2.",
        "temperature: Temp must be above 0, not 0.",
    ]
    assert event["sentence"].splitlines() == says


def test_the_traceback_of_a_reward_file_that_fails_to_load_is_in_the_log(
    inputs: Path, runs: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text("def broken(completions, **columns): ...\n\n\nraise RuntimeError('no table')\n")
    settings = _reward("broken") | {"reward_functions_file": str(tmp_path / "mine.py")}
    file = config(inputs, runs / "made", **settings)
    assert call("train", "--run", file.parent, "--allow-code").exit_code == 2
    (event,) = read_events(runs / "made" / "events.jsonl")
    assert "no table" in event["sentence"] and event["sentence"].endswith(" The traceback is in log.txt.")
    assert "Traceback" in (runs / "made" / "log.txt").read_text()


def test_a_failing_reward_is_named_and_the_steps_before_it_are_saved(inputs: Path, runs: Path, tmp_path: Path) -> None:
    fails_later = "broken.calls = getattr(broken, 'calls', 0) + 1\n    return [1 / (broken.calls < 3)"
    (tmp_path / "mine.py").write_text(MINE.replace("return [1 / 0", fails_later))
    file = config(inputs, tmp_path, **_reward("broken"), reward_functions_file="mine.py")
    result = call("train", file, "--name", "sad")
    assert result.exit_code == 2 and "Traceback" not in result.stderr
    assert "The reward function broken of mine.py raised ZeroDivisionError" in result.stderr.splitlines()[-1]
    run = RunFolder(runs / "sad")
    kinds = [kind for kind in small_run.kinds(run) if kind != "note"]
    assert kinds == ["started", "step", "step", "checkpoint", "failed"]
    assert (run.checkpoints / "000002" / "state.json").exists()
    (tmp_path / "mine.py").write_text(MINE.replace("1 / 0", "1.0"))
    assert run_ok("resume", "sad").stdout.splitlines()[-1] == "Finished after 3 steps."
    assert small_run.steps(run) == [1, 2, 3]


def test_a_run_that_does_not_exist_cannot_be_resumed_or_exported(runs: Path) -> None:
    assert refused("resume", "nothing").startswith("run: There is no run nothing")
    assert refused("export", "nothing", "--to", "folder").startswith("run: There is no run nothing")
    assert call("export", "nothing", "--to", "nowhere").exit_code == 2
    said = refused("export", "nothing", "--to", "folder", "--preview")
    assert said.startswith("preview: --preview has no effect with --to folder")
    assert refused("export", "nothing", "--to", "ollama", "--folder", "x").startswith("folder: --folder has no effect")
    assert refused("export", "nothing", "--to", "folder", "--name", "x").startswith("name: --name goes with --folder")


@pytest.mark.parametrize(
    ("written", "change", "key", "expected"),
    [
        ({"learning_rate": 1e-5}, "learning_rate=1e-4", "learning_rate", 1e-4),
        ({"num_generations": 2, "group_size": None}, "group_size=3", "group_size", 3),
        ({"lora_parameters": {"rank": 4}, "rank": None}, "rank=3", "rank", 3),
        ({"lr_schedule": {"name": "cosine_decay", "arguments": [1, 9]}}, "learning_rate=1e-3", "learning_rate", 1e-3),
        ({"epsilon_high": 0.3}, "epsilon_high=", "epsilon_high", None),
        ({}, "reward_functions=r1_int,r1_count_xml", "reward_functions", ["r1_int", "r1_count_xml"]),
        ({}, "system_prompt=Answer: yes or no", "system_prompt", "Answer: yes or no"),
        ({}, "run_name=007", "run_name", "007"),
        ({}, "lr_schedule={name: linear_schedule, arguments: [1e-3, 0, 9]}", "learning_rate", 1e-3),
        ({}, "chat_template_kwargs={enable_thinking: true}", "chat_template_kwargs", {"enable_thinking": True}),
    ],
)
def test_set_replaces_a_setting_under_any_name(
    inputs: Path, runs: Path, tmp_path: Path, written: dict[str, Any], change: str, key: str, expected: Any
) -> None:
    raw, _ = read_settings(config(inputs, tmp_path, iters=1, **written), [change])
    run = new_run(raw, None, None)
    assert getattr(run.settings, key) == getattr(load(run.folder.config), key) == expected


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("group_size", "set: --set group_size must be written as key=value."),
        ("reward_weights=[1,", "reward_weights: --set reward_weights=[1, is not valid YAML at line 1: expected "),
        ("temprature=1", "temprature: There is no setting temprature. Did you mean temperature?"),
        ("temperature=0", "temperature: Temp must be above 0, not 0."),
    ],
)
def test_set_that_cannot_be_read_is_refused(inputs: Path, runs: Path, tmp_path: Path, change: str, says: str) -> None:
    assert refused("train", config(inputs, tmp_path), "--set", change).startswith(says) and not runs.exists()


def test_a_file_for_trl_is_said_to_be_one_and_has_trls_defaults(inputs: Path, runs: Path, tmp_path: Path) -> None:
    """Once `train` said nothing, and took our defaults."""
    trl = {"model_name_or_path": str(inputs / "model"), "dataset_name": str(inputs / "rows.jsonl"), "max_steps": 1}
    trl |= {"num_generations": 2, "per_device_train_batch_size": 2, "max_completion_length": 6, "use_vllm": True}
    trl |= {"reward_funcs": "r1_int", "reward_isolation": "thread"}
    file = small_run.write_config(tmp_path / "trl.yaml", trl)
    said = call("train", file, "--name", "theirs")
    about = "From trl.yaml, a file for TRL: 6 settings converted; without effect here: use_vllm; TRL's defaults"
    assert said.exit_code == 0 and (said.stdout + said.stderr).count(about) == 1 and "train_type full" in said.stderr
    run = RunFolder(runs / "theirs")
    notes = [event["sentence"] for event in read_events(run.events) if event["kind"] == "note"]
    assert sum(note.startswith(about) for note in notes) == 1
    settings = load(run.config)
    assert (settings.train_type, settings.beta, settings.learning_rate) == ("full", 0.0, 1e-6)
    assert "num_generations: " not in run.config.read_text(), "it is a file of ours"
    assert settings == load(file).model_copy(update={"run_name": "theirs"})
    for words in (("queue", "add", file), ("check", file), ("estimate", file)):
        ours = call(*words, "--set", "defaults=ours")
        assert ours.exit_code == 0 and "for TRL" in ours.stderr and "GRPO Studio's defaults" in ours.stderr, words
    queued = next(run for run in all_runs(runs) if run.name != "theirs")
    assert (load(queued.config).train_type, load(queued.config).beta) == ("lora", 0.1)
    sweep = {"base": str(file), "over": {"beta": [0.0, 0.1]}, "seeds": [0]}
    planned = call("sweep", small_run.write_config(tmp_path / "sweep.yaml", sweep), "--plan")
    assert planned.exit_code == 0 and "From the base, a file for TRL" in planned.stderr


def test_paths_are_absolute_in_the_runs_config(inputs: Path, runs: Path, tmp_path: Path) -> None:
    """Paths are relative to the working directory, but config.yaml is read again in the run's folder."""
    small_run.write_rows(Path("mine.jsonl"))
    run = new_run(read_settings(config(inputs, tmp_path), ["data=mine.jsonl"])[0], None, None)
    assert yaml.safe_load(run.folder.config.read_text())["data"] == str(Path("mine.jsonl").absolute())


def test_a_live_run_refuses_a_second_writer(inputs: Path, runs: Path) -> None:
    """As while a trainer is in its second step: locked, with an event log."""
    run = RunFolder(config(inputs, runs / "live", iters=100_000).parent)
    lock = hold_lock(run)
    event_log = EventLog(run.events)
    event_log.write("started", iterations=100_000)
    event_log.write("step", step=1, metrics={"reward": 0.5})

    def state() -> str:
        return json.loads(run_ok("runs", "--json").stdout)[0]["state"]

    assert state() == "running"
    result = call("resume", "live")
    assert result.exit_code == 2
    assert "The run live is being trained by another process; stop that one first." in result.stderr
    assert "has an event log already" in refused("train", "--run", run.path)
    assert run.log.read_text() == "", "it is the log of the trainer that holds the run"
    assert state() == "running"
    os.close(lock)  # as the kill of that trainer does
    assert state() == "crashed"
    assert [event["seq"] for event in read_events(run.events)] == [0, 1], "the second one wrote nothing"


def test_version_prints_python_mlx_the_device_and_the_blas() -> None:
    first_words = {line.split()[0] for line in run_ok("--version").stdout.splitlines()}
    assert {"python", "mlx", "mlx-lm", "device", "BLAS"} <= first_words
