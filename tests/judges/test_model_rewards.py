"""Models among the reward functions: their place in a stage, what the worker gets, and errors."""

import gc
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.utils import load

from backend.config.config import Config, parse
from backend.judges import local_model as module
from backend.judges import reward_model
from backend.judges.judge import Judge
from backend.judges.local_model import LocalModel, SharingSampler, local_model
from backend.judges.model_reward import model_entries
from backend.judges.reward_model import RewardModel
from backend.rewards.bench import RewardBench, score_groups
from backend.rewards.calls import Failure, RewardError, ThreadCaller
from backend.rewards.catalogue import RewardCall, canonical_entry, metric_name, read_call, with_absolute_file
from backend.rewards.scorer import Scorer
from backend.rewards.scoring import Answer, FunctionHost, RewardSource, TrainerState
from backend.trainer.memory.model_shape import shape_of
from backend.trainer.memory.phases import MemoryModel
from backend.types import Completion, Group, Problem
from backend.utils.errors import UserError
from tests.support import random_models
from tests.support.reward_models import GOLDEN, arrays_of, golden_groups, opened, write_reward_model
from tests.support.scoring import make_group

FAILURE = "The model is gone."


class LengthModel:
    """Scores a completion's length times `factor`; fails on an empty one."""

    uses_mlx = True

    def __init__(self, name: str, factor: float) -> None:
        self.name, self.factor = name, factor
        self.calls: list[object] = []

    def load(self, folder: Path | None) -> None:
        self.calls.append(("load", folder))

    def score(self, groups, state, poll) -> Answer:
        self.calls.append("score")
        texts = [completion.text for group in groups for completion in group.completions]
        if "" in texts:
            raise RewardError(Failure(FAILURE), ("reward_functions", FAILURE))
        scores = [None if text == "?" else self.factor * len(text) for text in texts]
        return Answer(scores=[scores], columns={f"{self.name}/explanation": texts}, metrics={"judge/calls": 1.0})

    def close(self) -> None:
        self.calls.append("close")


@pytest.fixture
def opened_reward(monkeypatch) -> dict[str, LengthModel]:
    models: dict[str, LengthModel] = {}

    def open_model(call, base) -> LengthModel:
        factor = float(call.arguments.get("quantization") or 1)
        return models.setdefault(call.name, LengthModel(call.name, factor))

    monkeypatch.setattr(reward_model, "RewardModel", open_model)
    return models


def scorer_of(*stages: list[str], file: Path | None = None) -> Scorer:
    models = model_entries([entry for stage in stages for entry in stage], file)
    return Scorer(RewardSource(stages, file, Path.cwd(), models=models), FunctionHost(ThreadCaller()), 5.0)


def test_models_score_at_their_place_among_functions(opened_reward, tmp_path: Path) -> None:
    scorer = scorer_of(["org/first(quantization=4)", "r1_int", "org/second", "keyword(word=ab)"], ["org/second"])
    names = [[function.name for function in stage] for stage in scorer.load()]
    assert names == [["first", "r1_int_reward_func", "second", "keyword"], ["second"]]
    assert len(opened_reward) == 2 and not opened_reward["first"].calls, (
        "one of two stages is opened once, and not loaded yet"
    )
    scorer.load_models(tmp_path)
    group = make_group("ab", "12345", "?")
    report = scorer.score([group], 0, [1.0, 1.0, 10.0, 1.0], TrainerState())
    assert [list(completion.scores.values()) for completion in group.completions] == [
        [8.0, 0.0, 2.0, 1.0],
        [20.0, 0.0, 5.0, 0.0],
        [None, 0.0, None, 0.0],
    ]
    assert [completion.reward for completion in group.completions] == [29.0, 70.0, 0.0]
    assert report.columns.keys() == {"first/explanation", "second/explanation"} and report.metrics == {"judge/calls": 1}
    assert len(report.seconds) == 4
    scorer.score([group], 1, [1.0], TrainerState())
    assert [*group.completions[1].scores.items()] == [("second", 5.0)]
    assert opened_reward["first"].calls[:2] == [("load", tmp_path), ("load", None)]
    scorer.close()
    assert opened_reward["first"].calls[-1] == "close"


def test_a_failing_function_after_a_model_is_named(opened_reward, write_file) -> None:
    file = write_file("def bad(completions, **kwargs):\n    return [1 / 0]\n")
    scorer = scorer_of(["org/first", f"{file}::bad"])
    with pytest.raises(RewardError, match=r"The reward function bad of mine\.py raised ZeroDivisionError"):
        scorer.score([make_group("a")], 0, [1.0, 1.0], TrainerState())


