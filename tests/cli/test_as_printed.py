"""Every command of the README, the guide and the documents, and every settings file and Python program that they print,
run as printed in an empty home.

Files have the names that the documents use; RUN and the like stand for real ones. What no machine here can do (another
Mac, an account) has a stand-in: a Hub on this machine, an `ssh` that stays here, an `ollama` that only listens.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import yaml

from tests.support.fake_hosts import FakeHosts
from tests.support.hub_server import TOKEN, HubStandIn
from tests.support.public_datasets import GSM8K, gsm8k, model_repo
from tests.support.random_models import tiny_model
from tests.support.small_run import write_rows

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "guide").glob("*.md"))]
MODELS = ("Qwen/Qwen3-0.6B", "mlx-community/Qwen3-0.6B-4bit", "mlx-community/Qwen2.5-1.5B-Instruct-4bit")
REWARDS = '''
from backend.rewards import register_reward_function

@register_reward_function("low_half")
def low_half(prompts, completions, answer, types=None):
    """Share of ASCII characters."""
    return [sum(character < "~" for character in text) / max(1, len(text)) for text in completions]
'''
SMALL = {"num_layers": -1, "rank": 2, "group_size": 2, "max_completion_length": 8, "max_seq_length": 1024}
EXAMPLES = ROOT / "resources" / "examples"
ROWS = 'rows = [{"prompt": f"{n} plus {n}?", "solution": str(2 * n)} for n in range(16)]\n'
OTHERS = ("games.py", "mcp_servers", "openenv", "data: sessions")  # settings that name programs of the reader
PROGRAM = {"data": "rows.jsonl", "reward_functions": ["r1_int"], "iters": 2} | SMALL
QUICK = [f"--set={key}={value}" for key, value in {"iters": 2, "max_completion_length": 8, "group_size": 4}.items()]

pytestmark = pytest.mark.proof


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a page in one language, without their indentation."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```$", page.read_text(encoding="utf-8"), re.M | re.S)
    return [re.sub(f"^{indent}", "", text, flags=re.M) for indent, text in found]


def printed_commands() -> list[str]:
    """What follows `python -m backend` anywhere, and the README's list of verbs, each once and in order."""
    verbs = PAGES[0].read_text(encoding="utf-8").split("## In the terminal", 1)[1].split("```", 2)[1]
    lines = [line for line in verbs.splitlines() if line.strip()]
    for page in PAGES:
        lines += re.findall(r"python -m backend ([^`\n]+)", page.read_text(encoding="utf-8"))
    commands = [re.split(r"  +|#", line)[0].strip() for line in lines]
    return list(dict.fromkeys(command for command in commands if not command.startswith(("VERB", "(`"))))


class Home:
    """An empty home with the files that the documents name; `call` runs a command of theirs in it."""

    def __init__(self, folder: Path, hub: HubStandIn) -> None:
        self.folder, self.work = folder, folder / "work"
        self.work.mkdir()
        self.model = tiny_model(folder / "model", layers=1)
        kept = {name: value for name, value in os.environ.items() if name in ("PATH", "FAKE_HOSTS", "LANG")}
        self.environment = kept | {"HOME": str(folder), "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"}
        self.environment |= {"PYTHONPATH": str(ROOT), "SHELL": "/bin/bash", "TMPDIR": str(folder / "tmp")}
        self.environment |= {"PYTHON_KEYRING_BACKEND": "tests.support.keychain.Keychain"}
        for name in ("tmp", ".lmstudio/models"):
            (folder / name).mkdir(parents=True)
        self.runs = folder / ".local" / "share" / "grpo-studio" / "runs"

    def call(self, arguments: list[str], *, keys: str = "", seconds: float = 300) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "backend", *arguments]
        return subprocess.run(
            command, cwd=self.work, env=self.environment, input=keys, capture_output=True, text=True, timeout=seconds
        )

    def ok(self, arguments: list[str], *, keys: str = "", codes: tuple[int, ...] = (0,)) -> str:
        """Run a command; returns what it printed. It must end with one of `codes`, and show no traceback."""
        began = time.monotonic()
        done = self.call(arguments, keys=keys)
        print(f"{time.monotonic() - began:6.1f} s  {done.returncode}  {shlex.join(arguments)}", flush=True)
        said = done.stdout + done.stderr
        assert done.returncode in codes, (arguments, said)
        assert "Traceback" not in said, (arguments, said)
        return said


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    folder = tmp_path_factory.mktemp("home")
    model = tiny_model(folder / "hub-model", layers=1)
    with pytest.MonkeyPatch.context() as patch, HubStandIn(datasets={GSM8K: gsm8k()}) as hub:
        hub.repos["models"] |= {id_: model_repo(model) for id_ in MODELS}
        hosts = FakeHosts(folder, patch)
        (hosts.folder.parent / "programs" / "ollama").write_text("#!/bin/sh\ncat > /dev/null\n")
        (hosts.folder.parent / "programs" / "ollama").chmod(0o755)
        yield Home(folder, hub)


