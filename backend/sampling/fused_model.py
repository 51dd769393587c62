"""The policy's forward pass for decoding: the same function in fewer, larger products. Layers that read one array
(q|k|v, gate|up) become one, adapters are merged or added by two small ones. A trial pass records which share an input,
so no architecture is named; if the fused model's logits differ, decoding runs the policy, and `slow_paths` says why."""

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from backend.engine import device, patches, residual_stream
from backend.engine.attention import cached_attention
from backend.engine.caches import PackedSlotCache, Rotations, SlotCache, StepContext
from backend.engine.cpu import matmul_transposed, sliced
from backend.engine.metal import HeadNorms, Heads, rotated_heads, rotated_heads_plain
from backend.engine.model_probe import describe_error
from backend.engine.output_layer import SplitModel
from backend.engine.shared_weights import SharedWeights
from backend.sampling.fused_linear import (
    PLAIN_LAYERS,
    FusedLinear,
    FusedOutput,
    LinearBranch,
    base_of,
    fusion_key,
    has_adapter,
    is_plain,
    stream_sum,
)

# A transformer block that computes a decoding step in fewer kernels and leaves anything longer to the model's own.

ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj", "rope"}
BLOCK_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}


class DecodingBlock(nn.Module):
    """Computes a decoding step of a transformer block in fewer kernels, and leaves all else to the model's own block,
    which stays in the module tree."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.block = block
        attention = block.self_attn
        output = attention.q_proj.output
        size = rotated_size(attention.rope)
        self.heads = Heads(output.sizes[0] // size, output.sizes[1] // size, size)
        self.uses_kernels = False  # kernels of our own, on Metal
        self.rotations = Rotations(attention.rope, size)
        self.refresh()

    def refresh(self) -> None:
        """Follow the model's present norms of queries and keys."""
        q_norm, k_norm = (self.block.self_attn.get(name) for name in ("q_norm", "k_norm"))
        if q_norm is not None:
            weights = [q_norm.weight] * self.heads.queries + [k_norm.weight] * self.heads.keys
            self.norm_weight = mx.stack(weights)[:, None]  # an array of the module, so an input of compiled steps
            mx.eval(self.norm_weight)

    def __getattr__(self, name: str) -> Any:
        return self[name] if name in self else getattr(self.get("block"), name)

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None, *rest: Any, **more: Any) -> mx.array:
        if isinstance(cache, SlotCache):
            return self.step(x, cache)
        return self.block(x, mask, cache, *rest, **more)

    def step(self, x_B1H: mx.array, cache: SlotCache) -> mx.array:
        """One token a row of `x`, though several may share a row of the cache. Returns the residual stream, rounded
        where it is kept in float32; its float32 passes from block to block in the cache's step."""
        block = self.block
        attention, mlp, heads = block.self_attn, block.mlp, self.heads
        projection, step = attention.q_proj.output.projection, cache.step
        x, stream = x_B1H, step.stream_of(x_B1H)
        if device.on_cpu():
            x = stream = stream.reshape(1, len(x), x.shape[-1])  # as products in slices take it
        normed = block.input_layernorm(x)
        rotation = step.rotation(self.rotations)
        norms = HeadNorms(self.norm_weight, attention.q_norm.eps) if "norm_weight" in self else None
        if self.uses_kernels:
            assert isinstance(cache, PackedSlotCache)
            queries, kv = rotated_heads(projection.step(normed, with_kernel=True), rotation, heads, norms)
            keys, values = cache.write(step.by_row(kv))
        else:
            queries, *new = rotated_heads_plain(projection.heads(normed, heads.size), rotation, heads, norms)
            keys, values = cache.update_and_fetch(*map(step.by_row, new))
        queries = step.by_row(queries)
        if device.on_gpu():
            attended = mx.fast.scaled_dot_product_attention(
                queries, keys, values, scale=attention.scale, mask=step.mask(heads.queries, cache.window)
            )
        else:
            attended = cached_attention(queries, keys, values, attention.scale, step.mask(window=cache.window))
        if step.tokens is not None:
            attended = attended.swapaxes(1, 2)
        stream, x = self._added(stream, attention.o_proj, attended.reshape(*x.shape[:-1], -1))
        normed = block.post_attention_layernorm(x)
        gated = mlp.gate_proj.output.projection.step(normed, is_gate=True, with_kernel=self.uses_kernels)
        stream, x = self._added(stream, mlp.down_proj, gated)
        x_B1H = x.reshape(x_B1H.shape)
        step.stream = stream, x_B1H
        return x_B1H

    def _added(self, stream: mx.array, layer: Any, x: mx.array) -> tuple[mx.array, mx.array]:
        projection = layer.output.projection if isinstance(layer, LinearBranch) else None
        if residual_stream.is_float32(self.block.input_layernorm):
            if projection is None:
                return stream_sum(stream, layer(x), with_kernel=self.uses_kernels)
            return projection.stream_step(x, stream, with_kernel=self.uses_kernels)
        if projection is None:
            stream = stream + layer(x)
        else:
            stream = projection.added_step(x, stream, with_kernel=self.uses_kernels)
        return stream, stream


