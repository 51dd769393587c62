"""Try the text model of every vision family of the installed mlx-vlm with a tiny random model, and write
docs/vision_families.json: `python -m tests.support.vision_families [FAMILY …]`.

A family works if our program opens its text model and computes mlx-vlm's logits. Pictures are proved for those of
`tests.support.vision_models`; each other needs a processor of its own.
"""

import dataclasses
import importlib
import json
import logging
import multiprocessing
import os
import sys
import tempfile
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.support.architectures.outcome import DOCS
from tests.support.architectures.tiny_configs import SIZES
from tests.support.random_models import tiny_tokenizer
from tests.support.vision_models import FAMILIES, tiny_vision_model

RECORD, LIMIT_S = DOCS / "vision_families.json", 90
REFUSED = "This version of mlx-lm knows no model of the kind"
VISION = {"image_size": 32, "patch_size": 8, "spatial_patch_size": 8, "depth": 2, "out_hidden_size": 32}
VISION |= {
    "mlp_ratio": 2,
    "embed_dim": 32,
    "num_heads": 2,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}


def families() -> list[str]:
    """mlx-vlm's models with a text and a vision config."""
    root = Path(importlib.import_module("mlx_vlm.models").__path__[0])
    packages = [file.parent for file in root.glob("*/__init__.py") if (file.parent / "config.py").is_file()]
    configs = {package.name: (package / "config.py").read_text(encoding="utf-8") for package in packages}
    return sorted(name for name, text in configs.items() if "class VisionConfig" in text and "class TextConfig" in text)


def tiny(kind: type, sizes: dict[str, Any]) -> dict[str, Any]:
    """The fields of a config's class: sizes by their names, and its own defaults."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        default = field.default if field.default is not dataclasses.MISSING else None
        made = field.default_factory() if field.default_factory is not dataclasses.MISSING else default
        values[field.name] = sizes.get(field.name, made)
    return {name: value for name, value in values.items() if value is not None}


def config_of(family: str, package: Any) -> dict[str, Any]:
    from transformers import CONFIG_MAPPING

    theirs = CONFIG_MAPPING[family]().to_dict() if family in CONFIG_MAPPING else {}
    text = tiny(package.TextConfig, SIZES | {"rms_norm_eps": 1e-6})
    text["model_type"] = (theirs.get("text_config") or {}).get("model_type") or text.get("model_type") or family
    text["tie_word_embeddings"] = False  # a random output layer is not the embedding
    vision = tiny(package.VisionConfig, SIZES | VISION)
    vision.setdefault("model_type", (theirs.get("vision_config") or {}).get("model_type") or family)
    own = {key: value for key, value in theirs.items() if isinstance(value, (int, float))}
    own |= {"model_type": family, "vocab_size": SIZES["vocab_size"], "hidden_size": 32, "eos_token_id": 1}
    own = text | own | {"model_type": family}  # some of mlx-vlm's read the text model's settings here
    return own | {"tie_word_embeddings": False, "text_config": text, "vision_config": vision}


def outcome(family: str, folder: Path) -> str:
    """ "" where it works, or why not."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_vlm.utils import load_model as load_whole
    from mlx_vlm.utils import update_module_configs

    from backend.models.architectures import architecture_refusal
    from backend.models.loading import load_model
    from backend.utils.errors import UserError

    try:
        package = importlib.import_module(f"mlx_vlm.models.{family}")
        config = config_of(family, package)
    except Exception as error:
        return f"Not tried: {first_line(error)}"
    if refusal := architecture_refusal(config):
        return refusal
    try:
        if family in FAMILIES:
            tiny_vision_model(folder, family)
        else:
            parsed = package.ModelConfig.from_dict(json.loads(json.dumps(config)))
            parsed = update_module_configs(parsed, package, json.loads(json.dumps(config)), ["text", "vision"])
            mx.random.seed(0)
            model = package.Model(parsed)
            tiny_tokenizer(folder)
            (folder / "config.json").write_text(json.dumps(config))
            mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
        ids = mx.array([[5, 9, 40, 7, 3]])
        expected = load_whole(folder).language_model(ids).logits
        mx.eval(expected)
    except Exception as error:
        return f"Not tried: {first_line(error)}"
    try:
        own = load_model(str(folder), "model")[0](ids)
    except UserError as error:
        return error.faults[0].sentence.replace(str(folder), family)
    off = mx.abs(own - expected).max().item()
    return "" if off < 1e-3 else f"Its logits are off by {off:.2g}."


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0][:120]}"


def _child(family: str, answer: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        answer.send(outcome(family, Path(folder)))


def try_apart(family: str) -> str:
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.Process(target=_child, args=(family, theirs))
    child.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(LIMIT_S) else f"Not tried: it took more than {LIMIT_S} s."
    except EOFError:
        return "Not tried: its process ended."
    finally:
        child.kill()
        child.join()


def main() -> None:
    record = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else {}
    found = {name: why for part in ("fails", "not tried") for name, why in record.get(part, {}).items()}
    found |= dict.fromkeys([*record.get("pictures", []), *record.get("text", [])], "")
    found |= dict.fromkeys(record.get("refused", []), REFUSED)
    for family in sys.argv[1:] or families():
        found[family] = try_apart(family)
        print(f"{family}: {found[family] or 'works'}", flush=True)

    def those(part: str) -> dict[str, str]:
        return {name: why for name, why in sorted(found.items()) if _part(name, why) == part}

    named = {part: list(those(part)) for part in ("pictures", "text", "refused")}
    record = {"versions": {name: version(name) for name in ("mlx", "mlx-lm", "mlx-vlm")}} | named
    record |= {part: those(part) for part in ("fails", "not tried")}
    RECORD.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _part(family: str, why: str) -> str:
    if not why:
        return "pictures" if family in FAMILIES else "text"
    is_refused = why.startswith((REFUSED, "A model of the kind"))
    return "refused" if is_refused else "not tried" if why.startswith("Not tried") else "fails"


if __name__ == "__main__":
    main()
