"""`evaluate` on the command line: both spellings, tables and JSON, files, mistakes in one sentence, a clean stop."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from backend.runs.run_folder import RunFolder, hold_lock
from backend.runs.run_record import change_notes, read_record
from backend.trainer.evaluation.evaluation_rows import evaluations_of, read_evaluation, read_rows
from backend.trainer.health.rules import RULES
from backend.utils.command import backend_command, backend_environment
from tests.support import made_up_runs, small_run
from tests.support.diaries import recording
from tests.support.verbs import call, refused, run_ok


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run of a step on a dataset with a test split."""
    folder = tmp_path_factory.mktemp("evaluate")
    for split in ("train", "test"):
        small_run.write_rows(folder / "data" / f"{split}.jsonl", 6)
    raw = small_run.settings_for(folder, data=str(folder / "data"), iters=1)
    made = RunFolder(folder / "run")
    assert small_run.train_here(raw, made).kind == "finished"
    return made


def printed(*arguments: object) -> dict[str, Any]:
    """The JSON of the last line."""
    return json.loads(run_ok("evaluate", *arguments, "--json").stdout.splitlines()[-1])


def test_a_run_is_compared_with_its_base_and_the_result_is_kept(run: RunFolder) -> None:
    result = run_ok("evaluate", run.path)
    assert "The mean reward on 6 rows of the test split" in result.stdout and "95 % interval" in result.stdout
    assert "r1_int_reward_func" in result.stdout and "pass@1" not in result.stdout, "nothing compares with the answer"
    path = Path(result.stdout.splitlines()[-1])
    assert path == run.evaluations / "test-step-1.json" and evaluations_of(run)[0] == path
    evaluation = read_evaluation(path)
    assert [decoding.name for decoding in evaluation.decodings] == ["greedy", "sampled"]
    assert len(list(read_rows(path))) == 6
    again = call("evaluate", run.path, "--greedy", "--limit", 2)
    assert again.stdout.splitlines()[-1].endswith("test-step-1-2.json"), "the first one stays"


def test_json_ends_with_one_line_that_has_the_means_on_top(run: RunFolder, tmp_path: Path) -> None:
    how = ("--sampled", "--n", 2, "--k", "1,2", "--pass", "reward>=0.1")
    line = printed(run.path, *how, "--out", tmp_path, "--name", "mine")
    (sampled,) = line["decodings"]
    assert line["path"] == str(tmp_path / "mine.json") and line["name"] == "mine"
    assert line["reward"] == sampled["sides"]["tuned"]["figures"]["reward"]["value"]
    assert line["rewards"].keys() == {"r1_int_reward_func", "r1_count_xml"}
    assert sampled["sides"]["base"]["figures"]["pass_at"].keys() == {"1", "2"}


def test_a_model_needs_settings_which_have_two_spellings(run: RunFolder) -> None:
    model, config = run.path.parent / "model", run.config
    one = printed(model, config, "--greedy")
    other = printed(model, "--config", config, "--greedy")
    assert one["reward"] == other["reward"] and one["path"] is None
    assert list(one["decodings"][0]["sides"]) == ["model"] and one["decodings"][0]["difference"] is None
    base = printed(run.path, "--base-only", "--greedy", "--name", "base")
    assert base["reward"] == one["reward"] and list(base["decodings"][0]["sides"]) == ["base"]


