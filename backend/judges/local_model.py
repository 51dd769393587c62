"""A judge model that the run itself loads: greedy replies, decoded together. What prompts have in common (the rubric, a
group's prompt) is read once."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from backend.config.model_and_data_names import model_source
from backend.data.problems import Messages, tokenize_if_fits
from backend.engine.chunk_sizes import JUDGED_TOKENS, PREFILL_TOKENS
from backend.engine.device import on_cpu
from backend.models.loading import check_runs, open_model, read_weights
from backend.models.policy import Policy, cast
from backend.rewards.calls import Poll
from backend.sampling.conversations import common_prefix
from backend.sampling.grammar import Grammar
from backend.sampling.rollout import Prompts, Sampler
from backend.sampling.sampler import GREEDY, Sampling
from backend.sampling.scheduler import ParkedRow, Prefilled
from backend.types import Problem
from backend.utils.errors import UserError
from backend.utils.hub_cache import local_folder

SETTING = "reward_functions"

SHARED = 32  # tokens that prompts have in common from which on they are read once

_loaded: WeakValueDictionary[str, LocalModel] = WeakValueDictionary()


def local_model(name: str) -> LocalModel:
    """The model of a folder or Hub id, which judges of the same name share. Raises UserError."""
    if (model := _loaded.get(name)) is None:
        model = _loaded[name] = LocalModel(name)
    return model


class LocalModel:
    """`identity`: equal for equal files."""

    def __init__(self, name: str) -> None:
        model, self.tokenizer, config = open_model(name, SETTING)
        cast(model, "float32" if on_cpu() else "auto")  # a CPU is slow in 16 bits
        read_weights(model, name, SETTING)
        check_runs(model, name, SETTING)
        digest = blake2b(digest_size=8)  # of the ends of the files of weights: their last arrays
        for path in sorted((local_folder(model_source(name, SETTING)) or Path(name)).glob("*.safetensors")):
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - (1 << 16)))
                digest.update(file.read())
        self.identity = digest.hexdigest()
        self._sampler = SharingSampler(Policy(model.freeze().eval(), self.tokenizer, config, None), 1)
        # A model that always thinks writes its JSON after that: it cannot be held to JSON from the first token on.
        template = str(getattr(self.tokenizer, "chat_template", None))
        self._always_thinks = self.tokenizer.has_thinking and "enable_thinking" not in template

    def replies(self, prompts: Sequence[Messages], limits: Sequence[int], poll: Poll, schema: str = "") -> list[str]:
        """Replies without thoughts, of about `limits` tokens, held to the JSON `schema`. `poll` may raise. Raises
        UserError where the chat template fails."""
        if not prompts:
            return []
        tokens = list[list[int]]()
        for messages in prompts:
            # One message of the user, since some templates refuse one of the system.
            merged = [{"role": "user", "content": "\n\n".join(message["content"] for message in messages)}]
            try:
                ids: Any = tokenize_if_fits(
                    merged, self.tokenizer, {"enable_thinking": False}, "a judge's prompt", None
                )
            except UserError as error:
                raise UserError(SETTING, str(error)) from error
            tokens.append(ids)
        most, sampling = max(limits), GREEDY
        if schema and not self._always_thinks:
            compact = json.dumps(json.loads(schema) | {"x-guidance": {"whitespace_pattern": " ?"}})
            sampling = Sampling(0.0, grammar=Grammar("schema", compact))
        rows = max(1, JUDGED_TOKENS // (max(map(len, tokens)) + most))
        end = self.tokenizer.think_end or "</think>"
        return [text.rpartition(end)[2].strip() for text in self._sampler.texts(tokens, most, rows, sampling, poll)]


class SharingSampler(Sampler):
    """Reads once what different prompts begin with."""

    _prefixes: Mapping[tuple[int, ...], list[int]] = {}  # of each prompt: lengths in common with others
    _read: Mapping[tuple[int, ...], ParkedRow] = {}  # of these, what the last prompts began with

    def texts(
        self, prompts: Sequence[list[int]], max_tokens: int, rows: int, sampling: Sampling, poll: Poll
    ) -> list[str]:
        """A completion of each prompt, `rows` decoded together."""
        self.max_tokens, self.rows, self._poll = max_tokens, rows, poll
        self.prefill_chunk = max(1, PREFILL_TOKENS // min(rows, len(prompts)))
        self._prefixes = _shared_prefixes({tuple(tokens) for tokens in prompts})
        try:
            problems = [Problem(i, "", [], tokens, "") for i, tokens in enumerate(prompts)]
            groups = self.sample(problems, 1, sampling, 0, 0, lambda count: poll())
        finally:
            self._read = {}
        return [group.completions[0].text for group in groups]

    def prefill(self, prompts: Prompts) -> Prefilled:
        rows: list[ParkedRow] = []
        read: dict[tuple[int, ...], ParkedRow] = {}
        for prompt, _ in prompts:
            row, start = None, 0
            for end in self._prefixes.get(tuple(prompt), ()):
                key = tuple(prompt[:end])
                read[key] = read.get(key) or self._read.get(key) or self._read_prefix(row, prompt[start:end])
                row, start = read[key], end
            if row is None:
                return super().prefill(prompts)
            rows.append(replace(row, unread=prompt[start:]))
        self._read = read  # another one may be long, and is read again if it comes back
        return self.read_on(rows)

    def _read_prefix(self, before: ParkedRow | None, tokens: list[int]) -> ParkedRow:
        prefilled = (
            super().prefill([(tokens, None)]) if before is None else self.read_on([replace(before, unread=tokens)])
        )
        self._poll()
        return prefilled.parked(0)


def _shared_prefixes(prompts: Collection[tuple[int, ...]], read: int = 0) -> dict[tuple[int, ...], list[int]]:
    """For each prompt, the growing lengths beyond `read` that it has in common with others."""
    common = len(common_prefix([list(prompt[:-1]) for prompt in prompts]))
    lengths = [common] if len(prompts) > 1 and common - read >= SHARED else []
    parts: dict[int, list[tuple[int, ...]]] = defaultdict(list)
    for prompt in prompts:
        parts[prompt[common]].append(prompt)
    if len(parts) == 1:
        return dict.fromkeys(prompts, lengths)
    after = [_shared_prefixes(part, common if lengths else read) for part in parts.values()]
    return {prompt: lengths + more for part in after for prompt, more in part.items()}
