"""Model types: a tiny random model of each does all that `tests.support.architectures.trials` asks, or is refused in a
sentence.

`make architectures` tries every type of the installed mlx-lm and records what it finds.
CI tries one type per mechanism (REPRESENTATIVE) and compares it with the record, `make proofs` all of them.
"""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import qwen3

from backend.models.architectures import UNTRAINABLE
from backend.models.policy import load_policy
from backend.sampling import rollout as rollout_module
from backend.sampling.rollout import Sampler
from backend.trainer.preflight import check_model
from backend.utils.errors import UserError
from tests.support.architectures import trials
from tests.support.architectures.outcome import read_record
from tests.support.architectures.tiny_configs import model_types
from tests.support.architectures.trials import try_type

RECORD = read_record()

REPRESENTATIVE = {"qwen3_5": "gated delta net beside attention"}
"""The mechanisms of others have tests of their own: a sliding window and a state space in tests/sampling, state and
attention in one layer in test_recurrent_models.py. Latent attention and experts, as in deepseek_v3, are a proof: their
compiled functions alone take g++ a second."""


@pytest.mark.parametrize(
    "arch", [pytest.param(arch, marks=() if arch in REPRESENTATIVE else pytest.mark.proof) for arch in RECORD]
)
def test_a_type_does_what_the_record_says(arch: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if arch == "dbrx":  # its code reads arrays in a decoding step, which only a compiled one refuses
        request.getfixturevalue("compiled")
    assert try_type(arch, tmp_path) == RECORD[arch]


def test_the_record_has_every_type_of_the_installed_mlx_lm() -> None:
    new, gone = set(model_types()) - set(RECORD), set(RECORD) - set(model_types())
    assert not new | gone, f"mlx-lm {version('mlx-lm')} has {sorted(new)}, no {sorted(gone)}: run `make architectures`"


def test_every_type_works_or_is_refused() -> None:
    assert not {arch: outcome.failures for arch, outcome in RECORD.items() if outcome.failures}
    assert all(outcome.caches or outcome.refusal for outcome in RECORD.values())


@pytest.mark.parametrize("arch", UNTRAINABLE)
def test_an_untrainable_type_is_refused_before_anything_is_loaded(arch: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": arch}))
    with pytest.raises(UserError) as caught:
        check_model(str(tmp_path), "model")
    (fault,) = caught.value.faults
    assert fault.setting == "model" and fault.sentence.endswith(f"cannot be trained: {UNTRAINABLE[arch]}.")
    assert RECORD[arch].refusal and fault.sentence.endswith(RECORD[arch].refusal)


def no_kernel(plain: Any, *args: Any) -> None:
    raise RuntimeError("[metal_kernel] No Metal back-end.")


def acausal(plain: Any, model: Any, x: mx.array, *rest: Any) -> mx.array:
    return plain(model, x[:, ::-1])[:, ::-1]


def forward_only(plain: Any, *args: Any) -> mx.array:
    """With an operation that mlx has no backward pass of, as a kernel that runs forward only."""
    states = plain(*args)
    return states + 0 * mx.linalg.svd(states, stream=mx.cpu)[1].sum()


@pytest.mark.parametrize(
    ("part", "broken", "says"),
    [
        (qwen3.Model, no_kernel, "cannot run with this mlx-lm here: [metal_kernel] No Metal back-end."),
        (qwen3.Qwen3Model, acausal, "a token's logits change with the tokens after it."),
        (qwen3.MLP, forward_only, "cannot be trained here: an operation of its code has no gradient on this device"),
    ],
    ids=["no kernel", "acausal", "no gradient"],
)
def test_refused_models(part: type, broken: Any, says: str, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = part.__call__
    monkeypatch.setattr(part, "__call__", lambda *args, **more: broken(plain, *args))
    with pytest.raises(UserError) as caught:
        load_policy(trials.config_of(trials.tiny_model(models, "qwen3")))
    (fault,) = caught.value.faults
    assert fault.setting == "model" and says in fault.sentence and "\n" not in fault.sentence


def test_a_model_that_is_wrong_with_unequal_rows_goes_by_group(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that takes one mask or one position for all rows raises nothing when the shapes happen to broadcast."""
    plain = rollout_module.BatchKVCache
    monkeypatch.setattr(rollout_module, "BatchKVCache", lambda pads: plain([0] * len(pads)))
    assert not Sampler(load_policy(trials.config_of(trials.tiny_model(models, "llama"))), 4).has_continuous_batching
