"""GGUF files and Ollama: what is in the file, read back with gguf's own reader; the Modelfile; `ollama create` by a
stand-in.

That llama.cpp computes the same logits is shown by the proof at the end, where its library is at hand.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import pytest
from tokenizers import Tokenizer

from backend.export import lm_studio_rules, writer
from backend.export.export_run import Export, ExportedModel, export_run
from backend.export.exports import FORMATS, exported_bytes
from backend.export.gguf_file import LLAMA_3, QWEN_2, ChatFormat, modelfile
from backend.runs.run_folder import RunFolder
from backend.utils.errors import UserError
from tests.support.cases import cases
from tests.support.random_models import tiny_model
from tests.support.random_runs import PROMPT, write_run
from tests.support.verbs import call, run_ok

LLAMA_3_SCALING = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA_3_POSITIONS = {"rope_scaling": LLAMA_3_SCALING | {"original_max_position_embeddings": 256}}


def export(run: Path, format_: str = "gguf-f16", to: str = "folder", **how: Any) -> ExportedModel:
    return export_run(RunFolder(run), Export(to, "mine", run.parent / "out", format_, **how))


def written(path: Path) -> gguf.GGUFReader:
    return gguf.GGUFReader(path / "model.gguf")


def value(reader: gguf.GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    assert field is not None, key
    return field.contents()


def test_a_file_says_what_llama_cpp_asks_for(tmp_path: Path) -> None:
    base = tiny_model(tmp_path / "base", "llama", vocab=300, own={"vocab_size": 304})
    write_run(tmp_path / "run", base)
    report = export(tmp_path / "run")
    reader = written(report.path)
    sizes = {"block_count": 2, "vocab_size": 304, "attention.head_count": 2, "attention.head_count_kv": 1}
    sizes |= {"embedding_length": 32, "feed_forward_length": 64, "rope.dimension_count": 16, "rope.freq_base": 1e4}
    assert {name: value(reader, f"llama.{name}") for name in sizes} == sizes
    assert value(reader, "tokenizer.ggml.model") == "gpt2" and value(reader, "tokenizer.ggml.pre") == "gpt-2"
    tokens, types = value(reader, "tokenizer.ggml.tokens"), value(reader, "tokenizer.ggml.token_type")
    vocabulary = Tokenizer.from_file(str(base / "tokenizer.json")).get_vocab()
    assert tokens[:300] == sorted(vocabulary, key=vocabulary.__getitem__) and tokens[300:] == [
        f"[PAD{number}]" for number in range(300, 304)
    ]
    assert types == [3] * 3 + [1] * 297 + [5] * 4, "control, normal, unused"
    assert value(reader, "tokenizer.ggml.eos_token_id") == 1
    merges = json.loads((base / "tokenizer.json").read_text())["model"]["merges"]
    assert value(reader, "tokenizer.ggml.merges") == [" ".join(pair) for pair in merges]
    assert "<|im_start|>" in value(reader, "tokenizer.chat_template")


@pytest.mark.parametrize(("format_", "kind"), [("gguf-f16", "F16"), ("gguf-bf16", "BF16"), ("gguf-q8_0", "Q8_0")])
def test_matrices_have_the_type_and_size_and_vectors_stay_float32(tmp_path: Path, format_: str, kind: str) -> None:
    base = tiny_model(tmp_path / "base", "qwen2", hidden=64, layers=1)
    write_run(tmp_path / "run", base, "dora")
    report = export(tmp_path / "run", format_)
    tensors = written(report.path).tensors
    assert {t.tensor_type.name for t in tensors if len(t.shape) > 1} == {kind}
    assert {t.tensor_type.name for t in tensors if len(t.shape) == 1} == {"F32"}
    guess = exported_bytes(base, FORMATS[format_])
    assert guess is not None and abs(guess - sum(int(t.n_bytes) for t in tensors)) < 0.03 * guess
    assert report.verification.lost is not None and report.verification.lost < 0.05


def test_rows_of_queries_and_keys_are_in_the_order_of_llama_cpp_and_positions_are_scaled(tmp_path: Path) -> None:
    """Its Llama turns neighbouring numbers; another order would answer nonsense, and loading would not tell."""
    base = tiny_model(tmp_path / "base", "llama", own=LLAMA_3_POSITIONS)
    write_run(tmp_path / "run", base, "full")
    tensors = {t.name: t for t in written(export(tmp_path / "run").path).tensors}
    trained: Any = mx.load(str(RunFolder(tmp_path / "run").model / "model.safetensors"))
    for there, name, heads in (("attn_q", "q_proj", 2), ("attn_k", "k_proj", 1)):
        own = np.array(trained[f"model.layers.1.self_attn.{name}.weight"])
        rows = [head * 16 + half * 8 + at for head in range(heads) for at in range(8) for half in range(2)]
        assert np.abs(tensors[f"blk.1.{there}.weight"].data.astype(np.float32) - own[rows]).max() < 1e-3
    own = np.array(trained["model.layers.1.self_attn.v_proj.weight"])
    assert np.abs(tensors["blk.1.attn_v.weight"].data.astype(np.float32) - own).max() < 1e-3
    factors = tensors["rope_freqs.weight"].data
    # Waves of 2π, 2π·10000^(1/8) … tokens: up to 256/4 as they are, from 256 on eight times as long.
    assert factors.shape == (8,) and factors[0] == factors[1] == 1 and factors[4:].tolist() == [8] * 4
    assert 1 < factors[3] < 8


@pytest.mark.parametrize(
    ("arch", "own", "says"),
    [
        ("phi3", {}, "type phi3"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "scales its positions by linear"),
    ],
)
def test_what_is_not_written_here_is_refused(tmp_path: Path, arch: str, own: dict[str, Any], says: str) -> None:
    write_run(tmp_path / "run", tiny_model(tmp_path / "base", arch, own=own))
    with pytest.raises(UserError, match=says) as caught:
        export(tmp_path / "run")
    assert "convert_hf_to_gguf.py" in str(caught.value) and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("pattern", "ignore_merges", "name"),
    [(QWEN_2, False, "qwen2"), (LLAMA_3, True, "llama-bpe"), (LLAMA_3, False, ""), (r"\p{L}+", False, "")],
)
def test_words_are_split_as_llama_cpp_names_it(tmp_path: Path, pattern: str, ignore_merges: bool, name: str) -> None:
    base = tiny_model(tmp_path / "base", "qwen2", layers=1)
    write_run(tmp_path / "run", base)
    tokenizer = json.loads((base / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, byte_level]}
    tokenizer["model"]["ignore_merges"] = ignore_merges
    (base / "tokenizer.json").write_text(json.dumps(tokenizer))
    if name:
        assert value(written(export(tmp_path / "run").path), "tokenizer.ggml.pre") == name
        return
    with pytest.raises(UserError, match="splits words in a way"):
        export(tmp_path / "run")


def test_the_modelfile_puts_chats_and_samples_as_the_run_did(tmp_path: Path) -> None:
    base = tiny_model(tmp_path / "base", "llama", layers=1)
    (base / "LICENSE").write_text('Use it "freely".\n')
    write_run(tmp_path / "run", base, system_prompt="Think.", temperature=0.5, top_p=0.9, stop=["</answer>"])
    text = (export(tmp_path / "run").path / "Modelfile").read_text()
    assert text.startswith(
        'FROM ./model.gguf\nTEMPLATE """{{ if .System }}<|im_start|>system\n{{ .System }}<|im_end|>\n'
    )
    assert "{{ .Content }}<|im_end|>\n<|im_start|>assistant\n{{ else if" in text
    assert "PARAMETER temperature 0.5\nPARAMETER top_p 0.9\n" in text
    assert 'PARAMETER stop """</answer>"""\nPARAMETER stop """<|im_end|>"""\nSYSTEM """Think."""\n' in text
    assert text.endswith('LICENSE """Use it "freely".\n"""\n')


