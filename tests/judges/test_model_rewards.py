"""Models among the reward functions: their place in a stage, what the worker gets, and errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from backend.judges import reward_model
from backend.judges.entries import model_entries
from backend.judges.model_reward import ModelScores
from backend.rewards.bench import BenchSettings, RewardBench, line_of, score_lines
from backend.rewards.calls import ThreadCaller
from backend.rewards.catalogue import canonical_entry, metric_name, with_absolute_file
from backend.rewards.errors import Failure, RewardError
from backend.rewards.inputs import TrainerState
from backend.rewards.registry import FunctionDescription
from backend.rewards.scorer import Scorer
from backend.rewards.scoring import FunctionHost, RewardSource
from backend.utils.errors import ConfigProblem, UserError
from tests.support.scoring import make_group

FAILURE = "The model is gone."


class LengthModel:
    """Scores a completion's length times `factor`; fails on an empty one."""

    uses_mlx = True

    def __init__(self, name: str, factor: float) -> None:
        self.about, self.factor = FunctionDescription(name), factor
        self.calls: list[object] = []

    def load(self, folder: Path | None) -> None:
        self.calls.append(("load", folder))

    def start(self, group) -> None:
        self.calls.append("start")

    def score(self, groups, state, poll) -> ModelScores:
        self.calls.append("score")
        texts = [completion.text for group in groups for completion in group.completions]
        if "" in texts:
            raise RewardError([ConfigProblem("reward_functions", FAILURE)], Failure(FAILURE))
        scores = [None if text == "?" else self.factor * len(text) for text in texts]
        return ModelScores(scores, {f"{self.about.name}/explanation": texts}, {"judge/calls": 1.0})

    def close(self) -> None:
        self.calls.append("close")


@pytest.fixture
def opened(monkeypatch) -> dict[str, LengthModel]:
    models: dict[str, LengthModel] = {}

    def open_model(call, base) -> LengthModel:
        factor = float(call.arguments.get("quantization") or 1)
        return models.setdefault(call.name, LengthModel(call.name, factor))

    monkeypatch.setattr(reward_model, "open_reward_model", open_model)
    return models


def scorer_of(*stages: list[str], file: Path | None = None) -> Scorer:
    models = model_entries([entry for stage in stages for entry in stage], file)
    return Scorer(RewardSource(stages, file, Path.cwd(), models=models), FunctionHost(ThreadCaller()), 5.0)


def test_models_score_at_their_place_among_functions(opened, tmp_path: Path) -> None:
    scorer = scorer_of(["org/first(quantization=4)", "r1_int", "org/second", "keyword(word=ab)"], ["org/second"])
    names = [[function.name for function in stage] for stage in scorer.load()]
    assert names == [["first", "r1_int_reward_func", "second", "keyword"], ["second"]]
    assert len(opened) == 2 and not opened["first"].calls, "one of two stages is opened once, and not loaded yet"
    scorer.load_models(tmp_path)
    group = make_group("ab", "12345", "?")
    report = scorer.score([group], 0, [1.0, 1.0, 10.0, 1.0], 5.0, TrainerState())
    assert [list(completion.scores.values()) for completion in group.completions] == [
        [8.0, 0.0, 2.0, 1.0],
        [20.0, 0.0, 5.0, 0.0],
        [None, 0.0, None, 0.0],
    ]
    assert [completion.reward for completion in group.completions] == [29.0, 70.0, 0.0]
    assert report.columns.keys() == {"first/explanation", "second/explanation"} and report.metrics == {"judge/calls": 1}
    assert len(report.seconds) == 4
    scorer.score([group], 1, [1.0], 5.0, TrainerState())
    assert [*group.completions[1].scores.items()] == [("second", 5.0)]
    assert opened["first"].calls[:2] == [("load", tmp_path), ("load", None)]
    scorer.close()
    assert opened["first"].calls[-1] == "close"


def test_a_failing_function_after_a_model_is_named(opened, write_file) -> None:
    file = write_file("def bad(completions, **kwargs):\n    return [1 / 0]\n")
    scorer = scorer_of(["org/first", f"{file}::bad"])
    with pytest.raises(RewardError, match=r"The reward function bad of mine\.py raised ZeroDivisionError"):
        scorer.score([make_group("a")], 0, [1.0, 1.0], 5.0, TrainerState())


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
def test_entries_that_cannot_be_used(opened, entries: list[str], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence.replace("(", r"\(")):
        scorer_of(entries).load()


def test_the_bench_shows_a_failure_at_its_model(opened) -> None:
    settings = BenchSettings(["r1_int", "org/first"], [1.0, 1.0])
    bench = RewardBench()
    for text, error, scores in (("", FAILURE, {}), ("123", "", {"first": 3.0})):
        found = score_lines(bench, [line_of(make_group(text))], settings)
        assert [(each["error"] or {}).get("sentence", "") for each in found["functions"]] == ["", error]
        assert found["scored"][0][0]["rewards"].items() >= scores.items()
    assert opened["first"].calls[-1] == "close", "a bench that stays open keeps no model in memory"
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
