"""The workflows keep to GitHub's schema and to our rules, and shellcheck finds nothing in any script, those inside
workflows included."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
SHELLCHECK = Path(sysconfig.get_path("scripts")) / "shellcheck"
EXPRESSION = re.compile(r"\$\{\{.*?\}\}")


def jobs(workflow: Path) -> dict[str, Any]:
    return yaml.safe_load(workflow.read_text("utf-8"))["jobs"]


def steps(workflow: Path) -> Iterator[dict[str, Any]]:
    for job in jobs(workflow).values():
        yield from job["steps"]


def scripts() -> list[Path]:
    """Every shell script of ours, by suffix or first line."""
    files = [path for name in ("packaging", ".ci") for path in (ROOT / name).rglob("*") if path.is_file()]
    return [path for path in files if path.suffix == ".sh" or path.read_bytes()[:30].split(b"\n")[0].endswith(b"sh")]


def test_the_schema_of_workflows_holds() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", *WORKFLOWS]
    done = subprocess.run(command, capture_output=True, text=True)
    assert len(WORKFLOWS) == 2 and done.returncode == 0, done.stdout


def test_shellcheck_finds_nothing_in_our_scripts() -> None:
    found = scripts()
    assert {path.name for path in found} >= {"run", "launch.sh", "set_up.sh", "find_python.sh", "import_certificate.sh"}
    done = subprocess.run([SHELLCHECK, "--external-sources", *found], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_shellcheck_finds_nothing_in_the_commands_of_workflows() -> None:
    commands = [step["run"] for workflow in WORKFLOWS for step in steps(workflow) if "run" in step]
    # One call for all, each command in a function of its own; GitHub's bash stops at the first error.
    functions = [f"step_{i}() {{\n{EXPRESSION.sub('x', text)}\n}}\nstep_{i}\n" for i, text in enumerate(commands)]
    text = "".join(["set -e\n", *functions])
    done = subprocess.run([SHELLCHECK, "--shell=bash", "-"], input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_ask_for_little(workflow: Path) -> None:
    """They may read, unless a job says otherwise, end by themselves, keep no token in the checkout, and name what they
    run by version."""
    assert yaml.safe_load(workflow.read_text("utf-8"))["permissions"] == {"contents": "read"}
    assert all(job["timeout-minutes"] <= 90 for job in jobs(workflow).values())
    with_more = [name for name, job in jobs(workflow).items() if "permissions" in job]
    assert with_more == (["draft"] if workflow.stem == "release" else [])
    for step in steps(workflow):
        if uses := step.get("uses"):
            assert re.fullmatch(r"actions/[\w-]+@(v\d+|[0-9a-f]{40})", uses), "only GitHub's own actions"
        if str(step.get("uses")).startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False
        # An expression inside a script is pasted into it before the shell reads it: values go through the environment.
        assert not EXPRESSION.search(step.get("run", ""))


def test_secrets_reach_one_step_of_one_job_in_an_environment_of_its_own() -> None:
    assert not [path for path in WORKFLOWS if path.stem != "release" and "secrets." in path.read_text("utf-8")]
    release = jobs(ROOT / ".github" / "workflows" / "release.yml")
    steps_of = [(name, step) for name, job in release.items() for step in job["steps"]]
    with_secrets = [(name, step["name"]) for name, step in steps_of if "secrets." in str(step)]
    assert with_secrets == [("macos", "Certificate")] and release["macos"]["environment"] == "release"


def test_files_that_workflows_name_exist() -> None:
    named = {name for path in WORKFLOWS for name in re.findall(r"packaging/[\w./-]+", path.read_text("utf-8"))}
    assert named and not [name for name in named if not (ROOT / name).exists()]