def test_prompts_of_training_and_of_another_file_are_told_apart(run: RunFolder, tmp_path: Path) -> None:
    small_run.write_rows(tmp_path / "rows.jsonl", 6)
    config = small_run.write_config(
        tmp_path / "single.yaml", small_run.settings_for(run.path.parent, data=str(tmp_path / "rows.jsonl"))
    )
    line = printed(run.path, config, "--greedy")
    assert line["data"]["split"] == "train" and line["data"]["trained_on"] == 6
    assert any("has trained on these prompts" in note for note in line["notes"])
    own = tmp_path / "own.csv"
    own.write_text("prompt,answer\nWhat is 0 plus 0?,0\nWhat is 40 plus 2?,42\nWhat is 50 plus 5?,55\n")
    line = printed(run.path, "--data", own, "--greedy")
    assert (line["data"]["split"], line["data"]["rows"], line["data"]["trained_on"]) == ("own.csv", 3, 1)
    assert line["path"].endswith("own-step-1.json") and "1 of these 3 prompts" in " ".join(line["notes"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere"], "run: There is no run nowhere"),
        (["RUN", "--split", "valid"], "in Valid split, or a dataset of its own in Validation dataset, or hold"),
        (["RUN", "--split", "test", "--data", "x.csv"], "data: Give --split or --data"),
        (["RUN", "--data", "x.csv"], "x.csv"),
        (["RUN", "--checkpoint", "9"], "checkpoint: The run run has no checkpoint 9; there are 1"),
        (["RUN", "--n", "2", "--k", "3"], "k: --k 3 does not fit: there are 2 completions"),
        (["RUN", "--greedy", "--k", "2"], "k: --k 2 does not fit: there is one completion"),
        (["RUN", "--pass", "r1_int"], "pass: From what score on does r1_int count"),
        (["MODEL"], "config: "),
        (["MODEL", "CONFIG", "--base-only"], "base-only: "),
        (["MODEL", "CONFIG", "--config", "CONFIG"], "config: The settings are given twice"),
        (["RUN", "missing.yaml"], "missing.yaml"),
    ],
)
def test_a_mistake_is_one_sentence(run: RunFolder, arguments: list[str], says: str) -> None:
    places = {"RUN": run.path, "MODEL": run.path.parent / "model", "CONFIG": run.config}
    before = evaluations_of(run)
    result = call("evaluate", *(places.get(argument, argument) for argument in arguments))
    sentence = result.stderr.splitlines()[-1]
    assert result.exit_code == 2 and says in sentence and "Traceback" not in result.output, result.output
    assert evaluations_of(run) == before


def test_a_result_that_cannot_be_written_is_refused_first(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) not in (run.path, run.evaluations))
    for out in ([], ["--out", run.path / "a" / "b"]):
        said = refused("evaluate", run.path, "--greedy", *out)
        assert "cannot be written, and the result goes there" in said and "Sampling" not in said


def test_a_run_that_is_training_is_left_alone(run: RunFolder) -> None:
    handle = hold_lock(run)
    said = refused("evaluate", run.path)
    os.close(handle)
    assert "is being trained" in said


def test_a_signal_stops_it_and_leaves_nothing(run: RunFolder, tmp_path: Path) -> None:
    """As the window does: progress on stdout as JSON lines, SIGTERM in the middle of sampling."""
    folder = run.path.parent
    more = {"data": str(folder / "data"), "max_completion_length": 1500, "max_seq_length": 2000}
    config = small_run.write_config(tmp_path / "long.yaml", small_run.settings_for(folder, **more))
    arguments = (run.path, config, "--stream", "--n", "64", "--out", tmp_path / "out")
    command = backend_command("evaluate", *map(str, arguments))
    process = subprocess.Popen(command, env=backend_environment(), stdout=PIPE, stderr=PIPE, text=True)
    assert process.stdout is not None
    phases: list[str] = []
    while not phases or not phases[-1].startswith("Sampling"):
        phases.append(json.loads(process.stdout.readline())["phase"])
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 3 and "nothing was written" in said, said
    assert phases[:2] == ["Reading the dataset", "Loading the model"] and not (tmp_path / "out").exists()