def parsed(text: str) -> list[tuple[str, str]]:
    """Commands and values as Ollama reads a Modelfile: a value in three quotation marks may have several lines."""
    found, lines = list[tuple[str, str]](), iter(text.splitlines(keepends=True))
    for line in lines:
        begun = re.match(r"((?:PARAMETER )?\w+) ", line)
        assert begun, line
        command, value = begun[1], line[begun.end() :]
        while value.startswith('"""') and not (len(value.rstrip("\r\n")) >= 6 and value.rstrip("\r\n").endswith('"""')):
            value += next(lines)
        value = value.removesuffix("\n")
        found.append((command, value[3:-3] if value.startswith('"""') else value))
    return found


HOSTILE_TEXTS = ["\nFROM /etc/passwd\nADAPTER ./evil", '"""\nFROM ./evil\n"""', '""\nFROM ./evil', 'ends with """']
HOSTILE_TEXTS += ['""""\nSYSTEM "x"', '"', '""', 'a"\nPARAMETER num_ctx 1\n"b"', "\rFROM ./evil", "{{ .System }}"]


@cases("text", HOSTILE_TEXTS)
def test_no_text_in_a_modelfile_becomes_a_command(text: str) -> None:
    chat = ChatFormat(text, (text, text), text, text)
    read = parsed(modelfile("x.gguf", chat, {"temperature": 0.5, "stop": [text]}, text, text))
    commands = ["FROM", "TEMPLATE", "PARAMETER temperature", "PARAMETER stop", "SYSTEM", "LICENSE"]
    assert [command for command, _ in read] == commands
    assert read[0][1] == "./x.gguf" and read[2][1] == "0.5"
    assert read[3][1] == read[4][1] == read[5][1] == text.replace('"""', "'''")


