"""What is shipped, with versions and licences; and texts and reports without anything private."""

from __future__ import annotations

import getpass
import sys
from pathlib import Path

import pytest

from backend import __version__
from backend.config.config import SETTINGS
from backend.utils import about
from backend.utils.about import LOG_LINES, ProblemFacts, report, without_private


def test_everything_shipped_names_a_version_and_a_licence() -> None:
    parts = {part.name: part for part in about.components()}
    assert next(iter(parts)) == "grpo-studio" and "Permission is hereby granted" in parts["grpo-studio"].text
    by_platform = "mlx-cpu" if sys.platform == "linux" else "mlx-metal"
    assert {"mlx", by_platform, "mlx-lm", "numpy", "huggingface_hub", "antlr4-python3-runtime", "Python"} <= set(parts)
    assert not [part.name for part in parts.values() if not part.version or not part.licence]
    assert not {"pytest", "ruff", "pyinstaller"} & set(parts), "an extra is not shipped"
    without_text = {part.name for part in parts.values() if not part.text}
    assert len(without_text) <= len(parts) // 5, "most bring the text with them"


def test_the_field_license_is_the_text_where_there_is_no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = "You may do with this whatever you like, " * 4
    (tmp_path / "odd-1.0.dist-info").mkdir()
    metadata = tmp_path / "odd-1.0.dist-info" / "METADATA"
    metadata.write_text(f"Metadata-Version: 2.1\nName: odd\nVersion: 1.0\nLicense: {text}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    odd = about.component("odd")
    assert odd.text == text.strip() and odd.licence == "see its text"


def test_licences_are_found_without_a_list_of_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The frozen app has no RECORD, which names paths of the machine that built; some systems' packages have none
    either."""
    folder = tmp_path / "Odd_Name-1.0.dist-info"
    (folder / "licenses" / "third_party").mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.4\nName: odd.name\nVersion: 1.0\nLicense-Expression: MIT\n")
    (folder / "licenses" / "LICENSE").write_text("Do what you like.\n")
    (folder / "licenses" / "third_party" / "COPYING").write_text("And with this.\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert about.component("odd-name").text == "Do what you like.\n\nAnd with this."


def test_a_frozen_app_lists_what_it_has_from_the_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "system_licences").mkdir()
    for name in ("libssl3_3.0.20", "Python_3.11.7"):
        (tmp_path / "system_licences" / f"{name}.txt").write_text(f"The licence of {name}.\n")
    monkeypatch.setattr(about, "project_root", lambda: tmp_path)
    *_, library, python = about.components.__wrapped__()
    assert library == about.Component("libssl3", "3.0.20", "see its text", "The licence of libssl3_3.0.20.")
    assert (python.name, python.text) == ("Python", "The licence of Python_3.11.7.")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("open /home/ada/runs/a", "open ~/runs/a"),
        ("open /home/adamant/x", "open /home/…/x"),
        ("open /Users/eve/Library/x", "open /home/…/Library/x"),
        ("by ada, and Adam", "by …, and Adam"),
        ("HF_TOKEN=hf_abcdefghijkl now", "HF_TOKEN=… now"),
        ("https://ada:secret@host/x", "https://…@host/x"),
        ("Authorization: Bearer abc.def", "Authorization: Bearer …"),
        ("token: very-secret", "token: …"),
        ("1 token, 2 tokens: all fine", "1 token, 2 tokens: all fine"),
    ],
)
def test_what_is_private_is_left_out(text: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setattr(getpass, "getuser", lambda: "ada")
    assert without_private(text) == expected


def test_a_report_holds_versions_traceback_log_and_changed_settings() -> None:
    log = [f"line {number}" for number in range(LOG_LINES + 5)]
    settings = {"temperature": 0.7, "iters": SETTINGS["iters"].default}
    text = report(ProblemFacts("It broke.", "Traceback (most recent call last):\nValueError: x", log, settings))
    assert "It broke." in text and f"grpo-studio: {__version__}" in text and "ValueError: x" in text
    assert "temperature: 0.7" in text and "iters" not in text, "only what differs from its default"
    assert "line 5\n" in text and "line 4\n" not in text


def test_paths_prompts_and_tokens_are_left_out() -> None:
    settings = {"model": "/data/secret-project/model", "data": "owner/set", "system_prompt": "Our secret prompt"}
    settings["reward_functions_file"] = str(Path.home() / "mine" / "rewards.py")
    trace = f'File "{Path.home()}/mine/x.py"\nRuntimeError: HF_TOKEN=hf_abcdefghijklmnop'
    text = report(ProblemFacts("Broken.", trace, [f"reading {Path.home()}/a"], settings))
    assert "secret" not in text and str(Path.home()) + "/" not in text and "hf_abc" not in text
    assert "model: …/model" in text and "data: owner/set" in text and "rewards.py" in text and "(17 characters)" in text
