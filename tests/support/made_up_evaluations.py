"""Evaluations without a model: made-up completions through the real arithmetic."""

import random
from pathlib import Path
from typing import Any

from backend.runs.completion_rows import CompletionRow
from backend.runs.run_folder import RunFolder
from backend.sampling.sampler import Sampling
from backend.trainer.evaluation.comparison import decoding_of
from backend.trainer.evaluation.evaluation_rows import (
    Data,
    Decoding,
    DecodingName,
    EvaluatedRow,
    Evaluation,
    PassRule,
    RewardFunctionUsed,
    Subject,
    write_evaluation,
)

RULE = PassRule(reward="r1_accuracy_reward_func", at_least=2.0, chosen_by="default")


def completion(reward: float | None, text: str = "") -> CompletionRow:
    scores = {"r1_accuracy_reward_func": None if reward is None else 2 * reward, "r1_int_reward_func": reward}
    return CompletionRow(text=text or f"reward {reward}", tokens=6, stop="eos", rewards=scores, reward=reward)


def evaluated_row(index: int, before: float | None, after: float | None) -> EvaluatedRow:
    """A row with one greedy completion of each side."""
    sides: Any = {"base": [completion(before, f"base {index}")], "tuned": [completion(after, f"tuned {index}")]}
    return EvaluatedRow(index=index, prompt=f"Is it {index}?", answer=str(index), type=None, greedy=sides, sampled=None)


def sampled(row: EvaluatedRow, count: int, dice: random.Random) -> EvaluatedRow:
    """The row with sampled completions too, whose rewards are 0 or 1."""
    made: Any = {
        side: [completion(float(dice.random() < chance)) for _ in range(count)]
        for side, chance in (("base", 0.4), ("tuned", 0.7))
    }
    return EvaluatedRow(**{**row, "sampled": made})


def evaluation(
    rows: list[EvaluatedRow] | None = None, name: str = "test-step-32", created: float = 1.76e9
) -> Evaluation:
    """The evaluation of these rows; by default of two, one of which got better."""
    rows = rows or [evaluated_row(0, 0.0, 1.0), evaluated_row(1, 1.0, 1.0)]
    names: list[DecodingName] = [each for each in ("greedy", "sampled") if rows[0][each] is not None]
    about = {"created": created, "seconds": 3.0, "device": "Device(cpu, 0)", "max_completion_length": 28, "seed": 1}
    subject = Subject(model="demo/model", run="run", step=32, train_type="lora", config_sha256="0" * 64)
    data = Data(dataset="demo/data", split="test", source="test.jsonl", rows=len(rows), rows_in_split=len(rows))
    functions = [RewardFunctionUsed(name=f"r1_{kind}_reward_func", weight=1.0) for kind in ("accuracy", "int")]
    made: Any = {"name": name, "subject": subject, "data": data, "functions": functions, "pass_rule": RULE}
    return Evaluation(**made, **about, decodings=[_decoding(each, rows) for each in names])


def _decoding(name: DecodingName, rows: list[EvaluatedRow]) -> Decoding:
    sides = rows[0][name] or {}
    sampling = Sampling(0.0 if name == "greedy" else 1.0)
    return decoding_of(name, sampling, dict.fromkeys(sides, 1.0), rows, RULE, [1, len(sides["base"])])


def write(run: RunFolder, name: str, prompts: int = 40, seed: int = 0, created: float = 1.76e9) -> Path:
    """An evaluation in the run's folder, greedy and sampled, that is better on most prompts and worse on some."""
    dice = random.Random(seed)
    rows = [
        sampled(evaluated_row(i, float(dice.random() < 0.3), float(dice.random() < 0.8)), 4, dice)
        for i in range(prompts)
    ]
    return write_evaluation(run.evaluations, evaluation(rows, name, created), rows)