def is_plain_block(block: Any) -> bool:
    """True if the block has exactly the parts that `DecodingBlock.step` computes."""
    if not isinstance(block, nn.Module) or set(block.children()) != BLOCK_PARTS:
        return False
    if "attn_scale" in inspect.signature(type(block).__call__).parameters:  # Ministral scales queries by position
        return False
    attention: Any = block.self_attn
    mlp: Any = block.mlp
    norms = [block.input_layernorm, block.post_attention_layernorm]
    return (
        all(type(norm) is nn.RMSNorm for norm in norms)
        and set(mlp.children()) == {"gate_proj", "up_proj", "down_proj"}
        and _shared_output(mlp.gate_proj, mlp.up_proj) is not None
        and _is_plain_attention(attention)
    )


def _is_plain_attention(attention: Any) -> bool:
    parts = set(attention.children())
    if parts - {"q_norm", "k_norm"} != ATTENTION_PARTS or not isinstance(getattr(attention, "scale", None), float):
        return False
    output, size = _shared_output(attention.q_proj, attention.k_proj, attention.v_proj), rotated_size(attention.rope)
    if output is None or not size or output.sizes[1] != output.sizes[2] or any(n % size for n in output.sizes):
        return False
    if parts == ATTENTION_PARTS:
        return True
    q_norm, k_norm = attention.get("q_norm"), attention.get("k_norm")
    return (
        all(type(norm) is nn.RMSNorm and norm.weight.shape == (size,) for norm in (q_norm, k_norm))
        and q_norm.eps == k_norm.eps
    )


def _shared_output(*branches: Any) -> FusedOutput | None:
    if not all(isinstance(branch, LinearBranch) for branch in branches):
        return None
    output = branches[0].output
    is_whole = [branch.index for branch in branches] == list(range(output.count))
    return output if is_whole and all(branch.output is output for branch in branches) else None


def rotated_size(rope: Any) -> int:
    """The length of the heads that this rotary embedding rotates by halves; 0 for others."""
    if getattr(rope, "traditional", False):
        return 0
    size = getattr(rope, "dims", None) or getattr(rope, "dim", 0)
    return size if isinstance(size, int) and size % 2 == 0 else 0


HEAD_ROWS = 32  # with more, a product with the output layer's weights in one piece is quicker than in slices

PROBE = mx.array([[1, 2, 3, 2]])  # tokens of the trial pass


