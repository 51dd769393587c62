"""The models that an endpoint answers with: a base, and adapters on it that share its arrays."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx

from backend.config.config import Config
from backend.engine.caches import new_prompt_cache
from backend.engine.device import on_gpu
from backend.models.policy import Policy, load_base, load_policy, load_start
from backend.runs.saved_weights import SETTING, adapter_settings, find_adapter
from backend.sampling.chat import AS_TRAINED, ChatSource, Note, load_sides
from backend.sampling.rollout import Sampler
from backend.sampling.turn_format import TurnFormat
from backend.trainer.memory.estimate import choose_dtype
from backend.utils.errors import UserError
from backend.utils.files import names_folder
from backend.utils.machine import machine_bytes

CONTEXT = 32_768  # tokens of a prompt with its answer, where the model does not say how many it reads


@dataclass(frozen=True)
class ServedModel:
    """`config`: settings of the run, of which a request may leave the sampling out."""

    name: str
    config: Config
    sampler: Sampler

    @property
    def policy(self) -> Policy:
        return self.sampler.policy

    @property
    def context(self) -> int:
        """Most tokens of a prompt with its answer."""
        return int(getattr(getattr(self.policy.model, "args", None), "max_position_embeddings", 0) or CONTEXT)

    @cached_property
    def turn_format(self) -> TurnFormat:
        return TurnFormat(self.policy.tokenizer, self.config.chat_template_kwargs)

    @cached_property
    def bytes_per_token(self) -> int:
        """Of keys and values, where rows are decoded together."""
        cache: list[Any] = new_prompt_cache(self.policy.model)
        self.policy.split_model.hidden(mx.array([self.policy.eos_ids[:1]]), cache)
        return sum((layer.keys.nbytes + layer.values.nbytes) // layer.keys.shape[2] for layer in cache)


def load_models(source: ChatSource, adapters: Sequence[str], runs_dir: Path | None, note: Note) -> list[ServedModel]:
    """The base of `source`, its run, and further adapters as `adapter` names them. Raises UserError."""
    config = source.config.model_copy(update=AS_TRAINED | {"beta": 0.0})
    dtype, _ = choose_dtype([config], machine_bytes(mx.get_active_memory()), gpu=on_gpu())
    config = config.model_copy(update={"dtype": dtype})
    base_name = Path(config.model).name if names_folder(config.model) else config.model
    if source.has_two_models:
        if adapters:
            raise UserError(SETTING, f"{source.name} trained every weight, so no adapter of another run fits it.")
        names = {"base": base_name, "tuned": source.name}
        sides = load_sides(source, note=note)
        return [ServedModel(names[side], config, Sampler(policy, 1)) for side, policy in sides.items()]
    base = load_base(config, note)
    base.model.freeze()
    policy = Policy(base.model, base.tokenizer, base.model_config, None, shared_weights=base.weights)
    # Each sampler before the next policy: it packs the arrays that they share.
    served = {base_name: ServedModel(base_name, config, Sampler(policy, 1))}
    own = [(source.name, f"{source.run.path}@{source.weights.key}")] if source.run and source.weights else []
    for name, text in (*own, *((Path(text).name, text) for text in adapters)):
        if name in served:
            raise UserError(SETTING, f"Two models have the name {name}.")
        settings = adapter_settings(find_adapter(text, runs_dir))
        if (trained_on := settings.get("model", config.model)) != config.model:
            note(f"{name} was trained on {trained_on}, and answers here on {base_name}.")
        tuned = config.model_copy(update=settings | {"model": config.model})
        policy = load_policy(tuned, note, base)
        load_start(policy, tuned, text, runs_dir)
        served[name] = ServedModel(name, tuned, Sampler(policy, 1))
    return list(served.values())
