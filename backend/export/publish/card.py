"""The model card: README.md of the repository, from facts alone.

Its settings at the top are what the Hub sorts and links by (huggingface_hub's ModelCardData). Results come first, then how to use
the model, then how it was made.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator
from typing import Any

from huggingface_hub import ModelCardData
from huggingface_hub.constants import HUGGINGFACE_CO_URL_HOME

from backend.config.config import Config
from backend.config.loss_menu import kl_estimators, levels, losses
from backend.config.updates import OWN
from backend.export.publish.card_facts import CardFacts, CardSample, RewardEnds
from backend.trainer.evaluation.evaluation_rows import Decoding, Figures, MeanWithInterval
from backend.utils.text import one_line

CURVES_FILE, SETTINGS_FILE = "curves.png", "training.yaml"

MLX_LM = "[mlx-lm](https://github.com/ml-explore/mlx-lm)"
MESSAGES = 'messages = [{"role": "user", "content": "…"}]'

DEEPSEEK_MATH = """\
@misc{shao2024deepseekmath,
  title         = {DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models},
  author        = {Zhihong Shao and Peiyi Wang and Qihao Zhu and Runxin Xu and Junxiao Song and Xiao Bi and Haowei Zhang and
                   Mingchuan Zhang and Y. K. Li and Y. Wu and Daya Guo},
  year          = {2024},
  eprint        = {2402.03300},
  archivePrefix = {arXiv}
}"""


def model_card(facts: CardFacts) -> str:
    """The whole file, settings at the top included."""
    parts = (_summary, _results, _training_rewards, _usage, _samples, _method, _citation)
    body = "\n\n".join(text for part in parts if (text := "\n".join(part(facts)).strip()))
    return f"---\n{_metadata(facts).to_yaml()}\n---\n\n{body}\n"


def _metadata(facts: CardFacts) -> ModelCardData:
    """A fine-tune in 4 bits is marked as a fine-tune: the Hub calls quantized what has its base's weights in fewer bits, untrained."""
    is_adapter = facts.format.kind == "adapter"
    base: dict[str, Any] = {}
    if facts.base_is_on_hub:
        base = {"base_model": facts.base, "base_model_relation": "adapter" if is_adapter else "finetune"}
    adapters = [facts.config.train_type] if facts.config.train_type != "full" else []
    licence = facts.licence
    return ModelCardData(
        library_name=_library(facts),
        pipeline_tag="text-generation",
        tags=[*_OF_LIBRARY[_library(facts)], "grpo", "reinforcement-learning", *adapters, "grpo-studio"],
        license=licence.key if licence else None,
        license_name=licence.name if licence else None,
        license_link=licence.link if licence else None,
        datasets=[facts.dataset] if facts.dataset_is_on_hub else None,
        **base,
    )


_OF_LIBRARY = {"mlx": ("mlx", "mlx-lm"), "transformers": ("transformers",), "peft": ("peft",)}
"""Tags of each library."""


def _library(facts: CardFacts) -> str:
    """The library that loads the files, as the Hub calls it."""
    if facts.format.names == "mlx":
        return "mlx"
    return "peft" if facts.format.kind == "adapter" else "transformers"


# ── what it is, and what came of it ──────────────────────────────────────────────────────────────────────────────────


def _summary(facts: CardFacts) -> Iterator[str]:
    name = facts.repo_id.rpartition("/")[2]
    kind = {"lora": "LoRA adapter", "dora": "DoRA adapter"}.get(facts.config.train_type, "")
    is_adapter = facts.format.kind == "adapter"
    what = f"A {kind} for {_base(facts)}, trained" if is_adapter else f"{_base(facts)}, fine-tuned"
    steps = f", {facts.step:,} steps" if facts.step else ""
    yield f"# {name}\n"
    yield f"{what} with GRPO on {_dataset(facts)}{steps}, in GRPO Studio on MLX."
    if not facts.licence:
        yield "Its licence is that of the base model, which could not be read when this card was written."
    if not is_adapter:
        how = {"lora": " LoRA adapters were merged into it.", "dora": " DoRA adapters were merged into it."}
        yield f"Weights: {facts.format.label}.{how.get(facts.config.train_type, '')}"


def _base(facts: CardFacts) -> str:
    return f"[{facts.base}]({HUGGINGFACE_CO_URL_HOME}{facts.base})" if facts.base_is_on_hub else _code(facts.base)


def _dataset(facts: CardFacts) -> str:
    link = f"[{facts.dataset}]({HUGGINGFACE_CO_URL_HOME}datasets/{facts.dataset})"
    return link if facts.dataset_is_on_hub else f"a dataset of its author's ({_code(facts.dataset)})"