OLLAMA = """#!{python}
import pathlib, sys
here = pathlib.Path(__file__).parent
if sys.argv[1] == "list":
    print("NAME    ID    SIZE\\nothers:latest    a    1 GB")
elif (here / "broken").exists():
    print("transferring model data\\rError: no space left on device", file=sys.stderr)
    sys.exit(1)
else:
    folder = pathlib.Path(sys.argv[4]).parent
    weights = (folder / pathlib.Path(sys.argv[4]).read_text().splitlines()[0].removeprefix("FROM ./")).read_bytes()
    (here / "created").write_text(f"{{sys.argv[1]}} {{sys.argv[2]}} {{weights[:4].decode()}}")
"""


@pytest.fixture
def ollama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a stand-in for the program, which is all that the PATH leads to."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "ollama").write_text(OLLAMA.format(python=sys.executable))
    (folder / "ollama").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_run(tmp_path / "run", tiny_model(tmp_path / "base", "llama", layers=1))
    return tmp_path / "run"


def test_ollama_creates_the_model_and_nothing_else_is_left(run: Path, ollama: Path) -> None:
    before = {path.name for path in run.iterdir()}
    report = export(run, to="ollama")
    assert (ollama / "created").read_text() == "create mine GGUF" and report.place == "Ollama, as mine"
    assert {path.name for path in run.iterdir()} == before


