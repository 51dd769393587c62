"""A run folder of somebody else names a reward file or a hosts file: no verb runs it, and no machine is contacted,
before a person has allowed the file."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from app.state.consent import Consent
from backend.config import config
from backend.distributed.hosts_file import AllowedHosts
from backend.rewards.allowed_code import TrustRecord, allow_named, code_files, require_allowed
from backend.runs.queue import QueueFile
from backend.runs.run_folder import RunFolder
from backend.utils.errors import UserError
from backend.utils.text import shorten
from tests.support import small_run
from tests.support.trained_run import make_run
from tests.support.verbs import call

CODE = """
from pathlib import Path
from backend.rewards import register_reward_function
Path(__file__).with_name("it-ran").write_text("")

@register_reward_function("theirs")
def theirs(prompts, completions, answer, types=None):
    return [0.5] * len(completions)
"""
SWEEP = "name: theirs\nover:\n  learning_rate: [0.001, 0.0001]\nseeds: [0]\nhalving: off\nbase:\n"


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Path:
    """An unpacked folder: a run with a checkpoint, one not begun, a sweep, and the reward file that all three name."""
    folder = tmp_path_factory.mktemp("theirs")
    reward = folder / "theirs.py"
    reward.write_text(CODE)
    own = {"reward_functions_file": str(reward), "reward_functions": ["theirs"], "reward_weights": [1.0]}
    small_run.write_rows(models / "held.jsonl", 4)
    data = {"data": str(models / "rows.jsonl")}
    make_run(folder / "trained", models, **own, steps_per_eval=2)
    raw = small_run.settings_for(models, **own, **data, run_name="fresh")
    small_run.write_config(folder / "fresh" / "config.yaml", raw)
    raw = {key: value for key, value in raw.items() if key not in ("learning_rate", "run_name")} | {"steps_per_eval": 2}
    lines = "".join(f"  {key}: {json.dumps(value)}\n" for key, value in raw.items())
    (folder / "sweeps" / "theirs").mkdir(parents=True)
    (folder / "sweeps" / "theirs" / "sweep.yaml").write_text(SWEEP + lines)
    return folder


VERBS_ON_RUNS = [
    "resume {}/trained",
    "train --run {}/fresh",
    "clone {}/trained --set iters=20",
    "clone {}/trained --cold --start --runs-dir {}/../clones",
    "evaluate {}/trained --split train --limit 1",
    "export {}/trained --to folder --checkpoint last --held-out 2",
    "export {}/trained --to trl --folder {}/..",
    "generate {}/trained --prompt 2+2 --checkpoint last --answer 4 --score",
    "queue add {}/trained --runs-dir {}",
    "sweep {}/sweeps/theirs --resume",
    "resume {}/sweeps/theirs",
]


@pytest.mark.parametrize("line", VERBS_ON_RUNS)
def test_no_verb_runs_a_foreign_reward_file(line: str, theirs: Path) -> None:
    result = call(*(word.replace("{}", str(theirs)) for word in line.split()))
    assert result.exit_code == 2, (result.output, result.exception)
    refusal = f"The Python file {theirs / 'theirs.py'} was never allowed to run on this machine inside the trainer."
    assert shorten(f"{refusal} Read it first; --allow-code runs it from now on.") in result.stderr
    assert not (theirs / "it-ran").exists()


def test_what_a_person_has_allowed_runs_and_goes_on(theirs: Path, tmp_path: Path) -> None:
    mine = shutil.copytree(theirs, tmp_path / "mine")
    named = (mine / "fresh" / "config.yaml").read_text().replace(str(theirs), str(mine))
    (mine / "fresh" / "config.yaml").write_text(named)
    refused = call("train", "--run", mine / "fresh")
    assert refused.exit_code == 2 and "failed" in (mine / "fresh" / "events.jsonl").read_text(), "the window reads why"
    (mine / "fresh" / "events.jsonl").unlink()
    assert call("train", "--run", mine / "fresh", "--allow-code").exit_code == 0
    assert (mine / "it-ran").exists()
    assert call("clone", mine / "fresh", "--set", "iters=5").exit_code == 0, "asked once"


def test_no_run_folder_starts_an_mcp_server_that_nobody_allowed(theirs: Path, tmp_path: Path) -> None:
    server: dict[str, Any] = {"command": "touch", "args": [str(tmp_path / "it-ran")]}
    raw = config.read(theirs / "fresh" / "config.yaml") | {"mcp_servers": {"theirs": server}, "reward_functions": []}
    run = RunFolder(tmp_path / "run")
    small_run.write_config(run.config, raw | {"reward_functions_file": ""})
    refused = call("train", "--run", run.path)
    assert refused.exit_code == 2 and not (tmp_path / "it-ran").exists()
    assert "The MCP server theirs was never allowed on this machine: touch " in refused.stderr
    raw = config.read(run.config)
    consent = Consent(TrustRecord().file)
    assert not consent.obtain(raw) and consent.is_missing(raw), "without a user to ask, no"
    allow_named(raw)
    require_allowed(raw)
    assert consent.obtain(raw) and not consent.is_missing(raw)
    for edited in (server | {"env": {"PATH": "/theirs"}}, server | {"cwd": "/theirs"}, server | {"args": []}):
        with pytest.raises(UserError, match="The MCP server"):
            require_allowed(raw | {"mcp_servers": {"theirs": edited}})
    with pytest.raises(UserError, match="The OpenEnv server theirs was never allowed on this machine: MAX_CONC"):
        require_allowed(raw | {"environment": {"theirs": f"openenv:{tmp_path}"}})
    with pytest.raises(UserError, match="The OpenEnv server openenv was never allowed"):
        require_allowed(raw | {"environment": "openenv:ws://127.0.0.1:8000/ws"})


def test_a_yaml_on_the_command_line_is_a_choice_and_is_remembered(theirs: Path) -> None:
    raw = config.read(theirs / "fresh" / "config.yaml")
    with pytest.raises(UserError, match="was never allowed"):
        require_allowed(raw)
    allow_named(raw)
    require_allowed(raw)
    consent = Consent(TrustRecord().file)
    assert consent.obtain(raw), "the window knows it too"


def test_an_edited_file_goes_on_at_the_command_line_and_is_asked_about_in_the_window(tmp_path: Path) -> None:
    raw = small_run.low_half(tmp_path)
    allow_named(raw)
    (tmp_path / "low_half.py").write_text(small_run.LOW_HALF + "# mended\n")
    require_allowed(raw)
    assert not Consent(TrustRecord().file).obtain(raw), "without a user to ask, no"


@pytest.mark.parametrize(
    "named",
    [
        {"reward_functions_file": "theirs.py"},
        {"reward_functions_file": ["theirs.py"]},
        {"reward_functions": ["theirs.py::theirs"]},
        {"reward_functions": "r1_int, theirs.py::theirs"},
        {"stages": [{"steps": 2, "reward_functions": ["theirs.py::theirs"]}]},
        {"stages": [{"steps": 2, "reward_functions": "theirs.py::theirs"}]},
    ],
)
def test_code_is_found_however_a_run_folder_names_it(named: dict[str, Any], theirs: Path, tmp_path: Path) -> None:
    """The path is relative to the run's folder; neither the window nor a terminal has that as its working directory."""
    run = RunFolder(tmp_path / "run")
    small_run.write_config(run.config, {"model": "m", "data": "d"} | named)
    shutil.copy(theirs / "theirs.py", run.path)
    assert code_files(config.read(run.config)) == [run.path / "theirs.py"]
    assert not Consent(tmp_path / "trusted.json").obtain(config.read(run.config))


