"""The bundled demos: their files are those of the scripts, no held-out row is trained on, no network is needed."""

import hashlib
import json
import socket
import subprocess
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from PIL import Image

from backend import demo
from backend.config.config import load, parse, read
from backend.demo import NUMBERS, Sum, careful, encode, pools
from backend.demo import test_accuracy as accuracy
from backend.models.tokenizers import load_tokenizer
from backend.rewards.catalogue import DEFAULT_REWARDS
from backend.runs.events import read_events
from backend.runs.run_folder import RunFolder
from backend.sampling.turn_format import TurnFormat
from backend.types import ToolCall, ToolResult
from backend.utils.command import backend_command, backend_environment
from backend.utils.places import demo_config, project_root, resources
from backend.vision.tokenizer import with_vision
from benchmarks.loss_comparison import VARIANTS, measure
from tests.support.small_run import events, notes, train_here
from tests.support.verbs import refused

with pytest.MonkeyPatch.context() as patch:  # scripts, in no package
    patch.syspath_prepend(project_root() / "packaging")
    calculator_demo, shapes_demo = map(import_module, ("calculator_demo", "shapes_demo"))

DEMO, CALCULATOR, SHAPES = (resources() / name for name in ("demo", "calculator", "shapes"))
DEMOS = pytest.mark.parametrize(
    ("made_by", "folder"), [(demo, DEMO), (calculator_demo, CALCULATOR), (shapes_demo, SHAPES)]
)
EVERY_SUM = [Sum(a, b) for a in NUMBERS for b in NUMBERS]


def test_opening_the_model_needs_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("it looked for the network"))
    tokenizer = mlx_lm.load(str(DEMO / "model"))[1]
    assert tokenizer.get_vocab() == demo.make_tokenizer().get_vocab()


@DEMOS
@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_the_shipped_rows_are_those_of_the_script(made_by: Any, folder: Path, split: str) -> None:
    lines = (folder / "data" / f"{split}.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [question.row() for question in made_by.pools(0)[split]]


def test_no_question_is_in_two_splits_and_no_sum_mirrored() -> None:
    seen = [{frozenset(sum_) for sum_ in part} for part in pools(0).values()]
    assert len(seen) == 4 and len(set.union(*seen)) == sum(map(len, seen)) == 4095
    parts = calculator_demo.pools(0).values()
    assert len(set().union(*parts)) == sum(map(len, parts)) == 3 * 4000


def test_the_preset_trains_the_demo_and_the_longest_careful_answer_fits() -> None:
    config, tokenizer = load(demo_config()), demo.make_tokenizer()
    assert (Path(config.model), Path(config.data)) == (DEMO / "model", DEMO / "data")
    assert config.beta > 0 and config.num_iterations == 2 and tuple(config.reward_functions) == DEFAULT_REWARDS
    masks = [encode(tokenizer, sum_, careful(sum_))[1] for sum_ in [*EVERY_SUM[::7], Sum(99, 99)]]
    assert max(map(sum, masks)) <= config.max_completion_length
    assert max(mask.count(0) for mask in masks) + config.max_completion_length <= config.max_seq_length


def test_the_calculator_demo_warms_up_on_what_it_will_see() -> None:
    """The ids of a conversation of the warm-up are those that sampling, the parser and the template make."""
    config, question = load(demo_config("calculator")), calculator_demo.Question(99, "*", 98)
    tokenizer = mlx_lm.load(str(CALCULATOR / "model"))[1]
    ids, mask = calculator_demo.encode(tokenizer, question, calls=True, trusts=True)
    assert set(calculator_demo.VOCABULARY) == set(tokenizer.get_vocab())
    first = mask.index(1)
    chat = [{"role": "user", "content": question.row()["prompt"]}]
    assert tokenizer.apply_chat_template(chat, tools=calculator_demo.TOOLS, add_generation_prompt=True) == ids[:first]
    turns = TurnFormat(tokenizer, {})
    turn = ids[first : mask.index(0, first)]
    assert turns.fault == "" and turns.parse(turn, calculator_demo.TOOLS) == (
        "",
        [ToolCall("calculate", {"expression": "99*98"})],
    )
    between = turns.suffix([ToolResult("calculate", "9702")])
    answer = tokenizer.encode("<answer>9702</answer><|im_end|>")
    assert ids[:first] + turn + between + answer == ids[: len(mask) - mask[::-1].index(1)]
    assert len(ids) - first <= config.max_completion_length
    assert first + config.max_completion_length <= config.max_seq_length


def test_the_demo_with_images_warms_up_on_what_it_will_see() -> None:
    question, folder = shapes_demo.pools(0)["test"][0], SHAPES / "model"
    tokenizer, file = with_vision(load_tokenizer(folder), folder, 401_408), SHAPES / "data" / question.file
    parts = [{"type": "image", "image": str(file)}, {"type": "text", "text": question.row()["prompt"]}]
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)
    pad, (ids, mask) = tokenizer.convert_tokens_to_ids("<|image_pad|>"), shapes_demo.encode([question], lambda: True)
    seen = [pad if token in shapes_demo.NAMES else token for token in ids]
    answer = f"<think>{question.asked}</think><answer>{question.row()['answer']}</answer><|im_end|>\n"
    assert seen == prompt + tokenizer.encode(answer)
    assert sum(mask) == 8 + tokenizer.tokens_of(str(file)) - 1
    with Image.open(file) as shipped:
        drawn = shapes_demo.drawn(question.picture, Random(question.file))
        assert shipped.convert("RGB").tobytes() == drawn.convert("RGB").tobytes()


