"""docs/other-programs.md, written from the tables: `python -m tests.support.other_programs_page`."""

from collections.abc import Iterable, Iterator

from backend.config.other_programs.keys import IgnoredKey, Refused, Translated, Words
from backend.config.other_programs.peft import LORA_WORDS, OTHER_KINDS
from backend.config.other_programs.translation import PROGRAMS
from backend.utils.disk import replace_file
from backend.utils.places import project_root

PAGE = project_root() / "docs" / "other-programs.md"

ADAPTER_FILES = "The files of an adapter: [exports](exports.md#import-an-adapter)."
_OPENING = """\
# Settings of other programs

GRPO Studio reads the settings of TRL, mlx-lm-lora (with mlx-lm) and mlx-grpo: in a file that is opened in the window
or given to any verb, and with `--set`.

```
python -m backend check trl.yaml                      # what each key becomes, and every problem
python -m backend import trl.yaml --output mine.yaml  # the same as a file of ours
python -m backend train trl.yaml --set num_generations=16
```

- A file belongs to a program if it has a key that only that program has, such as `per_device_train_batch_size` (TRL),
  `lora_parameters` (mlx-lm-lora) or `num_rollout_samples` (mlx-grpo). Shared keys (`iters`, `save_every`) then have
  that program's units, and missing keys its defaults: of TRL full fine-tuning, three epochs, beta 0, groups of 8.
- `defaults: ours` (a line, `--set`, or *Use GRPO Studio's defaults* on the Train page) takes ours instead. So does a
  file that mixes programs, or has our key for one of theirs (`iters` for `max_steps`), unless `defaults: theirs`.
- The terminal, the event log and a banner on the Train page say what was converted, what has no effect and which
  defaults were taken. The run's `config.yaml` has every value in our keys.
- TRL counts completions and updates, GRPO Studio prompts and steps: 8 completions a batch, 4 batches an update and 8
  completions a prompt are `batch_size: 1` and `gradient_accumulation_steps: 4`. In mlx-lm-lora an iteration is one
  batch: `iters: 1000` with `gradient_accumulation_steps: 10` are 100 steps of 10 batches.
"""


def page() -> str:
    """The page as Markdown."""
    programs = (line for program in PROGRAMS for line in _section(program.name, program.source, program.words))
    return "\n".join(
        [_OPENING, *programs, *_section("PEFT", "LoraConfig of peft 0.21", LORA_WORDS), *_other_kinds(), ""]
    )


def _section(name: str, source: str, words: Words) -> Iterator[str]:
    yield f"## {name}\n"
    yield f"From {source}: {len(words)} keys.\n"
    translated: dict[tuple[str, ...], list[str]] = {}
    for word, fate in words.items():
        if isinstance(fate, Translated):
            translated.setdefault(tuple(fate.settings), []).append(word)
    same = [word for settings, listed in translated.items() for word in listed if settings == (word,)]
    yield f"Same name here, perhaps in other units: {_listed(same)}.\n"
    yield "| key | here |\n|---|---|"
    for settings, listed in translated.items():
        if others := [word for word in listed if settings != (word,)]:
            yield f"| {_listed(others)} | {_listed(settings)} |"
    ignored = sum(isinstance(fate, IgnoredKey) for fate in words.values())
    yield f"\nWithout effect: {ignored} keys, which `check` explains."
    if refused := [word for word, fate in words.items() if isinstance(fate, Refused)]:
        yield f"\nRefused: {_listed(refused)}."
    yield ""


def _other_kinds() -> Iterator[str]:
    yield f"Other kinds of adapters are refused: {_listed(OTHER_KINDS)}. " + ADAPTER_FILES


def _listed(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


if __name__ == "__main__":
    replace_file(PAGE, page())
