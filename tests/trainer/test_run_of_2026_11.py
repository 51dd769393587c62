"""A run, a YAML and a reward file made by the program of November 2026 open unchanged, whatever was renamed since."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from backend.config.config import load, problems
from backend.rewards.bench import RewardBench, group_of, read_groups, score_groups
from backend.runs.archive import summary
from backend.runs.completion_rows import CompletionIndex, GroupRow
from backend.runs.events import JsonLines, has_finished, read_events
from backend.runs.run_folder import RunFolder
from backend.trainer.run_process import train
from backend.trainer.telemetry import group_row
from backend.types import Completion, Group

GOLDEN = Path(__file__).parents[1] / "golden" / "run_of_2026_11"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A copy of the run, in the working directory that its relative paths start from."""
    shutil.copytree(GOLDEN, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    return RunFolder(tmp_path / "copy" / "run")


def test_summary_and_event_log_are_read(run: RunFolder) -> None:
    result = summary(run)
    assert (result.state, result.step, result.iterations, result.model) == ("finished", 3, 3, "model")
    assert result.sentence == "Finished after 3 steps." and result.began == 1795334318.50037 and has_finished(run)
    assert (result.reward_before, result.reward) == (0.29528862341362344, 0.3536270442520442)
    events = list(read_events(run.events))
    assert [event["seq"] for event in events] == list(range(13))
    assert [event["kind"] for event in events if event["kind"] != "phase"] == [
        *("started", "note", "step", "step", "checkpoint", "step", "checkpoint", "finished")
    ]


def test_the_settings_of_the_run_mean_what_they_meant(run: RunFolder) -> None:
    written = yaml.safe_load(run.config.read_text(encoding="utf-8"))
    assert not problems(written)
    config = load(run.config)
    assert {key: getattr(config, key) for key in written} == written


def test_a_yaml_in_mlx_lm_loras_words_gives_the_settings_of_the_run(run: RunFolder) -> None:
    folder = run.path.parent
    written = yaml.safe_load(run.config.read_text(encoding="utf-8"))
    resolved = load(folder / "settings.yaml")
    paths = {"model": str(folder / "model"), "data": str(folder / "rows.jsonl")}
    paths |= {"reward_functions_file": str(folder / "rewards.py")}
    names = ["low_half", "short", f'{folder}/rewards.py::has_digit(name="digits")']
    # The default is "auto" since then, which corrects nothing in float32.
    later = {"reward_functions": names, "sampling_correction": "auto"}
    assert {key: getattr(resolved, key) for key in written} == written | paths | later


def rows_of(run: RunFolder) -> dict[int, list[GroupRow]]:
    index = CompletionIndex(run.completions)
    while index.advance():
        pass
    return {step: index.rows(step) for step in index.steps()}


def test_the_completions_of_every_step_are_found_and_written_again_byte_for_byte(run: RunFolder) -> None:
    rows = rows_of(run)
    assert {step: len(groups) for step, groups in rows.items()} == {1: 2, 2: 2, 3: 2}
    copy = JsonLines(run.path / "copy.jsonl")
    for step, groups in rows.items():
        for row in groups:
            copy.append(group_row(step, group_from(row)))
    copy.close()
    assert copy.path.read_bytes() == run.completions.read_bytes()


def group_from(row: GroupRow) -> Group:
    """The group that a step would have had to write this row."""
    completions: list[Completion] = []
    for each in row["completions"]:
        scored = {"scores": each["rewards"], "reward": each["reward"], "advantage": each["advantage"]}
        scored["logged"] = each.get("logged", {})
        completions.append(Completion([5] * each["tokens"], [], each["text"], each["stop"], **scored))
    return Group(group_of(row, 0, "a row").problem, completions)


def test_its_completions_are_scored_as_they_were(run: RunFolder) -> None:
    """`low_half` asks for the sampled ids, of which the file has only the count: it has no opinion then."""
    groups = read_groups(run.completions)
    scorer = RewardBench()
    try:
        report = score_groups(scorer, groups, load(run.config))
    finally:
        scorer.close()
    assert not any(function["error"] for function in report["functions"])
    written = [completion for groups in rows_of(run).values() for row in groups for completion in row["completions"]]
    scored = [completion for group in report["scored"] for completion in group]
    assert len(scored) == len(written) == 18
    for new, old in zip(scored, written, strict=True):
        assert new["rewards"] == old["rewards"] | {"low_half": None}
        assert new["logged"] == old.get("logged")


@pytest.mark.parametrize("has_lengths", [True, False])
def test_the_run_resumes_from_its_checkpoint_past_its_last_step(has_lengths: bool, run: RunFolder) -> None:
    """As if it had been killed in its third step: the event log ends within a line, and the last checkpoint is
    missing. No row is lost or doubled, whether or not the checkpoint recorded the lengths of the files."""
    before = rows_of(run)
    if not has_lengths:
        file = run.checkpoints / "000002" / "state.json"
        state = json.loads(file.read_text())
        file.write_text(json.dumps({name: value for name, value in state.items() if "_bytes" not in name}))
    third = next(event for event in read_events(run.events) if event.get("step") == 3)
    shutil.rmtree(run.checkpoints / "000003")
    run.events.write_bytes(run.events.read_bytes()[:-40])
    assert summary(run).state == "crashed" and not has_finished(run)
    config = load(run.config)
    assert train(config, run, command="resume").kind == "finished"
    events = list(read_events(run.events))
    assert [event["resumed_from"] for event in events if event["kind"] == "started"] == [None, 2]
    assert [event["step"] for event in events if event["kind"] == "step"] == [1, 2, 3]
    assert not any("_bytes" in event["sentence"] for event in events if event["kind"] == "note")
    again = next(event for event in events if event.get("step") == 3)["metrics"]
    for name in ("num_tokens", "learning_rate", "epoch", "reward", "grad_norm"):
        assert again[name] == pytest.approx(third["metrics"][name], rel=1e-3), name
    texts = [[row["prompt"], *(each["text"] for each in row["completions"])] for row in before[3]]
    assert [[row["prompt"], *(each["text"] for each in row["completions"])] for row in rows_of(run)[3]] == texts
    assert rows_of(run)[1] == before[1] and rows_of(run)[2] == before[2]
    if has_lengths:
        assert train(config.model_copy(update={"iters": 4}), run, command="resume").step == 4
        assert [event["step"] for event in read_events(run.events) if event["kind"] == "step"] == [1, 2, 3, 4]
