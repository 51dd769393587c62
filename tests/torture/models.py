"""Model folders as a stranger, or a broken download, may leave them: config.json, weights, tokenizer and adapter with something wrong.

Each is checked as `check` does, listed as the picker does and measured as the estimate does; what passes `check` is loaded. It must end within
LIMIT_S, without a traceback, in sentences that are one printable line of at most 200 characters; nothing of the folder is run.
"""

from __future__ import annotations

import atexit
import json
import os
import random
import shutil
import struct
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from backend.models import inventory
from backend.models.export import lm_studio_rules
from backend.models.loading import load_model
from backend.run import preflight
from backend.serve import inventory_questions
from backend.serve.question_call import QuestionCall
from backend.spec.faults import Fault, Mistake
from backend.spec.memory.model_shape import shape_of
from tests.support.random_models import tiny_model
from tests.support.small_run import settings_for
from tests.torture.datasets import Slow, limited, wrong_sentences
from tests.torture.hostile_files import beginning
from tests.torture.report import run_cases

LIMIT_S = 5.0

ODD_VALUES: tuple[Any, ...] = (
    None, True, "", "x" * 5000, -1, 0, 1, 3, 7, 10**6, 10**9, 2**31, 2**63, 10**30, 1e308, float("nan"), float("inf"), [], [1], {}, {"a": None},
    "\n\x1b[0m", "\ud800", [[[]]], ["full_attention"], {"type": "yarn", "factor": -1}, "float32", 0.5, [None] * 50,
)  # fmt: skip
ARCHITECTURES = (
    "llama",
    "gemma3_text",
    "mixtral",
    "mamba",
    "qwen2",
    "no_such",
    "../../os",
    "os",
    "",
    "qwen3\n",
    "bert",
    "utils",
    "gpt2",
    "qwen3_moe",
    "deepseek_v3",
)
RUN_MARK = "was-run"
"""A file that code of the folder would leave beside it."""
TEMPLATES = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "{{ 'x' * 10**10 }}", "{{ 'x'|center(10**9) }}",
    "{{ raise_exception('no\n\x07way' * 50) }}", "{{ messages.__class__.__mro__ }}", "{{ cycler.__init__.__globals__.os.popen('touch was-run') }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ 1 / 0 }}", "{{ 7 ** (10 ** 9) }}", "{% for %}", "{{ messages[0].content", "{{ lipsum(10**6) }}",
    "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}", "{{ nothing.at.all }}", "{{ messages[99] }}",
    "{{ '%1000000000d' % 1 }}", "{% include '/etc/passwd' %}", "{% import 'os' as os %}", "{{ ''.format }}", "{{ [1]|sum(start='x') }}",
    "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}", "\ud800", "{{ bos_token * 7 }}{{ messages[0]['content'] }}", "",
)  # fmt: skip


@cache
def sound() -> Path:
    """A folder with a model, its adapter and rows, all sound."""
    home = Path(tempfile.mkdtemp(prefix="torture-sound-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    settings_for(home)
    about = {
        "fine_tune_type": "lora",
        "num_layers": 2,
        "lora_parameters": {"rank": 2, "scale": 1.0, "dropout": 0.0, "keys": ["self_attn.q_proj"]},
    }
    (home / "adapter").mkdir()
    (home / "adapter" / "adapter_config.json").write_text(json.dumps(about))
    write_safetensors(home / "adapter" / "adapters.safetensors", {"a": ("F32", [2, 2])})
    tiny_model(home / "quantised", bits=4)
    return home


def write_safetensors(file: Path, arrays: dict[str, tuple[str, list[int]]]) -> None:
    header: dict[str, Any] = {}
    place = 0
    for name, (dtype, shape) in arrays.items():
        size = 4
        for length in shape:
            size *= length
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [place, place + size]}
        place += size
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(place))


# ── what goes wrong ──────────────────────────────────────────────────────────────────────────────────────────────────


