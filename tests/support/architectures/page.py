"""docs/architectures.md, written from the record."""

from __future__ import annotations

from collections.abc import Mapping

from tests.support.architectures.outcome import DOCS, FINE_TUNES, Outcome, read_record, recorded_versions

PAGE = DOCS / "architectures.md"

MODELS = {
    "Klear": "Klear 46B", "afm7": "Apple's on-device model", "afmoe": "Trinity (Arcee)", "apertus": "Apertus", "baichuan_m1": "Baichuan M1",
    "bailing_hybrid": "Ling and Ring 2.5", "bailing_moe": "Ling and Ring 1 and 2", "bailing_moe_linear": "Ring Linear 2",
    "bailing_moe_v3": "Ling 3", "bitnet": "BitNet b1.58", "cohere": "Command R", "cohere2": "Command R7B, Command A", "dbrx": "DBRX",
    "deepseek": "DeepSeek MoE", "deepseek_v2": "DeepSeek V2, Coder V2", "deepseek_v3": "DeepSeek V3 and R1, Kimi K2, Moonlight",
    "deepseek_v32": "DeepSeek V3.2", "deepseek_v41": "DeepSeek V4.1", "dots1": "dots.llm1", "ernie4_5": "ERNIE 4.5, dense",
    "ernie4_5_moe": "ERNIE 4.5 MoE", "exaone": "EXAONE 3", "exaone4": "EXAONE 4", "exaone_moe": "K-EXAONE", "falcon_h1": "Falcon-H1",
    "gear": "Gear", "gemma": "Gemma 1", "gemma2": "Gemma 2", "gemma3": "Gemma 3, 4B and larger", "gemma3_text": "Gemma 3, 270M and 1B",
    "gemma3n": "Gemma 3n", "gemma4": "Gemma 4", "gemma4_text": "Gemma 4, text only", "glm": "GLM 4 (2024)", "glm4": "GLM 4 (0414)",
    "glm4_moe": "GLM 4.5, 4.6 and 4.7", "glm4_moe_lite": "GLM 4.7 Flash", "glm_moe_dsa": "GLM 5", "gpt2": "GPT-2",
    "gpt_bigcode": "StarCoder, SantaCoder", "gpt_neox": "Pythia, GPT-NeoX", "gpt_oss": "GPT-OSS", "gptj": "GPT-J",
    "granite": "Granite 3", "granitemoe": "Granite 3 MoE", "granitemoehybrid": "Granite 4", "helium": "Helium",
    "hunyuan": "Hunyuan Large", "hunyuan_v1_dense": "Hunyuan, dense", "internlm2": "InternLM 2 and 2.5", "internlm3": "InternLM 3",
    "iquestloopcoder": "IQuest Loop Coder", "jamba": "Jamba", "kimi_k25": "Kimi K2.5", "kimi_k3": "Kimi K3",
    "kimi_linear": "Kimi Linear", "kimi_vl": "Kimi VL", "laguna": "Laguna", "lfm2": "LFM 2", "lfm2-vl": "LFM 2 VL",
    "lfm2_moe": "LFM 2 MoE", "lille-130m": "Lille 130M", "llama": "Llama 2 and 3, Mistral 7B, Yi, SmolLM, SmolLM2",
    "llama4": "Llama 4", "llama4_text": "MobileLLM R1", "longcat_flash": "LongCat Flash", "longcat_flash_ngram": "LongCat Flash Lite",
    "mamba": "Mamba, Falcon Mamba", "mamba2": "Mamba 2, Codestral Mamba", "mellum": "Mellum 2", "mimo": "MiMo 7B",
    "mimo_v2_flash": "MiMo V2 Flash", "minicpm": "MiniCPM 1 and 2", "minicpm3": "MiniCPM 3", "minimax": "MiniMax M2",
    "minimax_m3_vl": "MiniMax M3", "ministral3": "Ministral 3, text only", "mistral3": "Mistral Small 3.1 and 3.2, Ministral 3",
    "mistral4": "Mistral Small 4", "mixtral": "Mixtral", "muse_glimmer": "Muse Glimmer", "muse_spark": "Muse Spark",
    "nanbeige": "Nanbeige 4", "nanochat": "nanochat", "nemotron": "Nemotron, Minitron", "nemotron-nas": "Llama Nemotron Super and Ultra",
    "nemotron_h": "Nemotron-H, Nemotron Nano 2 and 3", "olmo": "OLMo 1", "olmo2": "OLMo 2", "olmo3": "OLMo 3",
    "olmo_hybrid": "OLMo Hybrid", "olmoe": "OLMoE", "openelm": "OpenELM", "phi": "Phi 1 and 2", "phi3": "Phi 3 and 3.5 mini, Phi 4",
    "phi3small": "Phi 3 small", "phimoe": "Phi 3.5 MoE", "phixtral": "Phixtral", "pixtral": "Pixtral 12B", "plamo": "PLaMo 1",
    "plamo2": "PLaMo 2", "plamo3": "PLaMo 3", "prism_hadamard_qwen35": "Qwen 3.5 in 2-bit Hadamard packs", "qwen": "Qwen 1",
    "qwen2": "Qwen 2 and 2.5, DeepSeek-R1-Distill-Qwen", "qwen2_moe": "Qwen 1.5 and 2 MoE", "qwen2_vl": "Qwen 2 and 2.5 VL",
    "qwen3": "Qwen 3, dense", "qwen3_5": "Qwen 3.5 and 3.6, dense", "qwen3_5_moe": "Qwen 3.5 and 3.6 MoE", "qwen3_moe": "Qwen 3 MoE",
    "qwen3_next": "Qwen 3 Next", "qwen3_vl": "Qwen 3 VL, dense", "qwen3_vl_moe": "Qwen 3 VL MoE", "recurrent_gemma": "RecurrentGemma",
    "rwkv7": "RWKV 7", "seed_oss": "Seed OSS", "smollm3": "SmolLM3", "solar_open": "Solar Open", "spark2_5": "Spark 2.5",
    "stablelm": "StableLM 2", "starcoder2": "StarCoder 2", "step3p5": "Step 3.5", "talkie": "Talkie", "telechat3": "TeleChat 3",
    "youtu_llm": "Youtu LLM",
}  # fmt: skip
"""The best-known models of a type. Not from mlx-lm: a new type has none until somebody adds it."""

