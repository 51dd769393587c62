"""What a run reads: its dataset once and its reward files once; streamed and mapped rows, evaluation sets, cut prompts,
pictures; the presets of public datasets, against stand-ins of their repositories."""

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from backend.__main__ import app
from backend.config.config import parse
from backend.data import rows
from backend.data.rows import read_splits
from backend.models.tokenizers import tokenizer_folder
from backend.rewards.functions.answers import accuracy_reward
from backend.runs.completion_rows import images_of, prompt_key
from backend.runs.events import read_events
from backend.runs.run_folder import RunFolder
from backend.serve.dataset_questions import preview
from backend.serve.hub_questions import download
from backend.serve.questions import QuestionCall
from backend.trainer import run_context
from backend.trainer.evaluation.evaluation_rows import read_rows
from backend.trainer.preflight import preflight
from backend.utils import places
from backend.utils.errors import UserError
from tests.models.test_hub import point_at
from tests.support import public_datasets, small_run, verbs
from tests.support.hub_server import HubStandIn
from tests.support.public_datasets import DEEPMATH, GSM8K, QWEN2
from tests.support.random_models import tiny_model
from tests.support.small_run import QUICK, low_half, notes, resumed_and_whole, train_here, train_with_stops, write_rows
from tests.support.tool_tokenizers import tool_tokenizer
from tests.support.vision_models import picture, tiny_vision_model

COUNTS_ITS_EXECUTIONS = """
from pathlib import Path
from backend.rewards import register_reward_function
with Path(__file__).with_suffix(".count").open("a") as file:
    file.write("x")
@register_reward_function("length")
def length(prompts, completions, answer, types=None):
    return [float(len(text)) for text in completions]
def plain(completions, **kwargs):
    return [1.0 for _ in completions]
"""