@pytest.fixture
def write_file(tmp_path: Path):
    def write(text: str) -> Path:
        (tmp_path / "mine.py").write_text(text)
        return tmp_path / "mine.py"

    return write


@pytest.mark.parametrize(
    ("entries", "sentence"),
    [
        (["a/rm", "b/rm"], "rm is listed 2 times"),
        (["a/keyword", "keyword(word=so)"], "keyword is listed 2 times"),
        (["a/rm(bits=4)"], "a/rm has no parameter bits"),
        (["a/rm(quantization=four)"], "quantization of a/rm must be a whole number or none"),
    ],
)
def test_entries_that_cannot_be_used(opened_reward, entries: list[str], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence.replace("(", r"\(")):
        scorer_of(entries).load()


def test_the_bench_shows_a_failure_at_its_model(opened_reward) -> None:
    settings = Config(reward_functions=["r1_int", "org/first"])
    bench = RewardBench()
    for text, error, scores in (("", FAILURE, {}), ("123", "", {"first": 3.0})):
        found = score_groups(bench, [make_group(text)], settings)
        assert [(each["error"] or {}).get("sentence", "") for each in found["functions"]] == ["", error]
        assert found["scored"][0][0]["rewards"].items() >= scores.items()
    assert opened_reward["first"].calls[-1] == "close", "a bench that stays open keeps no model in memory"
    bench.close()


