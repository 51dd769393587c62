"""Any value becomes one short printable line; and what the program says about itself and its machine."""

import getpass
import subprocess
import sys
import time
from functools import reduce
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from backend import __version__
from backend.config.config import SETTINGS
from backend.utils import about, machine, places
from backend.utils.about import LOG_LINES, ProblemFacts, report, without_private
from backend.utils.errors import ConfigProblem, UserError
from backend.utils.text import SENTENCE, excess, quote, visible
from tests.support.cases import cases


@cases(
    ("value", "expected"),
    [
        ("two\nlines\r\n\tand   spaces ", "two lines and spaces"),
        ("\x00\x07\x1b[31m", r"\x00\x07\x1b[31m"),
        ("a\ud800b\udcff", r"a\ud800b\udcff"),
        ("\u202eevil\u2066", r"\u202eevil\u2066"),
        ("zero\u200bwidth\u2028line", r"zero\u200bwidth line"),
        ("naïve 日本語 🙂", "naïve 日本語 🙂"),
        (None, "None"),
        (10**50, "100000000000000000…0000000000000000000"),
        (10**5000, "a value of type int"),
        ([1, "two", None], "[1, 'two', None]"),
        (reduce(lambda inner, _: [inner], range(5000), []), "[[[[…]]]]"),
        (ValueError("a\nb"), "a b"),
    ],
)
def test_a_value_is_one_short_printable_line(value: object, expected: str) -> None:
    assert quote(value) == expected


LONG = ["x" * 10**6, "\n" * 10**6, "\u202e" * 500, list(range(10**6)), {"k" * 900: 1}]


@cases("value", LONG)
def test_what_was_left_out_is_an_ellipsis_and_the_limit_holds(value: object) -> None:
    for limit in (10, 80, 200):
        text = quote(value, limit)
        assert len(text) <= limit and "…" in text and text.isprintable()


def test_a_fault_is_one_printable_line_whatever_it_was_given() -> None:
    fault = ConfigProblem("key\n" + "x" * 500, "It is\nbroken\x1b[31m\ud800.")
    assert fault.sentence == r"It is broken\x1b[31m\ud800."
    assert fault.setting.startswith("key x") and len(fault.setting) <= 60
    assert str(UserError("a\0", "b\0.")) == r"a\x00: b\x00."


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("a\u202eb\x07c\x1b[31m", "a\\u202eb\\x07c\\x1b[31m"),
        ("one\ttwo\r\nthree\rfour", "one\ttwo\r\nthree\\rfour"),
        ("سلام می\u200cخواهم 👩\u200d🚀 全角\u3000空白", "سلام می\u200cخواهم 👩\u200d🚀 全角\u3000空白"),
    ],
)
def test_what_cannot_be_seen_is_escaped_and_writing_stays(text: str, seen: str):
    assert visible(text) == seen


def test_a_sentence_loses_the_middle_of_its_longest_words_and_none_of_its_own() -> None:
    long, two_paths = "x" * 5000, ("/a" * 150, "/b" * 150)
    for sentence, words in (
        (f"The run {long} has finished; clone it to go on.", ["The run xxx", "x has finished; clone it to go on."]),
        ("{}/rows.csv is not {}/more.csv.".format(*two_paths), ["/a/a", "/rows.csv is not /b", "/more.csv."]),
    ):
        fault = ConfigProblem("run", sentence)
        assert len(fault.sentence) <= SENTENCE and all(word in fault.sentence for word in words)


BOMBS = [
    "(.{1000000000})",
    "((?:.{999}){9999})",
    "((a{100}){100}){100}b",
    "(?:(?:(?:[]{]{99}){99}){99}){9}",
    "(?x) # [\n (.{1000000000})",
    "(?V1)([[a-z]--[{]]{2000}){2000}",
    "x" * 2_000 + "(" + "[a-z]x?" * 200 + "){10000}",
    "a{9}" * 20_000 + "(b{1000}){1000}",
]
SOUND = [
    r"#### ([0-9]{1,9})",
    "#([0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}) {3}x{3}y{3}z{3}a{3}b{3}c{3}d{3}e{3}f{3}g{3}h{3}",
    "(.{0,1000000000})",
    r"a\{99999999\}",
    "[{99999999}]",
    "",
]


@cases("pattern", BOMBS)
def test_a_pattern_that_would_fill_the_memory_is_refused_in_one_sentence_and_at_once(pattern: str) -> None:
    began = time.process_time()
    sentence = excess(pattern)
    assert "more than 1,000,000 characters long with its repetitions written out" in sentence and len(sentence) <= 200
    assert time.process_time() - began < 3


