"""`export --to trl`: the folder stands alone, with the run's rows and rewards and nothing of this machine."""

import ast
import json
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from backend.config.config import Config, parse
from backend.data.problems import PromptFormat, messages_of, problem_of
from backend.data.rows import Rows, Splits, read_splits
from backend.export.trl_folder import export_trl, needed_modules
from backend.rewards.catalogue import JUDGE, builtin_rewards
from backend.rewards.resolve import resolve
from backend.rewards.scorer import begin_scorer
from backend.rewards.scoring import TrainerState
from backend.types import Completion, Group
from backend.utils.errors import UserError
from backend.utils.places import demo_folder, resources
from tests.support.reward_models import write_reward_model
from tests.support.scoring import score

PROBE = Path(__file__).parents[1] / "support" / "trl_folder_probe.py"
USERS_FILE = '''
"""Rewards of a user."""
from helper import length
from backend.rewards import register_map_function, register_reward_function
from mlx_lm_lora.trainer.grpo_reward_functions import get_reward_function
@register_reward_function("brief")
def brief(prompts, completions, answer, types=None, *, most=20):
    return [1.0 if length(text) <= most else 0.0 for text in completions]
@register_reward_function()
def twice(prompts, completions, answer, types=None):
    return [2 * score for score in get_reward_function("r1_int_reward_func")(prompts, completions, answer)]
@register_map_function("even")
def even(row):
    return {**row, "note": "kept"} if int(row["number"]) % 2 == 0 else None
'''
PLAIN_FILE = """
def polite(prompts, completions, note, types, **kwargs):
    # As TRL calls it: a column of that name is given as it is.
    return [float("please" in text) + (note[0] == "kept") + (types[0] == "sum") / 2 for text in completions]
"""
TEXTS = [
    "<think>3+4</think><answer>7</answer>",
    "",
    "The answer is 7, please.",
    "\\boxed{\\frac{14}{2}}",
    "<answer>B</answer>",
    '{"a": 1}',
    "```python\ndef f(x):\n    return x + 1\n```",
    "<think>a</think> <answer>3*2+1</answer>",
]
WITH_CHILD = ("accuracy_reward", "cosine_scaled_reward")
"""They start math-verify in a process of its own, which takes a second and a half: once is enough."""
NEED_ARGUMENTS = {"keyword": "keyword(word=please)", "regex_match": 'regex_match(pattern="7")'}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Settings that use every part: all shipped functions, a user's files, each step of a row, other datasets."""
    folder = tmp_path_factory.mktemp("users")
    lines = ["number,question,solution,tests,types"] + [
        f'{n},What is {n}?,"so #### {n + 7}","assert f({n}) == {n + 1}",sum' for n in range(12)
    ]
    (folder / "train.csv").write_text("\n".join(lines) + "\n")
    (folder / "more.jsonl").write_text(json.dumps({"text": [{"role": "user", "content": "Hi"}], "result": 3}) + "\n")
    (folder / "users.py").write_text(USERS_FILE)
    (folder / "plain.py").write_text(PLAIN_FILE)
    (folder / "helper.py").write_text("def length(text):\n    return len(text)\n")
    shipped = [NEED_ARGUMENTS.get(entry.name, entry.name) for entry in builtin_rewards() if entry.name != JUDGE]
    files = {"model": str(demo_folder("model")), "data": str(folder / "train.csv")}
    own = ['brief(most=12, name="very-brief")', "twice", f"{folder / 'plain.py'}::polite"]
    rewards = {"reward_functions": [*shipped, *own], "reward_functions_file": str(folder / "users.py")}
    prompts = {"map_function": "even", "prompt_template": "Q: {question}", "answer_pattern": "#### (.*)"}
    prompts |= {"answer_feature": "solution", "system_prompt": "Think, then answer."}
    more = {"data": str(folder / "more.jsonl"), "prompt_feature": "text", "answer_feature": "result"}
    more |= {"map_function": "", "prompt_template": "", "answer_pattern": ""}
    others = {"eval_data": {"more": more}, "validation_split": 0.2, "data_seed": 3, "reward_isolation": "thread"}
    return parse(files | rewards | prompts | others | {"stop_when": ["kl > 0.8"], "num_layers": 2})