def test_names_and_folders(tmp_path: Path) -> None:
    assert metric_name("org/some-RM.v2") == "some-RM.v2" and metric_name("~/rm/(name=helpful)") == "helpful"
    for folder in ("own/rm", "rm", "r1_int"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config.json").write_text("{}")
    for text, entry in {
        "own/rm(quantization=4)": f"{tmp_path}/own/rm(quantization=4)",
        "./rm": f"{tmp_path}/rm",
        "rm": f"{tmp_path}/rm",
        "org/rm": "org/rm",
        "r1_int": "r1_int",
    }.items():
        assert with_absolute_file(text, tmp_path.resolve()) == entry.replace(str(tmp_path), str(tmp_path.resolve()))
    assert canonical_entry("org/rm(quantization=none)") == "org/rm(quantization=None)"


def test_a_judge_of_the_users_own_file_stays_in_the_worker(write_file) -> None:
    file = write_file("@register_reward_function('judge')\ndef f(completions, **kwargs): ...\n")
    entries = ["judge(rubric=helpful)", "org/rm", "r1_int", f"{file}::judge"]
    assert model_entries(entries, None) == {*entries[:2]} and model_entries(entries, file) == {entries[1]}


LIMIT = 12
VERDICT = {
    "type": "object",
    "properties": {"reason": {"type": "string", "maxLength": 8}, "verdict": {"enum": ["no", "yes"]}},
    "required": ["reason", "verdict"],
    "additionalProperties": False,
}


def folder_of(models: Path) -> Path:
    folder = models / "judge"
    return folder if folder.exists() else random_models.tiny_model(folder, tie=False, noise=0.3, seed=1)


def prompts_of() -> list[list[dict[str, Any]]]:
    """2 groups of 3 with a rubric in common, in two messages; one prompt is twice there."""
    words = random_models.CORPUS
    texts = [f"{words[0]} {group} {words[1]}\n\n{words[2][: 8 * n]}" for group in "ab" for n in (1, 5, 5)]
    return [[{"role": "system", "content": words[3]}, {"role": "user", "content": text}] for text in texts]


def plain_reply(model: Any, tokenizer: Any, messages: list[dict[str, Any]]) -> str:
    content = "\n\n".join(message["content"] for message in messages)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    tokens: list[int] = []
    for token, _ in generate_step(mx.array(prompt), model, max_tokens=LIMIT):
        if token in tokenizer.eos_token_ids:
            break
        tokens.append(int(token))
    return tokenizer.decode(tokens).strip()


@pytest.mark.parametrize("rows", [100, 2])
def test_replies_are_those_of_plain_greedy_decoding(models: Path, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(module, "JUDGED_TOKENS", rows * 220)
    folder, asked, read = folder_of(models), prompts_of(), list[int]()
    own = SharingSampler._read_prefix

    def counted(self: SharingSampler, before: Any, tokens: list[int]) -> Any:
        read.append(len(tokens))
        return own(self, before, tokens)

    monkeypatch.setattr(SharingSampler, "_read_prefix", counted)
    model = local_model(str(folder))
    assert local_model(str(folder)) is model
    replies = model.replies(asked, [LIMIT] * len(asked), lambda: None)
    plain, tokenizer, *_ = load(str(folder))
    assert replies == [plain_reply(plain, tokenizer, messages) for messages in asked]
    assert len(set(replies)) > 2
    if rows == 100:  # the rubric, and each group's prompt
        assert len(read) == 3


def test_replies_have_their_schema_and_no_thoughts(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = local_model(str(folder_of(models))), prompts_of()
    for reply in model.replies(asked, [80] * len(asked), lambda: None, json.dumps(VERDICT)):
        assert list(json.loads(reply)) == ["reason", "verdict"]
    monkeypatch.setattr(SharingSampler, "texts", lambda *arguments: ["<think>{}</think>\n [1] ", "[2]"])
    assert model.replies(asked[:2], [1, 1], lambda: None) == ["[1]", "[2]"]


def test_a_judge_scores_with_it_and_frees_its_memory(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backend.judges.judge.REASON_LENGTH", 4)
    gc.collect()
    before = mx.get_active_memory()
    rubric = tmp_path / "rubric.toml"
    rubric.write_text('[[criteria]]\nname = "short"\nchoices = ["no", "a bit", "yes"]\n', encoding="utf-8")
    arguments = {"rubric": str(rubric), "url": "local", "model": str(folder_of(models)), "mode": "single"}
    judge = Judge(RewardCall("judge", arguments))
    judge.load(None)
    group = Group(Problem(0, "?", [], [], ""), [Completion([], [], text, "eos") for text in ("a", "b", "a")])
    scored = judge.score([group], TrainerState(), lambda: None)
    assert scored.metrics["judge/judge/calls"] == 2 and scored.metrics["judge/judge/failed"] == 0
    (scores,) = scored.scores
    assert scores[0] == scores[2] and {*scores} <= {0.0, 0.5, 1.0}
    judge.close()
    mx.synchronize()  # what still runs holds its arrays
    assert mx.get_active_memory() <= before


def test_the_estimate_covers_a_judge(models: Path) -> None:
    folder = str(folder_of(models))
    config = parse(
        {"model": folder, "data": "none", "batch_size": 4, "group_size": 8, "max_seq_length": 300}
        | {"max_completion_length": 40, "reward_functions": [f"judge(url=local, model='{folder}', mode=single)"]}
    )
    shape = shape_of(Path(folder))
    assert shape is not None
    memory = MemoryModel(config, shape, 40, gpu=False)
    (scorer, mode), *_ = memory.scorers
    estimated = scorer.weights() + sum(memory._scoring(scorer, mode))
    gc.collect()
    before = mx.get_active_memory()
    model, text = LocalModel(folder), " ".join(random_models.CORPUS)
    mx.reset_peak_memory()
    prompts = [
        [{"role": "user", "content": f"{text[:400]}{group}{text}{n}{text[:80]}"}] for group in "abcd" for n in range(8)
    ]
    model.replies(prompts, [1] * 32, lambda: None)
    assert 0.3 < (mx.get_peak_memory() - before) / estimated < 1


def test_a_stop_ends_the_replies_and_keeps_no_memory(models: Path) -> None:
    model, asked, polls = local_model(str(folder_of(models))), prompts_of(), 0

    def stop() -> None:
        nonlocal polls
        polls += 1
        if polls == 5:
            raise KeyboardInterrupt

    model.replies(asked, [LIMIT] * len(asked), lambda: None)
    gc.collect()
    before = mx.get_active_memory()
    with pytest.raises(KeyboardInterrupt):
        model.replies(asked, [LIMIT] * len(asked), stop)
    model.replies(asked, [LIMIT] * len(asked), lambda: None)
    gc.collect()
    mx.synchronize()
    assert mx.get_active_memory() <= before


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^reward_functions: "):
        local_model(str(tmp_path))


def scored(model, groups=None) -> list[float | None]:
    return model.score(groups or golden_groups(), TrainerState(), lambda: None).scores[0]


@pytest.mark.parametrize("kind", GOLDEN["models"])
def test_scores_are_those_of_trl(kind: str, tmp_path: Path, monkeypatch) -> None:
    model = opened(write_reward_model(tmp_path, kind))
    expected = GOLDEN["models"][kind]
    monkeypatch.setattr(reward_model, "MICRO_BATCH_TOKENS", {False: 4096, True: 4096})
    batched = scored(model)
    assert batched == pytest.approx(expected["chat"], abs=1e-4)
    monkeypatch.setattr(reward_model, "MICRO_BATCH_TOKENS", {False: 1, True: 1})
    some = golden_groups()[::7]
    assert scored(model, some) == pytest.approx(batched[::7], abs=2e-5), "one text at a time"
    model.close()
    plain = opened(write_reward_model(tmp_path, kind, template=False))
    assert scored(plain, some) == pytest.approx(expected["plain"][::7], abs=1e-4)


def test_gemma_3_with_images(tmp_path: Path) -> None:
    about = GOLDEN["models"]["gemma3_text"]
    whole = {
        "architectures": ["Gemma3ForSequenceClassification"],
        "model_type": "gemma3",
        "text_config": about["config"],
    }
    names = (("model.language_model.", "model.vision_tower.x"), ("language_model.model.", "vision_tower.x"))
    some = golden_groups()[::7]
    for number, (prefix, image) in enumerate(names):
        folder = write_reward_model(tmp_path / str(number), "gemma3_text")
        (folder / "config.json").write_text(json.dumps(whole | {"id2label": {"0": "x"}}))
        arrays = {name.replace("model.", prefix): x for name, x in arrays_of(about["shapes"]).items()}
        mx.save_safetensors(str(folder / "model.safetensors"), arrays | {image: mx.zeros((2, 2))})
        assert scored(opened(folder), some) == pytest.approx(about["chat"][::7], abs=1e-4)


@pytest.mark.parametrize("kind", ["qwen3", "modernbert"])
def test_quantised_scores_are_close_and_the_head_stays(kind: str, tmp_path: Path) -> None:
    folder, expected = write_reward_model(tmp_path, kind), GOLDEN["models"][kind]["chat"][::7]
    some = golden_groups()[::7]
    distance = {
        bits: max(
            abs(a - b) for a, b in zip(scored(opened(folder, f"(quantization={bits})"), some), expected, strict=True)
        )
        for bits in (8, 4)
    }
    assert 1e-4 < distance[8] < 0.1 < distance[4], distance


def test_models_that_are_none_are_refused(tmp_path: Path) -> None:
    def refused(sentence: str, arguments: str = "", drop: str = "", **changes) -> None:
        folder = write_reward_model(tmp_path / "rm", **changes)
        if drop:
            arrays = {name: x for name, x in arrays_of(GOLDEN["models"]["qwen3"]["shapes"]).items() if name != drop}
            mx.save_safetensors(str(folder / "model.safetensors"), arrays)
        with pytest.raises(UserError) as caught:
            RewardModel(read_call(f"{folder}{arguments}"), tmp_path)
        (fault,) = caught.value.faults
        assert fault.setting == "reward_functions" and sentence in fault.sentence and len(fault.sentence) < 300

    refused("is Qwen3ForCausalLM, and a reward model is a model for", architectures=["Qwen3ForCausalLM"])
    refused("it has 3 labels, and a reward model has one", id2label={"0": "a", "1": "b", "2": "c"})
    refused("its architecture is bert, and", architectures=["BertForSequenceClassification"], model_type="bert")
    refused("its weights have no score.weight", drop="score.weight")
    refused("Missing 1 parameters", drop="model.norm.weight")
    refused("its quantization must be none, 4 or 8, not 3", "(quantization=3)")
    with pytest.raises(UserError, match="There is no model"):
        RewardModel(read_call("./nowhere/rm"), tmp_path)


def test_a_model_without_a_weight_to_quantise_is_refused(tmp_path: Path) -> None:
    folder = write_reward_model(tmp_path, intermediate_size=48)
    shapes = {name: [48 if n == 64 else n for n in of] for name, of in GOLDEN["models"]["qwen3"]["shapes"].items()}
    mx.save_safetensors(str(folder / "model.safetensors"), arrays_of(shapes))
    opened(folder)
    with pytest.raises(UserError, match="none of its weights is a multiple of 64 wide; leave out quantization"):
        opened(folder, "(quantization=4)")


def test_a_conversation_without_a_template_is_refused(tmp_path: Path) -> None:
    model = opened(write_reward_model(tmp_path, template=False))
    (group, *_) = golden_groups()
    group.problem.row["prompt"] = group.problem.messages
    with pytest.raises(RewardError, match="has no chat template, and the prompts are conversations"):
        scored(model, [group])
