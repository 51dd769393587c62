"""Samples groups of completions from a policy: one prefill per prompt, then all completions of a step together
(`scheduler`); models with other caches (state spaces) group by group. Keeps exact token ids and log-probabilities."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map
from mlx_lm.models.cache import BatchKVCache, KVCache, RotatingKVCache

from backend.engine.caches import PackedSlotCache, SlotCache, StepContext, new_prompt_cache, windows_of
from backend.engine.chunk_sizes import PREFILL_TOKENS
from backend.engine.device import on_gpu, release_cached_buffers
from backend.engine.graph import compiled_by_shape
from backend.engine.images import PromptImages, padded_images, positioned, read_prompt, shifts
from backend.engine.model_probe import describe_error
from backend.sampling.conversations import WAIT_S, Rollout, Tools
from backend.sampling.fused_model import FusedModel
from backend.sampling.grammar import GrammarCache
from backend.sampling.outputs import OPEN, CompletionBuffer
from backend.sampling.row_costs import RowCosts, row_costs
from backend.sampling.sampler import (
    GREEDY,
    Agree,
    Sampled,
    Sampling,
    SamplingState,
    alone,
    keyed_uniforms,
    sample_tokens,
    step_results,
)
from backend.sampling.scheduler import DECODE_CHUNK, ParkedRow, Prefilled, Scheduler, WaitingQueue, to_host
from backend.sampling.speculation import Speculation
from backend.types import Group, Problem
from backend.utils.errors import UserError
from backend.utils.machine import chip

Poll = Callable[[int], None]
Prompts = list[tuple[list[int], PromptImages | None]]

MOST_STEPS = 8  # compiled steps that are kept, one for each way to sample

QUANTIZED = (nn.QuantizedLinear, nn.QuantizedAllToShardedLinear)

SHORT_OF_MEMORY = (
    "Sampling now waits for each token before the next is queued, because caches copied meanwhile took too much "
    "memory. Fewer or shorter completions avoid it."
)


STUCK = (
    "{count} completions came to a place where no token of the tokenizer fits what the output is held to; they count "
    "as cut off."
)


class Sampler:
    """Keeps its compiled decoding steps from one call to the next. `stop` strings end a completion whose text contains
    one. `rows`: most completions decoded together (None: all). `merge`: allow a second copy of the weights that
    adapters change. `costs`: of a decoding step, instead of this machine's. `tools`: that completions may call."""

    def __init__(
        self,
        policy: Any,
        max_tokens: int,
        *,
        stop: Sequence[str] = (),
        prefill_chunk: int = 2048,
        rows: int | None = None,
        merge: bool = True,
        costs: RowCosts | None = None,
        tools: Tools | None = None,
    ) -> None:
        self.policy, self.tools = policy, tools
        self.agree: Agree = getattr(policy, "broadcast_from_rank0", alone)
        self.max_tokens = max_tokens
        self.stop = tuple(stop)
        self.prefill_chunk = prefill_chunk
        self.rows = rows
        others = [tree for tree in [getattr(policy, "reference_model", None)] if tree is not None]
        shared = getattr(policy, "shared_weights", None)
        self.fused = FusedModel(policy.model, policy.split_model, merge=merge, others=others, shared=shared)
        self.slow_paths = list(self.fused.slow_paths)  # messages for the user
        self.row_costs = costs or decode_costs(policy.model)
        self._notes: list[str] = []
        self._compiled_steps: dict[Sampling, Callable[..., Any]] = {}
        self.grammars = GrammarCache(policy.tokenizer, policy.eos_ids, policy.split_model.vocab_size)
        self.speculation: Speculation | None = None  # set after the tools (`speculation_of`)
        self.completions = 0  # sampled so far, evaluations included
        known = KVCache.__name__, RotatingKVCache.__name__
        other_caches = {type(cache).__name__ for cache in new_prompt_cache(policy.model)} - {*known}
        self._windows = windows_of(policy.model)
        if other_caches:
            reason = f"the model's {' and '.join(sorted(other_caches))} cannot hold rows of unequal length"
        else:
            reason = self._trial_decode() or (self._trial_windows() if any(self._windows) else "")
        if reason:
            self.slow_paths.append(f"Completions are decoded one group at a time: {reason}.")
        self.has_continuous_batching = not reason  # rows of unequal length are decoded together

    def sample(
        self,
        problems: Sequence[Problem],
        group_size: int,
        sampling: Sampling,
        seed: int,
        first_number: int,
        poll: Poll = lambda token_count: None,
        finished: Callable[[Group], None] | None = None,
    ) -> list[Group]:
        """One group of `group_size` completions for each problem. Token t of completion g of problem p uses a random
        number keyed by (seed, first_number + p, g), t. `poll` gets the number of tokens so far after each chunk, and
        may raise. `finished` gets each group whose completions have all ended while others are decoded."""
        keys = [(first_number + p, g) for p in range(len(problems)) for g in range(group_size)]
        uniform_NT = keyed_uniforms(seed, keys, self.max_tokens)
        outputs = CompletionBuffer(len(keys), self.max_tokens, self.policy.tokenizer, self.policy.eos_ids, self.stop)
        decode = self._decode_batch if self.has_continuous_batching else self._decode_by_group
        conversations = self.tools and self.tools.begin(problems, group_size, lambda: poll(0))
        if conversations is not None:
            problems = conversations.problems
            for row, opening in enumerate(conversations.openings):
                if len(opening) >= self.max_tokens:
                    what = (
                        f"The text that reset returned for a completion has {len(opening):,} tokens: no room is left."
                    )
                    raise UserError("max_completion_length", what)
                if opening:
                    outputs.insert(row, opening)

        images = self.policy.images_of(problems)
        if first := next(filter(None, images), None):
            sampling = replace(sampling, without=first.placeholders)

        def group(p: int) -> Group:
            rows = range(p * group_size, (p + 1) * group_size)
            if conversations is None:
                return Group(problems[p], [outputs.completion(row) for row in rows], images[p])
            return Group(problems[p], [conversations.completion(row, outputs) for row in rows], images[p])

        is_told_P = np.zeros(len(problems), bool)

        def tell_finished() -> None:
            if finished is None or is_told_P.all():
                return
            is_new_P = (outputs.stop.reshape(-1, group_size) >= 0).all(axis=1) & ~is_told_P
            is_told_P[is_new_P] = True
            for p in np.flatnonzero(is_new_P).tolist():
                finished(group(p))

        self.policy.follow()
        self.policy.model.eval()
        self.fused.refresh()
        try:
            prompts = [(problem.tokens, own) for problem, own in zip(problems, images, strict=True)]
            decode(prompts, group_size, sampling, uniform_NT, outputs, poll, conversations, tell_finished)
        finally:
            self.fused.release()
        if outputs.held is not None and (count := outputs.cut_off_stuck()):
            self._notes.append(STUCK.format(count=count))
        groups = [group(p) for p in range(len(problems))]
        self.completions += len(keys)
        # The allocator keeps freed KV caches for arrays of the same size, which training does not allocate.
        release_cached_buffers()
        return groups

    def _decode_batch(
        self,
        prompts: Prompts,
        G: int,
        sampling: Sampling,
        uniform_NT: np.ndarray,
        outputs: CompletionBuffer,
        poll: Poll,
        conversations: Rollout | None,
        tell_finished: Callable[[], None],
    ) -> None:
        tokens = [ids for ids, _ in prompts]
        queue = WaitingQueue(len(prompts), G, lambda chosen: self.prefill([prompts[p] for p in chosen]))
        drawing = self._sampling_state(sampling, tokens, G, outputs)
        step, rows = self.compiled_step(sampling), min(self.rows or queue.waiting, queue.waiting)
        talk = conversations, self.read_on, lambda: poll(outputs.token_count)
        speculation = self.speculation
        if speculation is not None:
            speculation.begin(tokens, G, sampling, outputs)
        scheduler = Scheduler(queue, outputs, uniform_NT, drawing, step, rows, self.row_costs, *talk, speculation)
        while scheduler.schedule():
            scheduler.decode_chunk()
            tell_finished()
            poll(outputs.token_count)
        if speculation is not None:
            speculation.drafts.end()
        if scheduler.waits_for_memory and SHORT_OF_MEMORY not in self.slow_paths:
            self.slow_paths.append(SHORT_OF_MEMORY)
            self._notes.append(SHORT_OF_MEMORY)

    def _sampling_state(
        self, sampling: Sampling, prompts: list[list[int]], G: int, outputs: CompletionBuffer
    ) -> SamplingState:
        outputs.held = self.grammars.state(sampling.grammar)
        return SamplingState(sampling, prompts, G, self.max_tokens, outputs.held, self.agree)

    def new_notes(self) -> list[str]:
        """Messages for the user since the last call."""
        notes, self._notes = self._notes, []
        return notes + (self.tools.host.new_notes() if self.tools is not None else [])

    def prefill(self, prompts: Prompts) -> Prefilled:
        *_, prefilled = self.prefill_pieces(prompts)
        assert prefilled is not None
        return prefilled

    def prefill_pieces(self, prompts: Prompts) -> Iterator[Prefilled | None]:
        """None after each piece of `prefill_chunk` tokens, which may change meanwhile, then the prefilled prompts."""
        split_model, length = self.fused.split_model, max(len(ids) for ids, _ in prompts)
        pad_P = [length - len(ids) for ids, _ in prompts]
        tokens = mx.array([[self.policy.pad_id] * pad + ids for pad, (ids, _) in zip(pad_P, prompts, strict=True)])
        images = [own for _, own in prompts]
        padded = padded_images(images, length, pad_P) if any(images) else None
        cache = [BatchKVCache(pad_P) for _ in new_prompt_cache(self.policy.model)]
        hidden, start = None, 0
        while start < length:
            end = start + min(self.prefill_chunk, max(1, PREFILL_TOKENS // len(prompts)))
            # The cache masks the padding's own keys (`pad_P`), whose positions are negative: real tokens start at 0.
            hidden = read_prompt(split_model, tokens, cache, (start, end), padded)
            mx.eval(hidden, [(layer.keys, layer.values) for layer in cache])
            start = end
            yield None
        assert hidden is not None
        # Left padding puts every prompt's last token into the last column.
        yield self._prefilled(hidden[:, -1], cache, np.array(pad_P), shifts(images))

    def _prefilled(
        self, hidden_PH: mx.array, cache: list[BatchKVCache], pad_P: np.ndarray, shift_P: np.ndarray | None
    ) -> Prefilled:
        # Copies: values may be a view of what the product computed for queries and keys too.
        keys, values = (list(map(mx.contiguous, x)) for x in zip(*(c.keys_and_values() for c in cache), strict=True))
        if self.fused.packs_cache:
            keys, values = [mx.stack([k, v], axis=2) for k, v in zip(keys, values, strict=True)], []
        return Prefilled(self.fused.split_model.logits(hidden_PH), keys, values, pad_P, shift_P)

    def read_on(self, rows: list[ParkedRow]) -> Prefilled:
        """Read the unread tokens of parked rows together."""
        *_, prefilled = self.read_on_pieces(rows)
        assert prefilled is not None
        return prefilled

    def read_on_pieces(self, rows: list[ParkedRow]) -> Iterator[Prefilled | None]:
        """`read_on` as `prefill_pieces`. Rows are padded left of what they have read, right of what they have not."""
        lengths = [row.columns for row in rows]
        unread = [len(row.unread) for row in rows]
        longest, most = max(lengths), max(unread)
        pad_P = [longest - length for length in lengths]
        shift_P = np.array([row.shift for row in rows], np.int32)
        cache = [BatchKVCache(pad_P) for _ in new_prompt_cache(self.policy.model)]
        for i, layer in enumerate(cache):
            layer.keys, layer.values = (
                mx.concatenate([mx.pad(x, [(0, 0), (0, 0), (longest - x.shape[2], 0), (0, 0)]) for x in arrays])
                for arrays in zip(*(row.layer(i) for row in rows), strict=True)
            )
            layer.offset, layer._idx = layer.offset + longest + mx.array(shift_P), longest
            layer.prepare(right_padding=[most - count for count in unread])
        tokens = mx.array([row.unread + [self.policy.pad_id] * (most - len(row.unread)) for row in rows])
        pieces, start = list[mx.array](), 0
        while start < most:
            end = start + self.prefill_chunk
            pieces.append(self.fused.split_model.hidden(tokens[:, start:end], cache))
            mx.eval(pieces[-1], [(layer.keys, layer.values) for layer in cache])
            start = end
            yield None
        for layer in cache:
            layer.finalize()  # moves the padding to the left
        hidden_PH = mx.concatenate(pieces, axis=1)[mx.arange(len(rows)), mx.array(unread) - 1]
        yield self._prefilled(hidden_PH, cache, longest + most - np.array(lengths) - np.array(unread), shift_P)

    def compiled_step(self, sampling: Sampling) -> Callable[..., Any]:
        """One compiled decoding step: feed the last tokens, write a cache column, sample the next tokens (or return
        logits if output is constrained). Traced once per rows, capacity and tokens of a row; weights are inputs."""
        if sampling not in self._compiled_steps:
            split_model = self.fused.split_model

            def decode(token_B, slot, pad_B, uniform_B, column_C, keys, values, *history):
                # Drafts to verify: several tokens a row, [B, N], and each row's own slot.
                N = token_B.shape[1] if token_B.ndim == 2 else None
                pad_B, shift_B = pad_B if isinstance(pad_B, tuple) else (pad_B, None)
                step = StepContext(slot, pad_B, column_C, N, shift_B)
                cache = self._slot_caches(keys, values, step)
                if N is None:
                    logits = split_model.logits(split_model.hidden(token_B[:, None], cache)[:, -1])
                else:
                    hidden = split_model.hidden(
                        token_B.reshape(-1, 1) if self.fused.decoding_blocks else token_B, cache
                    )
                    logits = split_model.logits(hidden.reshape(-1, hidden.shape[-1]))
                keys, values = ([layer.arrays[i] for layer in cache if i < len(layer.arrays)] for i in (0, 1))
                if sampling.grammar is not None:
                    return (logits,), keys, values
                return step_results(logits, token_B, uniform_B, sampling, history, self.agree), keys, values

            if len(self._compiled_steps) == MOST_STEPS:
                del self._compiled_steps[next(iter(self._compiled_steps))]
            self._compiled_steps[sampling] = compiled_by_shape(decode, [self.fused.model.state])
        return self._compiled_steps[sampling]

    def _slot_caches(self, keys: Any, values: Any, step: StepContext) -> list[Any]:
        if self.fused.packs_cache:
            return [PackedSlotCache(kv, step, window) for kv, window in zip(keys, self._windows, strict=True)]
        layers = zip(keys, values, self._windows, strict=True)
        return [SlotCache(k, v, step, window) for k, v, window in layers]

    def _trial_windows(self) -> str:
        """Decode a token with windows of two columns, and with other numbers before them, which layers with a window
        must not see. Returns why it failed, or ""."""

        class NarrowStep(StepContext):
            def mask(self, heads: int = 1, window: int | None = None) -> mx.array:
                return super().mask(heads, window and 2)

        def random(array: mx.array, seed: int) -> mx.array:
            shape = [*array.shape[:-2], 4, array.shape[-1]]
            return mx.random.normal(shape, key=mx.random.key(seed)).astype(array.dtype)

        def logits(seed: int) -> mx.array:
            layers = [
                [
                    mx.concatenate([random(array, seed if window else 0)[..., :2, :], random(array, 0)[..., 2:, :]], -2)
                    for array, window in zip(arrays, self._windows, strict=True)
                ]
                for arrays in (prefilled.keys, prefilled.values)
                if arrays
            ]
            step = NarrowStep(mx.array(3), mx.array([0]), mx.arange(4))
            cache = self._slot_caches(layers[0], layers[-1], step)
            return self.fused.split_model.logits(self.fused.split_model.hidden(mx.array([[self.policy.pad_id]]), cache))

        self.fused.refresh()
        try:
            prefilled = self.prefill([([self.policy.pad_id], None)])
            if mx.array_equal(logits(0), logits(1)):
                return ""
        finally:
            self.fused.release()
        return "in a trial the model attended outside its sliding windows"

    def _trial_decode(self) -> str:
        """Decode three short prompts together and compare with the whole model. Returns why it failed, or ""."""
        self.policy.model.eval()
        self.fused.refresh()
        pad, end = self.policy.pad_id, self.policy.eos_ids[0]
        # Lengths 1, 2, 3: every row has another padding. Two tokens each: the prefill gives one, a step the second.
        prompts = [[pad], [pad, end], [end, pad, end]]
        names = [(module, name) for module in self.fused.modules for name in module]
        # An adapter of several outputs keeps its arrays in a list, which a trace changes in place.
        before = [list(value) if isinstance(value := module[name], list) else value for module, name in names]
        outputs = CompletionBuffer(3, 2, self.policy.tokenizer, [-1], ())  # no id is −1, so no row ends early
        try:
            queue = WaitingQueue(len(prompts), 1, lambda chosen: self.prefill([(prompts[p], None) for p in chosen]))
            # Three rows, even if `rows` allows fewer: decoded one at a time, no row would be padded.
            step, uniform_NT = self.compiled_step(GREEDY), np.zeros((3, 2), np.float32)
            scheduler = Scheduler(
                queue, outputs, uniform_NT, SamplingState(GREEDY, agree=self.agree), step, 3, self.row_costs
            )
            while scheduler.schedule():
                scheduler.decode_chunk()
        except Exception as error:  # a model's own code may raise anything; the reason goes to the user
            for (module, name), value in zip(names, before, strict=True):
                module[name] = value  # an aborted trace leaves its placeholders where the weights were
            return f"a trial with prompts of unequal length failed with {describe_error(error)}"
        finally:
            self.fused.release()
        results = [outputs.arrays(row) for row in range(3)]
        split_model = self.policy.split_model
        # One pass for both tokens, since none changes the logits before it: loading refuses other models (`is_causal`).
        whole = [
            split_model.logits(split_model.hidden(mx.array([prompt + tokens[:1]])))[0, -2:]
            for prompt, (tokens, _, _) in zip(prompts, results, strict=True)
        ]
        alone = mx.concatenate(whole)
        expected = sample_tokens(alone, mx.zeros(len(alone)), GREEDY).logp_B
        logps = np.concatenate([logps for _, logps, _ in results])
        if np.allclose(logps, np.array(expected), atol=1e-3 if alone.dtype == mx.float32 else 0.3):
            return ""
        return "a trial with prompts of unequal length gave other log-probabilities than each prompt alone"

    def _decode_by_group(
        self,
        prompts: Prompts,
        G: int,
        sampling: Sampling,
        uniform_NT: np.ndarray,
        outputs: CompletionBuffer,
        poll: Poll,
        conversations: Rollout | None,
        tell_finished: Callable[[], None],
    ) -> None:
        drawing = self._sampling_state(sampling, [ids for ids, _ in prompts], G, outputs)

        def decode_turn(index: np.ndarray, p: int, written: list[int]) -> None:
            uniform_TB = mx.array(uniform_NT[index, len(written) :].T)
            steps = self._group_steps(prompts[p], written, index, drawing, uniform_TB)
            unread: list[Sampled] = []  # a chunk at a time, until every row has ended
            for t, sampled in enumerate(steps, 1):
                unread.append(sampled)
                if t % DECODE_CHUNK == 0 or t == len(uniform_TB):
                    outputs.append(index, *to_host(unread))
                    unread = []
                    poll(outputs.token_count)
                    if not (outputs.stop[index] == OPEN).any():
                        break
            drawing.keep(index[:0])
            if conversations is not None:
                conversations.end_turns(index.tolist(), outputs, lambda: poll(outputs.token_count))
            tell_finished()

        for p in range(len(prompts)):
            for first in range(p * G, (p + 1) * G, self.rows or G):
                index = np.arange(first, min(first + (self.rows or G), (p + 1) * G))
                for part in [index] if not outputs.length[index].any() else index[:, None]:
                    decode_turn(part, p, outputs.tokens(part[0]))
        # Conversations differ in length by now, and these caches can neither hold such rows nor go back.
        while conversations is not None and conversations.waiting:
            for row in conversations.results(outputs, WAIT_S, lambda: poll(outputs.token_count))[0]:
                outputs.stop[row] = OPEN
                decode_turn(np.array([row]), row // G, outputs.tokens(row))
            poll(outputs.token_count)

    def _group_steps(
        self,
        prompt: tuple[list[int], PromptImages | None],
        written: list[int],
        index: np.ndarray,
        drawing: SamplingState,
        uniform_TB: mx.array,
    ) -> Iterator[Sampled]:
        split_model, (ids, images) = self.fused.split_model, prompt
        cache = new_prompt_cache(self.policy.model)
        chunk, read = min(self.prefill_chunk, PREFILL_TOKENS), ids + written
        padded = padded_images([images], len(read)) if images is not None else None
        shift = images.shift if images is not None else 0
        tokens = mx.array([read])
        for start in range(0, len(read), chunk):  # as the memory plan counts it
            hidden = read_prompt(split_model, tokens, cache, (start, start + chunk), padded)
            mx.eval(hidden, [layer.state for layer in cache])
        logits = split_model.logits(hidden[:, -1])
        # Prefilled once as a single row; only its state is repeated for the completions.
        for layer in cache:
            layer.state = tree_map(lambda part: _repeated(part, len(index)), layer.state)
        logits = mx.repeat(logits, len(index), axis=0)
        sampled = drawing.first(index, logits, uniform_TB[0], [written] * len(index) if written else ())
        yield sampled
        for t in range(1, len(uniform_TB)):
            caches = positioned(cache, shift=shift) if shift else cache
            logits = split_model.logits(split_model.hidden(sampled.token_B[:, None], caches)[:, -1])
            if drawing.held is not None:
                mx.async_eval(logits)  # computed while the grammar reads the tokens
            sampled = drawing.next(index, sampled.token_B, logits, uniform_TB[t])
            yield sampled


def decode_costs(model: nn.Module) -> RowCosts:
    """The cost of a decoding step on this machine by its number of rows."""
    is_quantized = any(isinstance(module, QUANTIZED) for module in model.modules())
    return row_costs(on_gpu(), is_quantized, chip())


def _repeated(part: Any, G: int) -> Any:
    is_row = isinstance(part, mx.array) and part.ndim > 0 and part.shape[0] == 1
    return mx.repeat(part, G, axis=0) if is_row else part
