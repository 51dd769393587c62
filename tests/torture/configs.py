"""Hostile configurations: mutated YAML files and form values, given to everything that reads one.

A case is a sound configuration with one to four mutations of a kind listed in MUTATIONS (or a sweep of such), as a file of YAML or as the
mapping that the window has. It goes through reading, `check`, the memory estimate, what is unusual, the export for mlx-lm-lora and the reader of
sweeps, in a process of its own for many cases. A case fails where anything but a UserError is raised, where a sentence is not one printable line of
at most 200 characters that names a setting, where the same input gives other faults a second time, where it takes longer than 5 seconds, and
where a file appears. No request leaves the machine.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import selectors
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from backend.utils.text import quote
from tests.torture.report import Report

NAME = "configs"
SECONDS = 5.0
"""Longest time of one case, of its processor: the machine may be busy."""
LONGEST_SENTENCE = 200
BATCH = 2_000
"""Cases of one process."""

SHARE_OF_FILES = 0.25
"""Cases that are a file; the others are a mapping, which is tried a hundred times as fast."""
SHARE_OF_REPEATS = 0.1
"""Cases that are read a second time."""

Raw = dict[str, Any]


# ── what the mutations point to ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Place:
    """A folder with a sound model, dataset and reward file, with things that are no file, and three folders that must stay as they are."""

    root: Path
    sound: Raw

    @property
    def odd_paths(self) -> list[str]:
        names = (
            "pipe",
            "loop",
            "socket",
            "folder",
            "empty",
            "absent",
            "raises.py",
            "exits.py",
            "broken.py",
            "binary.py",
            "latin.yaml",
            "reward.py/x",
        )
        return [
            *(str(self.root / name) for name in names),
            "/dev/zero",
            "/dev/full",
            "/",
            "/proc/self/mem",
            "/proc/self/fd",
        ]

    @property
    def watched(self) -> list[Path]:
        return [self.root / name for name in ("cwd", "home", "runs", "prefs")]


def make_place(root: Path) -> Place:
    from tests.support.small_run import settings_for

    for name in ("cwd", "home", "runs", "prefs", "folder"):
        (root / name).mkdir()
    os.mkfifo(root / "pipe")
    (root / "loop").symlink_to(root / "loop")
    (root / "empty").write_text("")
    server = socket.socket(socket.AF_UNIX)
    before = Path.cwd()
    os.chdir(root)  # the name of a socket must be short
    server.bind("socket")
    os.chdir(before)
    reward = "from backend.rewards import register_reward_function\n@register_reward_function('ours')\ndef ours(prompts, completions, answer, types=None):\n    return [1.0 for _ in completions]\n"
    files = {
        "reward.py": reward,
        "raises.py": "raise KeyboardInterrupt('no')\n",
        "exits.py": "import sys\nsys.exit(0)\n",
        "broken.py": "def (\n",
    }
    for name, text in files.items():
        (root / name).write_text(text)
    (root / "binary.py").write_bytes(bytes(range(256)))
    (root / "latin.yaml").write_bytes("model: naïve\n".encode("latin-1"))
    _in_a_child(lambda: settings_for(root))
    return Place(root, settings_for(root))


def _in_a_child(work: Callable[[], Any]) -> None:
    """Do it in a forked process: mlx's threads, once there are some in this one, would be missing in those of the cases, where whatever waits for
    them waits for ever."""
    child = os.fork()
    if not child:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


# ── values that no setting should have ───────────────────────────────────────────────────────────────────────────────


def _deep(rng: random.Random) -> Any:
    value: Any = "x"
    for _ in range(rng.choice([3, 49, 51, 200, 5_000])):
        value = [value] if rng.random() < 0.5 else {"a": value}
    return value


def _text(rng: random.Random, place: Place) -> str:
    alphabet = "aA0/.~:,;'\"[]{}()#&*!|>%@`\\\n\r\t\0\x1b\x7f\x85\u202e\u200b\u2028\ud800\udcffé日🙂 "
    hostile = [
        "", " ", "~", "~nosuchuser", "~nosuchuser/x", "..", "../../etc/passwd", "x" * 256, "é" * 200, "/" * 5000, "a/" * 3000, "x" * 100_000, "\0", "a\0b",
        "\ud800", "a\udcffb", "\u202egnp.exe", "owner/", "/name", "owner/na me", "a/b/c", "owner/--x", "owner/x.git", "owner/" + "x" * 200, "nul", "CON",
        "-rf", "--help", "$HOME", "`id`", "{{x}}", "%s%n", "nan", "inf", "1e999", "true", "null", "0x10", "file.py::f", "::", "a::b::c", "keyword(", "keyword(word=" + "(" * 3000,
        "r1_int, r1_int", "kl > ", "kl > nan", "kl > 1e999", "loss" * 500, "reward >= " + "9" * 5000,
    ]  # fmt: skip
    choice = rng.random()
    if choice < 0.5:
        return rng.choice(hostile)
    if choice < 0.7:
        return rng.choice(place.odd_paths) + rng.choice(["", "", "::f", "/x"])
    return "".join(rng.choice(alphabet) for _ in range(rng.choice([1, 5, 50, 400])))


def _number(rng: random.Random) -> Any:
    whole = [
        0,
        1,
        -1,
        2,
        3,
        7,
        63,
        10**3,
        10**6,
        10**6 + 1,
        10**7,
        2**31,
        2**32,
        2**63,
        2**64,
        10**9,
        10**18,
        10**308,
        10**309,
        10**400,
        10**5000,
        -(10**400),
    ]
    real = [
        0.0,
        -0.0,
        1e-320,
        1e-45,
        1e-8,
        0.1,
        0.5,
        0.999999,
        1.0,
        1.5,
        1e6,
        1e7,
        1e38,
        1e39,
        1e308,
        math.inf,
        -math.inf,
        math.nan,
    ]
    return rng.choice(whole) if rng.random() < 0.6 else rng.choice(real)


def _value(rng: random.Random, place: Place, levels: int = 2) -> Any:
    kind = rng.randrange(10)
    if kind < 3:
        return _text(rng, place)
    if kind < 6:
        return _number(rng)
    if kind < 7:
        return rng.choice([None, True, False, [], {}, [None], [True], {"": None}, [[]], {"a": {}}])
    if kind < 8 and levels:
        return [_value(rng, place, levels - 1) for _ in range(rng.choice([0, 1, 2, 3, 30]))]
    if kind < 9 and levels:
        keys = [
            "name",
            "arguments",
            "iters",
            "reward_functions",
            "reward_weights",
            "rank",
            "betas",
            "adamw",
            "a",
            "tokenize",
            "enable_thinking",
        ]
        return {
            rng.choice([*keys, _key(rng, place)]): _value(rng, place, levels - 1) for _ in range(rng.choice([1, 2, 5]))
        }
    return rng.choice([_deep(rng), [1] * 2_000, ["x"] * 1_500, [0] * 12_000])


def _key(rng: random.Random, place: Place) -> Any:
    return rng.choice([1, None, True, 1.5, math.nan, (1, 2), 10**400, _text(rng, place)])


# ── mutations of a mapping ───────────────────────────────────────────────────────────────────────────────────────────


def _any_value(raw: Raw, rng: random.Random, place: Place) -> None:
    raw[_known_key(rng)] = _value(rng, place)


def _fitting_value(raw: Raw, rng: random.Random, place: Place) -> None:
    """A value of the setting's own type, often at or beyond a limit."""
    from backend.config.config import SETTINGS

    about = SETTINGS[rng.choice(list(SETTINGS))]
    ends = [end for end in (about.low, about.high) if end is not None]
    values: dict[str, Callable[[], Any]] = {
        "int": lambda: int(rng.choice([*ends, *(end + 1 for end in ends), 1, 2, 5, 100, 4096])),
        "float": lambda: rng.choice([*ends, *(end * 1.0001 for end in ends), 0.0, 0.5, 1e-300, 1.0, 3.0]),
        "bool": lambda: rng.random() < 0.5,
        "choice": lambda: rng.choice(about.choices).value,
        "list": lambda: [_text(rng, place) for _ in range(rng.randrange(4))],
        "numbers": lambda: [_number(rng) for _ in range(rng.randrange(4))],
    }
    raw[about.key] = values.get(about.kind, lambda: _text(rng, place))()