def _results(facts: CardFacts) -> Iterator[str]:
    yield "## Held-out results\n"
    if facts.evaluation is None:
        yield "These weights were not evaluated on held-out prompts; the rewards below are of prompts that they were trained on."
        return
    found, decoding = facts.evaluation, facts.evaluation.headline
    yield f"{found.sentence()}\n"
    yield from _table(("", "before", "after", "difference"), _figure_rows(decoding))
    how = (
        "greedily"
        if decoding.name == "greedy"
        else f"at temperature {decoding.temperature:g}, {decoding.completions} each"
    )
    yield f"\nSampled {how}. In brackets {100 * found.confidence:g} % intervals, paired by prompt for the difference."
    if found.pass_rule:
        yield found.pass_rule.sentence()


def _figure_rows(decoding: Decoding) -> Iterator[tuple[str, ...]]:
    before, after = (decoding.sides[name].figures for name in ("base", "tuned"))
    assert decoding.difference is not None
    sides = (before, after, decoding.difference)
    yield ("**Reward**", *(_interval(side.reward) for side in sides))
    for name in before.rewards:
        yield (_code(name), *(_interval(side.rewards.get(name)) for side in sides))
    for k in before.pass_at:
        yield (f"pass@{k}", *(_interval(side.pass_at.get(k), percent=True) for side in sides))
    yield ("Tokens of a completion", *(_interval(side.tokens) for side in sides))
    yield from _cut_off(sides)


def _cut_off(sides: Iterable[Figures]) -> Iterator[tuple[str, ...]]:
    values = [side.cut_off for side in sides]
    if any(value.value for value in values):
        yield ("Cut off at the length limit", *(_interval(value, percent=True) for value in values))


def _interval(found: MeanWithInterval | None, *, percent: bool = False) -> str:
    if found is None or found.value is None:
        return "–"
    ends = [found.value] if found.low is None or found.high is None else [found.value, found.low, found.high]
    shown = [f"{100 * end:.3g}\u00a0%" if percent else _number(end) for end in ends]
    return shown[0] if len(shown) == 1 else f"{shown[0]}\u00a0({shown[1]}\u00a0…\u00a0{shown[2]})"


def _training_rewards(facts: CardFacts) -> Iterator[str]:
    yield "## Rewards in training\n"
    rows = [_reward_row(row, _code(row.name)) for row in facts.rewards]
    total = facts.total
    yield from _table(
        ("reward function", "weight", "start", "end"),
        [*rows, ("**weighted sum**", "", _number(total.start), _number(total.end))],
    )
    yield "\nMean scores of sampled completions over the first and the last steps."
    if facts.curves:
        yield f"\n![Reward, KL and completion length by step]({CURVES_FILE})"


def _reward_row(row: RewardEnds, name: str) -> tuple[str, ...]:
    return name, f"{row.weight:g}", _number(row.start), _number(row.end)


# ── how to use it ────────────────────────────────────────────────────────────────────────────────────────────────────


def _usage(facts: CardFacts) -> Iterator[str]:
    yield "## How to use it\n"
    if _library(facts) != "mlx":
        yield from _usage_in_torch(facts)
    elif facts.format.kind == "adapter":
        yield from _usage_of_adapter(facts)
    else:
        yield from _usage_of_model(facts)
    if facts.config.system_prompt:
        yield f"\nIt was trained with a system prompt; it is `system_prompt` in [{SETTINGS_FILE}]({SETTINGS_FILE})."


def _usage_of_adapter(facts: CardFacts) -> Iterator[str]:
    yield f"With {MLX_LM}, on the base model that it was trained on:\n"
    yield "```bash\npip install mlx-lm"
    yield f"hf download {facts.repo_id} --local-dir adapter"
    yield f'mlx_lm.generate --model {shlex.quote(one_line(facts.base))} --adapter-path adapter --prompt "…"\n```'
    if facts.config.quantization != "none":
        yield f"\nIt was trained on the base in {facts.config.quantization} bits; on other weights it answers a little differently."


def _usage_of_model(facts: CardFacts) -> Iterator[str]:
    yield f"With {MLX_LM}:\n"
    yield f'```bash\npip install mlx-lm\nmlx_lm.generate --model {facts.repo_id} --prompt "…"\n```\n'
    yield "```python\nfrom mlx_lm import generate, load\n"
    yield f'model, tokenizer = load("{facts.repo_id}")'
    yield MESSAGES
    yield "prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)"
    yield f"print(generate(model, tokenizer, prompt=prompt, max_tokens={facts.config.max_completion_length}))\n```\n"
    yield f"In LM Studio: search for `{facts.repo_id}` under Discover, or open `lmstudio://open_from_hf?model={facts.repo_id}`."


def _usage_in_torch(facts: CardFacts) -> Iterator[str]:
    is_adapter = facts.format.kind == "adapter"
    yield f"With transformers{' and peft' if is_adapter else ''}:\n"
    yield "```python"
    if is_adapter:
        yield "from peft import AutoPeftModelForCausalLM as Model"
        yield "from transformers import AutoTokenizer\n"
    else:
        yield "from transformers import AutoModelForCausalLM as Model"
        yield "from transformers import AutoTokenizer\n"
    yield f'model = Model.from_pretrained("{facts.repo_id}")'
    yield f"tokenizer = AutoTokenizer.from_pretrained({json.dumps(facts.base if is_adapter else facts.repo_id, ensure_ascii=False)})"
    yield MESSAGES
    yield 'inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)'
    yield f"print(tokenizer.decode(model.generate(**inputs, max_new_tokens={facts.config.max_completion_length})[0]))\n```"