@pytest.fixture(scope="module")
def folder(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_trl(config, "for trl", tmp_path_factory.mktemp("out")).path


@pytest.fixture(scope="module")
def probe(folder: Path) -> dict[str, Any]:
    """What the folder's code makes of rows and completions, in a process that does not see ours (-I)."""
    run = subprocess.run(
        [sys.executable, "-IB", str(PROBE), str(folder)], input=json.dumps(TEXTS), capture_output=True, text=True
    )
    assert not run.returncode, run.stderr
    return json.loads(run.stdout.splitlines()[-1])  # dataset.py prints its notes before


@pytest.fixture(scope="module")
def splits(config: Config) -> Splits:
    """The rows that the run itself reads."""
    scorer = begin_scorer(config)
    try:
        return read_splits(config, scorer.map_rows)
    finally:
        scorer.close()


def lines(rows: Rows, config: Config) -> list[dict[str, Any]]:
    """Rows as dataset.py writes them."""
    form = PromptFormat.of(config)
    chats = [messages_of(row, form, "a row") for row in rows]
    problems = [problem_of(0, row, chat, [], form) for row, chat in zip(rows, chats, strict=True)]
    return [
        {"prompt": each.messages, "answer": each.answer, "row": json.dumps(each.row, ensure_ascii=False)}
        for each in problems
    ]


def test_the_rows_are_those_of_the_run(config: Config, splits: Splits, probe: dict[str, Any]) -> None:
    """Map function, template, pattern, system message, the share held out, another dataset with columns of its own."""
    assert (len(splits.train), len(splits.valid)) == (5, 1)
    assert probe["rows"]["train"] == lines(splits.train, config)
    assert probe["rows"]["validation"] == lines(splits.valid, config)
    assert probe["rows"]["test"] == []
    more = splits.evals["more"]
    assert probe["rows"]["more"] == lines(more.rows, config.model_copy(update=more.settings))


def test_the_rewards_are_those_of_the_run(config: Config, splits: Splits, folder: Path, probe: Any) -> None:
    """Shipped functions, two that a user registers, one with arguments, and a plain one of another file."""
    form, row = PromptFormat.of(config), splits.train[0]
    problem = problem_of(0, row, messages_of(row, form, "a row"), [], form)
    group = Group(problem, [Completion([], [], text, "eos") for text in TEXTS])
    functions = [
        each
        for each in resolve(config.reward_functions, Path(config.reward_functions_file))
        if each.about.name not in WITH_CHILD
    ]
    state = TrainerState(max_completion_length=config.max_completion_length)
    score([group], functions, 60.0, state)
    ours = {
        each.about.name: [completion.scores[each.about.name] for completion in group.completions] for each in functions
    }
    assert {name: scores for name, scores in probe["scores"].items() if name not in WITH_CHILD} == ours
    assert probe["scores"]["accuracy_reward"] == [1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0]
    assert list(probe["scores"])[-3:] == ["very-brief", "twice", "polite"]
    assert probe["scores"]["polite"][:3] == [1.5, 1.5, 2.5]
    assert sum(any(scores) for scores in ours.values()) > 12, "most of them found something to reward"
    assert len(probe["ours"]) > 30 and all(path.startswith(str(folder)) for path in probe["ours"].values())


def test_nothing_of_this_machine_is_in_it(config: Config, folder: Path) -> None:
    texts = {
        path: path.read_text()
        for path in folder.rglob("*")
        if path.suffix in (".py", ".md", ".yaml", ".json") and "model" not in path.parts
    }
    home = str(Path(config.data).parent)
    assert [path for path, text in texts.items() if home in text or str(Path.home()) + "/" in text] == []
    assert not [path for path in texts if "__pycache__" in path.parts]


def run_in(folder: Path, code: str) -> str:
    command = [sys.executable, "-BSc", f"import sys; sys.path += {sys.path[1:]}; {code}"]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert not run.returncode, run.stderr
    return run.stdout


def test_tools_and_environments_are_carried(tmp_path: Path) -> None:
    """With the column under TRL's name. Servers are not."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Play.", "answer": "crane", "game": "word"}\n')
    examples = resources() / "examples"
    environment = {"word": f"{examples / 'wordle.py'}::Wordle", "other": "openenv:ws://127.0.0.1:1/ws"}
    files: dict[str, Any] = {"tools_file": str(examples / "calculator.py"), "environment": environment}
    files |= {"model": "owner/model", "data": str(tmp_path / "rows.jsonl"), "environment_column": "game"}
    server = {"mcp_servers": {"local": {"url": "http://127.0.0.1:1/mcp"}}}
    exported = export_trl(parse(files | server | {"max_tool_calling_iterations": 3}), "it", tmp_path)
    assert [left.setting for left in exported.left_out] == ["mcp_servers", "environment"]
    assert {"tools_file", "environment", "environment_column"} <= exported.by_files.keys()
    assert yaml.safe_load((exported.path / "grpo_config.yaml").read_text())["max_tool_calling_iterations"] == 3
    opened = (
        "import json, dataset; from backend.tools.toolbox import run_tools; dataset.prepare();"
        "tools = run_tools(dataset.settings()).open({}); row = json.loads(dataset.TRAIN.read_text());"
        "print([*tools.tools], tools.schemas.by_environment['word'][0]['function']['name'], row['environment'])"
    )
    assert run_in(exported.path, opened).split("\n")[-2] == "['calculate'] guess word"


def test_rows_with_images_are_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "What?", "answer": "1", "image": "a.png"}\n')
    settings = parse({"model": "owner/model", "data": str(tmp_path / "rows.jsonl")})
    with pytest.raises(UserError, match=r"data: rows\.jsonl has images, and they are not carried"):
        export_trl(settings, "name", tmp_path)


def test_only_a_folder_of_ours_is_replaced(tmp_path: Path) -> None:
    plain = parse({"model": "owner/model", "data": "owner/rows"})
    first = export_trl(plain, "it", tmp_path)
    assert first.left_out == [] and not (first.path / "model").exists()
    assert (first.path / "README.md").read_text().startswith("# it, for TRL\n")
    with pytest.raises(UserError, match="is there already"):
        export_trl(plain, "it", tmp_path)
    (first.path / "output").mkdir()
    with pytest.raises(UserError, match="has what was trained there, and would be lost"):
        export_trl(plain, "it", tmp_path, overwrite=True)
    (first.path / "output").rmdir()
    (first.path / "notes.txt").touch()
    export_trl(plain, "it", tmp_path, overwrite=True)
    assert not (first.path / "notes.txt").exists()
    (first.path / "settings.json").unlink()
    with pytest.raises(UserError, match="no folder for TRL"):
        export_trl(plain, "it", tmp_path, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["it"]


def test_a_model_of_mlx_gives_way_to_its_original(tmp_path: Path) -> None:
    packed = tmp_path / "packed-4bit"
    packed.mkdir()
    (packed / "config.json").write_text(
        json.dumps({"model_type": "qwen3", "quantization": {"bits": 4, "group_size": 64}})
    )
    config = parse({"model": str(packed), "data": "owner/rows"})
    with pytest.raises(UserError, match="its card names no base_model"):
        export_trl(config, "it", tmp_path)
    (packed / "README.md").write_text("---\nlibrary_name: mlx\nbase_model: owner/whole\n---\n")
    exported = export_trl(config, "it", tmp_path)
    words = yaml.safe_load((exported.path / "grpo_config.yaml").read_text())
    assert words["model_name_or_path"] == "owner/whole" and words["load_in_4bit"] is True
    assert [left.setting for left in exported.left_out] == ["model"]


def test_reward_models_come_first_and_judges_are_left_out(tmp_path: Path) -> None:
    packed = f"{write_reward_model(tmp_path / 'rm')}(quantization=4, name=bert)"
    judge = "judge(rubric=helpful)"
    rewards = {"reward_functions": ["r1_int", judge, "owner/rm", packed, "r1_accuracy"]}
    rewards |= {"reward_weights": [1, 9, 2, 3, 4]}
    exported = export_trl(parse({"model": "owner/model", "data": "owner/rows"} | rewards), "it", tmp_path)
    words = yaml.safe_load((exported.path / "grpo_config.yaml").read_text())
    assert words["reward_model_name_or_path"] == "owner/rm" and words["reward_weights"] == [2, 3, 1, 4]
    assert words["reward_funcs"] == ["rewards.r1_int_reward_func", "rewards.r1_accuracy_reward_func"]
    assert [left.value for left in exported.left_out] == ["judge", "bert", packed]
    with pytest.raises(UserError, match="TRL has no judge"):
        export_trl(parse({"model": "owner/model", "data": "owner/rows", "reward_functions": [judge]}), "no", tmp_path)
    assert (exported.path / "reward_models/bert/model.safetensors").is_file()
    printed = run_in(exported.path, "import rewards; print(rewards.FUNCTIONS)")
    assert printed.startswith("['owner/rm', 'reward_models/bert', <function r1_int")


def test_the_bundled_app_has_the_sources_that_are_carried(config: Config) -> None:
    contents = (Path(__file__).parents[2] / "packaging" / "bundle_contents.py").read_text()
    (assignment,) = [
        node
        for node in ast.parse(contents).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "READ_AS_TEXT"
    ]
    patterns = ast.literal_eval(assignment.value)
    assert [path for path in needed_modules(config) if not any(fnmatch(path, pattern) for pattern in patterns)] == []