def _enormous(raw: Raw, rng: random.Random, place: Place) -> None:
    """Counts that are valid alone, and together more than any machine could work off."""
    keys = [
        "batch_size",
        "group_size",
        "gradient_accumulation_steps",
        "num_iterations",
        "steps_per_generation",
        "max_completion_length",
        "max_seq_length",
        "num_layers",
        "iters",
        "rank",
        "val_batches",
        "num_generations_eval",
        "top_k",
        "keep_checkpoints",
    ]
    for key in rng.sample(keys, rng.randrange(1, 6)):
        raw[key] = rng.choice([2, 3, 7, 97, 1000, 4096, 9_999, 10_000, 65_536, 499_999, 10**6, 10**7, 10**8, 10**9])
    if rng.random() < 0.5:
        completion = raw.get("max_completion_length")
        raw["max_seq_length"] = (completion if type(completion) is int else 6) + rng.choice([1, 2, 1000, 10**6])


def _stages(raw: Raw, rng: random.Random, place: Place) -> None:
    stage = {"iters": 2, "reward_functions": ["r1_int"], "reward_weights": [1.0]}
    stages = [dict(stage) for _ in range(rng.choice([1, 2, 5, 300]))]
    target = rng.choice(stages)
    key = rng.choice([*stage, "stray", _key(rng, place)])
    target[key] = _value(rng, place)
    if rng.random() < 0.3:
        target.pop(rng.choice(list(target)))
    raw["stages"] = rng.choice([stages, stages, stages, stages[0], "[{iters: 2}]"])


