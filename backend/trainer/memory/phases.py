"""Peak memory of each phase of a step in bytes, as a sum over the arrays alive at once; a term's factor is how many of
that size are alive. `tests/trainer/test_memory_plan.py` measures; a change in `backend.engine` that keeps another array
alive must be counted here. Axes: B rows, K prompt tokens, T completion tokens, H hidden size, V vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any

from backend.config.config import Config
from backend.engine.chunk_sizes import (
    JUDGED_TOKENS,
    MICRO_BATCH_TOKENS,
    PREFILL_TOKENS,
    REPLY_TOKENS,
    STORED_WIDTH,
    attention_block,
    capacity,
)
from backend.judges.model_reward import loaded_models
from backend.models.architectures import ALL_LINEAR, is_named
from backend.runs.saved_weights import WeightChoice
from backend.sampling.row_costs import row_costs
from backend.trainer.memory.model_shape import DTYPE_BYTES, Linear, ModelShape, is_usual, packed_width, shape_of
from backend.utils.hub_cache import local_folder
from backend.utils.machine import chip, has_gpu

FLOAT_BYTES = 4  # float32: adapters, their gradients, log-probabilities

PREFILL_CHUNK = 2048
PREFILL_BUCKET = 256  # columns by which mlx-lm's KV caches grow during prefill

IN_FLIGHT_NAME, IN_FLIGHT_SHARE = "in flight", 0.05  # allocated ahead of the device, of what a phase works on

OPTIMIZER_COPIES = {  # state arrays of a weight's size; a program's is taken for AdamW. Adafactor: rows, columns
    **dict.fromkeys(("adamw", "adam", "adamax", "adadelta", "own"), 2),
    **dict.fromkeys(("muon", "sgd", "lion", "rmsprop", "adagrad"), 1),
}

EIGHT_BIT_BYTES = 1 + 4 / 256  # a number of an 8-bit optimizer state, with its part of a block's float32

RUBRIC_TOKENS = 512  # of a judge's prompt, beside what it judges

TEMPLATE_TOKENS = 64  # of what self-distillation writes around a solution

QUANTIZED = {"4": (4, 64, "affine"), "6": (6, 64, "affine"), "8": (8, 64, "affine"), "mxfp4": (4, 32, "mxfp4")}


@dataclass(frozen=True, slots=True)
class Phase:
    """Bytes alive at the peak of a phase, by the name that the estimate shows."""

    sizes: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.sizes.values())

    @property
    def needed(self) -> int:
        """The total without the arrays in flight."""
        return self.total - self.sizes[IN_FLIGHT_NAME]

    def to_dict(self) -> dict[str, int]:
        return self.sizes | {"total": self.total}


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The sizes of a step's parts. `rows`: completions decoded together. `prefill_chunk`: tokens per prompt in one
    pass. `merge`: decode with adapters merged into the weights. `micro_batch_tokens`: with padding. `chunk`: tokens
    whose logits exist at a time. `recompute`: gradient checkpointing."""

    rows: int
    prefill_chunk: int
    merge: bool
    micro_batch_tokens: int
    chunk: int
    recompute: bool


