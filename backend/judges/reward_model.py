"""Reward models: sequence classification with one label, as TRL's `reward_funcs` takes them.

A decoder's score is the final norm's output at the last token that is not padding, times `score.weight` [1, H], without
a bias. The text is the conversation in the model's own chat template; without one, prompt and completion as they are.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.models import gemma
from mlx_lm.models.base import BaseModelArgs

from backend.config.model_and_data_names import check_weights, model_source
from backend.engine import cpu
from backend.engine.chunk_sizes import MICRO_BATCH_TOKENS
from backend.engine.device import on_gpu
from backend.models.architectures import language_model, model_type
from backend.models.hub import config_file
from backend.models.loading import fetch, open_weights, read_weights
from backend.models.model_folder import check_config, header_of
from backend.models.policy import QUANTIZATION, is_quantised, quantize
from backend.models.tokenizers import load_tokenizer
from backend.rewards.calls import Failure, Poll, RewardError
from backend.rewards.catalogue import RewardCall
from backend.rewards.scoring import Answer, TrainerState, inputs_for, samples_of
from backend.types import Group, content_text
from backend.utils.errors import UserError
from backend.utils.files import is_folder, user_path
from backend.utils.safetensors import StoredArray
from backend.utils.text import quote, reason_of

SETTING = "reward_functions"
BITS = (4, 8)
DECODERS = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "gemma3_text")
"""Values of `model_type` with code in mlx-lm that computes what transformers' *ForSequenceClassification does."""
MODERNBERT = "modernbert"
SCORE = "score"
EMBEDDING = "model.embed_tokens.weight"
GEMMA3 = {"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4}
"""What config.json of Gemma 3 with images leaves out (`mlx_lm.models.gemma3`)."""
NOT_TEXT = ("vision_tower", "multi_modal_projector", "lm_head")
_GLOBAL, _LOCAL = "full_attention", "sliding_attention"


class RewardModel:
    """A reward model and its tokenizer, loaded by `load`. `source`: folder or id; `bits`: quantised as it loads."""

    uses_mlx = True

    def __init__(self, call: RewardCall, base: Path) -> None:
        """Checks its config.json, and its weights if they are here. Raises UserError for another kind of model."""
        path = user_path(call.function, SETTING, base)
        self.name, self.bits = call.name, call.arguments.get("quantization")
        self.source = str(path) if is_folder(path) else call.function
        self._model: nn.Module | None = None
        self._tokenizer: Any = None
        if self.bits not in (None, *BITS):
            raise self._error(f"its quantization must be none, 4 or 8, not {self.bits}")
        source = Path(model_source(self.source, SETTING))
        file = source / "config.json" if is_folder(source) else config_file(self.source, SETTING)
        config = check_config(file, self.source, SETTING)
        kind, names, labels = model_type(config), config.get("architectures"), config.get("id2label")
        name = str(names[0]) if isinstance(names, list) and names else "of an unknown architecture"
        if "ForSequenceClassification" not in name:
            right = "a reward model is a model for sequence classification with one label"
            raise self._error(f"it is {quote(name, 40)}, and {right}")
        if kind not in (*DECODERS, MODERNBERT):
            known = "Qwen2, Qwen3, Llama, Gemma, Mistral and ModernBERT"
            raise self._error(f"its architecture is {quote(kind, 30)}, and reward models here are {known}")
        if isinstance(labels, dict) and len(labels) != 1:
            raise self._error(f"it has {len(labels):,} labels, and a reward model has one")
        check_weights(str(source), SETTING)
        if any(file.parent.glob("model*.safetensors")):
            self._open(file.parent)

    def load(self, folder: Path | None) -> None:
        """Raises UserError."""
        if self._model is None:
            cpu.check_compiler()  # mlx-lm's models call compiled functions
            model, self._tokenizer = self._open(fetch(self.source, SETTING))
            read_weights(model, self.source, SETTING)
            self._model = model.freeze().eval()

    def score(self, groups: Sequence[Group], state: TrainerState, poll: Poll) -> Answer:
        """Raises RewardError for a conversation without a chat template, and for a score that is no number."""
        texts = self._texts(groups, state)
        model: Any = self._model
        pad = self._tokenizer.pad_token_id
        pad = self._tokenizer.eos_token_id if pad is None else pad
        encode = partial(self._tokenizer, add_special_tokens=False)
        tokens = {text: encode(text)["input_ids"] for text in dict.fromkeys(texts)}
        scores: dict[str, float] = {}  # a text without tokens has none
        longest_first = sorted((text for text in tokens if tokens[text]), key=lambda text: -len(tokens[text]))
        while longest_first:
            poll()
            columns = len(tokens[longest_first[0]])
            rows = max(1, MICRO_BATCH_TOKENS[on_gpu()] // columns)
            batch, longest_first = longest_first[:rows], longest_first[rows:]
            padded = np.zeros((len(batch), columns), np.int32)
            for row, text in enumerate(batch):
                padded[row, : len(tokens[text])] = tokens[text]
            ends = [model.end(tokens[text], pad) for text in batch]
            found: Any = model(mx.array(padded), mx.array(ends)).tolist()
            scores.update(zip(batch, found, strict=True))
        if not all(map(math.isfinite, scores.values())):
            raise self._failed("gives a score that is not a finite number")
        return Answer(scores=[[scores.get(text) for text in texts]])

    def _texts(self, groups: Sequence[Group], state: TrainerState) -> list[str]:
        """The text of each completion after its prompt, as TRL 1.16 renders it."""
        has_template = bool(self._tokenizer.chat_template)
        inputs = inputs_for(samples_of(groups), state, "trl", as_messages=has_template)
        texts: list[str] = []
        for prompt, completion in zip(inputs["prompts"], inputs["completions"], strict=True):
            if isinstance(completion, str):
                texts.append(f"{prompt}{completion}")
                continue
            if not has_template:
                raise self._failed("has no chat template, and the prompts are conversations")
            prompt = [message | {"content": content_text(message["content"])} for message in prompt]
            try:
                texts.append(self._tokenizer.apply_chat_template(prompt + completion, tokenize=False))
            except Exception as error:  # a template raises what it likes
                raise self._failed(f"cannot render a conversation: {reason_of(error)}") from error
        return texts

    def close(self) -> None:
        if self._model is not None:
            self._model = self._tokenizer = None
            gc.collect()  # mlx modules are in reference cycles
            mx.clear_cache()

    def _open(self, folder: Path) -> tuple[nn.Module, Any]:
        arrays = dict[str, StoredArray]()
        for file in folder.glob("model*.safetensors"):
            arrays |= header_of(file, SETTING)
        config = check_config(folder / "config.json", self.source, SETTING)
        head = f"{'classifier' if model_type(config) == MODERNBERT else SCORE}.weight"
        if head not in arrays:
            raise self._error(f"its weights have no {head}")
        if arrays[head].shape[0] != 1:
            raise self._error(f"it has {arrays[head].shape[0]:,} labels, and a reward model has one")
        text = language_model(config)
        changes = {**GEMMA3, **text} if text else None
        model, config = open_weights(folder, self.source, SETTING, reward_classes, changes)
        if self.bits and is_quantised(model):
            raise self._error("it is quantised already; leave out quantization")
        if self.bits:
            try:
                model, _ = quantize(model, config, **QUANTIZATION[str(self.bits)])
            except Exception as error:  # as `backend.models.policy.quantized_as`
                raise self._error(f"it cannot be quantised: {reason_of(error)}") from error
            if not is_quantised(model):
                width = QUANTIZATION[str(self.bits)]["group_size"]
                raise self._error(f"none of its weights is a multiple of {width} wide; leave out quantization")
        return model, load_tokenizer(folder, SETTING)._tokenizer

    def _error(self, reason: str) -> UserError:
        return UserError(SETTING, f"{quote(self.source, 60)} cannot be used as a reward model: {reason}.")

    def _failed(self, what: str) -> RewardError:
        return RewardError(Failure(what), (SETTING, f"The reward model {self.name} {what}."))


def reward_classes(config: dict[str, Any]) -> tuple[type[nn.Module], Any]:
    """(model, arguments) for `mlx_lm.utils.load_model`: a decoder of mlx-lm with a head for one label."""
    if model_type(config) == MODERNBERT:
        return ModernBert, ModernBertArgs
    decoder, arguments = mlx_lm_utils._get_classes(config)

    class RewardDecoder(decoder):
        """Tokens [B, T], padded on the right, and where each text ends [B] → scores [B]."""

        def __init__(self, args: Any) -> None:
            super().__init__(args)
            self.score = nn.Linear(args.hidden_size, 1, bias=False)

        def __call__(self, tokens: mx.array, ends: mx.array) -> mx.array:
            hidden = self.model(tokens)[mx.arange(tokens.shape[0]), ends - 1]
            return self.score(hidden.astype(mx.float32))[:, 0]

        @staticmethod
        def end(tokens: Sequence[int], pad: int) -> int:
            """Number of tokens up to the last that is not `pad`, which may be the end of a turn too."""
            return next((i for i in range(len(tokens), 0, -1) if tokens[i - 1] != pad), 1)

        @staticmethod
        def quant_predicate(path: str, module: nn.Module) -> bool:
            return path != SCORE

        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            text = {name: x for name, x in weights.items() if not any(part in name for part in NOT_TEXT)}
            for before in ("language_model.model.", "model.language_model."):
                text = {name.replace(before, "model."): x for name, x in text.items()}
            found = super().sanitize(text) if hasattr(decoder, "sanitize") else text
            self.pop("lm_head", None)
            if model_type(config) == "gemma":
                for layer in self.model.layers:
                    layer.mlp.__class__ = GemmaMLP
            embedding = found.get(EMBEDDING)
            is_gemma3 = model_type(config) in ("gemma3", "gemma3_text")
            if is_gemma3 and embedding is not None and embedding.dtype != mx.bfloat16:
                # mlx-lm rounds it to bfloat16, transformers to the weights' type
                scale = self.score.weight.shape[1] ** 0.5
                found[EMBEDDING] = embedding * (scale / mx.array(scale, mx.bfloat16).item())
            return found

    return RewardDecoder, arguments


class GemmaMLP(gemma.MLP):
    """With transformers' approximation of GELU; mlx-lm computes it exactly."""

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(nn.gelu_approx(self.gate_proj(x)) * self.up_proj(x))


@dataclass
class ModernBertArgs(BaseModelArgs):
    """Fields of config.json. Raises ValueError for an activation or pooling without code here."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    norm_eps: float = 1e-5
    norm_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    classifier_bias: bool = False
    hidden_activation: str = "gelu"
    classifier_activation: str = "gelu"
    classifier_pooling: str = "cls"
    local_attention: int = 128
    global_attn_every_n_layers: int = 3
    layer_types: list[str] | None = None
    global_rope_theta: float = 160_000.0
    local_rope_theta: float | None = 10_000.0
    rope_parameters: dict[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        every = self.global_attn_every_n_layers
        self.kinds = self.layer_types or [_LOCAL if i % every else _GLOBAL for i in range(self.num_hidden_layers)]
        thetas = {_GLOBAL: self.global_rope_theta, _LOCAL: self.local_rope_theta or self.global_rope_theta}
        self.thetas = thetas | {kind: rope["rope_theta"] for kind, rope in self.rope_parameters.items() if rope}
        if {self.hidden_activation, self.classifier_activation} != {"gelu"}:
            raise ValueError("its activation is not gelu")
        if self.classifier_pooling not in ("cls", "mean"):
            raise ValueError(f"its pooling {self.classifier_pooling} is neither cls nor mean")


class _Parts(nn.Module):
    """Modules under these names."""

    def __init__(self, **modules: Any) -> None:
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)


class ModernBert(nn.Module):
    """ModernBERT with a classification head (arXiv:2412.13663), which mlx-lm lacks, with transformers' names of
    modules. Tokens [B, T], padded on the right, and their lengths [B] → scores [B]."""

    def __init__(self, args: ModernBertArgs) -> None:
        super().__init__()
        self.args, size, inner = args, args.hidden_size, args.intermediate_size

        def norm() -> nn.LayerNorm:
            return nn.LayerNorm(size, args.norm_eps, bias=args.norm_bias)

        def layer(number: int) -> _Parts:
            linears = nn.Linear(size, 3 * size, args.attention_bias), nn.Linear(size, size, args.attention_bias)
            gated = nn.Linear(size, 2 * inner, args.mlp_bias), nn.Linear(inner, size, args.mlp_bias)
            return _Parts(
                attn_norm=norm() if number else nn.Identity(),  # the embeddings have been normalised
                attn=_Parts(Wqkv=linears[0], Wo=linears[1]),
                mlp_norm=norm(),
                mlp=_Parts(Wi=gated[0], Wo=gated[1]),
            )

        self.model = _Parts(
            embeddings=_Parts(tok_embeddings=nn.Embedding(args.vocab_size, size), norm=norm()),
            layers=[layer(number) for number in range(len(args.kinds))],
            final_norm=norm(),
        )
        self.head = _Parts(dense=nn.Linear(size, size, args.classifier_bias), norm=norm())
        self.classifier = nn.Linear(size, 1)

    def __call__(self, tokens: mx.array, lengths: mx.array) -> mx.array:
        args = self.args
        model, head = cast("Any", self.model), cast("Any", self.head)
        places = mx.arange(tokens.shape[1])
        is_token = places < lengths[:, None]
        masks = {_GLOBAL: is_token[:, None, None]}  # [B, 1, 1, T]
        masks[_LOCAL] = masks[_GLOBAL] & (mx.abs(places[:, None] - places) <= args.local_attention // 2)
        x = model.embeddings.norm(model.embeddings.tok_embeddings(tokens))
        rows, columns, size = x.shape
        heads, width = args.num_attention_heads, size // args.num_attention_heads
        for layer, kind in zip(model.layers, args.kinds, strict=True):
            qkv = layer.attn.Wqkv(layer.attn_norm(x)).reshape(rows, columns, 3, heads, width)
            queries, keys, values = qkv.transpose(2, 0, 3, 1, 4)
            rope = {"traditional": False, "base": args.thetas[kind], "scale": 1.0, "offset": 0}
            queries, keys = mx.fast.rope(queries, width, **rope), mx.fast.rope(keys, width, **rope)
            out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=width**-0.5, mask=masks[kind])
            x = x + layer.attn.Wo(out.transpose(0, 2, 1, 3).reshape(rows, columns, size))
            inputs, gate = mx.split(layer.mlp.Wi(layer.mlp_norm(x)), 2, axis=-1)
            x = x + layer.mlp.Wo(nn.gelu(inputs) * gate)
        x = model.final_norm(x)
        pooled = x[:, 0]
        if args.classifier_pooling == "mean":
            pooled = mx.where(is_token[..., None], x, 0).sum(axis=1) / lengths[:, None]
        return self.classifier(head.norm(nn.gelu(head.dense(pooled))).astype(mx.float32))[:, 0]

    @staticmethod
    def end(tokens: Sequence[int], pad: int) -> int:
        """Number of tokens: a text's own token like padding counts, as in transformers' attention mask."""
        return len(tokens)

    @staticmethod
    def quant_predicate(path: str, module: nn.Module) -> bool:
        return path != "classifier"
