"""Write a model as a GGUF file, one tensor at a time, and read it back under its original names; Ollama's Modelfile.

Matrices have the chosen type, vectors float32; rows not divisible by 32 stay float16, as in llama.cpp.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Modelfile: https://docs.ollama.com/modelfile.
"""

import contextlib
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import mlx.nn as nn
import numpy as np

from backend.config.config import Config
from backend.export.exports import MODELFILE
from backend.export.originals import OriginalFiles, merged_arrays
from backend.export.trained_weights import TrainedWeights
from backend.export.writer import Done
from backend.models.tokenizers import load_tokenizer
from backend.utils.errors import UserError
from backend.utils.files import open_regular

ARCHITECTURES = {  # by `model_type` in config.json
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}
F32, F16, Q8_0 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.Q8_0
TYPES = {  # matrix type, and llama.cpp's name of the file type
    "f16": (F16, gguf.LlamaFileType.MOSTLY_F16),
    "bf16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "q8_0": (Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA_3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
QWEN_2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"
WORD_SPLITTERS = {  # llama.cpp's pre-tokenizer name by its steps
    (LLAMA_3, "bytes"): "llama-bpe",
    (QWEN_2, "bytes"): "qwen2",
    ("digits", "gpt-2"): "smollm",
    ("gpt-2",): "gpt-2",
}
WHOLE_WORDS_FIRST = {"llama-bpe"}  # pre-tokenizers with `ignore_merges` in llama.cpp


def use_converter(reason: str) -> UserError:
    converter = "llama.cpp's `python convert_hf_to_gguf.py FOLDER`"
    other = f"export the Hugging Face weights (--format original), and run {converter} on them"
    return UserError("format", f"{reason}, so its GGUF file is not written here; {other}.")


class GgufFamily:
    """llama.cpp's names of a model and its tensors, and its attention layout."""

    def __init__(self, config: dict[str, Any]) -> None:
        kind = str(config.get("model_type"))
        if kind not in ARCHITECTURES:
            raise use_converter(f"A model of type {kind} needs llama.cpp's own converter")
        if (kind == "mistral" and config.get("sliding_window")) or config.get("use_sliding_window"):
            raise use_converter("The model attends within a sliding window")
        self.config, self.architecture = config, ARCHITECTURES[kind]
        self.layers = int(config["num_hidden_layers"])
        self.queries = int(config["num_attention_heads"])
        self.keys = int(config.get("num_key_value_heads") or self.queries)
        self.head_size = int(config.get("head_dim") or config["hidden_size"] // self.queries)
        # Settings of rotary positions, which transformers 5 keeps in one place and 4 in two.
        self.rope: dict[str, Any] = {"rope_theta": config.get("rope_theta", 10_000.0)}
        self.rope |= (config.get("rope_scaling") or {}) | (config.get("rope_parameters") or {})
        self.rope_kind = str(self.rope.get("rope_type") or self.rope.get("type") or "default")
        if self.rope_kind not in ("default", "llama3"):
            raise use_converter(f"The model scales its positions by {self.rope_kind}")
        self._names = gguf.get_tensor_name_map(self.architecture, self.layers)

    def tensor_name(self, original: str) -> str | None:
        """llama.cpp's name of a tensor; None for one that it computes. Raises UserError if unknown."""
        is_tied = original == "lm_head.weight" and self.config.get("tie_word_embeddings")
        if is_tied or original.endswith("rotary_emb.inv_freq"):
            return None
        name = self._names.get_name(original, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise use_converter(f"llama.cpp's format has no place for {original}")
        return name

    def laid_out(self, original: str, array: np.ndarray, *, undo: bool = False) -> np.ndarray:
        """Rows in llama.cpp's order, or back: its Llama rotates neighbouring numbers of a head, not the two halves."""
        is_query = ".q_proj." in original
        if self.architecture != gguf.MODEL_ARCH.LLAMA or not (is_query or ".k_proj." in original):
            return array
        heads, half = (self.queries if is_query else self.keys), self.head_size // 2
        pairs = (half, 2) if undo else (2, half)
        return array.reshape(heads, *pairs, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)

    def extra_tensors(self) -> dict[str, np.ndarray]:
        """Divisors of Llama 3.1's RoPE frequencies, [head / 2], as in transformers' `_compute_llama3_parameters`."""
        if self.rope_kind != "llama3":
            return {}
        rope = self.rope
        factor, low, high = (float(rope[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
        context, size = float(rope["original_max_position_embeddings"]), self.head_size
        frequency = float(rope["rope_theta"]) ** -(np.arange(0, size, 2, dtype=np.float64) / size)
        turns = context * frequency / (2 * math.pi)
        share = np.clip((turns - low) / (high - low), 0, 1)
        return {"rope_freqs.weight": (1 / ((1 - share) / factor + share)).astype(np.float32)}


def _read_tokenizer(folder: Path) -> tuple[dict[str, Any], str]:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise use_converter("The tokenizer has no tokenizer.json")
    tokenizer: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    model = tokenizer["model"]
    if model["type"] != "BPE" or model.get("byte_fallback"):
        raise use_converter("The tokenizer is no byte-level BPE")
    name = WORD_SPLITTERS.get(tuple(_steps(tokenizer.get("pre_tokenizer"))))
    if name is None or (name in WHOLE_WORDS_FIRST) != bool(model.get("ignore_merges")):
        raise use_converter("The tokenizer splits words in a way whose name in llama.cpp is not known")
    return tokenizer, name


def _steps(pre_tokenizer: dict[str, Any] | None) -> list[str]:
    match pre_tokenizer:
        case {"type": "Sequence", "pretokenizers": steps}:
            return [name for step in steps for name in _steps(step)]
        case {"type": "Split", "behavior": "Isolated", "invert": False, "pattern": {"Regex": pattern}}:
            return [pattern]
        case {"type": "Digits", "individual_digits": True}:
            return ["digits"]
        case {"type": "ByteLevel", "add_prefix_space": False}:
            return ["gpt-2" if pre_tokenizer.get("use_regex", True) else "bytes"]
    return [str((pre_tokenizer or {}).get("type"))]


def _write_vocabulary(folder: Path, size: int, writer: gguf.GGUFWriter) -> None:
    tokenizer, splitter = _read_tokenizer(folder)
    tokens, types = [f"[PAD{number}]" for number in range(size)], [int(gguf.TokenType.UNUSED)] * size
    for token, number in tokenizer["model"]["vocab"].items():
        tokens[number], types[number] = token, int(gguf.TokenType.NORMAL)
    for added in tokenizer.get("added_tokens", ()):
        kind = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
        tokens[added["id"]], types[added["id"]] = added["content"], int(kind)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(splitter)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    gguf.SpecialVocab(folder, load_merges=True, n_vocab=size).add_to_gguf(writer, quiet=True)


def check(original: OriginalFiles, tokenizer: Path) -> None:
    """Raise UserError for an unsupported model or tokenizer."""
    family = GgufFamily(original.config)
    for name in original.shapes:
        family.tensor_name(name)
    _read_tokenizer(tokenizer)


def write_gguf(trained: TrainedWeights, original: OriginalFiles, type_: str, file: Path, done: Done) -> None:
    """Write the trained weights to a new `file`. Raises UserError for an unsupported model."""
    config = original.config
    family = GgufFamily(config)
    arrays = merged_arrays(trained, original)
    matrix_type, file_type = TYPES[type_]
    names = {name: there for name in arrays if (there := family.tensor_name(name)) is not None}
    extra = family.extra_tensors()
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[family.architecture])
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(original.name.rpartition("/")[2])
    writer.add_file_type(file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_block_count(family.layers)
    writer.add_context_length(int(config["max_position_embeddings"]))
    writer.add_embedding_length(int(config["hidden_size"]))
    writer.add_feed_forward_length(int(config["intermediate_size"]))
    writer.add_head_count(family.queries)
    writer.add_head_count_kv(family.keys)
    writer.add_key_length(family.head_size)
    writer.add_value_length(family.head_size)
    writer.add_layer_norm_rms_eps(float(config.get("rms_norm_eps", 1e-6)))
    writer.add_rope_freq_base(float(family.rope.get("rope_theta", 10_000.0)))
    writer.add_rope_dimension_count(family.head_size)
    writer.add_vocab_size(int(config["vocab_size"]))
    _write_vocabulary(trained.tokenizer, int(config["vocab_size"]), writer)
    for name, array in extra.items():
        writer.add_tensor_info(name, array.shape, array.dtype, array.nbytes)
    for name, there in names.items():
        shape = arrays[name].shape
        kind = _type_of(shape, matrix_type)
        size = math.prod(gguf.quant_shape_to_byte_shape(shape, kind))
        writer.add_tensor_info(there, shape, np.dtype(np.float32), size, raw_dtype=kind)
    file.parent.mkdir(parents=True)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for array in extra.values():
            writer.write_tensor_data(array)
        for count, name in enumerate(names, 1):
            widened: Any = arrays.pop(name).astype(mx.float32)
            array = family.laid_out(name, np.array(widened))
            del widened
            mx.clear_cache()
            writer.write_tensor_data(gguf.quants.quantize(array, _type_of(array.shape, matrix_type)))
            done(count / len(names))
    finally:
        writer.close()


def open_gguf(file: Path, original: OriginalFiles) -> nn.Module:
    """Open a GGUF model under its original tensor names."""
    family = GgufFamily(original.config)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    arrays: dict[str, mx.array] = {}
    for name in original.shapes:
        there = family.tensor_name(name)
        if there is not None:
            tensor = tensors[there]
            numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            arrays[name] = mx.array(np.ascontiguousarray(family.laid_out(name, numbers, undo=True)))
    return original.open_with(arrays)


def _type_of(shape: tuple[int, ...], matrix_type: gguf.GGMLQuantizationType) -> gguf.GGMLQuantizationType:
    if len(shape) < 2:
        return F32
    return F16 if matrix_type == Q8_0 and shape[-1] % 32 else matrix_type


# Ollama's Modelfile: chat template, sampling parameters and system message

LONGEST_LICENCE = 2**20  # in bytes; the GPL has 35,000
NO_TEMPLATE = (
    "The chat template does more than a Modelfile can say, so the Modelfile leaves it to Ollama, which knows those of "
    "many models; compare an answer with the run's before you rely on it."
)
MARKS = {  # marker messages to find in the rendered text
    "system": "\u2402sys\u2403",
    "first": "\u2402one\u2403",
    "answer": "\u2402two\u2403",
    "second": "\u2402three\u2403",
}

Message = dict[str, str]
Render = Callable[[list[Message]], str]  # a chat that ends with a user message. Raises if the template refuses it


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """Text around messages: `opening` or the two `around_system`, then after each user text and answer."""

    opening: str
    around_system: tuple[str, str] | None  # none if the template refuses a system message
    after_user: str
    after_answer: str

    def render(self, messages: list[Message]) -> str:
        text = self.opening
        for message in messages:
            content = message["content"]
            if message["role"] != "system":
                text += content + (self.after_user if message["role"] == "user" else self.after_answer)
            elif self.around_system:
                text = content.join(self.around_system)
        return text

    def go_template(self) -> str:
        opening = _go_text(self.opening)
        if self.around_system:
            system = "{{ .System }}".join(map(_go_text, self.around_system))
            opening = f"{{{{ if .System }}}}{system}{{{{ else }}}}{opening}{{{{ end }}}}"
        user = f'{{{{ if eq .Role "user" }}}}{{{{ .Content }}}}{_go_text(self.after_user)}'
        answer = f'{{{{ else if eq .Role "assistant" }}}}{{{{ .Content }}}}{_go_text(self.after_answer)}{{{{ end }}}}'
        return f"{opening}{{{{ range .Messages }}}}{user}{answer}{{{{ end }}}}"


def chat_format(render: Render, beginning: str = "") -> ChatFormat | None:
    """Extract a chat template's text around messages; None if it does more. Renders a Jinja template on a sample chat;
    the text between messages must reproduce other chats. `beginning`: the token that Ollama adds before each prompt."""
    user = {"role": "user", "content": MARKS["first"]}
    answered = [user, {"role": "assistant", "content": MARKS["answer"]}, {"role": "user", "content": MARKS["second"]}]
    system = {"role": "system", "content": MARKS["system"]}
    chats = [[user], answered]
    try:
        opening, rest = render(answered).removeprefix(beginning).split(MARKS["first"])
        after_user, rest = rest.split(MARKS["answer"])
        after_answer, _ = rest.split(MARKS["second"])
        try:
            before, rest = render([system, user]).removeprefix(beginning).split(MARKS["system"])
            around_system = before, rest.split(MARKS["first"])[0]
            chats += [[system, user], [system, *answered]]
        except Exception:  # a template may refuse a system message in any way
            around_system = None
        found = ChatFormat(opening, around_system, after_user, after_answer)
        is_same = all(found.render(chat) == render(chat).removeprefix(beginning) for chat in chats)
    except Exception:
        return None
    return found if is_same else None


def write_modelfile(config: Config, tokenizer_from: Path, weights: Path) -> tuple[str, ...]:
    """Write a run's Modelfile for the GGUF file `weights`; returns notes."""
    tokenizer = load_tokenizer(tokenizer_from)
    chat = None
    if tokenizer.has_chat_template:
        options = {"tokenize": False, "add_generation_prompt": True, **config.chat_template_kwargs}
        chat = chat_format(
            lambda messages: tokenizer.apply_chat_template(messages, **options), tokenizer.bos_token or ""
        )
    ends = [tokenizer.convert_ids_to_tokens(number) for number in tokenizer.eos_token_ids]
    sampling = {"temperature": config.temperature, "top_p": config.top_p, "top_k": config.top_k, "min_p": config.min_p}
    names, neutral = ("repeat_penalty", "presence_penalty", "frequency_penalty"), (1.0, 0.0, 0.0)
    penalties = {name: now for name, now, off in zip(names, config.penalties, neutral, strict=True) if now != off}
    licence = ""
    with contextlib.suppress(OSError, ValueError), open_regular(min(tokenizer_from.glob("LICENSE*"))) as file:
        licence = file.read(LONGEST_LICENCE).decode(errors="replace")
    parameters = {**sampling, **penalties, "stop": sorted({*ends, *config.stop})}
    text = modelfile(weights.name, chat, parameters, config.system_prompt, licence)
    (weights.parent / MODELFILE).write_text(text, encoding="utf-8")
    return (NO_TEMPLATE,) if chat is None and tokenizer.has_chat_template else ()


def modelfile(weights: str, chat: ChatFormat | None, parameters: dict[str, Any], system: str, licence: str) -> str:
    """Text of a Modelfile; a list in `parameters` gives one line per value."""
    lines = [f"FROM ./{weights}"]
    if chat is not None:
        lines.append(f"TEMPLATE {_quoted(chat.go_template())}")
    for name, value in parameters.items():
        for one in value if isinstance(value, list) else [value]:
            lines.append(f"PARAMETER {name} {_quoted(one) if isinstance(one, str) else one}")
    if system:
        lines.append(f"SYSTEM {_quoted(system)}")
    if licence:
        lines.append(f"LICENSE {_quoted(licence)}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return f'"""{text.replace(chr(34) * 3, chr(39) * 3)}"""'


def _go_text(text: str) -> str:
    return re.sub(r"\{{2,}|\{\Z", lambda found: f'{{{{ "{found[0]}" }}}}', text)