def _rewards(raw: Raw, rng: random.Random, place: Place) -> None:
    names = [
        "r1_int",
        "r1_count_xml",
        "ours",
        "accuracy",
        "keyword(word=so)",
        "math_eval",
        "keyword(word=",
        "keyword(nonsense=1)",
        "nosuch",
        _text(rng, place),
        f"{place.root / 'reward.py'}::ours",
    ]
    raw["reward_functions"] = [rng.choice(names) for _ in range(rng.randrange(4))]
    if rng.random() < 0.5:
        raw["reward_weights"] = rng.choice(
            [[1.0] * len(raw["reward_functions"]), _value(rng, place), [], [0], [math.nan]]
        )
    if rng.random() < 0.3:
        raw["reward_weight_schedule"] = rng.choice(["linear", "adaptive", "constant", "odd"])
        raw["reward_weights_final"] = rng.choice([[1.0] * len(raw["reward_functions"]), _value(rng, place)])
    # A reward file is a user's program and takes a process: seldom.
    if rng.random() < 0.02:
        raw["reward_functions_file"] = rng.choice([str(place.root / "reward.py"), *place.odd_paths])


def _alias(raw: Raw, rng: random.Random, place: Place) -> None:
    from backend.config.other_programs.translation import FOREIGN_WORDS

    groups = {
        "lora_parameters": lambda: {rng.choice(["rank", "scale", "dropout", "keys", "alpha"]): _value(rng, place)},
        "optimizer_config": lambda: {
            rng.choice(["adamw", "adam", "sgd"]): {rng.choice(["betas", "weight_decay", "lr"]): _value(rng, place)}
        },
        "lr_schedule": lambda: {
            "name": rng.choice(["cosine_decay", "linear_schedule", "odd"]),
            "arguments": [_number(rng) for _ in range(rng.randrange(5))],
            "warmup": _number(rng),
        },
    }
    if rng.random() < 0.5:
        key = rng.choice(list(groups))
        raw[key] = groups[key]()
    else:
        raw[rng.choice(FOREIGN_WORDS)] = _value(rng, place)


def _unknown(raw: Raw, rng: random.Random, place: Place) -> None:
    raw[_key(rng, place)] = _value(rng, place)


