"""Output constrained by a regular expression or a JSON schema, with llguidance. The grammar is followed in bytes;
allowed tokens come as a mask of bits. The end of sequence is allowed where the grammar is satisfied. The policy's mass
that a grammar keeps goes with every token, and learning corrects for it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import numpy as np

from backend.config.config import Config
from backend.utils.documents import parse_json
from backend.utils.errors import UserError
from backend.utils.files import read_text, user_path
from backend.utils.text import quote

# The bytes that each token of a tokenizer stands for inside a text, which a grammar is followed in.

BLANK = "▁"


class TokenBytes:
    """A tokenizer as llguidance's TokenizerWrapper takes one. `vocabulary`: entries of the model's logits."""

    def __init__(self, tokenizer: Any, eos_ids: list[int], vocabulary: int) -> None:
        self.eos_token_id, self.bos_token_id = eos_ids[0], None
        special = {*tokenizer.all_special_ids, *eos_ids}
        self.special_token_ids = sorted(token for token in special if token < vocabulary)
        self.tokens = [b""] * vocabulary
        for token, data in bytes_of(tokenizer).items():
            if token < vocabulary and token not in special:
                self.tokens[token] = data
        self._ids = {data: token for token, data in enumerate(self.tokens) if data}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: bytes | str) -> list[int]:
        data, start = text.encode() if isinstance(text, str) else text, 0
        tokens: list[int] = []
        while start < len(data):
            ends = range(min(len(data), start + self._longest), start, -1)
            end = next((end for end in ends if data[start:end] in self._ids), None)
            if end is None:
                break
            tokens.append(self._ids[data[start:end]])
            start = end
        return tokens


def bytes_of(tokenizer: Any) -> dict[int, bytes]:
    """Token → its bytes; tokens without any are left out."""
    fast = getattr(getattr(tokenizer, "_tokenizer", tokenizer), "backend_tokenizer", None)
    table: dict[str, Any] = json.loads(fast.to_str()) if fast is not None else {}
    kinds = _parts(table.get("decoder")) | _parts(table.get("pre_tokenizer"))
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    added = {entry["id"]: entry["content"].encode() for entry in table.get("added_tokens", ()) if not entry["special"]}
    if "ByteLevel" in kinds:
        # Printable bytes of Latin-1 stand for themselves, the others in their order for 256, 257, …
        printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
        others = [byte for byte in range(256) if byte not in printable]
        byte_of = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
        own = {
            token: bytes(byte_of[char] for char in text)
            for text, token in vocabulary.items()
            if all(char in byte_of for char in text)
        }
    elif kinds & {"ByteFallback", "Metaspace"}:
        own = {
            token: bytes([int(text[3:5], 16)]) if re.fullmatch("<0x..>", text) else text.replace(BLANK, " ").encode()
            for text, token in vocabulary.items()
        }
    else:
        # Each token decoded behind another, since a decoder may strip what begins a text.
        before = [token for text, token in vocabulary.items() if len(text) == 1 and text.isalnum()][:1]
        start = len(tokenizer.decode(before)) if before else 0
        texts = {token: tokenizer.decode([*before, token])[start:] for token in vocabulary.values()}
        own = {token: text.encode() for token, text in texts.items() if "\ufffd" not in text}
    return {token: data for token, data in (own | added).items() if data}


def _parts(stage: Any) -> set[str]:
    if not isinstance(stage, dict):
        return set()
    parts = [*stage.get("decoders", ()), *stage.get("pretokenizers", ())]
    return {stage["type"], *(kind for part in parts for kind in _parts(part))}


# between the parts of JSON; with any number of blanks a model might write nothing else
WHITESPACE = r"( |\r?\n[ \t]{0,24})?"

EVERY_TOKEN = '%llguidance {"no_forcing": true}'  # else text that must come is allowed in one tokenisation alone

SEARCHED = 256  # states that `check_grammar` visits in search of a complete output


@dataclass(frozen=True, slots=True)
class Grammar:
    """`source`: a regular expression, or the text of a JSON schema."""

    kind: Literal["regex", "schema"]
    source: str

    @classmethod
    def of(cls, config: Config) -> Grammar | None:
        """The grammar of a run; None if its output is free. Raises UserError for an unreadable schema."""
        if config.output_regex:
            return cls("regex", config.output_regex)
        if not config.output_schema:
            return None
        text, what = config.output_schema.strip(), "The text of Output schema"
        if not text.startswith("{"):
            path = user_path(text, "output_schema")
            text, what = read_text(path, "output_schema"), quote(path, 70)
        if not isinstance(parse_json(text, what, "output_schema"), dict):
            raise UserError("output_schema", f"{what} must be a JSON schema, which is an object in braces.")
        return cls("schema", text)

    @property
    def setting(self) -> str:
        return f"output_{self.kind}"

    @property
    def label(self) -> str:
        return f"Output {self.kind}"

    def compiled(self) -> str:
        """As llguidance takes it. Raises UserError."""
        from llguidance import LLMatcher, regex_to_lark

        if self.kind == "regex":
            rule = f"/{regex_to_lark(self.source, use_ascii='')}/"
        else:
            schema: dict[str, Any] = json.loads(self.source)
            options = {"whitespace_pattern": WHITESPACE} | schema.get("x-guidance", {})
            rule = "%json " + json.dumps(schema | {"x-guidance": options})
        text = LLMatcher.grammar_from_lark(f"{EVERY_TOKEN}\nstart: {rule}")
        failed, messages = LLMatcher.validate_grammar_with_warnings(text)
        if failed:
            raise UserError(self.setting, f"{self.label} cannot be used: {_reason(messages[0])}.")
        return text


def _reason(message: str) -> str:
    lines = [line.strip() for line in message.splitlines()]
    lines[0] = re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", lines[0])
    named = [line.removeprefix("error:").strip() for line in lines if line.startswith("error:")]
    return quote((named or lines)[0].rstrip("."), 100)


class CompiledGrammar:
    """A grammar over the tokens of a model with `vocabulary` logits. Raises UserError."""

    def __init__(self, grammar: Grammar, tokenizer: Any, eos_ids: Sequence[int], vocabulary: int) -> None:
        from llguidance import LLExecutor, LLMatcher, LLTokenizer, TokenizerWrapper

        self.grammar, self.eos_ids, self.vocabulary = grammar, tuple(eos_ids), vocabulary
        self.words = -(-vocabulary // 32)
        self.executor = LLExecutor()
        table = TokenizerWrapper(TokenBytes(tokenizer, list(eos_ids), vocabulary))
        tokens = LLTokenizer(table, n_vocab=vocabulary, eos_token=list(eos_ids))
        self._start = LLMatcher(tokens, grammar.compiled(), log_level=0)
        if self._start.is_error():
            raise UserError(grammar.setting, f"{grammar.label} cannot be used: {_reason(self._start.get_error())}.")

    def matcher(self) -> Any:
        return self._start.deep_copy()

    def masks(self, matchers: Sequence[Any]) -> np.ndarray:
        """[B, words] uint32: the tokens that each state allows, a bit each."""
        mask_BM = np.zeros((len(matchers), self.words), np.uint32)
        states = [(matcher, row) for row, matcher in enumerate(matchers)]
        self.executor.unsafe_compute_mask_ptr(states, mask_BM.ctypes.data, 4 * self.words, len(matchers))
        return mask_BM

    def accepts(self, tokens: Sequence[int]) -> bool:
        matcher = self.matcher()
        return matcher.try_consume_tokens(list(tokens)) == len(tokens) and matcher.is_accepting()


class GrammarState:
    """The states of the completions of one rollout, by number."""

    def __init__(self, compiled: CompiledGrammar) -> None:
        self.compiled = compiled
        self._matchers: dict[int, Any] = {}
        self._ended: set[int] = set()
        self.stuck: set[int] = set()  # incomplete completions that no token could continue: their end was forced

    def masks(self, index: np.ndarray) -> mx.array:
        """[B, words]: what may come next in the completions `index`; the end of sequence in those that have ended."""
        numbers: list[int] = index.tolist()
        matchers = [self._matcher(number) for number in numbers]
        mask_BM = self.compiled.masks(matchers)
        # A state that allows nothing is in error, and its mask has the end of sequence.
        states = zip(numbers, matchers, strict=True)
        self.stuck |= {number for number, matcher in states if number not in self._ended and matcher.is_error()}
        return mx.array(mask_BM)

    def read(self, index: np.ndarray, tokens_B: np.ndarray) -> None:
        for number, token in zip(index.tolist(), tokens_B.tolist(), strict=True):
            if number in self._ended:
                continue
            if token in self.compiled.eos_ids or number in self.stuck:
                self._ended.add(number)
            else:
                self._matcher(number).consume_token(token)

    def _matcher(self, number: int) -> Any:
        if number not in self._matchers:
            self._matchers[number] = self.compiled.matcher()
        return self._matchers[number]


class GrammarCache:
    """Keeps the compiled grammar from one rollout to the next."""

    def __init__(self, tokenizer: Any, eos_ids: Sequence[int], vocabulary: int) -> None:
        self._arguments = tokenizer, eos_ids, vocabulary
        self._compiled: CompiledGrammar | None = None

    def state(self, grammar: Grammar | None) -> GrammarState | None:
        if grammar is None:
            return None
        if self._compiled is None or self._compiled.grammar != grammar:
            self._compiled = CompiledGrammar(grammar, *self._arguments)
        return GrammarState(self._compiled)


def check_grammar(config: Config, tokenizer: Any, vocabulary: int | None = None) -> None:
    """Raises UserError where a run could not constrain its output so. `tokenizer`: None where it is not here."""
    grammar = Grammar.of(config)
    if grammar is None:
        return
    grammar.compiled()
    if tokenizer is None:
        return
    eos_ids = sorted(tokenizer.eos_token_ids)
    compiled = CompiledGrammar(
        grammar, tokenizer, eos_ids, vocabulary or max([len(tokenizer), *(i + 1 for i in eos_ids)])
    )
    if not _can_end(compiled):
        raise UserError(
            grammar.setting,
            f"{grammar.label} asks for text that this model's tokenizer cannot write, so no completion could end.",
        )


def _can_end(compiled: CompiledGrammar) -> bool:
    """True if a complete output was found, or the search reached its limit."""
    pending, visited = [compiled.matcher()], 0
    while pending and visited < SEARCHED:
        matcher, visited = pending.pop(), visited + 1
        if matcher.is_accepting():
            return True
        mask = compiled.masks([matcher])[0]
        if matcher.is_error():
            continue
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: compiled.vocabulary]
        allowed = [token for token in np.flatnonzero(bits).tolist() if token not in compiled.eos_ids]
        for token in allowed[:: max(1, len(allowed) // 8)]:
            following = matcher.deep_copy()
            if following.consume_token(token):
                pending.append(following)
    return visited >= SEARCHED