def break_json(file: Path, rng: random.Random) -> None:
    """One value of a JSON file, or the file, is not what it should be."""
    content = json.loads(beginning(file))
    for _ in range(rng.choice([1, 1, 2, 4])):
        place = content
        while True:
            key = (
                rng.choice([*place, "added"])
                if isinstance(place, dict)
                else rng.randrange(len(place))
                if place
                else None
            )
            if key is None:
                break
            inner = place.get(key) if isinstance(place, dict) else place[key]
            if isinstance(inner, (dict, list)) and inner and rng.random() < 0.6:
                place = inner
                continue
            if isinstance(place, dict) and rng.random() < 0.3:
                place.pop(key, None)
            else:
                place[key] = rng.choice(ODD_VALUES)
            break
    file.write_text(json.dumps(content))


def break_file(file: Path, rng: random.Random) -> None:
    """The file as a whole: its bytes, its encoding, or what it is."""
    old = beginning(file)
    file.unlink()
    kind = rng.randrange(12)
    if kind == 0:
        return
    if kind == 1:
        os.mkfifo(file)
    elif kind == 2:
        file.mkdir()
    elif kind == 3:
        file.symlink_to(file)
    elif kind == 4:
        file.write_bytes(old[: rng.randrange(len(old) or 1)])
    elif kind == 5:
        file.write_bytes(b"[" * rng.choice([200, 100_000]))
    elif kind == 6:
        file.write_bytes(old.decode("utf-8", "replace").encode("utf-16"))
    elif kind == 7:
        file.write_text(rng.choice(["null", "[]", "3", '"x"', "{}", "", "NaN", "1" * 5000, "{'a': 1}"]))
    elif kind == 8:
        place = rng.randrange(len(old) or 1)
        file.write_bytes(old[:place] + rng.randbytes(rng.choice([1, 8, 60])) + old[place + 1 :])
    elif kind == 9:
        file.write_bytes(rng.randbytes(100))
    elif kind == 10:
        file.symlink_to("/dev/zero")
    else:
        with file.open("wb") as stream:
            stream.truncate(10**11)


def break_header(file: Path, rng: random.Random) -> None:
    """The header of a safetensors file says something else than the file holds."""
    old = beginning(file)
    (length,) = struct.unpack("<Q", old[:8])
    try:
        header, data = json.loads(old[8 : 8 + length]), old[8 + length :]
    except (ValueError, RecursionError):  # broken so before
        return
    names = [name for name in header if name != "__metadata__"]
    about = header[name] if (name := rng.choice(names)) else {}
    claim: int | None = None
    kind = rng.randrange(12)
    if kind == 0:
        claim = rng.choice([0, 1, 2**30, 2**63, 2**64 - 1, length - 1, length + 1, len(old)])
    elif kind == 1:
        about["shape"] = rng.choice(
            [[], [0], [-1], [2**62, 2**62], [1] * 100, "x", None, [1.5], about["shape"][::-1], [*about["shape"], 1]]
        )
    elif kind == 2:
        about["dtype"] = rng.choice(["F16", "F64", "I8", "F4", "", None, 3, "float32"])
    elif kind == 3:
        about["data_offsets"] = rng.choice(
            [[0, 4], [0], None, [-4, 0], [2**62, 2**63], ["0", "4"], about["data_offsets"][::-1], [0, 0]]
        )
    elif kind == 4:
        header[rng.choice(names)] = rng.choice([None, [], 3, {}, "x"])
    elif kind == 5:
        del header[name]
    elif kind == 6:
        header[rng.choice(["\n\x1b", "n" * 10_000, "../../x", "", "\ud800", "lm_head.weight"])] = header.pop(name)
    elif kind == 7:
        header["__metadata__"] = rng.choice([None, 3, {"a": 3}, [], {"format": "pt\n"}])
    elif kind == 8:
        data += bytes(rng.choice([1, 1000]))
    elif kind == 9:
        data = data[: rng.randrange(len(data))]
    elif kind == 10:
        header = dict(rng.sample(sorted(header.items()), len(header)))
    text = json.dumps(header).encode()
    if kind == 11:
        text = text[:-1] + b"," + json.dumps({name: about}).encode()[1:]
    file.write_bytes(struct.pack("<Q", len(text) if claim is None else claim) + text + data)