def _odd_path(raw: Raw, rng: random.Random, place: Place) -> None:
    key = rng.choice(
        [
            "model",
            "data",
            "dataset",
            "reference_model_path",
            "run_name",
            "lm_studio_name",
            "train_split",
            "valid_split",
            "test_split",
            "dataset_config",
        ]
    )
    raw[key] = rng.choice(place.odd_paths) if rng.random() < 0.5 else _text(rng, place)


def _known_key(rng: random.Random) -> str:
    from backend.config.config import SETTINGS

    return rng.choice(list(SETTINGS))


MUTATIONS: dict[str, Callable[[Raw, random.Random, Place], None]] = {
    "any value": _any_value,
    "fitting value": _fitting_value,
    "enormous": _enormous,
    "stages": _stages,
    "rewards": _rewards,
    "alias": _alias,
    "unknown key": _unknown,
    "odd path": _odd_path,
}


# ── mutations of a text ──────────────────────────────────────────────────────────────────────────────────────────────

_LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
_MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 9))
SNIPPETS = [
    "!!python/object/apply:os.system [id]", "!!python/name:os.system", "!!binary aGk=", "!!set {a, b}", "!!int x", "!!bool x", "!!timestamp x", "! x", "!x {}", "!<tag:x> 1",
    "&a [*a]", "*nothing", "&a &b 1", "1:59:59", "1" + ":59" * 300, "0o7", "010", "0x" + "f" * 5000, "9" * 5000, "1e400", "-.inf", ".nan", "2026-13-45", "2026-01-02",
    "2026-01-02 03:04:05+99:99", "=", "<<", "? ? ?", "[" * 500, "- " * 500, "{a: " * 100, "|\n  text", ">+9\n x", "'", '"\\ud800"', '"\\0"', '"\\xZZ"', "@x", "`x`", "%x", "yes", "~", "- -", "a: b: c",
    "x" * 70_000, "<<: {rank: 4}", "<<: 3", "<<: [1]",
]  # fmt: skip


def _snippet(text: str, rng: random.Random) -> bytes:
    lines = text.splitlines()
    at = rng.randrange(len(lines))
    key = lines[at].partition(":")[0]
    lines[at] = rng.choice(
        [f"{key}: {rng.choice(SNIPPETS)}", rng.choice(SNIPPETS), f"{lines[at]} {rng.choice(SNIPPETS)}"]
    )
    return _encoded("\n".join(lines))


def _doubled(text: str, rng: random.Random) -> bytes:
    lines = text.splitlines(keepends=True)
    return _encoded(text + rng.choice(lines or [""]))


def _bytes(text: str, rng: random.Random) -> bytes:
    content = bytearray(_encoded(text))
    for _ in range(rng.choice([1, 1, 3, 30])):
        at = rng.randrange(max(1, len(content)))
        change = rng.randrange(3) if content else 2
        if change == 0:
            content[at] = rng.randrange(256)
        elif change == 1:
            del content[at]
        else:
            content.insert(at, rng.choice(b"\t\0\xff\x85:-[]{}&*!|>'\"%@`#\n\r "))
    return bytes(content)


def _encoding(text: str, rng: random.Random) -> bytes:
    return text.encode(rng.choice(["utf-16", "utf-8-sig", "latin-1", "utf-32", "utf-16-be"]), "replace")


def _bomb(text: str, rng: random.Random) -> bytes:
    # The largest take up to two seconds each: seldom.
    large = ["#" * 2**20, "[" + "1," * 12_000 + "]", "x" * 2**21, "a: " + "b" * 2**19, "\n" * 2**20]
    return _encoded(text + rng.choice(large) if rng.random() < 0.003 else text + rng.choice([_LAUGHS, _MERGES]))


def _cut(text: str, rng: random.Random) -> bytes:
    return _encoded(text[: rng.randrange(max(1, len(text)))])


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


TEXT_MUTATIONS: dict[str, Callable[[str, random.Random], bytes]] = {
    "snippet": _snippet,
    "given twice": _doubled,
    "bytes": _bytes,
    "encoding": _encoding,
    "bomb": _bomb,
    "cut": _cut,
}