def _samples(facts: CardFacts) -> Iterator[str]:
    if not facts.samples:
        return
    yield "## What it writes\n"
    for sample in facts.samples:
        yield from _sample(sample)


def _sample(sample: CardSample) -> Iterator[str]:
    yield f"**Prompt**\n\n{_fenced(sample.prompt)}\n"
    for heading, text, reward in sample.completions:
        yield f"{heading}{'' if reward is None else f', reward {_number(reward)}'}:\n\n{_fenced(text)}\n"


def _fenced(text: str) -> str:
    """Text as a code block whose fence is longer than any in it."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}text\n{text}\n{fence}"


# ── how it was made ──────────────────────────────────────────────────────────────────────────────────────────────────


def _method(facts: CardFacts) -> Iterator[str]:
    config = facts.config
    yield "## How it was trained\n"
    yield (
        "For each prompt, GRPO samples a group of completions, scores them with reward functions, and makes those that score above "
        f"their group's mean more likely ([DeepSeekMath](https://arxiv.org/abs/2402.03300)). {_loss_sentence(facts)}\n"
    )
    versions = _plain(", ".join(f"{name} {number}" for name, number in facts.versions.items()))
    rows = [
        ("Steps × prompts × completions", f"{facts.step or '–'} × {config.batch_size} × {config.group_size}"),
        ("Longest completion", f"{config.max_completion_length} tokens"),
        ("Learning rate", _learning_rate(config)),
        ("KL coefficient β", f"{config.beta:g}{_kl_formula(config)}"),
        ("Seed", str(config.seed)),
        ("Time", f"{_duration(facts.seconds)} on {_plain(facts.device)}"),
        ("Versions", versions or "–"),
    ]
    yield from _table(("", ""), rows, rest="---")
    yield f"\nEvery setting is in [{SETTINGS_FILE}]({SETTINGS_FILE}); GRPO Studio trains from it once `model` and `data` are yours."
    if facts.steps_before:
        yield f"\nIt began with the weights of another run, after {facts.steps_before:,} steps of that."
    if facts.changes:
        yield f"\nSettings were changed during training; the figures above and {SETTINGS_FILE} have the last ones:\n"
        yield from (f"- {_plain(change.sentence)}" for change in facts.changes)


def _learning_rate(config: Config) -> str:
    """With the optimizer where it is an object of the program that trained."""
    of_program = f"; {_plain(config.own_optimizer)}" if config.optimizer == OWN else ""
    if config.lr_schedule == OWN:
        return f"{_plain(config.own_schedule)}{of_program}"
    return f"{config.learning_rate:g}, {config.lr_schedule}{of_program}"


def _kl_formula(config: Config) -> str:
    """The formula of the KL term, where it is not the usual one."""
    if config.kl_estimator == "k3" or not config.beta:
        return ""
    return f", estimator: {next(row.name for row in kl_estimators() if row.key == config.kl_estimator).lower()}"


def _loss_sentence(facts: CardFacts) -> str:
    loss = next(row for row in losses() if row.key == facts.config.grpo_loss_type)
    level = next((row for row in levels() if row.key == facts.config.importance_sampling_level), None)
    ratio = f", with importance ratios by {level.name.lower()}" if level and level.key != "token" else ""
    if facts.config.ratio_against == "reference":
        ratio += ", with importance ratios against the reference model"
    return f"The loss is {loss.name} ({_paper(loss.paper)}){ratio}: {loss.sentence[0].lower()}{loss.sentence[1:]}"


def _paper(paper: str) -> str:
    number = paper.removeprefix("arXiv:")
    return f"[{paper}](https://arxiv.org/abs/{number})" if number != paper else paper


def _citation(facts: CardFacts) -> Iterator[str]:
    yield f"## Citation\n\n```bibtex\n{DEEPSEEK_MATH}\n```"


# ── text of others ───────────────────────────────────────────────────────────────────────────────────────────────────


def _code(text: str) -> str:
    """A name as one code span. One with grave accents has a longer delimiter around it."""
    name, delimiter = one_line(text), "`"
    while delimiter in name:
        delimiter += "`"
    return f"`{name}`" if delimiter == "`" else f"{delimiter} {name} {delimiter}"


def _plain(text: str) -> str:
    """Text on one line that is no link, picture, code or HTML in Markdown."""
    return re.sub(r"[\\`\[\]<>&!]", r"\\\g<0>", one_line(text))


# ── words ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]], rest: str = "---:") -> Iterator[str]:
    """Markdown; `rest` aligns every column but the first."""
    yield f"| {' | '.join(head)} |"
    yield f"|{'|'.join(['---', *['---:'] * (len(head) - 1)])}|"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}".replace("-", "−")


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
