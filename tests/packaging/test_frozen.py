"""The frozen app: every verb, every page and every child process works from dist/ on a machine that has nothing.

Run by `make app-test`, which builds first. The programs run with an empty environment and a PATH that holds a shell and
nothing else, so neither this machine's Python nor its compiler can help. The bundle is dist/, or the folder that
$GRPO_STUDIO_BUNDLE names.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import yaml

from app.state import guide
from backend.__main__ import app
from backend.cli.common import STOPPED
from backend.export.exports import FORMATS
from backend.runs.events import Event, read_events
from backend.utils import about
from backend.utils.command import BUNDLED_PROGRAM
from tests.support.hub_server import TOKEN, HubStandIn
from tests.support.random_models import tiny_model
from tests.support.random_runs import write_run

ROOT = Path(__file__).parents[2]
BUILT = ROOT / "dist" / ("GRPO Studio.app/Contents/MacOS" if sys.platform == "darwin" else "GRPO Studio")
BUNDLE = Path(os.environ.get("GRPO_STUDIO_BUNDLE") or BUILT)
INSIDE = next((path for path in (BUNDLE / "_internal", BUNDLE.parent / "Resources") if path.is_dir()), BUNDLE)
RESOURCES = INSIDE / "resources"

pytestmark = [
    pytest.mark.proof,
    pytest.mark.skipif(not (BUNDLE / BUNDLED_PROGRAM).exists(), reason="no frozen app in dist/: make app builds it"),
]

FAILS_ONCE = """
import pathlib, traceback
import mlx.core as mx
from backend.rewards import register_reward_function
MARK = pathlib.Path(__file__).with_name("failed")
TEXT = "[METAL] Command buffer execution failed: Impacting Interactivity (0000000e:kIOGPUCommandBufferCallbackError" \\
    "ImpactingInteractivity)"
def failing(evaluate):
    def call(*arrays):
        if not MARK.exists() and any(frame.name == "update" for frame in traceback.extract_stack()):
            MARK.write_text("once")
            raise RuntimeError(TEXT)
        return evaluate(*arrays)
    return call
mx.eval = failing(mx.eval)
@register_reward_function("length")
def length(completions, **kwargs):
    return [float(len(text)) for text in completions]
"""

IMPORTS = """
import concurrent.futures, csv, ctypes, decimal, difflib, email.mime.text, fractions, sqlite3, statistics
import unicodedata, xml.etree.ElementTree
import numpy, regex, sympy
from backend.rewards import register_reward_function
@register_reward_function("digits")
def digits(completions, **kwargs):
    return [float(sum(character.isdigit() for character in text)) for text in completions]