class MemoryModel:
    """Sizes of the arrays of one run. `prompt`: tokens of the longest prompt. `gpu`: MLX computes on one."""

    def __init__(self, config: Config, shape: ModelShape, prompt: int, *, gpu: bool) -> None:
        self.config, self.shape, self.prompt, self.gpu = config, shape, prompt, gpu
        self.row = prompt if config.learns_labels else 0  # of which all but the first token may be imitated
        self.full = config.train_type == "full"
        is_packed = shape.quantised or config.quantization != "none"
        # On a CPU float32 expands quantised weights (`backend.models.policy.cast`).
        self.quantised = is_packed and (gpu or config.dtype != "float32")
        chosen = DTYPE_BYTES.get(config.dtype)
        self.weight_width = chosen or shape.width
        # Bytes per activation: full fine-tuning computes in float32 unless the settings say otherwise.
        self.width = (chosen or FLOAT_BYTES) if self.full else self.weight_width
        self.group, self.completion = config.group_size, config.max_completion_length
        self.completions = config.prompts_per_step * self.group
        if self.row:
            self.completions = config.prompts_per_evaluation_batch * (config.num_generations_eval or self.group)
            self.group, self.prompt, self.completion = 1, 1, max(1, prompt - 1)
        bits = {config.quantization, config.rollout_quantization}
        self.row_costs = row_costs(gpu, shape.quantised or bits != {"none"}, chip())
        self.rows = self.row_costs.planned(self.completions)  # decoded together where memory suffices
        whole = config.modules_to_save
        outside_trained = [linear.name for linear in shape.outside if is_named(linear.name, whole)]
        # True if the output layer's weights may learn: it is the embedding in many models.
        self.trains_head = self.full or bool(outside_trained)
        trains_embedding = any(not name.endswith("lm_head") for name in outside_trained) and not self.full
        # The trainable layers are the last; earlier ones save nothing for the backward pass. A trained embedding makes
        # every layer save, and adapters are in the last ones all the same.
        count = len(shape.layers)
        adapted = count if self.full or config.num_layers < 0 else min(config.num_layers, count)
        saving = count if trains_embedding else adapted
        self.layers = shape.layers[count - saving :]
        self.kinds = shape.kinds[count - saving :]
        self.adapted = [
            *(linear for layer in shape.layers[count - adapted :] for linear in self.adapted_in(layer)),
            *(linear for linear in shape.outside if is_named(linear.name, config.lora_keys)),
        ]
        self.largest_adapted = max((linear.numbers for linear in self.adapted), default=0)
        # Numbers of the matrices that are trained as a whole beside adapters.
        self.in_whole_modules = sum(linear.numbers for linear in shape.matrices if is_named(linear.name, whole))
        learnt = (linear.numbers for linear in shape.matrices if self.full or is_named(linear.name, whole))
        self.largest_whole = max(learnt, default=0)
        other = {"train_mode": "grpo", "train_type": "lora", "modules_to_save": [], "use_speculative_decoding": False}
        other |= {"reward_functions": []}
        self.teacher = self.draft = None  # None where their files are not known, too
        if config.train_mode == "distill":
            other |= {"quantization": config.teacher_quantization}
            self.teacher = self._other_model(config.teacher_model, other)
        if config.use_speculative_decoding and config.draft_model_path:
            self.draft = self._other_model(config.draft_model_path, other | {"quantization": "none"})
        # Models that score, in the type that they are stored in; judges on a CPU in float32.
        self.scorers: list[tuple[MemoryModel, str]] = []
        for each in loaded_models(config.reward_functions):
            dtype = "float32" if each.judges and not gpu else "auto"
            scorer = self._other_model(each.source, other | {"dtype": dtype, "quantization": each.quantization})
            self.scorers += [(scorer, each.judges)] if scorer else []
        self.tower = shape.tower if shape.tower and shape.tower.tokens else None
        # The vision tower computes in float32 where the text model does, else in bfloat16.
        self.tower_width = FLOAT_BYTES if self.weight_width == FLOAT_BYTES else 2
        # Rows of a prompt read it together; with noise on the embeddings each reads its own.
        self.shares_prompts = shape.is_attention_only and not (config.neftune_noise_alpha or self.row)

    def _other_model(self, name: str, settings: dict[str, Any]) -> MemoryModel | None:
        shape = shape_of(local_folder(name))
        config = self.config.model_copy(update={"model": name} | settings)
        return MemoryModel(config, shape, self.prompt, gpu=self.gpu) if shape else None

    def adapted_in(self, layer: tuple[Linear, ...]) -> list[Linear]:
        keys, whole = self.config.lora_keys, self.config.modules_to_save
        if self.full:
            return list(layer)
        chosen = (linear for linear in layer if not keys or ALL_LINEAR in keys or is_named(linear.name, keys))
        return [linear for linear in chosen if not is_named(linear.name, whole)]

    def _phase(self, sizes: dict[str, int], working: int) -> Phase:
        """The arrays that live through a step, those of the phase, and those in flight: a share of `working`."""
        weights, trainable = self.weights(), self.trainable()
        # Whole modules train in place in a float32 model, and beside the weights in a 16-bit one.
        in_place = FLOAT_BYTES * self.in_whole_modules if self.weight_width == FLOAT_BYTES else 0
        reference = 0  # it shares the frozen weights
        if self.config.needs_reference:
            if self.config.reference_model_path:
                reference = weights
            elif self.full or self.config.moves_reference:
                reference = trainable
            else:
                reference = self.in_whole_modules * self.weight_width
        vision = 0
        if self.tower:  # its weights, and the features of a step's images
            vision = self.tower.bytes * self.tower_width // self.shape.width
            vision += self.config.prompts_per_step * self.features(self.tower.tokens)
        persistent = {
            "weights": weights,
            "adapters": 0 if self.full else trainable - in_place,
            "optimizer": self.optimizer(),
            "reference": reference,
            "teacher": self.teacher.weights() if self.teacher else 0,
            "draft model": self.draft.weights() if self.draft else 0,
            "rollout weights": 0 if self.config.learns_labels else self._packed(self.config.rollout_quantization),
            "vision": vision,
            "reward models": sum(scorer.weights() for scorer, _ in self.scorers),
        }
        alive = {name: size for name, size in (persistent | sizes).items() if size}
        return Phase(alive | {IN_FLIGHT_NAME: round(IN_FLIGHT_SHARE * working)})

    def weights(self) -> int:
        """The weights as trained: in the type that the settings give, quantised after loading if they say so. Under
        full fine-tuning float32, and beside it the 16-bit copies that the model computes with."""
        if self.shape.quantised and not self.quantised:
            stored = sum(linear.bytes for linear in self.shape.matrices)
            rest = (self.shape.weights - stored) * FLOAT_BYTES // self.shape.width
            return FLOAT_BYTES * sum(linear.numbers for linear in self.shape.matrices) + rest
        if self.shape.quantised:
            # Two floats for every 64 numbers, as a rule: scale and bias.
            scales = 2 * sum(linear.numbers for linear in self.shape.matrices) // 64
            return self.shape.weights + scales * (self.weight_width - self.shape.width)
        if self.full:
            return self.trainable() + (0 if self.width == FLOAT_BYTES else self._in_floats(self.width))
        return (self._packed(self.config.quantization) if self.quantised else 0) or self._in_floats(self.weight_width)

    def _packed(self, quantization: str) -> int:
        """The weights in the bits of a setting such as `quantization`; 0 for none."""
        if quantization not in QUANTIZED:
            return 0
        bits, group, mode = QUANTIZED[quantization]
        # mlx-lm leaves a matrix in float whose input size is no multiple of the group size.
        fitting = sum(linear.numbers for linear in self.shape.matrices if linear.inputs % group == 0)
        saved = self.weight_width - packed_width(bits, group, mode, self.weight_width)
        return self._in_floats(self.weight_width) - round(fitting * saved)

    def _in_floats(self, width: int) -> int:
        return round(self.shape.weights * width / self.shape.width)

    def trainable(self) -> int:
        """Bytes of all trainable weights, and of their gradients: LoRA's A [in, rank] and B [rank, out] per expert
        (arXiv:2106.09685), DoRA's magnitude of each output row (arXiv:2402.09353)."""
        if self.full:
            return self._in_floats(FLOAT_BYTES)
        rank, dora = self.config.rank, self.config.train_type == "dora"
        numbers = sum(
            linear.experts * rank * (linear.inputs + linear.outputs) + dora * linear.outputs for linear in self.adapted
        )
        return FLOAT_BYTES * (numbers + self.in_whole_modules)

    def optimizer(self) -> int:
        if self.config.optimizer in OPTIMIZER_COPIES:
            width = EIGHT_BIT_BYTES if self.config.optimizer_bits == "8" else FLOAT_BYTES
            return round(OPTIMIZER_COPIES[self.config.optimizer] * self.trainable() * width / FLOAT_BYTES)
        # Adafactor: row and column sums of a matrix, full-size state for vectors such as norms and DoRA's magnitudes.
        if self.full:
            matrices = self.shape.matrices
            vectors = self.weights() - FLOAT_BYTES * sum(linear.numbers for linear in matrices)
            sums = sum(linear.experts * (linear.inputs + linear.outputs) for linear in matrices)
            return vectors + FLOAT_BYTES * sums
        vectors = sum(linear.outputs for linear in self.adapted) if self.config.train_type == "dora" else 0
        sums = sum(each.experts * (each.inputs + each.outputs + 2 * self.config.rank) for each in self.adapted)
        return FLOAT_BYTES * (sums + vectors)

    def features(self, tokens: int) -> int:
        return tokens * self.shape.hidden * (1 + self.tower.deepstack) * self.tower_width if self.tower else 0

    def _tower_pass(self) -> int:
        """One prompt's images in the tower: pixels, and the larger part of a layer. On a CPU attention is composed."""
        if (tower := self.tower) is None:
            return 0
        patches = tower.tokens * tower.of_token
        one = min(patches, tower.one or self.config.image_max_pixels // tower.patch**2)
        scores = 0 if self.gpu else FLOAT_BYTES * tower.heads * patches * one
        hidden, inner = (patches * size * self.tower_width for size in (tower.hidden, tower.inner))
        pixels = 2 * 3 * patches * tower.patch**2 * FLOAT_BYTES
        return pixels + max(scores + 8 * hidden, 2 * hidden + 3 * inner)

    def cache(self, rows: int, columns: int) -> int:
        """Bytes of the KV cache: [rows, kv_heads, columns, head_dim] twice per layer that has one."""
        return rows * self.shape.cached_numbers(columns) * self.width

    def uses_per_token(self, linear: Linear) -> int:
        return self.shape.experts_per_token or 1 if linear.experts > 1 else 1

    def mlp_width(self, layer: tuple[Linear, ...]) -> int:
        """Intermediate size of the gated MLP, summed over the experts of a token."""
        return sum(linear.inputs * self.uses_per_token(linear) for linear in layer if linear.name.endswith("down_proj"))

    def rollout(self, plan: MemoryPlan, allowed: int = 0) -> Phase:
        """The peak of prefill, of copying the prompts' cache into rows, or of the longest rows' last tokens. `allowed`:
        bytes up to which MLX allocates ahead of a CPU (`plan_memory`)."""
        if self.row and not self.config.reward_functions:
            return self._phase({}, 0)
        shape, rows = self.shape, min(plan.rows, self.rows)
        # Other caches, such as an SSM's state, cannot be cut into rows: there one prompt's group is sampled at a time.
        prefilled = -(-rows // self.group) if shape.is_attention_only else 1
        prompt_cache = self.cache(prefilled, -(-self.prompt // PREFILL_BUCKET) * PREFILL_BUCKET)
        rows_cache = self.cache(rows, capacity(self.prompt + self.completion))
        # Where not all are decoded together, the prefilled prompts stay beside the rows until the last one has started.
        cache = rows_cache + (prompt_cache if rows < self.completions else 0)
        # Logits, logits minus their maximum, exponentials, the filtered distribution, its running sum: [B, V].
        logits = 5 * rows * shape.vocabulary * FLOAT_BYTES
        # The caches grow layer by layer: one layer exists twice, before and after.
        layer = rows_cache // max(len(shape.layers), 1)
        if self.draft:
            cache += self.draft.cache(min(rows, self.row_costs.drafted_rows), capacity(self.prompt + self.completion))
        # Prefill: one layer's temporaries on a chunk of the prompts. Attention scores [B, heads, chunk, K] before the
        # mask, after it and after softmax, or the four arrays of the gated MLP. On a CPU scores are float32, of a block
        # of queries, and the MLP's exponential takes some arrays more.
        chunk = min(plan.prefill_chunk, max(1, PREFILL_TOKENS // prefilled), self.prompt)
        heads = prefilled * shape.heads
        queries = chunk if self.gpu else attention_block(heads, chunk, self.prompt, gpu=False)
        scores = heads * queries * self.prompt * (self.width if self.gpu else FLOAT_BYTES)
        mlp_width = prefilled * chunk * self.mlp_width(shape.layers[-1])
        exponential = 0 if self.gpu else mlp_width * FLOAT_BYTES
        prefill = max(3 * scores + 3 * exponential, 4 * mlp_width * self.width + 7 * exponential)
        # (KV cache, temporaries) at each moment that can be the peak; they are never alive together.
        held, work = max(
            (0, 4 * FLOAT_BYTES * self.largest_adapted),  # adapters are merged one matrix at a time
            (0, self._tower_pass()),
            (prompt_cache, prefill + self.features(prefilled * self.prompt)),
            (prompt_cache + self.cache(rows, capacity(self.prompt + 8)), layer // 2),  # the rows are filled
            (cache, layer),
            (cache, logits),
            *(self._scoring(scorer, mode) for scorer, mode in self.scorers),
            key=sum,
        )
        working = {"KV cache": held, "logits" if work == logits else "activations": work}
        phase = self._phase({"decoding weights": self._merged_weights(plan)} | working, held + work)
        # Prefill allocates the arrays of attention and MLP together, unless the limit is reached.
        together = 3 * scores + 6 * mlp_width * self.width + 7 * exponential
        ahead = min(prompt_cache + together - held - work, allowed - phase.needed)
        return Phase(phase.sizes | {IN_FLIGHT_NAME: max(ahead, phase.sizes[IN_FLIGHT_NAME])})

    def _scoring(self, scorer: MemoryModel, mode: str) -> tuple[int, int]:
        """(KV cache, temporaries of one layer) while a model scores (`backend.judges`); `mode` of a judge."""
        columns, tokens, cache = self.prompt + self.completion, MICRO_BATCH_TOKENS[self.gpu], 0
        if mode:
            texts = self.group if mode == "group" else 1
            columns, reply = self.prompt + texts * self.completion + RUBRIC_TOKENS, REPLY_TOKENS * (1 + texts)
            rows = min(self.completions // texts, max(1, JUDGED_TOKENS // (columns + reply)))
            # Prompts are read, then copied into the rows.
            cache = scorer.cache(1, rows * (2 * columns + reply))
            tokens = min(PREFILL_TOKENS, rows * texts * self.completion)  # what is before them is read once
        layers = scorer.shape.layers
        widest = max((sum(linear.inputs + linear.outputs for linear in layer) for layer in layers), default=0)
        scores = 0 if self.gpu else 3 * FLOAT_BYTES * scorer.shape.heads * columns
        return cache, max(columns, tokens) * (widest * scorer.width + scores)

    def _merged_weights(self, plan: MemoryPlan) -> int:
        """The weights that only decoding uses: float weights with adapters merged in, else the adapters fused side by
        side; under full fine-tuning the fused matrices that share an input (q, k, v; gate, up). On a CPU in float32 the
        output layer's too, in slices."""
        is_sliced = not (self.gpu or self.quantised) and self.shape.vocabulary % STORED_WIDTH == 0
        head = self.shape.vocabulary * self.shape.hidden if is_sliced and self.width == FLOAT_BYTES else 0
        if self.full:
            linears = (linear for layer in self.shape.layers for linear in layer if linear.experts == 1)
            fused = sum(each.numbers for each in linears if not each.name.endswith(("o_proj", "down_proj")))
            return self.width * (fused + head) if plan.merge else 0
        # Adapters stay beside quantised and 16-bit weights (`backend.sampling.fused_model`).
        if not plan.merge or self.quantised or self.weight_width != FLOAT_BYTES:
            return self.trainable()
        return self.width * (sum(linear.numbers for linear in self.adapted if linear.experts == 1) + head)

    def training(self, plan: MemoryPlan) -> Phase:
        """The peak of training: in the backward pass of a micro-batch or of shared prompts, or in the update."""
        config, group, prompt, budget = self.config, self.group, self.prompt, plan.micro_batch_tokens
        prompts = config.batch_size * config.gradient_accumulation_steps
        # A prompt's keys and values may be shared by its group's micro-batches (`backend.training.shared_prefix`).
        may_share = self.shares_prompts and not config.dropout
        # Rows of a micro-batch as `backend.training.microbatch` forms them; a larger row is one by itself.
        if may_share:
            fitting = budget // self.completion
        elif self.shares_prompts:
            whole, rest = divmod(budget, group * self.completion + prompt)
            fitting = whole * group + max(0, rest - prompt) // self.completion
        else:
            fitting = budget // (self.completion + prompt)
        rows = max(1, min(fitting, config.batch_size * group))
        passes = -(-prompts * group // rows)
        read_together = 0  # prompts that the largest micro-batch reads; where none is shared, each row has its own
        if self.shares_prompts:
            is_even = rows % group == 0 or group % rows == 0
            read_together = min(prompts, -(-rows // group) if is_even else (rows - 2) // group + 2)
        # Each boundary between micro-batches inside a group makes its prompt read once more. The extra prefill of
        # shared prompts has no gradient and so costs a third of a pass with one.
        read_again = passes - 1 - (passes - 1) // (group // gcd(rows, group))
        too_large = rows * self.completion + read_together * prompt > budget
        is_shared = may_share and (too_large or 3 * read_again > prompts)
        if is_shared:
            together = max(1, min(prompts, budget // prompt))
            activations, logits = max(self._backward(rows, 0, plan), self._backward(0, together, plan), key=sum)
            # Keys and values of all prompts and the gradients in them, and both again while a micro-batch adds to them.
            shared = 4 * self.cache(prompts, prompt)
        else:
            activations, logits = self._backward(rows, read_together, plan)
            shared = 0
        if config.self_distillation_weight:
            teacher, of_rows = self._teacher_pass(plan)
            activations, logits, shared = max((activations, logits, shared), (teacher, of_rows, 0), key=sum)
        trainable = self.trainable()
        # The sum of earlier gradients is alive beside a backward pass only where another pass came before it.
        gradients = trainable if passes > 1 or is_shared else 0
        # What a run on several machines keeps of a step's beginning, to take the step back where one is lost between
        # updates. Until the first update has made new arrays, these are the arrays in use.
        kept_all = 0
        if config.hosts:
            kept_all = trainable * (2 if config.needs_reference and config.sync_ref_model else 1) + self.optimizer()
        kept = kept_all if config.updates_per_step > 1 else 0
        if self.teacher:  # its hidden states of all tokens
            kept += prompts * group * self.completion * self.teacher.shape.hidden * self.teacher.width
        # The update begins when the last backward pass has freed its arrays: gradients before and after clipping, about
        # a third of the new weights before the old ones are freed, and the largest matrix's new weights and state.
        of_largest = self.largest_whole * (1 + self.optimizer() / trainable) if trainable else 0
        update = round(2.3 * trainable + FLOAT_BYTES * of_largest)
        if activations + logits + gradients + shared + kept < update + kept_all:
            activations, logits, gradients, shared, kept = 0, 0, update, 0, kept_all
        if activations:  # the features of prompts that are read together, in place
            activations += self.features(read_together * prompt)
        sizes = {"gradients": gradients, "activations": activations, "logits": logits, "prompts": shared, "kept": kept}
        return self._phase(sizes, gradients + activations + logits + shared)

    def _teacher_pass(self, plan: MemoryPlan) -> tuple[int, int]:
        """(activations, logits) of self-distillation's pass without gradient: keys and values of all layers, and one
        layer's temporaries. A prompt shows a solution; with feedback it may be as long as `max_seq_length` allows."""
        longest, completion = self.config.max_seq_length, self.completion
        prompt = longest - completion
        if not self.config.include_environment_feedback:
            prompt = min(prompt, self.prompt + completion + TEMPLATE_TOKENS)
        rows = max(1, min(plan.micro_batch_tokens // (prompt + completion), self.completions))
        tokens, heads = rows * (prompt + completion), rows * self.shape.heads
        scores = 3 * FLOAT_BYTES * heads * prompt * attention_block(heads, prompt, prompt, self.gpu)
        temporaries = max(scores, 4 * self.mlp_width(self.shape.layers[-1]) * tokens * self.width)
        return self.cache(1, tokens) + temporaries, self._logits(rows * completion, plan)

    def _backward(self, rows: int, prompts: int, plan: MemoryPlan) -> tuple[int, int]:
        """(activations, logits) at the peak of a pass over `rows` completions and `prompts` that are computed once."""
        shape, width = self.shape, self.width
        is_dora, prompt, completion = self.config.train_type == "dora", self.prompt, self.completion
        tokens = rows * (completion + (0 if self.shares_prompts else prompt)) + prompts * prompt
        # Keys and values: each token's own, and the prompt's again per row where several prompts have rows.
        keys_and_values = 2 * shape.keys * width * (tokens + (rows * prompt if prompts > 1 else 0))
        # [B, heads, T, K + T], which `backend.engine.attention` avoids; layers with a sliding window do not use it,
        # unless the rows fit into the window, and read the prompt's keys and values again per row.
        length = prompt + completion
        of_rows = rows * (completion if self.shares_prompts else length) * length
        of_prompts = prompts * prompt**2 if self.shares_prompts and prompt > shape.window else 0
        window_scores = shape.heads * width * (of_rows + of_prompts) if length > shape.window else 0

        saved = [tokens * self._saved_per_token(layer) + keys_and_values for layer in self.layers]
        for i, (layer, kind) in enumerate(zip(self.layers, self.kinds, strict=True)):
            if kind == "window" and window_scores:
                saved[i] += window_scores + 2 * shape.keys * width * rows * prompt
            if is_dora and self.quantised:
                # mlx-lm's DoRA dequantises the weight in every call, and the gradient of its input needs it.
                calls = bool(rows) + bool(prompts)
                saved[i] += calls * width * sum(linear.numbers for linear in self.adapted_in(layer))
        # Temporaries of one layer's backward pass: arrays like one block of scores and the gradients of the keys and
        # values attended to, or the gradients inside the gated MLP, three of its intermediate size, on a GPU five
        # where it is recomputed. Attention and MLP are differentiated one after the other.
        queries, keys = (completion, length) if rows else (prompt, prompt)
        heads = (rows or prompts) * shape.heads
        block = FLOAT_BYTES * heads * keys * attention_block(heads, queries, keys, self.gpu)
        scores = max(5 * block if "full" in self.kinds else 0, 3 * window_scores if "window" in self.kinds else 0)
        mlp = FLOAT_BYTES * self.mlp_width(self.layers[-1]) if self.layers else 0
        hidden = FLOAT_BYTES * shape.hidden
        mlp_gradients = (rows * completion or prompts * prompt) * (
            (5 if self.gpu else 3) * mlp + 12 * hidden if plan.recompute else 3 * mlp + hidden
        )
        work = max(scores + keys_and_values, mlp_gradients)
        work += 3 * FLOAT_BYTES * self.largest_adapted if is_dora else 0  # DoRA's adapted weights, for their row norms
        logits = self._logits(rows * completion, plan)
        if not plan.recompute:
            return sum(saved) + max(work - logits, 0), logits
        # Recomputed layers save their input, float32 in most 16-bit models too (`backend.engine.residual_stream`), and
        # the prompts' keys and values. No layer's activations are alive beside the logits, so the larger of the two
        # counts. Under full fine-tuning the next layer is recomputed before the last one's weight gradients are done.
        inputs = len(self.layers) * (tokens * hidden + prompts * prompt * 2 * shape.keys * width)
        at_once = 1.75 if self.full and len(self.layers) > 2 else 1
        return inputs + max(round(at_once * max(saved, default=0)) + work - logits, 0), logits

    def _saved_per_token(self, layer: tuple[Linear, ...]) -> int:
        """Norms save their input, attention its queries and the log-sum-exp of its scores, the gated MLP gate and up
        and what its activation keeps. Adapters save their input, with dropout the dropped input of each too. DoRA saves
        the product before scaling. A trainable norm saves its normalised input."""
        shape, width, config = self.shape, self.width, self.config
        adapted = self.adapted_in(layer)
        if not (shape.heads and is_usual(layer)):
            return round(1.2 * width * sum(linear.inputs + linear.outputs for linear in layer))
        norm_inputs = 2 * shape.hidden + (shape.queries + shape.keys if shape.has_qk_norm else 0)
        saved = norm_inputs * (width if self.gpu else FLOAT_BYTES) * (2 if self.full and not self.gpu else 1)
        mlp_width = self.mlp_width(layer)
        saved += (shape.queries + 2 * mlp_width) * width + FLOAT_BYTES * shape.heads
        if shape.kind.startswith("gemma"):  # the GELU's factors, and two norms more
            saved += 4 * mlp_width * width + 2 * shape.hidden * FLOAT_BYTES
        elif self.gpu:  # where mlx's own SwiGLU is used, the gate's sigmoid and silu
            saved += 2 * mlp_width * width
        for linear in layer:  # the experts' outputs before they are weighted, and the router's probabilities
            if linear.experts > 1 and linear.name.endswith("down_proj"):
                saved += width * linear.outputs * self.uses_per_token(linear) + 3 * FLOAT_BYTES * linear.experts
        inputs: dict[str, int] = {}
        has_dropout = not self.full and config.dropout > 0
        for linear in adapted:
            part, _, name = linear.name.rpartition(".")
            # Without dropout q, k and v share an input, and so do gate and up.
            own = linear.name if has_dropout or name in ("o_proj", "down_proj") else part
            # mlx-lm's adapters of experts copy their input to float32.
            float_width = FLOAT_BYTES if linear.experts > 1 else width
            inputs[own] = (2 if has_dropout else 1) * float_width * linear.inputs * self.uses_per_token(linear)
        saved += sum(inputs.values())
        if not self.full:
            saved += FLOAT_BYTES * config.rank * sum(map(self.uses_per_token, adapted))
        if config.train_type == "dora":
            saved += width * sum(linear.outputs for linear in adapted)
        return saved

    def _logits(self, tokens: int, plan: MemoryPlan) -> int:
        """The output layer on `chunk` tokens: five arrays [chunk, V] (logits, logits minus their maximum, exponentials,
        the gradient before and after the target's entry), on a CPU four more inside the exponential, and half of the
        next chunk's logits. The hidden states [N, H] of all chunks and their gradients stay. A trainable output layer
        holds its weight gradient three times."""
        is_cut, vocabulary, hidden = plan.chunk < tokens, self.shape.vocabulary, self.shape.hidden
        arrays = 5.5 if self.gpu else 9.5
        arrays += 2 if self.config.penalises else 0  # the tokens' counts, and the penalised logits
        if self.teacher:  # its own, both distributions, their distance and its gradient
            arrays *= 2
        logits = round(arrays * min(plan.chunk, tokens) * vocabulary * FLOAT_BYTES)
        head_gradients = 3 * vocabulary * hidden * FLOAT_BYTES if self.trains_head and is_cut else 0
        return logits + head_gradients + 2 * tokens * hidden * FLOAT_BYTES


CHAT_PROCESS_BYTES = 250_000_000  # beside arrays: 125 MB on Linux with the demo, twice for a large tokenizer

CONTEXT = 4096  # tokens of a conversation, on each side


def chat_bytes(config: Config, shape: ModelShape, weights: WeightChoice | None) -> int:
    """Bytes of a process that has loaded base and tuned model; of a plain model (`weights` None) that alone."""
    lora = config.model_copy(update={"train_type": "lora"})
    memory = MemoryModel(lora, shape, 0, gpu=has_gpu() and config.device != "cpu")
    base = memory.weights()
    if weights is None:
        trained, sides = 0, 1
    else:
        trained, sides = base if config.train_type == "full" else weights.bytes, 2
    tower = shape.tower.bytes if shape.tower else 0
    return base + trained + tower + sides * memory.cache(1, CONTEXT) + CHAT_PROCESS_BYTES
