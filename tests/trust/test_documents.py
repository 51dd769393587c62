"""Configurations and code that users bring, as guides and manuals of other trainers print them: each runs here, with a
tiny model, rows made on the spot and fewer steps. `trl` is `backend` where docs/library.md says so."""

import ast
import csv
import json
import re
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from backend import train
from backend.runs.events import read_events
from backend.runs.run_folder import RunFolder
from tests.models.test_hub import point_at
from tests.support import public_datasets, small_run
from tests.support.hub_server import HubStandIn
from tests.support.public_datasets import DEEPMATH, GSM8K
from tests.support.verbs import run_ok

pytestmark = pytest.mark.proof

CUT = {"max_completion_length": 6, "max_seq_length": 400, "report_to": "none", "device": "cpu"}
"""Over every configuration. wandb, which one of them names, is an extra."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("documents")
    small_run.settings_for(folder)
    return folder


def arguments(block: str) -> dict[str, Any]:
    """The keyword arguments of the first call in a block, as the lines of a settings file."""
    call = next(node for node in ast.walk(ast.parse(block.replace("...,", ""))) if isinstance(node, ast.Call))
    return {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def metrics_of(run: Path, functions: Sequence[str]) -> list[dict[str, Any]]:
    """Of every step of a finished run, which has a mean of each function."""
    events = list(read_events(RunFolder(run).events))
    steps = [event["metrics"] for event in events if event["kind"] == "step"]
    assert events[-1]["kind"] == "finished" and steps
    assert all(f"rewards/{name}/mean" in step for step in steps for name in functions)
    return steps


def trained(
    folder: Path, tmp_path: Path, settings: dict[str, Any], functions: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Metrics of the steps of `check FILE.yaml` and `train FILE.yaml`."""
    model = {"model": str(folder / "model")} if "model_path" not in settings else {}
    file = small_run.write_config(tmp_path / "run.yaml", model | settings | CUT)
    run_ok("check", file)
    printed = run_ok("train", file, "--runs-dir", tmp_path / "runs", "--allow-code")
    return metrics_of(Path(printed.stdout.splitlines()[0]), functions)


DEEP = r'''
from datasets import load_dataset, Dataset
SYSTEM_PROMPT = """
Respond in the following format:
[Your step-by-step thinking]
[Final answer]
"""
def prepare_dataset(raw_data):
    return raw_data.map(lambda x: {
        'prompt': [
            {'role': 'system', 'content': SYSTEM_PROMPT},
            {'role': 'user', 'content': x['question']}
        ],
        'answer': extract_answer(x['raw_answer'])
    })
def reward_function_name(
    prompts,  # List[List[Dict]]: Original prompts
    completions,  # List[List[Dict]]: Model generations
    answer=None,  # Optional: Ground truth from dataset
    **kwargs  # Additional dataset columns
) -> list[float]:
    responses = [comp[0]['content'] for comp in completions]
    return [compute_score(response) for response in responses]
def correctness_reward(prompts, completions, answer, **kwargs):
    responses = [comp[0]['content'] for comp in completions]
    extracted = [extract_final_answer(r) for r in responses]
    return [2.0 if ans == gt else 0.0 for ans, gt in zip(extracted, answer)]
def incremental_format_reward(completions, **kwargs):
    responses = [comp[0]['content'] for comp in completions]
    rewards = []
    for r in responses:
        score = 0.0
        if '' in r: score += 0.25
        if r.count('') == 1:
            extra_text = r.split('')[-1].strip()
            score -= len(extra_text) * 0.001
        rewards.append(score)
    return rewards
class AdaptiveReward:
    def __init__(self, base_reward_func, initial_weight=1.0):
        self.func = base_reward_func
        self.weight = initial_weight
    def __call__(self, *args, **kwargs):
        rewards = self.func(*args, **kwargs)
        return [r * self.weight for r in rewards]
def load_custom_knowledge_base(csv_path):
    import pandas as pd
    return Dataset.from_pandas(pd.read_csv(csv_path)).map(lambda x: {
        'prompt': [
            {'role': 'system', 'content': CUSTOM_SYSTEM_PROMPT},
            {'role': 'user', 'content': x['question']}
        ],
        'answer': x['expert_answer']
    })
def debug_reward(completions, **kwargs):
    responses = [comp[0]['content'] for comp in completions]
    for i, r in enumerate(responses[:2]):
        print(f"Response {i}: {r[:200]}...")
    return [1.0] * len(responses)
'''
LEFT_OPEN = """
CUSTOM_SYSTEM_PROMPT = SYSTEM_PROMPT
extract_answer = extract_final_answer = str.strip
compute_score = len
adaptive = AdaptiveReward(correctness_reward)
"""
"""What the guide leaves to its reader."""
BOTH = ["incremental_format_reward", "correctness_reward"]
SMALL_GPU = """
training_args = GRPOConfig(
    output_dir="outputs/grpo-model", learning_rate=5e-6, adam_beta1=0.9, adam_beta2=0.99, weight_decay=0.1,
    warmup_ratio=0.1, lr_scheduler_type='cosine', per_device_train_batch_size=1, gradient_accumulation_steps=4,
    num_generations=8, max_prompt_length=256, max_completion_length=512, num_train_epochs=1, max_steps=None, bf16=True,
    optim="adamw_8bit", max_grad_norm=0.1, logging_steps=1, save_steps=100, report_to="wandb",
)
"""
LARGE_GPU = """
training_args = GRPOConfig(
    output_dir="outputs/grpo-model", learning_rate=1e-5, per_device_train_batch_size=4, gradient_accumulation_steps=2,
    num_generations=16, max_prompt_length=512, max_completion_length=1024, num_train_epochs=1, bf16=True, use_vllm=True,
    logging_steps=10,
)
"""
PEFT = """
peft_config = LoraConfig(
    r=16, lora_alpha=32, task_type="CAUSAL_LM", lora_dropout=0.05,
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
)
"""