def add_code(folder: Path, rng: random.Random) -> None:
    """Code that leaves a mark where it is run, and every way to name it."""
    (folder / "evil.py").write_text(
        f"open({str(folder.parent / RUN_MARK)!r}, 'w')\nModel = ModelArgs = Evil = object\n"
    )
    where = rng.choice(["config.json", "tokenizer_config.json"])
    config = json.loads(beginning(folder / where))
    config |= rng.choice([
        {"model_file": "evil.py"}, {"auto_map": {"AutoTokenizer": ["evil.Evil", None], "AutoConfig": "evil.Evil"}, "tokenizer_class": "Evil"},
        {"auto_map": {"AutoTokenizer": "evil.Evil"}, "model_type": "unheard_of"}, {"auto_map": ["evil.Evil", None]}, {"model_file": 3},
        {"tokenizer_class": "Evil"}, {"chat_template_type": "../evil"}, {"tool_parser_type": "evil"}, {"chat_template_type": ["x"]},
    ])  # fmt: skip
    (folder / where).write_text(json.dumps(config))


def add_pickle(folder: Path, rng: random.Random) -> None:
    body = f"cbuiltins\nopen\n(V{folder.parent / RUN_MARK}\nVw\ntR.".encode()
    for name in ("pytorch_model.bin", "model.pt", "vocab.pkl", "model.safetensors.pkl"):
        (folder / name).write_bytes(body)
    is_left_out, is_pickle = rng.random() < 0.5, rng.random() < 0.5
    if is_left_out or is_pickle:  # unlinked first: it may have been made a pipe
        (folder / "model.safetensors").unlink()
    if is_pickle:
        (folder / "model.safetensors").write_bytes(body)


def other_architecture(folder: Path, rng: random.Random) -> None:
    config = json.loads(beginning(folder / "config.json"))
    config["model_type"] = rng.choice(ARCHITECTURES)
    config["architectures"] = rng.choice([None, ["X"], "X", 3, [None], [["a"]], {"a": 1}])
    (folder / "config.json").write_text(json.dumps(config))


def other_template(folder: Path, rng: random.Random) -> None:
    file = folder / "tokenizer_config.json"
    config = json.loads(beginning(file))
    config["chat_template"] = rng.choice(TEMPLATES)
    file.write_text(json.dumps(config))


def other_growth(folder: Path, rng: random.Random) -> None:
    """A tokenizer that makes texts longer, or much longer, before it cuts them or after it has put them together."""
    file = folder / "tokenizer.json"
    parts = json.loads(beginning(file))
    pattern = rng.choice(
        [{"String": "a"}, {"String": ""}, {"String": " "}, {"Regex": "a*"}, {"Regex": "."}, {"Regex": "(a+)+$"}, 3]
    )
    step = {"type": "Replace", "pattern": pattern, "content": rng.choice(["", "a", "aa", "a" * 5000])}
    steps = [rng.choice([step, {"type": "Prepend", "prepend": "x" * rng.choice([1, 3000])}])] * rng.choice(
        [1, 3, 40, 3000]
    )
    name = rng.choice(["normalizer", "decoder"])
    parts[name] = rng.choice([{"type": "Sequence", f"{name}s": steps}, steps[0]])
    file.write_text(json.dumps(parts))


def other_index(folder: Path, rng: random.Random) -> None:
    files = [
        "model.safetensors",
        "../../etc/passwd",
        "/etc/passwd",
        "model-00002-of-00002.safetensors",
        None,
        3,
        "\n",
        "x" * 3000,
    ]
    named: Any = rng.choice([{f"a{n}": rng.choice(files) for n in range(3)}, None, [], "x", {}])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": named}))
    if rng.random() < 0.3:
        shutil.copy(folder / "model.safetensors", folder / "model-2.safetensors")