class FusedModel:
    """A module tree `model` that computes the policy's function with fused layers. `merge` allows temporary weights,
    which `refresh` computes and `release` drops. Unchanged modules are shared with the policy; packed weights become
    the storage of the policy, of `others` and of `shared`."""

    def __init__(
        self,
        model: nn.Module,
        split_model: SplitModel,
        *,
        merge: bool = True,
        others: Iterable[nn.Module] = (),
        shared: SharedWeights | None = None,
    ) -> None:
        self.policy, self.model, self.split_model = model, model, split_model
        self.fused_linears: list[FusedLinear] = []
        self.decoding_blocks: list[DecodingBlock] = []  # all blocks of the model, or none
        self.slow_paths: list[str] = []  # messages for the user
        self.slices_head = False
        self._copies: list[tuple[nn.Module, nn.Module]] = []  # (module of the policy, its copy in `model`)
        was_training = model.training
        model.eval()  # dropout would make the two models differ, and the comparison fail
        trees = [model, *others, *([shared.tree] if shared else [])]
        if reason := self._build(trees, merge, shared):
            self.slow_paths.append(f"Layers are not fused for decoding: {reason}.")
        elif reason := self._replace_blocks():
            self.slow_paths.append(f"Decoding steps run more kernels than they need: {reason}.")
        model.train(was_training)
        self.slices_head = merge and self.model is not model and self.split_model.is_product
        if self.slices_head:
            self.split_model = replace(self.split_model, logits=self._logits)

    @property
    def modules(self) -> list[nn.Module]:
        return [*self.policy.modules(), *self.model.modules()]

    def _logits(self, hidden: mx.array) -> mx.array:
        head: Any = self.split_model.head
        rows = hidden.size // hidden.shape[-1]
        return matmul_transposed(hidden, self.model["sliced_head"] if rows <= HEAD_ROWS else head.weight)

    @property
    def packs_cache(self) -> bool:
        """True if decoding steps run on `PackedSlotCache`."""
        return bool(self.decoding_blocks) and device.on_gpu()

    def use_kernels(self, on: bool) -> None:
        """Run decoding steps with or without our own kernels. Compiled steps have to be traced again."""
        for block in self.decoding_blocks:
            block.uses_kernels = on

    def refresh(self) -> None:
        """Follow the policy's present weights. Call before decoding."""
        self.model.eval()
        for fused in self.fused_linears:
            fused.refresh()
        # Training replaces arrays instead of writing into them, so a copied module still holds the old ones.
        for original, duplicate in self._copies:
            duplicate.update({name: value for name, value in original.items() if isinstance(value, mx.array)})
        for block in self.decoding_blocks:
            block.refresh()
        if self.slices_head:
            self.model.sliced_head = sliced(self.split_model.head.weight)  # pyright: ignore
            mx.eval(self.model.sliced_head)

    def release(self) -> None:
        """Drop the arrays of `refresh`. Call after decoding."""
        self.model.pop("sliced_head", None)
        for fused in self.fused_linears:
            fused.projection.clear()

    def _build(self, trees: list[nn.Module], merge: bool, shared: SharedWeights | None) -> str:
        fused_linears = fusable_linears(self.policy, merge)
        if not fused_linears:
            return ""
        self.fused_linears = fused_linears
        # Before the comparison, and kept if it fails: packed views hold the numbers of the arrays that they replace.
        for fused in fused_linears:
            fused.pack(trees, shared)
        branches: dict[int, nn.Module] = {
            id(member): branch for fused in fused_linears for member, branch in fused.branches()
        }
        self.model = replace_modules(self.policy, branches, self._copies)
        split_model = self.split_model.of_tree(self.model)

        def logits() -> tuple[mx.array, mx.array]:
            return self.policy(PROBE), split_model.logits(split_model.hidden(PROBE))  # pyright: ignore

        with self._noisy_adapters():
            reason = difference("the fused layers", logits)
        if reason:
            self.model, self.fused_linears, self._copies = self.policy, [], []
        else:
            self.split_model = split_model
        return reason

    def _replace_blocks(self) -> str:
        layers = getattr(self.model, "layers", None)
        if not layers or not all(is_plain_block(layer) for layer in layers):
            return ""  # nothing lost: the model's own blocks are as fast as they were
        blocks: dict[int, DecodingBlock] = {id(layer): DecodingBlock(layer) for layer in layers}
        dtype = self.policy(PROBE).dtype  # pyright: ignore
        if device.on_cpu() and dtype != mx.float32:
            return ""  # mlx's own operations for a CPU, which learn, round more often in 16 bits
        shapes = [(3, block.heads.keys, 2, 8, block.heads.size) for block in blocks.values()]
        kv = [mx.random.normal(shape, key=mx.random.key(i)).astype(dtype) for i, shape in enumerate(shapes)]
        step = StepContext(mx.array(5), mx.array([0, 2, 4]), mx.arange(8))

        def trial(model: SplitModel, packed: bool = False) -> mx.array:
            """Logits and written caches, flat, of a step of three rows at different positions."""
            cache = [PackedSlotCache(x, step) if packed else SlotCache(x[:, :, 0], x[:, :, 1], step) for x in kv]
            logits = model.logits(model.hidden(mx.array([[1], [2], [3]]), cache))
            written = [layer.arrays[0] if packed else mx.stack(list(layer.arrays), axis=2) for layer in cache]
            outputs = mx.concatenate([array.flatten() for array in (logits, *written)])
            mx.eval(outputs)
            return outputs

        with self._noisy_adapters():
            try:
                expected = trial(self.split_model)
            # The model decodes no rows at different positions: `Rollout` finds that out too, and tells it.
            except Exception:
                return ""
            # Blocks whose rotary embeddings turn alike share one, so that a step computes it once.
            places, seen = mx.array([0, 300, 1000]), {}
            for block in blocks.values():
                rotation = block.rotations.turned(places)
                block.rotations = seen.setdefault(np.array(rotation).tobytes(), block.rotations)
            copies: list[tuple[nn.Module, nn.Module]] = []
            model = replace_modules(self.model, blocks, copies)
            split_model = self.split_model.of_tree(model)
            if reason := difference("the fused blocks", lambda: (expected, trial(split_model, device.on_gpu()))):
                return reason
            self._copies += copies
            self.model, self.split_model, self.decoding_blocks = model, split_model, list(blocks.values())
            if not device.has_metal():
                return ""
            self.use_kernels(True)
            if reason := difference("kernels of our own", lambda: (expected, trial(split_model, device.on_gpu()))):
                self.use_kernels(False)
            return reason

    @contextlib.contextmanager
    def _noisy_adapters(self) -> Iterator[None]:
        """Weights refreshed, with noise on every lora_b: fresh adapters are zero, and would hide any error."""
        fresh: list[Any] = [
            (member, member.lora_b) for fused in self.fused_linears for member in fused.members if has_adapter(member)
        ]
        # Separate keys: this comparison must not change the run's random numbers.
        for i, (member, lora_b) in enumerate(fresh):
            member.lora_b = lora_b + 0.01 * mx.random.normal(lora_b.shape, key=mx.random.key(i))
        try:
            self.refresh()
            yield
        finally:
            for member, lora_b in fresh:
                member.lora_b = lora_b
            self.release()