@cases("pattern", SOUND)
def test_patterns_as_people_write_them_are_left_alone(pattern: str) -> None:
    assert not excess(pattern)


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
    """The frozen app has no RECORD, which names the build machine's paths; some systems' packages have none either."""
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


GIB = 1 << 30


@pytest.fixture
def as_on_a_mac(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(machine, "sysctl", lambda name: b"")
    return monkeypatch


def test_a_mac_gives_a_share_of_its_memory_and_no_more_than_metal_recommends(as_on_a_mac: pytest.MonkeyPatch) -> None:
    """The working sets that Metal reports: 5.3 GiB of 8, 10.7 of 16, 48 of 64."""
    given: dict[int, int] = {}
    for size in (8, 16, 64):
        as_on_a_mac.setattr(psutil, "virtual_memory", lambda size=size: SimpleNamespace(total=size * GIB))
        given[size] = machine.machine_bytes() + machine.PROCESS_BYTES
    assert given == {8: 8 * GIB * 2 // 3, 16: 16 * GIB * 2 // 3, 64: 48 * GIB}
    assert machine.machine_bytes(working_set=20 * GIB) == 20 * GIB - machine.PROCESS_BYTES
    assert machine.machine_bytes(working_set=60 * GIB) == 48 * GIB - machine.PROCESS_BYTES


def test_a_working_set_that_the_user_has_raised_counts(as_on_a_mac: pytest.MonkeyPatch) -> None:
    values = {"iogpu.wired_limit_mb": (14336).to_bytes(8, sys.byteorder), "machdep.cpu.brand_string": b"Apple M5 Max\0"}
    as_on_a_mac.setattr(machine, "sysctl", lambda name: values[name])
    assert machine.working_set_of(16 * GIB) == 14 * GIB
    machine.chip.cache_clear()
    assert machine.chip() == "Apple M5 Max"
    machine.chip.cache_clear()


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac's memory is shared otherwise")
def test_on_linux_what_the_run_holds_already_counts_as_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10 * GIB))
    more = machine.machine_bytes(held=4 * GIB) - machine.machine_bytes()
    assert more == 3 * GIB, "three quarters of it"
    assert machine.machine_bytes() == int(7.5 * GIB) - machine.PROCESS_BYTES


def test_the_runs_folder_follows_the_platform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv(places.RUNS_VARIABLE, raising=False)
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    assert places.runs_folder() == tmp_path / ".local" / "share" / "grpo-studio" / "runs"
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert places.runs_folder() == tmp_path / "data" / "grpo-studio" / "runs"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert places.runs_folder() == tmp_path / "Library" / "Application Support" / "GRPO Studio" / "runs"
    monkeypatch.setenv(places.RUNS_VARIABLE, "~/elsewhere")
    assert places.runs_folder() == tmp_path / "elsewhere"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_lm_studio_names_its_home_in_a_pointer_file_and_its_models_in_its_settings(home: Path) -> None:
    """Read, never written; what is of no use is passed over."""
    settings, pointer = home / ".lmstudio" / "settings.json", home / ".lmstudio-home-pointer"
    settings.parent.mkdir()
    default = settings.parent / "models"
    for text, folder in {
        '{"downloadsFolder": "/Volumes/Big/models"}': Path("/Volumes/Big/models"),
        '{"downloadsFolder": "~/models"}': home / "models",
        **dict.fromkeys(("{}", '{"downloadsFolder": ""}', '{"downloadsFolder": 3}', "[]", "x", ""), default),
    }.items():
        settings.write_text(text)
        assert places.lm_studio_models() == folder
    (home / ".cache" / "lm-studio").mkdir(parents=True)
    for content, folder in ((b"~/studio\n", "studio"), *((odd, ".cache/lm-studio") for odd in (b"", b" \n", b"\xff"))):
        pointer.write_bytes(content)
        assert places.lm_studio_home() == home / folder and pointer.read_bytes() == content
    assert places.lm_studio_models() == home / ".cache" / "lm-studio" / "models"


def test_the_program_works_with_few_open_files() -> None:
    """mlx-lm's import sets a limit of 4096, which is refused where the hard limit is lower."""
    code = "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (99, 999)); import backend; "
    code += "r.setrlimit(r.RLIMIT_NOFILE, (2048, 4096)); assert r.getrlimit(r.RLIMIT_NOFILE) == (999, 999)"
    subprocess.run([sys.executable, "-c", code], check=True)