def break_it(folder: Path, adapter: Path, rng: random.Random) -> None:
    texts = ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]
    ways: list[tuple[int, Callable[[], None]]] = [
        (30, lambda: break_json(folder / rng.choice(["config.json", "config.json", *texts]), rng)),
        (12, lambda: break_file(folder / rng.choice([*texts, "model.safetensors"]), rng)),
        (20, lambda: break_header(folder / "model.safetensors", rng)),
        (5, lambda: add_code(folder, rng)),
        (3, lambda: add_pickle(folder, rng)),
        (8, lambda: other_architecture(folder, rng)),
        (5, lambda: other_template(folder, rng)),
        (5, lambda: other_index(folder, rng)),
        (5, lambda: other_growth(folder, rng)),
        (5, lambda: break_json(adapter / "adapter_config.json", rng)),
        (3, lambda: break_header(adapter / "adapters.safetensors", rng)),
        (
            2,
            lambda: (
                (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": rng.choice(ODD_VALUES)}))
                and None
            ),
        ),
    ]
    for _ in range(rng.choice([1, 1, 1, 2])):
        try:
            rng.choices([way for _, way in ways], [weight for weight, _ in ways])[0]()
        except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, struct.error):
            continue  # broken before, so that it cannot be broken in this way


# ── one case ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def seen_by(folder: Path, raw: dict[str, Any]) -> list[Fault]:
    """The sentences of `check`, of the picker and of LM Studio's rules; what passes `check` is loaded."""
    faults = preflight.check(raw)
    call = QuestionCall(lambda progress: None)
    item = inventory.model_at(folder)
    listed = inventory_questions.models({"paths": [str(folder), str(folder.parent)]}, call)
    facts = inventory_questions.model_facts({"name": str(folder)}, call)
    json.dumps([item.to_dict(), listed, facts]).encode("utf-8", "replace")
    shape_of(folder)
    refusals = [Fault("model", item.refusal)] if item.refusal else []
    of_rules = lm_studio_rules.faults(folder)
    if not faults and str(folder) in (raw["model"], raw.get("reference_model_path")):
        load_model(str(folder), "model")
    return [*faults, *refusals, *of_rules]


def case(seed: int, home: Path) -> str:
    """What is wrong with one case; "" for nothing."""
    rng = random.Random(f"models {seed}")
    folder, adapter = home / "model", home / "adapter"
    shutil.copytree(sound() / ("quantised" if rng.random() < 0.15 else "model"), folder)
    shutil.copytree(sound() / "adapter", adapter)
    try:
        break_it(folder, adapter, rng)
        made = sorted(str(path) for path in home.rglob("*"))
        raw = settings_for(sound()) | {"model": str(folder)}
        if rng.random() < 0.2:
            raw |= {"beta": 0.1, "reference_model_path": str(rng.choice([adapter, folder]))}
            raw["model"] = str(sound() / "model")
        began = time.process_time()
        with limited(LIMIT_S):
            faults = seen_by(folder, raw)
        if (took := time.process_time() - began) > LIMIT_S:
            return f"took {took:.1f} s"
        now = sorted(str(path) for path in home.rglob("*"))
        return "; ".join([*wrong_sentences(faults), *(f"left {path}" for path in now if path not in made)])
    except Slow:
        return "did not end"
    except Mistake as mistake:
        return f"passed check and cannot be loaded: {mistake}"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return traceback.format_exc()
    finally:
        for path in (folder, adapter, home / RUN_MARK):
            shutil.rmtree(path, ignore_errors=True)
            path.unlink(missing_ok=True) if not path.is_dir() else None


def main(count: int, seed: int) -> int:
    """`count` model folders; returns how many failed."""
    sound()  # so that the first case is not charged for it
    return run_cases("models", case, range(seed, seed + count))
