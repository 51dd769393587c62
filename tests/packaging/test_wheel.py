"""The wheel holds one package with everything that the programs need at run time, and works from wherever it is
installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

from app.help_menu import DOCUMENTS
from app.state import guide
from app.state.guide import GLOSSARY
from backend import __version__

ROOT = Path(__file__).parents[2]


def test_it_holds_every_file_of_ours_inside_one_package(wheel: Path) -> None:
    """And nothing else: no folder `app` or `backend` that would collide with another program's, no tests, no caches."""
    files = [path for folder in ("app", "backend", "resources") for path in (ROOT / folder).rglob("*")]
    files = [path.relative_to(ROOT).as_posix() for path in files if path.is_file() and path.suffix != ".pyc"]
    ours = {f"grpo_studio/{name}" for name in files}
    ours |= {f"grpo_studio/docs/{name}" for name in {*DOCUMENTS.values(), GLOSSARY.name} | guide.documents()}
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