FINE_TUNE_NAMES = {"lora": "LoRA", "dora": "DoRA", "full": "full"}

PAGE_TEXT = """\
# Model families

Written by `make architectures`, which tries every model type of the installed mlx-lm ({versions}); edit
`tests/support/architectures/page.py`, not this page. Of {count} types {fast} work on every fast path, {slow} work with a slow path, and {refused}
are refused.

For each type the script makes a tiny random model and takes it through a step with LoRA, a stop, a resume that must end with the
weights of an uninterrupted run, its adapters opened by mlx-lm with equal logits, and an export that is loaded back; then two updates each with LoRA,
DoRA and full fine-tuning. The log-probabilities recorded while sampling agree with training's forward pass within 1e-4 nats, and the gradient of
every weight with that of plain autodiff over each row alone, with gradient checkpointing and without. Random weights show correctness, not how well a family
learns. Of models that also read images or sound, the text model is trained. All of this runs on a CPU: an operation that only Metal computes in
another way is not covered. Where it has no gradient there, the run is refused when it starts, with the operation's name (RWKV 7: its Metal kernel).

**Cache** is the kind of state that a layer keeps of earlier tokens. **Decoded** is how the completions of a step are sampled: *all
rows together* in one compiled step, or *a group at a time*, where only the completions of one prompt, whose prompt is
equally long, share a batch. The second is slower when a step has several prompts. A trial on three short prompts of unequal
length decides when a run starts: where the model raises, or its logits differ from those of each prompt alone, it is decoded
a group at a time.

Notes name the other slow paths. A run's event log names all of its model's with their reason:

- **Whole rows**: a prompt is read once per completion, not once per group.
- **Whole logits**: the vocabulary is computed for prompt tokens too, which takes more memory.
- **Not fused**: decoding runs layer by layer as the model's code does.

| Family | Models | Cache | Decoded | Fine-tune | Note |
|---|---|---|---|---|---|
{rows}

DoRA is refused on models with experts in stacked layers: mlx-lm has no DoRA for them.

## What is refused

Each refusal is one sentence at the setting concerned, before the weights change; those of this table come at `check`, and in the list of models.

| What | Why |
|---|---|
{refusals}
| Full fine-tuning of a quantised model | Packed weights have no gradient. |
| An operation without a gradient on this device | Reported when the run starts, with the operation's name. |
| A model whose tokens attend to later ones | Found by a trial when it is loaded: what is sampled token by token would not be what is learned from. |
"""


def write_page() -> None:
    """Write the page from the record on disk."""
    PAGE.write_text(page_of(read_record(), recorded_versions()), encoding="utf-8")


def page_of(record: Mapping[str, Outcome], versions: Mapping[str, str]) -> str:
    usable = {arch: outcome for arch, outcome in record.items() if not outcome.refusal}
    refused = {arch: outcome for arch, outcome in record.items() if outcome.refusal}
    fast = sum(not outcome.slow_paths for outcome in usable.values())
    return PAGE_TEXT.format(
        versions=", ".join(f"{name} {number}" for name, number in versions.items()),
        count=len(record), fast=fast, slow=len(usable) - fast, refused=len(refused),
        rows="\n".join(_row(arch, usable[arch]) for arch in sorted(usable, key=str.casefold)),
        refusals="\n".join(f"| `{arch}` ({MODELS.get(arch, '–')}) | {refused[arch].refusal} |" for arch in sorted(refused, key=str.casefold)),
    )  # fmt: skip


def _row(arch: str, outcome: Outcome) -> str:
    decoded = "all rows together" if outcome.together else "a group at a time"
    tuned = ", ".join(FINE_TUNE_NAMES[kind] for kind in FINE_TUNES if kind not in outcome.refused)
    cells = [f"`{arch}`", MODELS.get(arch, "–"), ", ".join(outcome.caches), decoded, tuned, " ".join(_notes(outcome))]
    return "| " + " | ".join(cells) + " |"


def _notes(outcome: Outcome) -> list[str]:
    notes = {
        "Does not work yet.": bool(outcome.failures),
        "Whole rows.": not outcome.shared_prompts,
        "Whole logits.": outcome.whole_logits,
        "Not fused.": any("not fused" in sentence for sentence in outcome.slow_paths),
    }
    return [note for note, holds in notes.items() if holds]
