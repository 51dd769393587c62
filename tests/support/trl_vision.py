"""Run by a Python that has TRL and torch, which ours has not: one GRPO batch with pictures by TRL's own trainer.
Knows nothing of this project.

    python trl_vision.py FOLDER

FOLDER holds `model`, a Qwen3-VL that transformers reads, adapters.safetensors with PEFT's names, batch.safetensors:
the model's inputs beside ids, and batch.json: rows with ids, and settings. Prints JSON: advantages, loss,
log-probabilities, the gradient by name.
"""

import json
import sys
from pathlib import Path
from typing import Any

import peft
import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration
from transformers.feature_extraction_utils import BatchFeature
from transformers.processing_utils import ProcessorMixin
from trl import GRPOConfig, GRPOTrainer

TARGETS = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"


class Processor(ProcessorMixin):
    """Gives pictures that are already pixels."""

    def __init__(self, tokenizer: Any, inputs: dict[str, torch.Tensor]) -> None:
        self.tokenizer, self.inputs, self.chat_template = tokenizer, inputs, "{{ messages }}"

    def __call__(self, **_: Any) -> BatchFeature:
        return BatchFeature(dict(self.inputs))

    def apply_chat_template(self, *_: Any, **__: Any) -> str:
        return ""

    def batch_decode(self, ids: Any, **_: Any) -> list[str]:
        return ["" for _ in ids]


def main(folder: Path) -> dict[str, Any]:
    batch = json.loads((folder / "batch.json").read_text())
    rows, settings = batch["rows"], batch["settings"]
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder / "model", dtype=torch.float32)
    processor = Processor(tokenizer, load_file(folder / "batch.safetensors"))
    prompt = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}]
    arguments = GRPOConfig(
        output_dir=str(folder / "out"), per_device_train_batch_size=len(rows), gradient_checkpointing=False,
        use_cpu=True, bf16=False, report_to=[], loss_type="grpo", mask_truncated_completions=False, **settings["grpo"],
    )  # fmt: skip
    trainer = GRPOTrainer(
        model,
        reward_funcs=lambda **_: [row["reward"] for row in rows],
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": prompt}] * 2),
        processing_class=processor,
        peft_config=peft.LoraConfig(target_modules=TARGETS, task_type="CAUSAL_LM", **settings["lora"]),
    )
    values = load_file(folder / "adapters.safetensors")
    trained = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    trained = {name.replace(".default.weight", ".weight"): p for name, p in trained.items()}
    assert trained.keys() == values.keys(), (sorted(trained), sorted(values))
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(values[name])
    ids = [row["prompt"] for row in rows], [row["completion"] for row in rows]
    images = [["a picture"] for _ in rows]
    trainer._generate = lambda prompts: (*ids, None, [""] * len(rows), None, {}, images, [])
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    inputs = trainer._generate_and_score_completions([{"prompt": prompt, "images": each} for each in images])
    scores: list[torch.Tensor] = []
    compute = trainer._get_per_token_logps_and_entropies

    def recorded(*given: Any, **named: Any) -> Any:
        found = compute(*given, **named)
        scores.append(found[0].detach())
        return found

    trainer._get_per_token_logps_and_entropies = recorded
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    lengths = [len(row["completion"]) for row in rows]
    return {
        "advantages": inputs["advantages"].tolist(),
        "logps": [row[:n].tolist() for row, n in zip(scores[-1], lengths, strict=True)],
        "ref_logps": [row[:n].tolist() for row, n in zip(inputs["ref_per_token_logps"], lengths, strict=True)],
        "loss": loss.item(),
        "gradient": {name: parameter.grad.tolist() for name, parameter in trained.items()},
    }


if __name__ == "__main__":
    print("\n" + json.dumps(main(Path(sys.argv[1]))))
