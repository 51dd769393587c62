"""README.md of the folder, and what of it is told elsewhere: how to run it, what is where, what is not as it is here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from backend.run.export.trl.requirements import Requirements
from backend.spec.other_programs.into_trl.writing import LeftOut

FILES = {
    "train.py": "trains: TRL's GRPOTrainer with what this list says",
    "grpo_config.yaml": "TRL's arguments, as `trl grpo --config` takes them",
    "settings.json": "the run's settings under their names in GRPO Studio, for the other files",
    "dataset.py": "makes the rows: `data/` for training and validation, `held_out/` for the test and further sets",
    "rewards.py": "the reward functions under the names that TRL calls them by",
    "reward_calls.py": "gives them what they expect",
    "backend/": "the parts of GRPO Studio's code that these need, as they are there",
    "source/": "the rows of local files",
    "user_code/": "your own reward and map functions",
    "model/": "the model, which has no name on Hugging Face",
}
"""What may lie in the folder → what it is."""


def readme(
    name: str,
    requirements: Requirements,
    files: Iterable[str],
    by_files: Mapping[str, str],
    left_out: Iterable[LeftOut],
) -> str:
    """The text. `files`: the names at the top of the folder."""
    listed = [f"| `{file}` | {about} |" for file, about in FILES.items() if file in set(files)]
    carried = [f"| `{setting}` | {how} |" for setting, how in by_files.items()]
    left = [f"| `{row.setting}: {_in_code(row.shown)}` | {row.instead} |" for row in left_out]
    parts = [
        f"# {name}, for TRL\n\nWritten by GRPO Studio. It trains on CUDA machines with TRL {requirements.trl} and needs nothing of GRPO Studio.\n",
        _RUN.format(install=requirements.install_line),
        "## What is here\n\n| | |\n|---|---|\n" + "\n".join(listed) + "\n",
        "## What TRL has no argument for, and these files do\n\nWhat train.py does, `trl grpo` alone does not.\n\n| setting | how |\n|---|---|\n"
        + "\n".join(carried) + "\n" if carried else "",
        "## What is not carried over\n\n| setting | what stands in for it |\n|---|---|\n" + "\n".join(left) + "\n"
        if left
        else "## What is not carried over\n\nNothing: every setting of this run has its counterpart.\n",
        _DIFFERENT,
    ]  # fmt: skip
    return "\n".join(part for part in parts if part)


def _in_code(text: str) -> str:
    """A value between grave accents in a table, which it can leave neither by one of its own nor by a column's border."""
    return text.replace("`", "'").replace("|", "\\|")


_RUN = """\
## Run it

One GPU; [uv](https://docs.astral.sh/uv/) installs what the first lines of train.py name:

    uv run train.py

Several GPUs, here four, where the packages are installed. train.py divides an update among them, so that it has as many completions as
on one:

    {install}
    accelerate launch --num_processes 4 train.py

Hugging Face Jobs, from this folder. The folder is copied into a bucket, and `output/` is written there; what the job prints says how to
fetch it:

    hf jobs uv run --flavor a100-large --timeout 12h --secrets HF_TOKEN -v .:/run:rw train.py --folder /run

TRL's own script, which knows the arguments alone (below is what it leaves out):

    python dataset.py
    trl grpo --config grpo_config.yaml

Any argument of `trl grpo` may follow train.py and overrides the file: `--max_steps 2 --report_to none`. Without CUDA, train.py trains
on the CPU and samples with transformers. Reward functions run in the trainer's own process: code that a model wrote is executed
there, so use a machine or container that may be lost.

`output/` has the adapter in PEFT's files, or the whole model. An adapter comes home to GRPO Studio, onto the model there, with its logits
compared:

    python -m backend import output --model MODEL
"""

_DIFFERENT = """\
## What is different all the same

Sampling draws other random numbers, and vLLM or transformers computes in other kernels: the run is the same experiment, not the same
numbers. Loss and advantages of one batch are the same to five digits (GRPO Studio's tests compare them with TRL's).
"""