@pytest.fixture(scope="module")
def deep(folder: Path) -> Path:
    """The guide's functions in one file, none of them registered."""
    file = folder / "deep.py"
    file.write_text(DEEP + LEFT_OPEN)
    return file


@pytest.fixture(scope="module")
def flow(folder: Path, deep: Path) -> dict[str, Any]:
    """Settings of the guide's flow: text questions, a system prompt, and its functions by name."""
    questions = [{"question": f"What is {n} plus {n}?", "answer": str(2 * n)} for n in range(3)]
    data = write_rows(folder / "questions.jsonl", questions)
    about = {"data": data, "prompt_feature": "question", "system_prompt": "Respond in the following format."}
    return about | {"reward_functions_file": str(deep), "reward_functions": BOTH}


@pytest.mark.parametrize("block", [SMALL_GPU, LARGE_GPU], ids=["small", "large"])
@pytest.mark.parametrize("peft", [{}, {"peft_config": arguments(PEFT)}], ids=["full", "lora"])
def test_deep_guide_configurations(folder: Path, flow: dict[str, Any], tmp_path: Path, block: str, peft: Any) -> None:
    steps = trained(folder, tmp_path, arguments(block) | peft | flow, BOTH)
    assert len(steps) == 3, "one epoch of one prompt a step"


@pytest.mark.parametrize(
    "names", [["reward_function_name"], ["debug_reward"], ["deep.py::adaptive"], ["deep.py::adaptive", *BOTH[:1]]]
)
def test_deep_guide_functions(folder: Path, flow: dict[str, Any], tmp_path: Path, names: list[str]) -> None:
    entries = [name.replace("deep.py", str(folder / "deep.py")) for name in names]
    trained(
        folder, tmp_path, flow | {"iters": 1, "reward_functions": entries}, [name.split("::")[-1] for name in names]
    )


def test_deep_guide_stages_and_debugging(folder: Path, flow: dict[str, Any], tmp_path: Path) -> None:
    stages = [{"iters": 1, "reward_functions": BOTH[:1]}, {"iters": 1, "reward_functions": BOTH}]
    first, second = trained(folder, tmp_path, flow | {"iters": 2, "stages": stages})
    assert f"rewards/{BOTH[0]}/mean" in first and f"rewards/{BOTH[1]}/mean" not in first
    assert f"rewards/{BOTH[1]}/mean" in second
    (run,) = (tmp_path / "runs").iterdir()
    run_ok("export", run, "--to", "folder", "--folder", tmp_path / "merged")
    asked = ("--prompt", "What is 15 + 27?", "--max-tokens", "4", "--temperature", "0.7", "--top-p", "0.9")
    assert run_ok("generate", run, *asked).stdout
    settings = {"model": str(folder / "model"), "group_size": 2} | flow | {"reward_functions": ["debug_reward"]} | CUT
    run_ok("rewards", "sample", small_run.write_config(tmp_path / "debug.yaml", settings), "-n", "1")