# ── one case ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Case:
    """What one seed gives: a mapping, or the bytes of a file; `is_sweep` says that it describes a sweep."""

    kinds: tuple[str, ...]
    raw: Raw
    content: bytes | None
    is_sweep: bool


def make_case(seed: int, place: Place) -> Case:
    rng = random.Random(f"{NAME} {seed}")
    raw, kinds = dict(place.sound), list[str]()
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        kind = rng.choice(list(MUTATIONS))
        kinds.append(kind)
        MUTATIONS[kind](raw, rng, place)
    is_sweep = rng.random() < 0.15
    if is_sweep:
        raw = _sweep(raw, rng, place)
    content = None
    if rng.random() < SHARE_OF_FILES:
        text = _as_yaml(raw) or "iters: 1\n"
        content = _encoded(text)
        if rng.random() < 0.6:
            kind = rng.choice(list(TEXT_MUTATIONS))
            kinds.append(kind)
            content = TEXT_MUTATIONS[kind](text, rng)
    return Case(tuple(kinds), raw, content, is_sweep)


SWEEP_KEYS = (
    "base", "over", "seeds", "trials", "search", "search_seed", "halving", "metric", "name", "round_steps",
)  # fmt: skip


def _sweep(base: Raw, rng: random.Random, place: Place) -> Raw:
    raw: Raw = {"base": base, "over": {"learning_rate": [1e-5, 1e-4]}, "seeds": [0, 1]}
    for _ in range(rng.randrange(3)):
        key = rng.choice([*SWEEP_KEYS, "odd"])
        raw[key] = _value(rng, place)
    if rng.random() < 0.5:
        values = rng.choice(
            [
                [_value(rng, place)],
                {"uniform": [_number(rng), _number(rng)]},
                {"log_uniform": _value(rng, place)},
                list(range(600)),
            ]
        )
        raw["over"] = (
            {rng.choice([_known_key(rng), _key(rng, place)]): values, "seed": [1]}
            if rng.random() < 0.2
            else {_known_key(rng): values}
        )
        raw |= {"search": "random", "trials": rng.choice([1, 5, 501, 10**6, 10**400])} if rng.random() < 0.5 else {}
    return raw


def _as_yaml(raw: Raw) -> str:
    """YAML of a mapping; what no YAML can hold is left out of it."""
    writable = {key: value for key, value in raw.items() if isinstance(key, str | int | float | bool | None)}
    try:
        return yaml.dump(writable, Dumper=yaml.CSafeDumper, sort_keys=False)
    except (RecursionError, yaml.YAMLError, ValueError):
        return "\n".join(
            f"{key}: {value}"[:10_000] for key, value in writable.items() if isinstance(value, str | float | bool)
        )


DISK = "disk"
"""What a fault names that no setting makes: a run that the disk has no room for."""


class TooSlow(BaseException):
    """A case has taken longer than SECONDS."""


def try_case(case: Case, place: Place, is_repeated: bool = True) -> str:
    """Everything that reads a configuration, with `case`. Returns the longest sentence. Raises AssertionError, or whatever was not a UserError."""
    file = place.root / "case.yaml"
    if case.content is not None:
        file.write_bytes(case.content)
    first = _faults_of(case, place, file, use=lambda raw: _use(raw, is_written=is_repeated))
    second = _faults_of(case, place, file, use=None) if is_repeated else []
    known = _known_settings(case)
    for fault in first:
        sentence = fault.sentence
        assert sentence.isprintable() and len(sentence) <= LONGEST_SENTENCE, f"{len(sentence)} characters: {sentence!r}"
        assert sentence.endswith((".", "?")), sentence
        assert fault.setting.isprintable() and (known is None or fault.setting in (*known, DISK)), (
            f"names {fault.setting!r}: {sentence}"
        )
    assert first[: len(second)] == second or not second, f"a second time: {second} after {first}"
    return max((fault.sentence for fault in first), key=len, default="")


