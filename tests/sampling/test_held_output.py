"""Output held to a regular expression or a JSON schema, with several tokenizers."""

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import mlx.core as mx
import numpy as np
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.utils import load_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, trainers
from transformers import PreTrainedTokenizerFast

from backend.config.config import parse
from backend.demo import make_tokenizer
from backend.engine.penalties import Penalties
from backend.models.policy import Policy, load_policy
from backend.runs.events import read_events
from backend.runs.run_folder import RunFolder
from backend.sampling.grammar import CompiledGrammar, Grammar, GrammarState, check_grammar
from backend.sampling.outputs import REPLACEMENT, CompletionBuffer, TextStream
from backend.sampling.rollout import Sampler
from backend.sampling.sampler import Sampling
from backend.types import Completion, Problem
from backend.utils.errors import UserError
from tests.support import random_models, small_run
from tests.support.cases import cases
from tests.support.random_models import tiny_tokenizer

REGEX = Grammar("regex", r"<think>[a-z ]{0,6}</think><answer>([0-9]{1,3}|none)</answer>")


class Answer(pydantic.BaseModel, extra="forbid", strict=True):
    """What the schema asks for."""

    name: Annotated[str, pydantic.Field(max_length=4)]
    score: Annotated[int, pydantic.Field(ge=0, le=100)]
    tags: Annotated[list[Literal["a", "bc"]], pydantic.Field(max_length=2)]


JSON = Grammar("schema", json.dumps(Answer.model_json_schema()))


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder, made = tmp_path_factory.mktemp("models"), {}

    def policy(arch: str = "qwen3") -> Policy:
        if arch not in made:
            random_models.tiny_model(folder / arch, arch, noise=0.1)
            made[arch] = load_policy(parse({"model": str(folder / arch), "data": "none", "beta": 0, "num_layers": -1}))
        return made[arch]

    return policy


def problems(count: int = 2) -> list[Problem]:
    rng = np.random.default_rng(0)
    return [Problem(i, "", [], rng.integers(60, 320, 3 + 4 * i).tolist(), "") for i in range(count)]


def is_valid(grammar: Grammar, text: str) -> bool:
    if grammar.kind == "regex":
        return re.fullmatch(grammar.source, text) is not None
    try:
        return bool(Answer.model_validate_json(text))
    except pydantic.ValidationError:
        return False


def completions(policy: Policy, sampling: Sampling, tokens: int = 200, **how: Any) -> list[Completion]:
    groups = Sampler(policy, tokens, **how).sample(problems(), 4, sampling, seed=3, first_number=0)
    return [completion for group in groups for completion in group.completions]


HELD = [
    ("qwen3", REGEX, Sampling(0.0), None),
    ("qwen3", JSON, Sampling(0.8, 0.9, 20, 0.05, Penalties(1.3, 0.2, 0.1)), 3),
    ("mamba", REGEX, Sampling(1.0, top_p=0.9), None),
]


@pytest.mark.parametrize(("arch", "grammar", "sampling", "rows"), HELD)
def test_ended_output_is_valid(policies: Any, arch: str, grammar: Grammar, sampling: Sampling, rows: int | None):
    """A random model writes noise without it. Rows end at different steps, so that they are compacted and refilled."""
    held = Sampling(sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.penalties, grammar)
    done = completions(policies(arch), held, rows=rows)
    assert {completion.stop for completion in done} == {"eos"}
    assert all(is_valid(grammar, completion.text) for completion in done)
    assert len({completion.text for completion in done}) > 3 or held.temperature == 0
    assert not any(is_valid(grammar, c.text) for c in completions(policies(arch), sampling, 40, rows=rows))


def test_log_probabilities_are_the_policy_s_and_the_shares_those_of_the_allowed_tokens(policies: Any) -> None:
    """By a full forward pass and masks made token by token, under top-k."""
    policy, sampling = policies(), Sampling(0.8, top_k=3, grammar=REGEX)
    compiled = CompiledGrammar(REGEX, policy.tokenizer, policy.eos_ids, policy.split_model.vocab_size)
    (group,) = Sampler(policy, 60).sample(problems(1), 3, sampling, seed=0, first_number=0)
    for completion in group.completions:
        prompt, matcher = group.problem.tokens, compiled.matcher()
        logits = np.array(policy.model(mx.array([prompt + completion.tokens]))[0], np.float64)[len(prompt) - 1 : -1]
        for t, token in enumerate(completion.tokens):
            bits = np.unpackbits(compiled.masks([matcher])[0].view(np.uint8), bitorder="little")[: logits.shape[1]] > 0
            mass = np.exp(logits[t] / 0.8)
            allowed = np.sort(mass[bits])[-3:]
            assert completion.logps[t] == pytest.approx(np.log(mass[token] / mass.sum()), abs=1e-4)
            assert completion.log_held[t] == pytest.approx(np.log(mass[bits].sum() / mass.sum()), abs=1e-4)
            assert completion.log_kept[t] == pytest.approx(np.log(allowed.sum() / mass.sum()), abs=1e-4)
            matcher.consume_token(token)
        assert min(completion.log_held) < -1, "the grammar took nothing, so this shows nothing"