def difference(what: str, compute: Callable[[], tuple[mx.array, mx.array]]) -> str:
    """A message if the (expected, actual) arrays of `compute` differ, else ""."""
    try:
        expected, actual = compute()
        # A mistake makes this about 1; rounding in 16 bits keeps it below 0.1.
        allowed = 1e-4 if actual.dtype == mx.float32 else 0.25
        expected = expected.astype(mx.float32)
        distance = mx.linalg.norm(actual.astype(mx.float32) - expected) / mx.linalg.norm(expected)
        return "" if float(distance.item()) < allowed else f"{what} give other logits than the model"  # pyright: ignore
    except Exception as error:  # a model's own code may raise anything
        return f"{what} failed with {describe_error(error)}"


def replace_modules(module: Any, new: Mapping[int, nn.Module], copies: list[tuple[nn.Module, nn.Module]]) -> Any:
    """The module tree with the modules of `new`, by id of the module that each replaces. Subtrees without replacements
    are shared, the others copied, and (original, copy) appended to `copies`."""
    if id(module) in new:
        return new[id(module)]
    if isinstance(module, (list, tuple)):
        items = [replace_modules(item, new, copies) for item in module]
        return module if all(a is b for a, b in zip(items, module, strict=True)) else type(module)(items)
    if not isinstance(module, dict):
        return module
    items = {name: replace_modules(item, new, copies) for name, item in module.items()}
    if all(items[name] is module[name] for name in items):
        return module
    # A module is a dict of its arrays and children. copy.copy shares them all; dict.update bypasses Module's own
    # `update`, which would write into the shared children.
    duplicate: Any = copy.copy(module)
    dict.update(duplicate, items)
    if isinstance(module, nn.Module):
        copies.append((module, duplicate))
    return duplicate


def fusable_linears(model: nn.Module, merge: bool) -> list[FusedLinear]:
    """Groups of layers that read the same array and have the same `fusion_key`, where fusing pays."""
    groups: dict[tuple[Any, ...], list[nn.Module]] = {}
    inputs = _linear_inputs(model)
    calls = [id(member) for member, _ in inputs]
    # Identity of arrays is the criterion; `inputs` keeps them alive, so that no id is used twice.
    for member, x in inputs:
        # A layer that is called twice has two inputs, so it is fused with no other.
        shared = id(x) if calls.count(id(member)) == 1 else id(member)
        groups.setdefault((shared, x.dtype, *fusion_key(member)), []).append(member)
    fused_linears: list[FusedLinear] = []
    for (_, dtype, *_), members in groups.items():
        unique = list({id(member): member for member in members}.values())
        if how := _fusion(unique, merge):
            fused_linears.append(FusedLinear(unique, dtype, how == "merge"))
    return fused_linears


def _fusion(members: list[nn.Module], merge: bool) -> Literal["merge", "pack"] | None:
    """None where fusing gains nothing or `merge` does not allow the memory. Only float32 weights take adapters in: 16
    bits would swallow small updates."""
    has_adapters = any(has_adapter(member) for member in members)
    is_trainable = any(tree_flatten(base_of(member).trainable_parameters()) for member in members)
    if len(members) == 1 and not has_adapters:
        return None
    if is_trainable:
        return "merge" if merge else None
    can_merge = has_adapters and base_of(members[0]).weight.dtype == mx.float32
    return "merge" if merge and can_merge else "pack"


def _linear_inputs(model: nn.Module) -> list[tuple[nn.Module, mx.array]]:
    """The plain layers that a pass calls, each with its input, in order."""
    layers = {id(module): module for module in model.modules() if is_plain(module)}
    bases = {id(layer.linear) for layer in layers.values() if has_adapter(layer)}
    inputs: list[tuple[nn.Module, mx.array]] = []

    def recording(call: Callable[..., mx.array]) -> Callable[..., mx.array]:
        def recorded(layer: nn.Module, x: mx.array) -> mx.array:
            if id(layer) in layers and id(layer) not in bases:
                inputs.append((layer, x))
            return call(layer, x)

        return recorded

    with patches.replaced((kind, "__call__", recording(kind.__call__)) for kind in PLAIN_LAYERS):
        model(PROBE)
    return inputs