def test_deep_guide_datasets(folder: Path, deep: Path, tmp_path: Path) -> None:
    from datasets import Dataset

    code = runpy.run_path(str(deep))
    settings = {"model": str(folder / "model"), "iters": 1, "group_size": 2} | CUT
    with (tmp_path / "base.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["question", "expert_answer"], ["Why?", "So."], ["Where?", "Here."]])
    raw = Dataset.from_list([{"question": "What is 2 plus 2?", "raw_answer": " 4 "}] * 3)
    for rows in (code["prepare_dataset"](raw), code["load_custom_knowledge_base"](str(tmp_path / "base.csv"))):
        functions = [code[name] for name in BOTH] + [code["AdaptiveReward"](code["correctness_reward"])]
        run = train(settings, reward_functions=functions, dataset=rows, runs_dir=tmp_path / "runs")
        metrics_of(run.folder, [*BOTH, "AdaptiveReward"])


MLX_GRPO = """python mlx_grpo_trainer_aligned.py --output_dir ./output_model --model_path ./base_model
--train_dataset_path ./data/train.jsonl --val_dataset_path ./data/valid.jsonl --num_training_steps 10000
--reward_content_type jaccard"""
MLX_GRPO_HUB = 'python mlx_grpo_trainer_aligned.py --dataset_name "your-hf-dataset" --dataset_config "main"'


@pytest.mark.parametrize("kind", ["jaccard", "math_eval", "choice_correctness"])
def test_mlx_grpo_command(folder: Path, tmp_path: Path, kind: str) -> None:
    told = dict(re.findall(r"--(\w+) (\S+)", MLX_GRPO))
    told |= {"model_path": str(folder / "model"), "num_training_steps": 2, "reward_content_type": kind}
    rows = write_rows(tmp_path / "train.jsonl", [{"prompt": f"{n} + {n}?", "completion": str(2 * n)} for n in range(4)])
    told |= {"train_dataset_path": rows, "val_dataset_path": rows}
    told |= {"reward_format_weight": 0.5, "reward_content_weight": 0.5}
    assert len(trained(folder, tmp_path, told, ["r1_soft_format_reward_func", kind])) == 2


def test_datasets_of_the_hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """mlx-grpo's command with a dataset, and TRL's quick start with DeepMath and its accuracy_reward."""
    told = dict(re.findall(r'--(\w+) "(\S+)"', MLX_GRPO_HUB)) | {"dataset_name": GSM8K, "num_training_steps": 1}
    told |= {"dataset_prompt_key": "question", "dataset_answer_key": "answer"}  # your-hf-dataset has prompt, completion
    quick = {"dataset_name": DEEPMATH, "reward_funcs": "trl.rewards.accuracy_reward", "max_steps": 1}
    with HubStandIn({}, {GSM8K: public_datasets.gsm8k(), DEEPMATH: public_datasets.deepmath()}) as stand_in:
        point_at(stand_in.url, tmp_path / "cache", monkeypatch)
        monkeypatch.setattr("datasets.config.HF_ENDPOINT", stand_in.url)
        trained(folder, tmp_path, told, ["jaccard"])
        trained(folder, tmp_path, quick, ["accuracy_reward"])


# TRL's manual, of 0.16 and of today

TRL = r"""
def reward_len(completions, **kwargs):
    return [-abs(20 - len(completion)) for completion in completions]
def longer(completions, **kwargs):
    return [float(len(completion)) for completion in completions]
def more_tokens(completions_ids, **kwargs):
    return [float(len(ids)) for ids in completions_ids]
import re
def format_reward_func(completions, **kwargs):
    pattern = r"^<think>.*?</think><answer>.*?</answer>$"
    completion_contents = [completion[0]["content"] for completion in completions]
    matches = [re.match(pattern, content) for content in completion_contents]
    return [1.0 if match else 0.0 for match in matches]
def boxed(completions, ground_truth, **kwargs):
    matches = [re.search(r"\\boxed\{(.*?)\}", completion) for completion in completions]
    contents = [match.group(1) if match else "" for match in matches]
    return [1.0 if c == gt else 0.0 for c, gt in zip(contents, ground_truth)]
def math_reward_func(prompts, completions, task, **kwargs):
    return [(1.0 if "4" in c else -1.0) if t == "math" else None for c, t in zip(completions, task)]
def coding_reward_func(prompts, completions, task, **kwargs):
    return [(1.0 if "4" in c else -1.0) if t == "coding" else None for c, t in zip(completions, task)]
import asyncio
async def async_reward_func(prompts, completions, **kwargs):
    await asyncio.sleep(0.01)
    return [1.0 if completion else 0.0 for completion in completions]
"""
"""Four functions are all called reward_func there."""
ROWS = [
    {"prompt": "What is 2+2?", "task": "math", "ground_truth": "4"},
    {"prompt": "Write a function that returns the sum of two numbers.", "task": "code", "ground_truth": "2"},
    {"prompt": "What is 3*4?", "task": "math", "ground_truth": "12"},
    {"prompt": "Write a function that returns the product of two numbers.", "task": "code", "ground_truth": "5"},
]
BLOCKS = {  # configurations of the manual's blocks and sentences → functions to run them with
    "GRPOConfig(output_dir='Qwen2-0.5B-GRPO', logging_steps=10)": ["reward_len"],
    "GRPOConfig(..., use_vllm=True)": ["reward_len", "longer"],
    "GRPOConfig(..., use_vllm=True, vllm_mode='server')": ["more_tokens", "async_reward_func"],
    "GRPOConfig(..., use_vllm=True, vllm_mode='colocate')": ["boxed", "reward_len"],
    "GRPOConfig(per_device_train_batch_size=4, use_vllm=True, vllm_server_host='10.0.0.1')": ["format_reward_func"],
    "GRPOConfig(reward_weights=[1.0, 2.0])": ["math_reward_func", "coding_reward_func"],
    "GRPOConfig(scale_rewards=False, beta=0.04, num_iterations=2, loss_type='dr_grpo')": ["accuracy_reward"],
    "GRPOConfig(scale_rewards='batch', loss_type='sapo', mask_truncated_completions=True)": ["think_format_reward"],
    "GRPOConfig(vllm_importance_sampling_correction=False, vllm_enable_sleep_mode=True, loss_type='dapo')": ["longer"],
    "GRPOConfig(importance_sampling_level='sequence', vllm_importance_sampling_mode='token_mask')": ["boxed"],
}


@pytest.mark.parametrize("block", BLOCKS)
def test_trl_manual(folder: Path, tmp_path: Path, block: str) -> None:
    """By a file of settings; the quick starts go by the trainer, and the deep guide's datasets by the library."""
    names, settings = BLOCKS[block], arguments(block) | {"max_steps": 2}
    (tmp_path / "manual.py").write_text(TRL)
    settings |= {"data": write_rows(tmp_path / "rows.jsonl", ROWS), "answer_feature": "ground_truth"}
    settings |= {"reward_functions_file": str(tmp_path / "manual.py"), "reward_funcs": names}
    steps = trained(folder, tmp_path, settings, names)
    assert len(steps) == 2 // settings.get("num_iterations", 1), "max_steps counts updates"


QUICK_START = """
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

dataset = load_dataset("trl-lib/tldr", split="train")

# Define the reward function, which rewards completions that are close to 20 characters
def reward_len(completions, **kwargs):
    return [-abs(20 - len(completion)) for completion in completions]

training_args = GRPOConfig(output_dir="Qwen2-0.5B-GRPO", logging_steps=10)
trainer = GRPOTrainer(
    model="Qwen/Qwen2-0.5B-Instruct",
    reward_funcs=reward_len,
    args=training_args,
    train_dataset=dataset,
)
trainer.train()
"""
QUICK_START_NOW = """
from datasets import load_dataset
from trl import GRPOTrainer
from trl.rewards import accuracy_reward

dataset = load_dataset("trl-lib/DeepMath-103K", split="train")

trainer = GRPOTrainer(
    model="Qwen/Qwen2-0.5B-Instruct",
    reward_funcs=accuracy_reward,
    train_dataset=dataset,
)
trainer.train()
"""


@pytest.mark.parametrize("script", [QUICK_START, QUICK_START_NOW], ids=["0.16", "today"])
def test_trl_quick_start_as_printed(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """With another model and fewer rows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRPO_STUDIO_RUNS", str(tmp_path / "runs"))
    ours = script.replace("from trl", "from backend.trl").replace("Qwen/Qwen2-0.5B-Instruct", str(folder / "model"))
    with HubStandIn({}, {DEEPMATH: public_datasets.deepmath()}) as stand_in:
        point_at(stand_in.url, tmp_path / "cache", monkeypatch)
        monkeypatch.setattr("datasets.config.HF_ENDPOINT", stand_in.url)
        code: dict[str, Any] = {}
        exec(ours.replace("trl-lib/tldr", DEEPMATH).replace('split="train"', 'split="train[:2]"'), code)
    run = code["trainer"].run
    assert run.ending == "finished" and len(metrics_of(run.folder, [])) == run.step > 0