@pytest.mark.parametrize("module", ["trainer.evaluation.comparison", "export.export_run"])
def test_what_drops_a_signal_is_imported_before_signals_are_listened_to(module: str) -> None:
    """numpy loads its random numbers, whose C modules drop the exception of a signal, on first use: 3 % were lost."""
    code = f"import sys, backend.{module}; print('numpy.random.mtrand' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], stdout=PIPE, text=True).stdout == "True\n"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """The runs folder, with a slow run and a fast one."""
    for name, rate in (("slow", 1e-6), ("fast", 1e-4)):
        made_up_runs.make_run(tmp_path / "runs" / name, steps=4, learning_rate=rate)
    return tmp_path / "runs"


def test_runs_are_searched_and_archived_ones_left_out(runs: Path) -> None:
    change_notes(RunFolder(runs / "fast"), title="Quick one", tags=("math",))

    def names(*flags: str) -> set[str]:
        return {row["name"] for row in json.loads(run_ok("runs", "--json", *flags).stdout)}

    assert names("--search", "lr>1e-5 tag:math") == {"fast"} and "Quick one" in run_ok("runs").stdout
    change_notes(RunFolder(runs / "fast"), archived=True)
    assert names() == {"slow"} and names("--archived") == {"slow", "fast"}
    assert names("--search", "is:archived") == {"fast"}
    assert "search: Runs have no lrr. Did you mean lr?" in refused("runs", "--search", "lrr>1")
    about = read_record(made_up_runs.make_run(runs / "long", steps=12)).summary
    assert about.reward != about.reward_after and f" {about.reward_after:.3g} " in run_ok("runs").stdout


def test_runs_are_compared_in_the_terminal(runs: Path) -> None:
    compared = json.loads(run_ok("compare", "slow", "fast", "--json").stdout)
    assert compared["settings"] == {"learning_rate": [1e-6, 1e-4]}
    assert [one["name"] for one in compared["results"]] == ["slow", "fast"]
    printed = run_ok("compare", "slow", "fast", "--markdown").stdout
    assert "| Learning Rate | 1e-06 | 0.0001 |" in printed and "| Run | State |" in printed
    made_up_runs.make_run(runs / (name := "a-name-of-40-characters-that-people-copy"), steps=4, learning_rate=1e-6)
    printed = run_ok("compare", "slow", "fast", name).stdout
    assert "Learning Rate" in printed and "…" not in printed and "Held-out, last" in printed
    assert name in run_ok("runs").stdout
    assert call("compare", "slow").exit_code == 2
    # A setting that changed during the run differs though it ends the same.
    change = {"step": 3, "settings": {"learning_rate": [1e-6, 1e-4]}}
    RunFolder(runs / "slow").changes.write_text(json.dumps({"v": 1, "changes": [change]}))
    compared = json.loads(run_ok("compare", "slow", "fast", "--json").stdout)
    assert compared["settings"] == {"learning_rate": ["1e-06, from step 3 on 0.0001", 1e-4]}
    listed = json.loads(run_ok("runs", "--json", "--search", "lr>1e-5").stdout)
    assert {row["name"] for row in listed} == {"slow", "fast"}, "a list of runs has the settings of their ends"


def doctor(*arguments: object) -> str:
    return run_ok("doctor", *arguments).stdout


def test_findings_have_steps_figures_advice_and_a_proposal(tmp_path: Path) -> None:
    run = recording("lr-high").unpack(tmp_path / "sick")
    text = doctor(run.path)
    assert "sick: finished, 64 steps, 9 evaluations." in text
    assert "Drifting from the reference (warning, since step 10)" in text
    assert "Proposed: --set learning_rate=0.0015" in text
    (told,) = [json.loads(line) for line in doctor(run.path, "--json").splitlines()]
    drifting = next(finding for finding in told["findings"] if finding["code"] == "drifting")
    assert drifting["since"] == 10 and drifting["until"] is None and drifting["settings"] == {"learning_rate": 0.0015}
    assert drifting["value"] > drifting["threshold"] == 0.5 and drifting["chart"] == "KL from the reference"
    assert any(finding["until"] for finding in told["findings"])


def test_nothing_found_says_what_was_looked_at_and_what_was_not(tmp_path: Path) -> None:
    text = doctor(recording("healthy-lora").unpack(tmp_path / "well").path)
    looked_at = next(line for line in text.splitlines() if line.startswith("Nothing found. Looked at:"))
    assert "Flat reward" in looked_at and "KL exploding" not in looked_at
    assert "did not measure it: Drifting from the reference (kl); KL exploding (kl)" in text
    short = doctor(str(recording("healthy-lora").unpack(tmp_path / "other").path), "--json")
    assert set(json.loads(short)["looked_at"]) < set(RULES)


SAID = {"lr-1": "The gradient of update 2 is not a number", "crashed": "crashed, 20 steps"}


@pytest.mark.parametrize(("name", "sentence"), SAID.items())
def test_a_failed_run_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, sentence: str) -> None:
    monkeypatch.setattr("backend.runs.run_folder.STARTUP_GRACE_S", 0.0)
    text = doctor(recording(name).unpack(tmp_path / name).path)
    assert sentence in text
    assert ("There is no finished step to look at." in text) == (name == "lr-1")