def test_a_step_of_the_calculator_demo_trains_on_conversations(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    quick = {"iters": 1, "batch_size": 2, "steps_per_eval": 0, "fuse": False}
    quick |= {"reward_isolation": "thread", "tool_timeout": 60.0}
    assert train_here(read(demo_config("calculator")) | quick, run).kind == "finished"
    metrics = next(event["metrics"] for event in read_events(run.events) if event["kind"] == "step")
    assert 0 < metrics["tools/call_frequency"] < 1 < metrics["tools/turns"] < 2
    assert metrics["tools/failure_frequency"] == metrics["tools/dropped_frequency"] == 0
    turns = [
        completion["turns"] for group in map(json.loads, run.completions.open()) for completion in group["completions"]
    ]
    called = next(each for each in turns if len(each) == 2)
    assert called[0]["calls"][0]["name"] == "calculate" and called[0]["result_tokens"] > 0


def digests(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@DEMOS
def test_the_same_seed_makes_the_same_bytes(
    made_by: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rebuild = made_by.rebuild
    monkeypatch.setattr(made_by, "ROWS", 4)
    messages: list[str] = []
    rebuild(tmp_path / "once", steps=2, progress=messages.append)
    mx.random.normal((3,))  # earlier random numbers must not matter
    rebuild(tmp_path / "again", steps=2)
    rebuild(tmp_path / "other", seed=1, steps=2)
    once, again, other = (digests(tmp_path / name) for name in ("once", "again", "other"))
    shipped = digests(folder)
    assert once == again and set(once) == set(shipped)
    assert all(once[file] == shipped[file] for file in ("model/config.json", "model/tokenizer_config.json"))
    changed = {name for name in once if once[name] != other[name]}
    assert changed == {"model/model.safetensors", *(file for file in once if file.startswith("data/"))}
    assert messages[0].startswith("Warm-up step 2 of 2")


def test_rebuild_makes_no_demo_that_a_script_makes() -> None:
    assert "packaging/shapes_demo.py" in refused("demo", "--images", "--rebuild")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["demo", "calculator", "shapes"])
def test_the_shipped_model_has_something_to_learn(name: str) -> None:
    assert 0.10 <= demo.test_accuracy(load(demo_config(name)), None) <= 0.50


@pytest.mark.proof
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("which", [(), ("--tools",), ("--images",)])
def test_the_demo_gains_thirty_points_within_four_minutes(which: tuple[str, ...], seed: int, tmp_path: Path) -> None:
    where = ("--runs-dir", str(tmp_path), "--seed", str(seed), "--json", "--no-progress")
    command = backend_command("demo", *which, *where)
    done = subprocess.run(command, env=backend_environment(), capture_output=True, text=True, check=True, cwd=tmp_path)
    result = json.loads(done.stdout.splitlines()[-1])
    print(result)
    assert result["after"] - result["before"] >= 0.3 and result["seconds"] <= 240


@pytest.mark.proof
@pytest.mark.timeout(3600)
def test_the_demo_in_bfloat16_is_within_two_points_of_float32(tmp_path: Path) -> None:
    """Full fine-tuning: the model computes in bfloat16, and what learns stays in float32. Ten minutes: this CPU's
    bfloat16 products run at a twentieth of the speed of its float32."""
    reached: dict[str, float] = {}
    for dtype in ("float32", "bfloat16"):
        raw = read(demo_config()) | {"dtype": dtype}
        run = RunFolder(tmp_path / dtype)
        assert train_here(raw, run).kind == "finished"
        reached[dtype] = accuracy(parse(raw), run)
    print(reached)
    assert reached["bfloat16"] >= reached["float32"] - 0.02


@pytest.mark.proof
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_loss_improves_the_held_out_reward(variant: str) -> None:
    """`docs/algorithms.md` has figures for three seeds; the demo's model begins at a held-out reward of about 1.24."""
    measured = measure(VARIANTS[variant], seed=0)
    print(measured)
    assert measured["reward_held_out"] > measured["reward_before"]


PLAIN_SUM = '''
import re
from backend.rewards import register_reward_function
@register_reward_function("plain_sum")
def plain_sum(prompts, completions, answer, types=None):
    """1 for working and the right sum without a tag, which the demo's model always writes."""
    matches = [re.fullmatch(r"[0-9+=,]+,(\\d+)", text) for text in completions]
    return [float(match is not None and match[1] == right) for match, right in zip(matches, answer)]
'''


def plain(problem: Sum) -> str:
    return careful(problem).removeprefix("<think>").replace("</think><answer>", ",").removesuffix("</answer>")


@pytest.mark.proof
def test_a_warm_up_teaches_what_grpo_alone_never_finds(tmp_path: Path) -> None:
    """Measured: GRPO alone stays at 0.00 in each step and on the test split."""
    (tmp_path / "plain_sum.py").write_text(PLAIN_SUM)
    for split in ("train", "valid", "test"):
        rows = [sum_.row() | {"completion": plain(sum_)} for sum_ in pools(0)[split]]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    raw = read(demo_config()) | {"data": str(tmp_path), "steps_per_eval": 0, "fuse": False}
    raw |= {"reward_functions": ["plain_sum"], "reward_weights": [], "reward_isolation": "thread"}
    raw |= {"reward_functions_file": str(tmp_path / "plain_sum.py"), "test": True, "test_batches": -1}
    raw |= {"batch_size": 16, "group_size": 4, "num_generations_eval": 1, "learning_rate": 2e-4}
    warm = {"iters": 180, "warmup_steps": 100, "warmup_learning_rate": 1e-3, "warmup_pass_rate": 0.9}
    reached: dict[str, float] = {}
    for name, changes in {"alone": {"iters": 30, "group_size": 8}, "warm": warm}.items():
        run = RunFolder(tmp_path / name)
        assert train_here(raw | changes, run).kind == "finished"
        (test,) = events(run, "eval")
        reached[name] = test["metrics"]["reward"]
        if name == "alone":
            assert not any(event["metrics"]["reward"] for event in events(run, "step"))
        else:
            print(*notes(run), sep="\n")
    print(reached)
    assert reached["alone"] == 0 and reached["warm"] >= 0.9
