"""A run folder of somebody else names a hosts file: no machine is contacted before a person has allowed the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from backend.distributed.hosts_file import AllowedHosts
from backend.runs.run_folder import RunFolder
from tests.support import small_run
from tests.support.verbs import call

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
def test_no_verb_contacts_the_machines_of_a_foreign_run(
    verb: str, models: Path, tmp_path: Path, contacted: Path
) -> None:
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
