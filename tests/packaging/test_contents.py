"""The wheel and the frozen app hold what is used at run time and nothing else, and a wheel works from wherever it is
installed.

Building the app takes minutes and is `make app-test`'s (test_frozen.py); here its rules meet the installed packages."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from app.state import guide
from backend import __version__
from backend.rewards import catalogue

ROOT = Path(__file__).parents[2]


@pytest.fixture
def contents(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("bundle_contents")


def test_models_of_transformers_are_left_out_and_what_one_program_lacks_is_in_the_other(contents) -> None:
    kept, left_out = contents.transformers_modules()
    assert "transformers.models.qwen3.modeling_qwen3" in left_out and "transformers.trainer" in left_out
    assert "transformers.models.qwen2.tokenization_qwen2" in kept and "transformers.models.qwen3" in kept
    assert not [name for name in contents.TRANSFORMERS if not any(fnmatchcase(module, name) for module in kept)]
    assert not {*contents.ENGINE, *contents.WINDOW} & set(contents.NEVER)
    assert not [name for name in (*contents.ENGINE, *contents.WINDOW) if importlib.util.find_spec(name) is None]


def test_reward_files_may_import_the_standard_library(contents) -> None:
    names = set(contents.standard_library())
    assert {"json", "sqlite3", "xml.etree.ElementTree", "email.mime.text", "concurrent.futures", "_decimal"} <= names
    assert not {name for name in names if name.split(".")[0] in ("tkinter", "idlelib", "ensurepip")}
    assert not {name for name in names if "test" in name.split(".")}


def test_sources_and_documents_that_menus_read_are_in_the_bundle(contents) -> None:
    inside = {file for pattern in contents.READ_AS_TEXT for file in ROOT.glob(pattern)}
    rewards = (catalogue._REWARDS_FOLDER / f"{name}.py" for name in catalogue._REWARD_MODULES)
    assert {ROOT / "backend" / "training" / "losses.py", *rewards} <= inside
    there = {file.relative_to(ROOT / "docs").as_posix() for file in contents.documents() if file.is_file()}
    assert there == guide.documents()


@pytest.mark.skipif(shutil.which("dpkg-query") is None, reason="packages of the system are named where it is Debian")
def test_libraries_of_the_system_bring_their_licences(script, tmp_path: Path) -> None:
    (tmp_path / "left").mkdir()
    dpkg = shutil.which("dpkg-query")
    written = script("system_licences").write_licences([dpkg, pytest.__file__], tmp_path / "left")
    names = {path.name.partition("_")[0]: path for path in written}
    assert set(names) <= {"dpkg", "Python"} and "dpkg" in names
    assert "General Public License" in names["dpkg"].read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="the download for Linux is made on Linux")
def test_the_download_installs_the_app_and_removes_it_again(script, tmp_path: Path) -> None:
    dist, home = tmp_path / "dist", tmp_path / "home of mine"
    bundle = dist / "GRPO Studio"
    (bundle / "_internal").mkdir(parents=True)
    home.mkdir()
    for name in ("grpo-studio", "grpo-studio-backend"):
        (bundle / name).write_text(f"#!/bin/sh\necho {name} $*\n")
        (bundle / name).chmod(0o755)
    (bundle / "_internal" / "link").symlink_to("GRPO Studio")
    archive = script("linux_package").package(dist)
    assert sorted(path.name for path in dist.iterdir()) == ["GRPO Studio", archive.name]
    subprocess.run(["tar", "-xf", str(archive), "-C", str(tmp_path)], check=True)
    folder = tmp_path / archive.name.removesuffix(".tar.xz")
    assert (folder / "GRPO Studio" / "_internal" / "link").readlink() == Path("GRPO Studio")

    def install(*arguments: str) -> None:
        environment = {"HOME": str(home), "PATH": os.environ["PATH"]}
        subprocess.run([folder / "install.sh", *arguments], env=environment, check=True)

    install()
    install()  # again, as an update
    prefix = home / ".local"
    assert subprocess.check_output([prefix / "bin" / "grpo-studio", "a.yaml"], text=True) == "grpo-studio a.yaml\n"
    entry = (prefix / "share" / "applications" / "grpo-studio.desktop").read_text()
    assert f'\nExec="{prefix}/opt/grpo-studio/grpo-studio" %f\n' in entry
    assert (prefix / "share" / "icons" / "hicolor" / "scalable" / "apps" / "grpo-studio.svg").exists()
    install("--remove")
    left = {path.name for path in prefix.rglob("*") if not path.is_dir()}
    assert left <= {"mimeinfo.cache"}, "the desktop's own list of all entries"


def test_it_holds_every_file_of_ours_inside_one_package(wheel: Path) -> None:
    """And nothing else: no folder `app` or `backend` that would collide with another program's, no tests, no caches."""
    files = [path for folder in ("app", "backend", "resources") for path in (ROOT / folder).rglob("*")]
    files = [path.relative_to(ROOT).as_posix() for path in files if path.is_file() and path.suffix != ".pyc"]
    ours = {f"grpo_studio/{name}" for name in files}
    ours |= {f"grpo_studio/docs/{name}" for name in guide.documents()}
    ours |= {f"grpo_studio/{name}.py" for name in ("__init__", "launch")}
    about = f"grpo_studio-{__version__}.dist-info"
    packed = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in packed if not name.startswith(f"{about}/")} == ours
    assert f"{about}/licenses/LICENSE" in packed


def test_the_programs_find_ours_beside_another_package_of_the_same_name(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site-packages"
    zipfile.ZipFile(wheel).extractall(site)
    for name in ("app", "backend"):
        (site / name).mkdir()
        (site / name / "__init__.py").write_text("raise ImportError('this is the package of another program')")
    script = """
import json, grpo_studio.launch, app
from backend.utils.command import backend_command, backend_environment
from backend.utils.places import demo_config
print(json.dumps([app.__file__, str(demo_config()), backend_command("check", "none.yaml"), backend_environment()]))
"""
    environment = os.environ | {"PYTHONPATH": str(site)}
    first = [sys.executable, "-P", "-c", script]
    said = subprocess.run(first, env=environment, check=True, capture_output=True, text=True, cwd=site)
    window, demo, command, for_children = json.loads(said.stdout)
    assert Path(window) == site / "grpo_studio" / "app" / "__init__.py"
    assert Path(demo).is_file() and Path(demo).is_relative_to(site / "grpo_studio")
    # The command that the window shows works in any shell; child processes import modules of ours by their own names.
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=site)
    assert (done.returncode, done.stderr) == (2, "config: There is no file none.yaml.\n")
    child = [sys.executable, "-P", "-c", "import backend.utils.child_process"]
    subprocess.run(child, env=for_children, check=True, cwd=site)


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
    """They may read by default, end by themselves, keep no token in the checkout, and name what they run by version."""
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