def _faults_of(case: Case, place: Place, file: Path, use: Callable[[Raw], None] | None) -> list[Any]:
    """The faults of a case, and those of `use` where the settings are sound."""
    from backend.config.config import problems, read
    from backend.runs.sweeps.sweep_file import load_sweep, parse_sweep
    from backend.utils.errors import UserError

    try:
        if case.is_sweep:
            _ = load_sweep(file) if case.content is not None else parse_sweep(case.raw)
            return []
        raw = case.raw if case.content is None else read(file)
        faults = problems(raw)
        if use is not None and not faults:
            use(raw)
        return faults
    except UserError as mistake:
        return mistake.faults


def _use(raw: Mapping[str, Any], *, is_written: bool) -> None:
    """What follows valid settings; `is_written`: also written as YAML, which takes long, and read again. Raises UserError."""
    from backend.config.config import dump, parse
    from backend.config.notes import unusual
    from backend.config.other_programs.into_mlx_lm_lora import mlx_lm_lora_yaml
    from backend.config.other_programs.into_trl import into_trl, trl_yaml
    from backend.trainer.memory.estimate import estimate
    from backend.trainer.preflight import preflight
    from backend.utils.documents import parse_yaml

    config = parse(raw)
    if is_written:
        again = parse(parse_yaml(dump(config), "what was written", "config"))
        assert again == config or config.epochs, "what is written is read otherwise"
        mlx_lm_lora_yaml(config)
        trl_yaml(into_trl(config).words, "a file")
    for shape in _shapes():
        for gpu in (False, True):
            result = estimate(config, shape, 16 * 10**9, gpu=gpu)
            assert result.total >= 0 and result.to_dict()["sentence"]
    for remark in unusual(config):
        assert remark.sentence.isprintable()
    preflight(raw)


_SHAPES: list[Any] = []


def _shapes() -> list[Any]:
    return _SHAPES


_SETTING_OF_ANOTHER = ("config", "sweep", *SWEEP_KEYS, "lora_parameters")


def _known_settings(case: Case) -> set[str] | None:
    """What a fault may name: our settings, and what the case itself has as keys. None where the file's keys are unknown."""
    from backend.config.config import SETTINGS
    from backend.config.other_programs.translation import FOREIGN_WORDS
    from backend.utils.errors import ConfigProblem

    if case.content is not None:
        return None
    over: Any = case.raw.get("over")
    keys = [*case.raw, *(over if isinstance(over, dict) else ())]
    nested = [name for value in case.raw.values() if isinstance(value, dict) for name in value]
    base = case.raw.get("base")
    deeper = (
        [name for value in base.values() if isinstance(value, dict) for name in value] if isinstance(base, dict) else []
    )
    return {
        *SETTINGS,
        *FOREIGN_WORDS,
        *_SETTING_OF_ANOTHER,
        *(ConfigProblem(_plain(key), "").setting for key in [*keys, *nested, *deeper]),
    }


def _plain(key: Any) -> str:
    return key if isinstance(key, str) else quote(key)


# ── many cases ───────────────────────────────────────────────────────────────────────────────────────────────────────


def prepare(place: Place) -> None:
    """In the process of the cases: folders of its own, no network, and what is the same for all cases read once."""
    os.environ |= {
        "HOME": str(place.root / "home"), "GRPO_STUDIO_RUNS": str(place.root / "runs"), "GRPO_STUDIO_PREFS": str(place.root / "prefs"),
        "HF_HUB_OFFLINE": "1", "HF_HOME": str(place.root / "hub"),
    }  # fmt: skip
    os.chdir(place.root / "cwd")
    from functools import cache

    from backend.models import loading
    from backend.trainer.memory.model_shape import shape_of

    tokenizer = cache(loading.load_tokenizer)
    loading.load_tokenizer = lambda folder, setting="model", eos_token_ids=None: tokenizer(folder, setting)
    _SHAPES[:] = [shape_of(place.root / "model")]