def test_a_stop_string_ends_a_completion_only_where_the_grammar_is_satisfied(policies: Any) -> None:
    """“1” comes at once and often; the completion is whole at the first semicolon after it."""
    grammar = Grammar("regex", "1(;1){2,40};+")
    done = completions(policies(), Sampling(grammar=grammar), 90, stop=["1", ";"])
    assert {completion.stop for completion in done} == {"string"}
    for completion in done:
        assert re.fullmatch(grammar.source, completion.text) and completion.text.endswith("1;")


def test_a_place_that_no_token_continues_counts_as_cut_off_and_is_told() -> None:
    """The tokenizer of sums has no x: the end of sequence is all that is left after 1."""
    compiled = CompiledGrammar(Grammar("regex", "1x|1[23]y"), make_tokenizer(), [3], 32)
    held, index = GrammarState(compiled), np.array([4])
    assert not held.stuck
    for token in ("1", "2"):
        mask = int(np.array(held.masks(index))[0, 0])
        held.read(index, np.array([make_tokenizer().convert_tokens_to_ids(token)]))
    assert mask and not held.stuck
    assert np.array(held.masks(index)).tolist() == [[1 << 3]] and held.stuck == {4}
    assert not compiled.accepts([14])


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """As Llama 2's: ▁ for spaces, bytes as a fallback, a decoder that strips the first space."""
    corpus = ["the answer is 42 and the name is x", '{"name": "abc", "score": 10, "tags": ["a", "bc"]}'] * 20
    tokens = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokens.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokens.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokens.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>", "<s>", "</s>"]))
    pieces = json.loads(tokens.to_str())
    pieces["model"]["vocab"] |= {f"<0x{byte:02X}>": len(pieces["model"]["vocab"]) + byte for byte in range(256)}
    tokens = Tokenizer.from_str(json.dumps(pieces))
    tokens.add_tokens([AddedToken("<think>", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokens, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece", "characters"])
def test_masks_lead_to_valid_text_with_every_kind_of_tokenizer(tmp_path: Path, kind: str) -> None:
    """A uniform choice of the allowed tokens, decoded as completions are."""
    made = {"byte level": lambda: load_tokenizer(tiny_tokenizer(tmp_path))}
    tokenizer = (made | {"sentencepiece": sentencepiece_like, "characters": make_tokenizer})[kind]()
    grammar = Grammar("regex", r"<answer>\d{2}\+1=\d</answer>") if kind == "characters" else JSON
    eos, size = [tokenizer.eos_token_id], len(tokenizer) + 40  # logits may have more entries than the tokenizer
    compiled, rng = CompiledGrammar(grammar, tokenizer, eos, size), np.random.default_rng(0)
    for number in range(8):
        held, tokens, index = GrammarState(compiled), [], np.array([number])
        while not tokens or tokens[-1] != eos[0]:
            mask = np.array(held.masks(index))[0]
            bits = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:size])
            assert bits.max() < len(tokenizer), "a token beyond the tokenizer's was allowed"
            tokens.append(int(rng.choice(bits)))
            held.read(index, np.array([tokens[-1]]))
        text = tokenizer.decode(tokens[:-1], skip_special_tokens=False)
        assert is_valid(grammar, text), text


class WithEnds:
    """A tokenizer with its ends as mlx-lm's wrapper has them."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.eos_token_ids = tokenizer, {tokenizer.eos_token_id}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __len__(self) -> int:
        return len(self._tokenizer)


@cases(
    ("settings", "sentence"),
    [
        ({"output_regex": "(a"}, "Output regex cannot be used: unclosed group."),
        ({"output_regex": "(?=a)b"}, "look-around, including look-ahead and look-behind, is not supported"),
        *(
            (settings, "this model's tokenizer cannot write")
            for settings in (
                {"output_regex": "hello"},
                {"output_regex": "12(3x|4y)"},
                {"output_schema": '{"type": "object"}'},
            )
        ),
        ({"output_schema": '{"type": "thing"}'}, "Output schema cannot be used: Invalid type: thing."),
        ({"output_schema": "{"}, "The text of Output schema"),
        ({"output_schema": "nowhere.json"}, "nowhere.json"),
        ({"output_schema": '{"not": {"type": "string"}}'}, 'Unimplemented keys: ["not"]'),
    ],
)
def test_what_cannot_be_held_is_refused_in_a_sentence(settings: dict[str, str], sentence: str) -> None:
    config = parse({"model": "m", "data": "d", **settings})
    with pytest.raises(UserError) as caught:
        check_grammar(config, WithEnds(make_tokenizer()))
    (fault,) = caught.value.faults
    assert fault.setting == next(iter(settings)) and sentence in fault.sentence and len(fault.sentence) <= 200


def test_a_run_holds_its_output_and_corrects_for_it(tmp_path: Path) -> None:
    """Through trainer, event log and evaluation: the ratio is the chance of so much luck."""
    held = {"output_regex": "[0-9]{1,2}[ab]", "iters": 2, "top_p": 1.0, "steps_per_eval": 2, "record_tokens": True}
    raw = small_run.settings_for(tmp_path, **held, skip_zero_signal=False, **small_run.low_half(tmp_path))
    run = RunFolder(tmp_path / "run")
    small_run.train_here(raw, run)
    rows = [json.loads(line) for line in run.completions.read_text().splitlines()]
    texts = [(c["text"], c["stop"]) for row in rows for c in row["completions"]]
    assert len(texts) == 4 and all(re.fullmatch("[0-9]{1,2}[ab]", text) for text, stop in texts if stop == "eos")
    assert any(stop == "eos" for _, stop in texts)
    steps = [event for event in read_events(run.events) if event["kind"] == "step"]
    ratios = [event["metrics"]["sampling/importance_sampling_ratio/max"] for event in steps]
    assert all(0 < ratio < 0.01 for ratio in ratios)
    assert all(event["metrics"]["sampling/logp_gap/max"] < 1e-4 for event in steps)


class Letters:
    """A tokenizer of one character a token; 2 ends a sequence."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(map(chr, ids))


def append(outputs: CompletionBuffer, rows: dict[int, str]) -> None:
    """The next tokens of these rows."""
    tokens = np.array([[ord(letter) for letter in text] for text in rows.values()]).T
    logps = np.zeros(tokens.shape)
    outputs.append(np.array([*rows]), tokens, logps, logps, None)


LONG = "a stop string of thirty letters"


@cases(
    ("stop", "chunks", "text"),
    [
        (["and"], ["no stop string, then one a", "nd"], "no stop string, then one and"),
        (["and"], ["and", " more"], "and"),
        (["and"], ["so and"], "so and"),
        (["and"], ["and then more than is read around new tokens"], "and"),
        (["no", "and"], ["thanks a", "n", "d"], "thanks and"),
        (["and", LONG], [*("x" * 40 + LONG)], "x" * 40 + LONG),
    ],
)
def test_a_stop_string_ends_a_row_with_its_last_token(stop: list[str], chunks: list[str], text: str) -> None:
    outputs = CompletionBuffer(2, 200, Letters(), (2,), stop)
    for chunk in chunks:
        append(outputs, {1: chunk})
    append(outputs, {0: "x\2", 1: "y\2"})
    made = [outputs.completion(row) for row in (0, 1)]
    assert [(completion.text, completion.stop) for completion in made] == [("x", "eos"), (text, "string")]


@pytest.fixture(scope="module")
def tokenizer(models: Path):
    return load_tokenizer(tiny_tokenizer(models / "tokenizer"))


def pieces(tokenizer, tokens: list[int]) -> list[str]:
    stream = TextStream(lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False))
    return [*(stream.push(token) for token in tokens), stream.rest()]


@settings(deadline=None, max_examples=30)
@given(text=st.text(max_size=40))
def test_a_character_of_several_tokens_comes_whole(tokenizer, text: str):
    tokens = tokenizer.encode(text, add_special_tokens=False)
    shown = pieces(tokenizer, tokens)
    assert "".join(shown) == text
    assert not any(REPLACEMENT in piece for piece in shown) or REPLACEMENT in text


def test_a_leading_space_that_depends_on_the_token_before_is_kept():
    words = {1: "▁two", 2: "▁words"}

    def decode(ids) -> str:  # as SentencePiece decodes: no space at the beginning of a text
        return "".join(words[token] for token in ids).replace("▁", " ").removeprefix(" ")

    stream = TextStream(decode)
    assert [stream.push(1), stream.push(2), stream.rest()] == ["two", " words", ""]
