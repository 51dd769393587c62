"""The training prompts of each stage of a run, and which of them its steps take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from backend.data.problems import PromptFormat
from backend.data.prompt_stream import PromptStream
from backend.data.prompts import TokenizedPrompts, measure_first_rows
from backend.data.rows import check_columns
from backend.run.run_inputs import StageRows, stage_mistake
from backend.spec.config import Config
from backend.spec.faults import Mistake
from backend.spec.stages import Stages, stage_at


@dataclass(slots=True)
class StagePrompts:
    """`prompts` and `rows` have one entry a stage. Stages with the same rows and format share their prompts."""

    stages: Stages
    rows: Sequence[StageRows]
    prompts: Sequence[TokenizedPrompts]
    present: int = 0
    """The stage whose prompts are taken."""

    def named(self) -> dict[str, TokenizedPrompts]:
        """The prompts by a name for notes, each once."""
        found: dict[str, TokenizedPrompts] = {}
        for number, prompts in enumerate(self.prompts, 1):
            if not any(prompts is known for known in found.values()):
                found[f"train (stage {number})"] = prompts
        return found

    def begin(self, step: int, stream: PromptStream) -> None:
        """Let the stream take the prompts of the stage of `step`."""
        index = stage_at(self.stages, step)
        if self.prompts[index] is not stream.problems:
            stream.go_on_with(self.prompts[index], are_same_rows=self.rows[index] is self.rows[self.present])
        self.present = index


def tokenized_stages(
    config: Config, configs: Sequence[Config], rows: Sequence[StageRows], make: Callable[..., TokenizedPrompts]
) -> StagePrompts:
    """The prompts of every stage, their first rows tokenised. `configs`: the settings of each; `make(rows, format, source)` makes prompts.
    Raises Mistake, naming the stage."""
    prompts: list[TokenizedPrompts] = []
    for index, (of_stage, own) in enumerate(zip(configs, rows, strict=True)):
        prompt_format = PromptFormat.of(of_stage)
        known = (each for each in prompts if each.are_of(own.rows, prompt_format))
        try:
            prompts.append(next(known, None) or _tokenized(of_stage, own, prompt_format, make))
        except Mistake as mistake:
            raise stage_mistake(index, mistake) from None
    return StagePrompts(config.stages, rows, prompts)


def _tokenized(
    config: Config, own: StageRows, prompt_format: PromptFormat, make: Callable[..., TokenizedPrompts]
) -> TokenizedPrompts:
    if faults := check_columns(own.rows, config, own.source):
        raise Mistake(faults)
    prompts = make(own.rows, prompt_format, own.source)
    measure_first_rows(prompts, "train")
    prompts.measure(prompts.longest_texts())  # memory is planned for the longest prompt of all rows
    return prompts