def test_a_queue_of_somebody_else_starts_no_code(theirs: Path, tmp_path: Path) -> None:
    """Nobody is asked when a queue's runner begins a run, so it is refused there."""
    from backend.runs.queue import train_queue

    folder = shutil.copytree(theirs, tmp_path / "runs")
    (folder / "theirs.py").unlink()  # the files name that of the first folder
    # A folder so new and without an event log is taken for one that is being started, and waited for.
    shutil.rmtree(folder / "trained")
    (folder / "fresh" / "events.jsonl").unlink(missing_ok=True)
    (folder / "queue.json").write_text(json.dumps({"runs": ["fresh"], "event logs": {}}))

    def train(run: RunFolder) -> int:
        return call("train", "--run", run.path).exit_code

    said: list[str] = []
    train_queue(QueueFile(folder), said.append, train)
    assert said[-1] == "fresh failed; its log tells why." and not (theirs / "it-ran").exists()


HOSTS = [{"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}, {"ssh": "theirs.example", "ips": ["127.0.0.2"]}]


@pytest.fixture
def contacted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that is there once anything has called ssh."""
    mark = tmp_path / "contacted"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(f"#!/bin/sh\n: > {mark}\nexit 255\n")
    (tmp_path / "bin" / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    return mark


def write_run(run: RunFolder, models: Path, *, in_changes: bool = False, begun: bool = True) -> Path:
    """A run that names hosts.json, which came with its folder: in config.yaml or in its changes. → the hosts file."""
    file = run.path / "hosts.json"
    run.path.mkdir()
    file.write_text(json.dumps(HOSTS))
    raw = small_run.settings_for(models, data=str(models / "rows.jsonl"))
    small_run.write_config(run.config, raw if in_changes else raw | {"hosts": "hosts.json"})
    if in_changes:
        change = {"step": 1, "settings": {"hosts": ["", str(file)]}}
        run.changes.write_text(json.dumps({"v": 1, "changes": [change]}))
    if begun:
        run.events.write_text('{"seq": 1, "t": 1.0, "kind": "created"}\n')
    return file


@pytest.mark.parametrize("verb", ["resume", "resume, by its changes", "train --run", "queue add"])
def test_no_verb_contacts_the_machines_of_a_foreign_run(verb: str, models: Path, tmp_path: Path, contacted: Path):
    run = RunFolder(tmp_path / "theirs")
    write_run(run, models, in_changes="changes" in verb, begun=verb != "train --run")
    result = call(*verb.partition(",")[0].split(), run.path)
    assert result.exit_code == 2, (result.output, result.exception)
    assert "was never allowed on this machine" in result.stderr and "hosts.json" in result.stderr
    assert max(map(len, result.stderr.splitlines())) <= 210, "200 characters, and what marks it as an error"
    assert not contacted.exists()
    if verb == "train --run":  # the window reads the event log alone
        assert "was never allowed" in run.events.read_text()


def test_a_hosts_file_that_was_named_is_allowed(models: Path, tmp_path: Path, contacted: Path) -> None:
    run = RunFolder(tmp_path / "mine")
    file = write_run(run, models)
    assert "Refused" in call("machines", file).output and contacted.exists(), "checking it is a choice"
    contacted.unlink()
    assert "never allowed" not in call("resume", run.path).stderr and contacted.exists()
    contacted.unlink()
    file.write_text(json.dumps([*HOSTS[:1], {"ssh": "another.example", "ips": ["127.0.0.3"]}]))
    assert "never allowed" not in call("resume", run.path).stderr and contacted.exists()
    record = AllowedHosts()
    asked = record.missing(str(file))
    assert asked is not None and asked.changed, "the window asks about the new contents"
    assert [host.ssh for host in asked.others] == ["another.example"]
