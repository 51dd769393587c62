"""Run by a Python that has torch, transformers and peft, which ours has not: make tiny models with transformers' own
classes, and compute the logits of saved ones. Knows nothing of this project.

A line of JSON on stdin is a call, a line on stdout its result:

    ["make", FAMILY, FOLDER, SHARD_SIZE]     null
    ["logits", FOLDER, PEFT_ADAPTER]         the logits [T, V] of IDS; the adapter may be left out
    ["adapt", FOLDER, TO, SETTINGS]          a random adapter with these settings of LoraConfig is written; its logits
"""

import json
import sys

import peft
import torch
import transformers

IDS = [2, 40, 41, 42, 100, 200, 7, 300, 5]

COMMON = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
COMMON |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 4096}
COMMON |= {"eos_token_id": 1, "pad_token_id": 0, "bos_token_id": 2}
HEADS = {"head_dim": 16}
GEMMA = HEADS | {"query_pre_attn_scalar": 16, "sliding_window": 64}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SPECIAL = {
    "llama": {"tie_word_embeddings": False},
    "qwen3": HEADS | {"tie_word_embeddings": True},
    "gemma2": GEMMA,
    "gemma3_text": GEMMA | {"layer_types": ["sliding_attention", "full_attention"]},
    "mistral": HEADS,
    "phi": {"tie_word_embeddings": False, "partial_rotary_factor": 0.5},
    "gemma": HEADS,
    "mixtral": EXPERTS,
    "qwen3_moe": EXPERTS | HEADS,
}


def make(family: str, folder: str, shard: str = "5GB") -> None:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **COMMON | SPECIAL.get(family, {}))
    model = transformers.AutoModelForCausalLM.from_config(config)
    # New models have small weights and norms of one: spread them, so that every mechanism shows in the logits.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder, max_shard_size=shard)


def logits(folder: str, adapter: str = "") -> list[list[float]]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    if adapter:
        model = peft.PeftModel.from_pretrained(model, adapter)
    model.eval()
    with torch.no_grad():
        return model(torch.tensor([IDS])).logits[0].tolist()


def adapt(folder: str, to: str, settings: str) -> list[list[float]]:
    torch.manual_seed(1)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **json.loads(settings)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:  # a magnitude must stay positive
                noise = 0.1 * torch.randn_like(parameter)
                parameter.mul_(1 + noise) if "magnitude" in name else parameter.add_(noise)
    model.save_pretrained(to)
    model.eval()
    with torch.no_grad():
        return model(torch.tensor([IDS])).logits[0].tolist()


if __name__ == "__main__":
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps({"make": make, "logits": logits, "adapt": adapt}[name](*arguments)), flush=True)