def run_cases(seeds: range, place: Place, tell: Callable[[dict[str, Any]], None]) -> None:
    """Try every case, and tell each result: {"seed", "kinds", "failure", "longest"}."""
    prepare(place)
    signal.signal(signal.SIGPROF, _too_slow)
    for seed in seeds:
        tell({"began": seed})
        case = make_case(seed, place)
        failure, longest, began = "", "", time.process_time()
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            longest = try_case(case, place, random.Random(seed).random() < SHARE_OF_REPEATS)
        except TooSlow:
            failure = f"hang: {''.join(traceback.format_exc(limit=-6))}"
        except BaseException:
            failure = traceback.format_exc(limit=-6)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        if stray := [str(path) for folder in place.watched for path in folder.iterdir()]:
            failure += f"stray files: {stray}"
        tell(
            {
                "seed": seed,
                "kinds": case.kinds,
                "failure": failure,
                "longest": longest,
                "seconds": time.process_time() - began,
            }
        )


def _too_slow(_signal: int, _frame: Any) -> None:
    raise TooSlow


def forked_cases(seeds: range, place: Place) -> Iterator[dict[str, Any]]:
    """The results of `seeds` from a forked process; one that hangs beyond the reach of a signal, or dies, is replaced."""
    first = seeds.start
    while first < seeds.stop:
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            os.close(reader)
            _as_child(range(first, min(first + BATCH, seeds.stop)), place, writer)
        os.close(writer)
        current = first
        for told in _lines(reader):
            if told is None:
                break
            if "began" in told:
                current = told["began"]
            else:
                first = told["seed"] + 1
                yield told
        os.close(reader)
        done = first >= min(current + 1, seeds.stop)
        if not done:
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if not done:
            yield {
                "seed": current,
                "kinds": (),
                "failure": f"the process ended or hung: {os.waitstatus_to_exitcode(status)}",
                "longest": "",
                "seconds": SECONDS,
            }
            first = current + 1


def _as_child(seeds: range, place: Place, writer: int) -> None:
    code = 1
    try:
        with open(writer, "w", buffering=1) as stream:
            run_cases(seeds, place, lambda told: print(json.dumps(told), file=stream, flush=True))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _lines(reader: int) -> Iterator[dict[str, Any] | None]:
    """What the child tells; None once it has been silent for six times SECONDS, as where it waits for a pipe, and the end where it has
    ended."""
    buffer = b""
    with selectors.DefaultSelector() as selector:
        selector.register(reader, selectors.EVENT_READ)
        while True:
            if not selector.select(6 * SECONDS):
                yield None
                return
            chunk = os.read(reader, 1 << 16)
            if not chunk:
                return
            *lines, buffer = (buffer + chunk).split(b"\n")
            yield from map(json.loads, lines)


def main(count: int, seed: int) -> int:
    """Try `count` cases; returns how many failed."""
    report = Report(NAME)
    longest, slowest, kinds = "", 0.0, dict[str, int]()
    _load()
    with tempfile.TemporaryDirectory(prefix="configs-") as folder:
        place = make_place(Path(folder))
        for told in forked_cases(range(seed, seed + count), place):
            longest, slowest = max(longest, told["longest"], key=len), max(slowest, told["seconds"])
            if told["failure"]:
                last = [line for line in told["failure"].splitlines() if line.strip()][-1]
                kind = re.sub(r"\d+|0x[0-9a-f]+|'.*'", "…", last)[:100]
                kinds[kind] = kinds.get(kind, 0) + 1
                details = told["failure"] if kinds[kind] == 1 else ""  # the traceback of the first of its kind
                report.failed(told["seed"], f"{', '.join(told['kinds'])}: {last[:300]}", details)
            else:
                report.passed()
    print(f"   longest sentence {len(longest)} characters: {longest}\n   slowest case {slowest:.2f} s")
    for kind, number in sorted(kinds.items(), key=lambda pair: -pair[1]):
        print(f"   {number:>7,} × {kind}")
    return report.failures


def _load() -> None:
    """Import what the cases need before forking, so that each process has it already."""
    import backend.config.notes
    import backend.config.other_programs.into_mlx_lm_lora
    import backend.config.other_programs.into_trl  # noqa: F401


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