def config(home: Home, name: str, **settings: object) -> None:
    values = {"model": str(home.model), "data": "rows", "reward_functions_file": "FILE.py"}
    values |= {"reward_functions": ["low_half"], "fuse": False} | SMALL | settings
    (home.work / name).write_text(yaml.safe_dump(values))


def write_files(home: Home) -> None:
    """Every file that a printed command names."""
    shutil.copytree(EXAMPLES, home.work, dirs_exist_ok=True)
    write_rows(home.work / "rows.jsonl", 40)
    (home.work / "questions.csv").write_text("prompt,answer\nSay !,!\n")
    for split in ("train", "valid", "test"):
        write_rows(home.work / "rows" / f"{split}.jsonl", 16)
    (home.work / "FILE.py").write_text(REWARDS)
    case = {"prompt": "Say !", "answer": "!", "completion": "!", "expected": {"low_half": 1.0}}
    (home.work / "FILE.cases.jsonl").write_text(json.dumps(case) + "\n")
    config(home, "CONFIG.yaml", iters=300, save_every=100, steps_per_eval=50, val_batches=2)
    for name in ("config.yaml", "FILE.yaml"):
        config(home, name, iters=2)
    (rates,) = [text for page in PAGES for text in blocks(page, "yaml") if text.startswith("# rates.yaml")]
    (home.work / "rates.yaml").write_text(rates)
    config(home, "lora.yaml", iters=16, steps_per_eval=8, val_batches=2)
    sweep = {"base": "lora.yaml", "over": {"learning_rate": [1e-4, 1e-3]}, "seeds": [0], "metric": "reward"}
    (home.work / "SWEEP.yaml").write_text(yaml.safe_dump(sweep))
    trl = {"model": str(home.model), "data": "rows.jsonl", "max_steps": 2, "num_generations": 2, "use_peft": True}
    trl |= {"reward_funcs": ["think_format_reward"], "max_completion_length": 8, "per_device_train_batch_size": 2}
    for name in ("FILE", "trl.yaml"):
        (home.work / name).write_text(yaml.safe_dump(trl))
    lines = [{"prompt": "What is 2 plus 2?", "answer": "4", "completion": text} for text in ("4", "5")]
    (home.work / "FILE.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name in ("HOSTS.json", "hosts.json"):
        (home.work / name).write_text(json.dumps([{"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}]))


WORDS = {"[--file F]": "--file FILE.py", "RUN RUN …": "first second", "lmstudio|folder|ollama|hub|trl": "folder"}
WORDS |= {"[--checkpoint best]": "--checkpoint best", "[--format 4bit]": "--format 4bit", "P": "'2 plus 2?'"}
"""What stands for other things in the printed commands."""
SERVERS = ("endpoint", "job", "mcp", "sessions")
"""Verbs that answer until they are stopped, and what needs their recordings: `tests/endpoint`, `tests/jobs`."""
EXITS = {"machines": (0, 2), "rewards judge": (2,)}
"""Commands that find fault here: one machine is no cluster, and these settings have no judge."""
KEYS = {"hub login": f"{TOKEN}\n", "chat": "What is 2 plus 2?\n/help\n/quit\n"}  # what is typed


def as_run(command: str, home: Home) -> list[str]:
    """The arguments of a printed command, with real things for its words."""
    verb = command.split()[0]
    folder = {"import": str(home.work / "peft"), "validate": str(home.work / "whole" / "model")}.get(verb, "")
    words = WORDS | {"MODEL": str(home.model), "M": str(home.model), "RUN": "live" if verb == "change" else "first"}
    words |= {"FOLDER/output": str(home.work / "output"), "FOLDER": folder}
    for word, real in words.items():
        command = re.sub(rf"(?<![\w/.]){re.escape(word)}(?![\w/.])", real, command)
    return shlex.split(command)


@contextmanager
def live_run(home: Home) -> Iterator[None]:
    """While a run named live is training; it is stopped and saved at the end."""
    shutil.rmtree(home.runs / "live", ignore_errors=True)
    command = [sys.executable, "-m", "backend", "train", "CONFIG.yaml", "--name=live", "--set=iters=1000000"]
    log = home.folder / "live.txt"
    with log.open("w") as file:
        training = subprocess.Popen([*command, "--stream"], cwd=home.work, env=home.environment, stdout=file)
    while '"kind": "step"' not in log.read_text():
        assert training.poll() is None, log.read_text()
        time.sleep(0.1)
    yield
    training.send_signal(signal.SIGTERM)
    assert training.wait(120) == 3


def test_every_command_runs_as_printed(home: Home) -> None:
    write_files(home)
    home.ok([*("train", "CONFIG.yaml", "--name", "first")])
    home.ok([*("train", "CONFIG.yaml", "--name", "second", "--set=seed=1")])
    home.ok([*("export", "first", "--to", "folder", "--folder", "whole", "--name", "model")])
    home.ok([*("export", "first", "--to", "folder", "--folder", ".", "--name", "peft", "--format", "peft")])
    for name in ("checkpoint-200", "output"):
        shutil.copytree(home.work / "peft", home.work / name)
    home.ok([*("train", "config.yaml", f"--set=model={MODELS[0]}")])  # downloads what is imported for
    for command in printed_commands():
        if command.split()[0] in SERVERS:
            continue
        arguments = as_run(command, home)
        typed = next((keys for words, keys in KEYS.items() if command.startswith(words)), "")
        if command == "bench device":
            arguments += ["--quick", "--minutes=0.2"]
        with live_run(home) if command.startswith("change ") else nullcontext():
            codes = next((codes for words, codes in EXITS.items() if command.startswith(words)), (0,))
            home.ok(arguments, keys=typed, codes=codes)
        if command == "queue add CONFIG.yaml":
            home.ok(["queue", "run"])


def printed(language: str) -> list[tuple[str, str]]:
    """(page, text) of every block in one language."""
    return [(page.name, text) for page in PAGES for text in blocks(page, language)]


def test_every_settings_file_is_read_as_printed(home: Home) -> None:
    """What a block leaves out, as it shows a few lines only, are those of a small run."""
    write_files(home)
    for name in ("my_data.jsonl", "hard.jsonl"):
        write_rows(home.work / name, 60)
    small = yaml.safe_load((home.work / "config.yaml").read_text())
    for page, text in printed("yaml"):
        values = yaml.safe_load(text)
        if "over" in values or any(word in text for word in OTHERS):  # a sweep, which a printed command trains
            continue
        print(page, text.splitlines()[0])
        if page == "tools.md":  # the bundled model that calls tools, where the page names none
            values = {"model": str(ROOT / "resources" / "calculator" / "model"), "max_seq_length": 256} | values
        is_whole = "model" in yaml.safe_load(text)
        (home.work / "printed.yaml").write_text(text if is_whole else yaml.safe_dump(small | values))
        if is_whole:  # a whole file, which trains; a first run downloads what it names
            home.ok(["train", "printed.yaml", *QUICK, "--set=gradient_accumulation_steps=1", "--set=steps_per_eval=2"])
        home.ok(["check", "printed.yaml"])


def test_every_program_runs_as_printed(home: Home) -> None:
    write_files(home)
    rewards = ""
    for page, text in printed("python"):
        print(page, text.splitlines()[0])
        if "register_reward_function" in text:
            rewards += text
            continue
        begin = f"from backend import train\nconfig = {PROGRAM | {'model': MODELS[1]}}\n"
        begin = ("" if "import train" in text else begin) + ("" if "rows =" in text else ROWS)
        (home.work / "printed.py").write_text(begin + text)
        done = subprocess.run(
            [sys.executable, "printed.py"], cwd=home.work, env=home.environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    (home.work / "my_rewards.py").write_text(rewards)
    names = re.findall(r'register_reward_function\("(\w+)"\)', rewards)
    listed = home.ok(["rewards", "list", "--file", "my_rewards.py"])
    assert names and all(name in listed for name in names)
    config(home, "rewarded.yaml", iters=2, reward_functions=names, reward_functions_file="my_rewards.py")
    home.ok(["train", "rewarded.yaml"])