@pytest.fixture
def reward_file(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(COUNTS_ITS_EXECUTIONS)
    return file


def rewards(reward_file: Path) -> dict[str, Any]:
    return {"reward_functions": ["length"], "reward_weights": [], "reward_functions_file": str(reward_file)}


@pytest.mark.parametrize("prepared", [False, True], ids=["train CONFIG", "train --run"])
def test_inputs_read_once(tmp_path: Path, reward_file: Path, monkeypatch: pytest.MonkeyPatch, prepared: bool) -> None:
    """`check` ran before loading, in the same process, and both read the rows and ran the user's file."""
    files_read: list[Path] = []
    read_file = rows.read_file
    monkeypatch.setattr(rows, "read_file", lambda path: files_read.append(path) or read_file(path))
    raw = small_run.settings_for(tmp_path, iters=1, **rewards(reward_file))
    run = RunFolder(tmp_path / "runs" / "mine")
    if prepared:
        small_run.prepare(run, raw)
        arguments = ["--run", str(run.path)]
    else:
        config = small_run.write_config(tmp_path / "c.yaml", raw)
        arguments = [str(config), "--runs-dir", str(tmp_path / "runs"), "--name", "mine"]
    result = CliRunner().invoke(app(), ["train", *arguments, "--no-progress"])
    assert result.exit_code == 0, result.output
    assert small_run.kinds(run)[-1] == "finished"
    assert reward_file.with_suffix(".count").read_text() == "x" and files_read == [tmp_path / "rows.jsonl"]


def test_a_dataset_that_has_changed_is_refused_before_the_model_loads(
    tmp_path: Path, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = small_run.settings_for(tmp_path, save_every=1)
    train_with_stops(raw, run, 1)
    other = json.dumps({"question": "What is 1 plus 1?", "answer": "2"})
    (tmp_path / "rows.jsonl").write_text(f"{other}\n")
    monkeypatch.setattr(run_context, "load_policy", lambda *arguments: pytest.fail("the model was loaded"))
    ending = train_here(raw | {"iters": 4}, run)
    assert (ending.kind, ending.exit_code) == ("failed", 2) and ending.sentence.startswith("prompt_feature: ")


def test_preflight_raises_every_fault_that_check_returns(tmp_path: Path) -> None:
    wrong = {"model": "./nowhere", "data": "./no_rows.jsonl", "reward_functions": ["r1_itn", "r1_int"]}
    raw = small_run.settings_for(tmp_path, **wrong)
    faults = small_run.check(raw)
    assert [fault.setting for fault in faults] == ["model", "data", "reward_functions"]
    with pytest.raises(UserError) as caught:
        preflight(parse(raw))
    assert caught.value.faults == faults
    # Nothing learns: no memory for it.
    (fault,) = small_run.check(small_run.settings_for(tmp_path, lora_keys=["q_projj"]))
    assert fault.setting == "lora_keys" and fault.sentence.startswith("No layer of this model is called q_projj")


def test_tools_need_a_chat_template_with_calls(tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text('def now() -> str:\n    """Tell the time."""\n    return "noon"\n')
    raw = small_run.settings_for(tmp_path, tools_file=str(tmp_path / "tools.py"), max_seq_length=2000)
    (fault,) = small_run.check(raw)
    assert fault.setting == "model" and fault.sentence.startswith("The model cannot use tools: mlx-lm knows no parser")
    tool_tokenizer(tmp_path / "model")
    assert not small_run.check(raw)


def test_what_an_environment_adds_to_a_prompt_must_fit(tmp_path: Path) -> None:
    raw = small_run.settings_for(tmp_path, environment=f"{tmp_path / 'game.py'}::Game", max_seq_length=2000)
    tool_tokenizer(tmp_path / "model")
    for times, setting in ((1, []), (500, ["max_seq_length"])):
        (tmp_path / "game.py").write_text(
            "class Game:\n"
            f"    def reset(self, **row): return 'Find the way. ' * {times}\n"
            '    def go(self) -> str:\n        """Take a step."""\n        return "here"\n'
            "    def get_reward(self): return 1.0\n"
        )
        assert [fault.setting for fault in small_run.check(raw)] == setting


MAP = '''
from backend.rewards import register_map_function, register_reward_function
@register_map_function("short")
def short(row):
    """Without the last two rows."""
    return None if row["answer"] in ("12", "14") else row | {"prompt": row["prompt"].replace("What is", "Say")}
@register_map_function
def odd(row):
    return [row] if row["answer"] == "4" else row
@register_map_function
def deep(row):
    nested = []
    for _ in range(400):
        nested = [nested]
    return row | {"nested": nested}
@register_reward_function("low_half")
def low_half(prompts, completions, answer, types=None, completion_ids=None):
    return [sum(token < 160 for token in ids) / len(ids) for ids in completion_ids]
'''


@pytest.fixture
def mapped(tmp_path: Path) -> dict[str, Any]:
    file = tmp_path / "mine.py"
    file.write_text(MAP)
    rewards = {"reward_functions": ["low_half"], "reward_weights": [], "reward_functions_file": str(file)}
    return rewards | {"map_function": "short"}


def trained(folder: Path, name: str, **raw: Any) -> tuple[RunFolder, dict[str, Any]]:
    run, raw = RunFolder(folder / name), small_run.settings_for(folder, **raw)
    ending = small_run.train_here(raw, run)
    assert ending.kind == "finished", ending
    return run, raw


def fingerprint(run: RunFolder) -> tuple[str, list[Any]]:
    """The trained weights, and all that was sampled."""
    weights = hashlib.sha256((run.adapters / "adapters.safetensors").read_bytes()).hexdigest()
    return weights, small_run.rows(run)


def test_a_streamed_run_is_the_run_in_memory_also_when_resumed(tmp_path: Path, mapped: dict[str, Any]) -> None:
    """Rows held out, cut by a map function to five: three steps of two prompts cross the end of an epoch."""
    raw = mapped | {"iters": 3, "batch_size": 2, "validation_split": 0.2, "steps_per_eval": 3, "save_every": 2}
    here, _ = trained(tmp_path, "here", **raw)
    there, streamed = trained(tmp_path, "there", **raw, streaming=True)
    assert fingerprint(here) == fingerprint(there)
    assert {row["prompt"].split()[0] for row in fingerprint(here)[1]} == {"Say"}
    again = RunFolder(tmp_path / "again")
    small_run.train_with_stops(streamed, again, 2)
    assert fingerprint(again) == fingerprint(here)


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_a_map_function_names_the_row_it_fails_on(tmp_path: Path, mapped: dict[str, Any], isolation: str) -> None:
    raw = small_run.settings_for(tmp_path, **mapped, reward_isolation=isolation)
    assert small_run.check(raw) == []
    (fault,) = small_run.check(raw | {"map_function": "odd"})
    assert fault.setting == "map_function"
    assert fault.sentence.startswith("The map function odd returned list, not a dict of columns or None on row 3 of ")
    (fault,) = small_run.check(raw | {"map_function": "deep"})
    assert fault.sentence.startswith("The map function deep returned a row that is nested more than 50 levels deep on ")


def test_evaluation_sets_stand_under_their_names_in_one_event(tmp_path: Path) -> None:
    other = small_run.write_rows(tmp_path / "other.jsonl", 3)
    sets, stop_when = {"more": str(other), "same": str(tmp_path / "rows.jsonl")}, ["eval/more/reward > 100"]
    run, _ = trained(tmp_path, "run", iters=2, steps_per_eval=2, eval_data=sets, stop_when=stop_when)
    events = [event for event in read_events(run.events) if event["kind"] == "eval"]
    assert [event["step"] for event in events] == [0, 2] or [event["step"] for event in events] == [2]
    metrics = events[-1]["metrics"]
    assert metrics["reward"] == metrics["more/reward"], "without a valid split the first set counts"
    assert {"same/reward", "more/rewards/r1_int_reward_func/mean", "same/completions/mean_length"} <= metrics.keys()
    run, _ = trained(tmp_path, "none", iters=2, steps_per_eval=2, eval_data=sets, val_batches=0)
    assert "eval" not in {event["kind"] for event in read_events(run.events)}


def test_long_prompts_are_left_out_or_cut_on_the_left(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    rows = [{"prompt": f"{'word ' * 80 * (n % 2)}the end {n}", "answer": "1"} for n in range(6)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shared = {"data": str(path), "iters": 3, "max_prompt_length": 60}
    tiny_model(tmp_path / "model", layers=1, own={"vision_config": {"depth": 1}})
    left_out, _ = trained(tmp_path, "left out", **shared)
    cut, _ = trained(tmp_path, "cut", **shared, long_prompts="cut_left")
    assert any("3 of 6 rows of the train split are left out" in sentence for sentence in notes(left_out))
    assert any("3 of 6 prompts of the train split are longer than 60 tokens, and cut" in note for note in notes(cut))
    prompts = [row["prompt"] for row in fingerprint(cut)[1]]
    assert all("the end" in prompt for prompt in prompts) and any(prompt.count("word") > 1 for prompt in prompts)
    assert not any("word" in row["prompt"] for row in fingerprint(left_out)[1])


ANSWERS = {"gsm8k": ["2,000", "-3"], "deepmath": ["Yes", r"$\dfrac{1}{2}$"]}
"""Preset → answers that its rows must have once they are read."""
RIGHT = {"gsm8k": r"So it is \boxed{2000}.", "deepmath": r"Thus \boxed{\frac{1}{2}}."}
"""Preset → a completion that is right for one of these."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStandIn]:
    model = tiny_model(tmp_path / "model", "qwen2")
    repos = {GSM8K: public_datasets.gsm8k(), DEEPMATH: public_datasets.deepmath()}
    with HubStandIn({QWEN2: public_datasets.model_repo(model)}, repos) as stand_in:
        point_at(stand_in.url, tmp_path / "cache", monkeypatch)
        monkeypatch.setattr("datasets.config.HF_ENDPOINT", stand_in.url)
        yield stand_in


@pytest.mark.parametrize("preset", ["gsm8k", "deepmath"])
def test_a_documented_preset_finds_its_rows_and_answers(hub: HubStandIn, preset: str) -> None:
    file = places.resources() / "presets" / f"{preset}.yaml"
    settings = yaml.safe_load(file.read_text()) | {"model": QWEN2}
    assert preview(QuestionCall(), settings=settings) == {"absent": True}, "nothing is fetched unasked"
    download(QuestionCall(), id=settings["data"], repo_type="dataset")
    assert small_run.check(settings) == []
    splits = read_splits(parse(settings))
    rows = {row[settings["answer_feature"]] for row in splits.train}
    assert set(ANSWERS[preset]) <= rows and len(splits.train) > 280 and splits.valid and len(splits.test) == 30
    right = [answer for answer in ANSWERS[preset] if accuracy_reward([], [RIGHT[preset]], [answer]) == [1.0]]
    assert len(right) == 1, "the reward tells the right answer from the other"
    shown = preview(QuestionCall(), settings=settings)
    assert not shown["faults"] and shown["splits"]["train"]["unanswered"] == 0
    hub.down = True
    assert len(read_splits(parse(settings)).train) == len(splits.train), "from the cache"


def test_prompts_that_do_not_fit_are_found_before_a_model_is_fetched(hub: HubStandIn, tmp_path: Path) -> None:
    raw = QUICK | {"model": QWEN2, "data": str(write_rows(tmp_path / "sums.jsonl"))}
    assert small_run.check(raw | {"max_prompt_length": 2}) == [] and {*hub.sent} == {"config.json"}, (
        "a check fetches no tokenizer"
    )
    tokenizer_folder(QWEN2)  # as the first part of a download that was stopped
    assert small_run.check(raw) == []
    (fault,) = small_run.check(raw | {"max_prompt_length": 2})
    assert fault.setting == "max_prompt_length" and fault.sentence.startswith("Every prompt is longer than Max prompt")
    assert not any(path.endswith(".safetensors") for path in hub.sent)


def settings_with_pictures(folder: Path, **changes: Any) -> dict[str, Any]:
    """A quick run on rows with one picture, two, and none."""
    tiny_vision_model(folder / "model")
    picture(folder / "pictures" / "a.png", 64, 48, 1)
    picture(folder / "pictures" / "b.png", 32, 64, 2)
    own: list[dict[str, Any]] = [{"image": "pictures/a.png"}, {"image": "pictures/b.png"}]
    own += [{"images": ["pictures/b.png", "pictures/a.png"]}, {}]
    rows = [{"prompt": f"What is in it, {i}?", "answer": str(i)} | more for i, more in enumerate(own)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    where = {"model": str(folder / "model"), "data": str(folder / "rows.jsonl")}
    # Two updates against a reference: every prompt is read five times.
    many = {"batch_size": 2, "beta": 0.05, "num_iterations": 2, "learning_rate": 1e-2, "iters": 2}
    return QUICK | where | many | low_half(folder) | changes


@pytest.mark.parametrize(
    ("settings", "setting"),
    [({"train_mode": "distill"}, "train_mode"), ({"distillation_weight": 0.5}, "distillation_weight")],
)
def test_a_teacher_does_not_see_pictures(tmp_path: Path, settings: dict[str, Any], setting: str) -> None:
    """Nor those of a later row; before the run, and naming a setting that there is."""
    raw = settings_with_pictures(tmp_path, teacher_model=str(tmp_path / "model"), **settings)
    lines = (tmp_path / "rows.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "rows.jsonl").write_text("".join(reversed(lines)))
    (fault,) = small_run.check(raw)
    assert fault.setting == setting and "row 2 of" in fault.sentence and "has pictures" in fault.sentence


def test_the_tower_sees_each_picture_once_a_step_and_a_run_resumes(tmp_path: Path, monkeypatch: Any) -> None:
    from mlx_vlm.models.qwen3_vl import VisionModel

    seen: list[int] = []
    look = VisionModel.__call__

    def counted(self: Any, pixels: Any, grid_thw: Any, *more: Any, **named: Any) -> Any:
        seen.append(len(grid_thw))
        return look(self, pixels, grid_thw, *more, **named)

    monkeypatch.setattr(VisionModel, "__call__", counted)
    raw = settings_with_pictures(tmp_path, save_every=1)
    whole = resumed_and_whole(raw, tmp_path / "runs", 1)
    assert Counter(seen) == {1: 4, 2: 2}, "in both; of four prompts one has two pictures and one none"

    pictures = {name: str(tmp_path / "pictures" / f"{name}.png") for name in "ab"}
    shown = {prompt_key(row) for row in small_run.rows(whole)}
    paths = [(pictures["a"],), (pictures["b"],), (pictures["b"], pictures["a"]), ()]
    assert shown == {(f"What is in it, {i}?", *those) for i, those in enumerate(paths)}
    other = [{"prompt": f"What is in it, {i}?", "answer": "", "image": f"pictures/{'ba'[i]}.png"} for i in range(2)]
    (tmp_path / "other.jsonl").write_text("".join(json.dumps(row) + "\n" for row in other))
    result = verbs.call(
        "evaluate", whole.path, "--data", tmp_path / "other.jsonl", "--greedy", "--base-only", "--allow-code", "--json"
    )
    assert result.exit_code == 0, result.output
    line = json.loads(result.stdout.splitlines()[-1])
    assert line["data"]["trained_on"] == 0, "the same questions about other pictures"
    assert [images_of(row) for row in read_rows(Path(line["path"]))] == [[pictures["b"]], [pictures["a"]]]


def test_a_text_run_of_a_vision_model_needs_no_mlx_vlm(tmp_path: Path, run: RunFolder, monkeypatch: Any) -> None:
    raw = settings_with_pictures(tmp_path, iters=1, num_iterations=1, beta=0.0)
    write_rows(tmp_path / "rows.jsonl", 2)
    monkeypatch.setitem(sys.modules, "mlx_vlm", None)
    assert train_here(raw, run).kind == "finished"