"""


class Machine:
    """A home folder and a PATH with nothing but a shell, and the frozen programs run in it."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / "home"
        self.programs = folder / "bin"
        self.home.mkdir(parents=True)
        self.programs.mkdir()
        (self.programs / "sh").symlink_to(shutil.which("sh") or "/bin/sh")

    def environment(self, program: str) -> dict[str, str]:
        """All that one of the two executables is told."""
        bare = {"HOME": str(self.home), "PATH": str(self.programs), "TMPDIR": str(self.home), "HF_HUB_OFFLINE": "1"}
        return bare | ({"QT_QPA_PLATFORM": "offscreen"} if program == "grpo-studio" else {})

    @contextmanager
    def started(
        self, program: str, *arguments: str | Path, stdout: int = subprocess.DEVNULL
    ) -> Generator[subprocess.Popen[bytes]]:
        """One of the two executables while it runs; whoever asks for it ends it, or it is killed."""
        command = [str(BUNDLE / program), *map(str, arguments)]
        process = subprocess.Popen(command, env=self.environment(program), cwd=self.home, stdout=stdout)
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def run(
        self, program: str, *arguments: str | Path, stdin: str = "", code: int = 0, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run one of the two executables to its end, and check its exit code; `variables` join its environment."""
        command, environment = [str(BUNDLE / program), *map(str, arguments)], self.environment(program) | variables
        done = subprocess.run(
            command, env=environment, cwd=self.home, input=stdin, capture_output=True, text=True, timeout=280
        )
        said = f"{command} ended with {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        assert done.returncode == code, said
        return done

    def backend(self, *arguments: str | Path, **how: Any) -> str:
        return self.run(BUNDLED_PROGRAM, *arguments, **how).stdout


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return Machine(tmp_path_factory.mktemp("bare"))


def config(machine: Machine, name: str, **changes: object) -> Path:
    """A config of the bundled demo, two short steps long, with `changes`."""
    raw = yaml.safe_load((RESOURCES / "presets" / "demo.yaml").read_text("utf-8"))
    raw |= {"model": str(RESOURCES / "demo" / "model"), "data": str(RESOURCES / "demo" / "data")}
    raw |= {"iters": 2, "save_every": 1, "steps_per_eval": 0, "val_batches": 1, **changes}
    if "reward_functions" in changes:  # the demo's weights are for the demo's functions
        raw.pop("reward_weights", None)
    path = machine.home / f"{name}.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


def trained(machine: Machine, name: str, *arguments: str | Path, **changes: object) -> Path:
    """Train a run to its end; returns its folder."""
    machine.backend("train", config(machine, name, **changes), "--name", name, "--no-progress", *arguments)
    folder = machine.home / ".local" / "share" / "grpo-studio" / "runs" / name
    assert events(folder)[-1]["kind"] == "finished"
    return folder


@pytest.fixture(scope="module")
def run(machine: Machine) -> Path:
    """A finished run."""
    return trained(machine, "trained")


def events(run: Path) -> list[Event]:
    return list(read_events(run / "events.jsonl"))


def steps(run: Path) -> list[int]:
    return [event["step"] for event in events(run) if event["kind"] == "step"]


def wait_for(run: Path, kind: str) -> None:
    """Until the run's event log has an event of this kind."""
    until = time.monotonic() + 200
    while all(event["kind"] != kind for event in events(run)):
        assert time.monotonic() < until, f"no {kind} in the event log of {run.name}"
        time.sleep(0.2)


def last_json(output: str) -> Any:
    return json.loads(output.splitlines()[-1])


LINES = """\
check {run}/config.yaml
clone {run} --warm --name warm --set iters=99
clone {run} --step 1 --name goes-on --start --no-progress
compare {run} {run} --json
demo --iters 1 --json
doctor {run} --json
estimate {run}/config.yaml --json
evaluate {run} --limit 4 --greedy --json
export {run} --to folder --folder {home}/models --name exported
generate {run} --row 1 --both --score --max-tokens 4 --json
hub logout
replay {run} --speed 0 --name replayed --runs-dir {home}
resume {run}
rewards list
rewards score {run}/config.yaml --completions {run}/completions.jsonl --json
rewards sample {run}/config.yaml -n 1 --json
runs --json
track {run} --to csv
validate {resources}/demo/model
where --json
bench device --quick --minutes 0.3 --out {home}
""".splitlines()
"""What needs no more than an exit without an error."""
REFUSED = {
    "change {run} beta=0.1": "is not training",
    "hub whoami": "You are not logged in to Hugging Face",
    "job --hardware": "HF_HUB_OFFLINE",
    "mcp": "not installed",
    "sessions {home}": "",
    "track {run} --to tensorboard": "tensorboard is not part of this app",
}


def words(line: str, machine: Machine, run: Path) -> list[str]:
    return [word.format(run=run, home=machine.home, resources=RESOURCES) for word in line.split(" ")]


@pytest.mark.parametrize("line", [*LINES, *REFUSED])
def test_verb(machine: Machine, run: Path, line: str) -> None:
    done = machine.run(BUNDLED_PROGRAM, *words(line, machine, run), code=2 if line in REFUSED else 0)
    assert REFUSED.get(line, "") in done.stderr


def change(machine: Machine, run: Path) -> None:
    live = run.with_name("live")
    settings = config(machine, "live", iters=1000)
    with machine.started(BUNDLED_PROGRAM, "train", settings, "--name", "live", "--no-progress") as training:
        wait_for(live, "step")
        machine.backend("change", live, "learning_rate=1e-5")
        wait_for(live, "change")
        machine.run("grpo-studio", "--screenshot", machine.home / "live.png")  # ends, and asks nobody about the run
        training.terminate()
        assert training.wait(60) == STOPPED


def chat(machine: Machine, run: Path) -> None:
    assert machine.backend("chat", run, "--max-tokens", "4", stdin="1+1=\n").strip()


def export(machine: Machine, run: Path) -> None:
    machine.backend("export", run, "--to", "trl", "--folder", machine.home, "--name", "for-trl")
    folder = machine.home / "for-trl"
    assert {"train.py", "rewards.py", "grpo_config.yaml"} <= {path.name for path in folder.iterdir()}
    for file in folder.rglob("*.py"):
        compile(file.read_text("utf-8"), str(file), "exec")
    assert list((folder / "backend" / "rewards" / "functions").glob("*.py"))


def serve(machine: Machine, run: Path) -> None:
    line = json.dumps({"id": 1, "ask": "models", "with": {}})
    replies = [json.loads(line) for line in machine.backend("serve", stdin=f"{line}\n").splitlines()]
    assert "answer" in replies[-1], replies


def hub(machine: Machine, run: Path) -> None:
    """keyring and its backends are there, and find that this machine has no keychain."""
    refusal = machine.run(BUNDLED_PROGRAM, "hub", "login", "--from-stdin", stdin="hf_none\n", code=2).stderr
    assert sys.platform != "linux" or "This system has no keychain that could keep the token" in refusal


def sweep(machine: Machine, run: Path) -> None:
    raw = {"base": yaml.safe_load(config(machine, "swept").read_text("utf-8")), "over": {"learning_rate": [1e-4, 1e-5]}}
    file = machine.home / "sweep.yaml"
    file.write_text(yaml.safe_dump(raw))
    results = last_json(machine.backend("sweep", file, "--json"))
    assert results["state"] == "finished" and len(results["configurations"]) == 2


def queue(machine: Machine, run: Path) -> None:
    machine.backend("queue", "add", run / "config.yaml", "--name", "waits", "--set", "iters=1")
    machine.backend("queue", "run")
    assert events(run.with_name("waits"))[-1]["kind"] == "finished"


def import_(machine: Machine, run: Path) -> None:
    theirs = machine.home / "theirs.yaml"
    theirs.write_text("model_name_or_path: owner/name\ndataset_name: owner/rows\nnum_generations: 8\n")
    assert "group_size: 8" in machine.backend("import", theirs)


def rank(machine: Machine, run: Path) -> None:
    """Two ranks of this machine, started by the verb `train`, train one run."""
    file = machine.home / "hosts.json"
    file.write_text(json.dumps([{"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}] * 2))
    report = last_json(machine.backend("machines", file, "--json"))
    assert report["backend"] == "ring" and [each["problem"] for each in report["machines"]] == ["", ""], report
    shared = trained(machine, "shared", "--hosts", file)
    assert next(event for event in events(shared) if event["kind"] == "started")["ranks"] == 2


def endpoint(machine: Machine, run: Path) -> None:
    with machine.started(BUNDLED_PROGRAM, "endpoint", run, "--port", "0", "--json", stdout=subprocess.PIPE) as serving:
        assert serving.stdout is not None
        url = json.loads(serving.stdout.readline())["url"]
        asked = json.dumps({"messages": [{"role": "user", "content": "1+1="}], "max_tokens": 4}).encode()
        with urlopen(Request(f"{url}/chat/completions", asked, {"Content-Type": "application/json"})) as answer:
            assert json.load(answer)["choices"][0]["message"]["role"] == "assistant"
        serving.terminate()
        assert serving.wait(20) == 0


CHECKED = {"change": change, "chat": chat, "endpoint": endpoint, "export": export, "hub": hub, "import": import_}
CHECKED |= {"queue": queue, "rank": rank, "serve": serve, "sweep": sweep}


@pytest.mark.parametrize("verb", CHECKED)
def test_verb_that_needs_more(machine: Machine, run: Path, verb: str) -> None:
    CHECKED[verb](machine, run)


def test_every_verb_has_a_test_here() -> None:
    line = app()
    names = [command.name or command.callback.__name__ for command in line.registered_commands if command.callback]
    tried = {line.split()[0] for line in (*LINES, *REFUSED)} | CHECKED.keys() | {"machines", "train"}
    assert {*names, *(str(group.name) for group in line.registered_groups)} == tried


def test_versions_and_what_is_slow_here(machine: Machine) -> None:
    lines = machine.backend("--version").splitlines()
    assert any(line.startswith("transformers ") for line in lines)
    if sys.platform == "linux":
        assert any(line.startswith("BLAS is OpenBLAS") for line in lines)
        assert lines[-1].startswith("g++ is not installed, so")


@pytest.mark.parametrize("program", [BUNDLED_PROGRAM, "grpo-studio"])
def test_selftest(machine: Machine, program: str) -> None:
    path = machine.home / f"{program}.json"
    machine.run(program, "--selftest", "--report", path)
    report = json.loads(path.read_text("utf-8"))
    assert {check["state"] for check in report["checks"]} == {"ok"}, report["summary"]
    assert report["about"]["installed as"] == "frozen app"


@pytest.fixture(scope="module")
def lora_run(machine: Machine) -> Path:
    """A run on a base that all formats know: that of the demo has a tokenizer that llama.cpp does not."""
    write_run(machine.home / "lora", tiny_model(machine.home / "base", "qwen2", hidden=64), "lora")
    return machine.home / "lora"


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_of_an_export(machine: Machine, lora_run: Path, name: str) -> None:
    models = machine.home / "formats"
    machine.backend("export", lora_run, "--format", name, "--to", "folder", "--folder", models, "--name", name)
    ending = "gguf" if FORMATS[name].kind == "gguf" else "safetensors"
    assert list(models.rglob(f"{name}/*.{ending}"))


def test_upload_with_card_and_curves(machine: Machine, run: Path) -> None:
    with HubStandIn() as stand_in:
        network = {"HF_ENDPOINT": stand_in.url, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        upload: list[Any] = ["export", run, "--to", "hub", "--repo", "someone/sums"]
        machine.run(BUNDLED_PROGRAM, *upload, **network)  # pyright: ignore
        files = stand_in.repos["models"]["someone/sums"].files
    assert {"config.json", "model.safetensors", "README.md"} <= set(files)
    assert files["curves.png"].startswith(b"\x89PNG")


def test_an_adapter_goes_out_as_one_of_peft_and_comes_home(machine: Machine, lora_run: Path) -> None:
    models = machine.home / "adapters"
    machine.backend("export", lora_run, "--format", "peft", "--to", "folder", "--folder", models, "--name", "out")
    (folder,) = (file.parent for file in models.rglob("adapter_model.safetensors"))
    machine.backend("import", folder, "--model", machine.home / "base", "--output", machine.home / "home")
    assert (machine.home / "home" / "adapters.safetensors").is_file()


ADDS = ("def add(a, b):\n    return a + b", "def add(a, b):\n    return 7", "import os\nos.abort()")
CODE_TESTS = [{"completion": text, "answer": "", "tests": '["assert add(1, 2) == 3"]'} for text in ADDS]
CHILDREN: dict[str, tuple[list[dict[str, Any]], list[float]]] = {
    "accuracy_reward": ([{"completion": "$\\frac{2}{4}$", "answer": "0.5"}], [1.0]),
    "code_tests": (CODE_TESTS, [1, 0, 0]),
}


@pytest.mark.parametrize("name", CHILDREN)
def test_children_verify_mathematics_and_programs(machine: Machine, name: str) -> None:
    rows, expected = CHILDREN[name]
    file = machine.home / f"{name}.jsonl"
    file.write_text("".join(json.dumps({"prompt": "p"} | row) + "\n" for row in rows))
    settings = config(machine, name, reward_functions=[name])
    scored = last_json(machine.backend("rewards", "score", settings, "--completions", file, "--json"))
    assert [row["scores"][name] for row in scored["rows"]] == expected


def test_completions_are_held_to_a_pattern(machine: Machine) -> None:
    completions = (trained(machine, "held", output_regex="[0-9]{2}", iters=1) / "completions.jsonl").read_text("utf-8")
    texts = [each["text"] for line in completions.splitlines() for each in json.loads(line)["completions"]]
    assert texts and all(len(text) == 2 and text.isdigit() for text in texts)


def test_a_reward_file_may_import_the_standard_library_and_what_is_missing_is_one_sentence(machine: Machine) -> None:
    file = machine.home / "mine.py"
    file.write_text(IMPORTS)
    own = {"reward_functions_file": str(file), "reward_functions": ["digits"], "iters": 1}
    trained(machine, "own_rewards", **own)
    file.write_text("import scipy\n" + IMPORTS)
    done = machine.run(BUNDLED_PROGRAM, "train", config(machine, "missing", **own), "--no-progress", code=2)
    assert "No module named 'scipy'" in done.stderr and "not in the app: use grpo-studio from pip" in done.stderr
    assert "Traceback" not in done.stderr


def test_after_a_gpu_error_the_run_goes_on_in_a_fresh_program(machine: Machine) -> None:
    file = machine.home / "fails_once.py"
    file.write_text(FAILS_ONCE)
    own = {"reward_functions_file": str(file), "reward_functions": ["length"], "reward_isolation": "thread"}
    event_log = events(trained(machine, "restarted", iters=3, **own))
    started = [event for event in event_log if event["kind"] == "started"]
    assert len({event["pid"] for event in started}) == 1 and started[-1]["resumed_from"] is not None


def test_the_queue_outlives_the_window_that_began_it(machine: Machine, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    for name in ("first", "second"):
        machine.backend("queue", "add", config(machine, name), "--name", name, "--runs-dir", runs)
    with machine.started("grpo-studio", "--runs-dir", runs) as window:
        wait_for(runs / "first", "started")
        assert window.poll() is None
    wait_for(runs / "second", "finished")
    assert events(runs / "first")[-1]["kind"] == "finished"


def test_a_dataset_in_parquet_from_the_cache_of_the_hub(machine: Machine) -> None:
    import pyarrow
    import pyarrow.parquet

    repo = machine.home / ".cache" / "huggingface" / "hub" / "datasets--someone--sums"
    snapshot = repo / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0123")
    table = pyarrow.table({"prompt": ["1+1=", "2+2="] * 20, "answer": ["2", "4"] * 20})
    pyarrow.parquet.write_table(table, snapshot / "train.parquet")
    machine.backend("check", config(machine, "from_hub", data="someone/sums", val_batches=0))


def test_about_has_the_licences_of_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program's own list, made of the bundle's metadata and not of this machine's."""
    installed = set(about.needed())
    standard = [path for path in sys.path if "site-packages" not in path and Path(path or ".").resolve() != ROOT]
    monkeypatch.setattr(sys, "path", [str(INSIDE), *standard])
    monkeypatch.setattr(about, "project_root", lambda: INSIDE)
    monkeypatch.setattr(about, "resources", lambda: RESOURCES)
    assert set(about.needed()) >= installed
    parts = {part.name: part for part in about.components.__wrapped__()}
    assert {name for name, part in parts.items() if not part.text} == {"antlr4-python3-runtime"}, "its makers ship none"
    assert "GNU LESSER" in parts["PySide6_Essentials"].text and "PYTHON SOFTWARE" in parts["Python"].text
    if sys.platform == "linux":
        assert parts["jeepney"].licence == "MIT"
        assert not shutil.which("dpkg-query") or {"libopenblas0-pthread", "libssl3", "libgfortran5"} <= set(parts)


def test_presets_and_documents_of_the_help_menu_are_there() -> None:
    presets = {path.name for path in (ROOT / "resources" / "presets").glob("*.yaml")}
    assert presets <= {path.name for path in (RESOURCES / "presets").iterdir()}
    for name in guide.documents():
        assert (INSIDE / "docs" / name).read_bytes() == (ROOT / "docs" / name).read_bytes(), name


def test_no_text_file_names_a_path_of_the_machine_that_built() -> None:
    kinds = (".py", ".json", ".txt", ".yaml", "")
    files = [path for path in BUNDLE.rglob("*") if path.is_file() and path.suffix in kinds and path.parent != BUNDLE]
    texts = [path for path in files if path.stat().st_size < 1_000_000]
    assert not [path for path in texts if str(ROOT).encode() in path.read_bytes()]
