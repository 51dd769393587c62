"""docs/other-programs.md, written from the tables: `python -m tests.support.other_programs_page`."""

from __future__ import annotations

from collections.abc import Iterator

from backend.config.other_programs.keys import IgnoredKey, OtherProgram, Refused, Translated, Word, Words
from backend.config.other_programs.peft import LORA_WORDS, OTHER_KINDS
from backend.config.other_programs.translation import PROGRAMS
from backend.utils.places import project_root
from backend.utils.whole_file import replace_file

PAGE = project_root() / "docs" / "other-programs.md"

_OPENING = """\
# Words of other programs

GRPO Studio reads the settings of TRL, mlx-lm-lora (with mlx-lm) and mlx-grpo, in a file that is opened in the window or given to any
verb, and with `--set`. Each word is read as settings of GRPO Studio, is accepted without effect because there is nothing here that
it could change, or is refused with what is nearest. This page is written from the tables that do it
(`backend/config/other_programs/`).

```
python -m backend check trl.yaml                      # what was made of each word, and every problem
python -m backend import trl.yaml --output mine.yaml  # the same as a file of ours, with a comment on what was not carried over
python -m backend train trl.yaml --set num_generations=16
```

**Whose file it is.** A file is for a program when it has a word that only that program has, such as `per_device_train_batch_size`
(TRL), `lora_parameters`, `train` or `adapter_path` (mlx-lm-lora), or `num_rollout_samples` (mlx-grpo). In such a file a word that
GRPO Studio has too means what it means there: `gradient_accumulation_steps`, `iters`, `save_every` and the like are counted in that
program's units. In a file of ours, and in one that mixes the words of several programs, it means what it means here.

**What a file leaves out** has GRPO Studio's defaults in `check`, `train` and the window. `import` writes the defaults of the file's
program instead, and lists them; `--our-defaults` leaves them out.

**Units.** TRL counts completions, and updates of the weights; GRPO Studio counts prompts, and steps. 8 completions a batch, 4
batches an update and 8 completions a prompt are `batch_size: 1` and `gradient_accumulation_steps: 4`. A batch that is not whole
groups of completions is refused. With several updates a rollout, `max_steps`, `save_steps`, `eval_steps` and `logging_steps` are
divided by them, rounded up. In mlx-lm-lora an iteration is one batch, and every k-th (`gradient_accumulation_steps: k`) and the last
update the weights: `iters: 1000` with k = 10 are 100 steps of 10 batches, the same prompts and the same updates.

**On the command line** `--set` takes the same words. In a file for another program, one of its words replaces that line of the file;
any other word means what it means here.
"""


def page() -> str:
    """The page as Markdown."""
    return "\n".join([_OPENING, *(line for program in PROGRAMS for line in _program(program)), *_peft()])


def _peft() -> Iterator[str]:
    yield "## PEFT\n"
    yield "In `peft_config` of a file for TRL, and in the adapter_config.json of an adapter that is imported (peft 0.21).\n"
    yield "### LoraConfig\n"
    yield from _table(LORA_WORDS, list(LORA_WORDS))
    yield "\nThe files of a trained adapter say more, and more of them is read: [what is imported](exports.md).\n"
    yield "### Other kinds\n"
    yield "Refused, with the nearest that exists:\n"
    yield "| `peft_type` | nearest here |\n|---|---|"
    kinds_by_nearest: dict[str, list[str]] = {}
    for kind, nearest in OTHER_KINDS.items():
        kinds_by_nearest.setdefault(nearest, []).append(kind)
    for nearest, kinds in kinds_by_nearest.items():
        yield f"| {_listed(kinds)} | {nearest} |"
    yield ""


def _program(program: OtherProgram) -> Iterator[str]:
    yield f"## {program.name}\n"
    yield f"From {program.source}: {len(program.words)} words.\n"
    for title, words in program.sections.items():
        yield f"### {title}\n"
        plain = [word for word in words if program.shares_meaning(word)]
        if plain:
            yield f"The same here: {_listed(plain)}.\n"
        yield from _table(program.words, [word for word in words if word not in plain])
        yield ""


def _table(table: Words, words: list[str]) -> Iterator[str]:
    """Words of one fate in one row."""
    alike: dict[tuple[str, str], list[str]] = {}
    for word in words:
        alike.setdefault(_cells(table[word]), []).append(word)
    yield "| words | here | |\n|---|---|---|"
    for (here, sentence), listed in alike.items():
        yield f"| {_listed(listed)} | {here} | {sentence} |"


def _listed(words: list[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def _cells(fate: Word) -> tuple[str, str]:
    """What a word becomes, and one sentence on it."""
    match fate:
        case Translated(settings, how):
            return ", ".join(f"`{key}`" for key in settings), how
        case IgnoredKey(reason):
            return "without effect", f"{reason[0].upper()}{reason[1:]}."
        case Refused(nearest, off):
            but = f" Accepted where it is {', '.join(str(value).lower() for value in off)}." if off else ""
            return "refused", f"{nearest}{but}"


if __name__ == "__main__":
    replace_file(PAGE, page())