def test_what_ollama_says_is_passed_on(run: Path, ollama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (ollama / "broken").touch()
    with pytest.raises(UserError, match=r"`ollama create` failed: Error: no space left on device\."):
        export(run, to="ollama")
    with pytest.raises(UserError, match="has a model others already"):
        export_run(RunFolder(run), Export("ollama", "others", format="gguf-f16"))
    with pytest.raises(UserError, match="as a name, not 'a b'"):
        export_run(RunFolder(run), Export("ollama", "a b", format="gguf-f16"))
    with pytest.raises(UserError, match="Ollama takes GGUF files only"):
        export(run, "full", to="ollama")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("backend.export.exports.OLLAMA_PLACES", ())
    with pytest.raises(UserError, match="Ollama was not found"):
        export(run, to="ollama")
    monkeypatch.setattr("backend.export.exports.OLLAMA_PLACES", (str(ollama),))
    (ollama / "broken").unlink()
    assert export(run, to="ollama").place == "Ollama, as mine", "found outside the PATH"


@pytest.mark.proof
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_llama_cpp_computes_the_trained_logits_and_reads_text_alike(tmp_path: Path, arch: str) -> None:
    """LLAMA_CPP_PYTHON is a Python with llama-cpp-python installed (it builds llama.cpp, which takes minutes)."""
    python = os.environ.get("LLAMA_CPP_PYTHON")
    if not python:
        pytest.skip("LLAMA_CPP_PYTHON names no Python with llama-cpp-python")
    own = LLAMA_3_POSITIONS if arch == "llama" else {}
    base = tiny_model(tmp_path / "base", arch, own=own, tie=arch != "llama", noise=0.1)
    trained = np.array(write_run(tmp_path / "run", base, "dora"))
    texts = ["What is 17 plus 25?<|im_end|>\n<|im_start|>assistant", " The  quick\n\nbrown fox, it's 2024"]
    script = Path(__file__).parents[1] / "support" / "llama_cpp_reference.py"
    ids: Any = PROMPT.tolist()
    for format_, tolerance in (("gguf-f16", 0.01), ("gguf-bf16", 0.1), ("gguf-q8_0", 0.5)):
        path = export_run(RunFolder(tmp_path / "run"), Export("folder", format_, tmp_path / "out", format_)).path
        command = [python, str(script), str(path / "model.gguf"), json.dumps(ids[0]), json.dumps(texts)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        theirs = json.loads(done.stdout)
        assert np.abs(np.array(theirs["logits"]) - trained).max() < tolerance
        tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
        assert theirs["tokens"] == [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("sound") / "model", layers=1)


def edit(**changes: object) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(config))

    return change


def shards(folder: Path, *, gap: bool = False, index: bool = True) -> None:
    """The weights in two shards."""
    arrays = dict(mx.load(str(folder / "model.safetensors")))  # pyright: ignore
    (folder / "model.safetensors").unlink()
    names, where = sorted(arrays), {}
    for number, part in ((1, names[:3]), (3 if gap else 2, names[3:])):
        file = f"model-{number:05d}-of-00002.safetensors"
        writer.write_safetensors(folder / file, {name: arrays[name] for name in part})
        where |= dict.fromkeys(part, file)
    if index:
        (folder / lm_studio_rules.INDEX).write_text(json.dumps({"weight_map": where}))


def without(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def lm_studio_written(name: str, text: str = "") -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


BREAKS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "no config": (without("config.json"), "config.json", "missing"),
    "config of something else": (lm_studio_written("config.json", "[]"), "config.json", "no JSON object"),
    "no type": (edit(model_type=None), "config.json", "model_type"),
    "no weights": (without(WEIGHTS), WEIGHTS, "no weights"),
    "cut off": (lambda f: os.truncate(f / WEIGHTS, (f / WEIGHTS).stat().st_size - 8), WEIGHTS, "cut off"),
    "no weights but text": (lm_studio_written(WEIGHTS, "no header at all"), WEIGHTS, "not a valid safetensors"),
    "no metadata": (lambda f: mx.save_safetensors(str(f / WEIGHTS), {"a": mx.zeros(2)}), WEIGHTS, "metadata"),
    "quantised in words": (edit(quantization={"bits": 4}), "config.json", "says that the weights are quantised"),
    "no tokenizer": (without("tokenizer_config.json"), "tokenizer_config.json", "missing"),
    "no vocabulary": (without("tokenizer.json"), "tokenizer.json", "no vocabulary"),
    "adapter": (lm_studio_written("adapters.safetensors"), "adapters.safetensors", "no part"),
    "mac companion": (lm_studio_written("._model.safetensors"), "._model.safetensors", "hidden"),
    "folder": (lambda f: (f / "more").mkdir(), "more", "folder"),
    "other weights": (lm_studio_written("extra.safetensors"), "extra.safetensors", "is called model.safetensors"),
    "shards without index": (lambda f: shards(f, index=False), lm_studio_rules.INDEX, "index of the shards"),
    "a shard is missing": (lambda f: shards(f, gap=True), "model-00001-of-00002.safetensors", "2 shards"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_what_breaks_a_rule_is_named(sound: Path, tmp_path: Path, name: str) -> None:
    broken, file, word = BREAKS[name]
    folder = Path(shutil.copytree(sound, tmp_path / "model"))
    broken(folder)
    faults = lm_studio_rules.faults(folder)
    assert [fault for fault in faults if fault.setting == file and word in fault.sentence], faults


def test_a_sound_model_has_no_fault_and_the_verb_names_what_is_missing(sound: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(sound, tmp_path / "model"))
    assert not lm_studio_rules.faults(folder) and not lm_studio_rules.warnings(folder)
    shards(folder)
    assert "is a model that LM Studio and mlx-lm open" in run_ok("validate", folder).output
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").unlink()
    bad = call("validate", folder)
    assert bad.exit_code == 2 and "config.json: The file is missing" in bad.output and "chat template" in bad.output
    said = json.loads(call("validate", folder, "--json").output)
    assert [fault["setting"] for fault in said["warnings"]] == ["chat_template"] and said["faults"]
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "model.gguf").touch()
    for path, says in ((tmp_path / "nowhere", "This is no folder"), (tmp_path / "gguf", "GGUF file is complete")):
        bad = call("validate", path)
        assert bad.exit_code == 2 and says in bad.output and "template" not in bad.output
