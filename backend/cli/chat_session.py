"""What the verbs `generate` and `chat` share: loading, sampling settings, the terminal's view of answers, their scores."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from backend.cli.completions import checkpoints, run_names
from backend.cli.output import tell
from backend.config.config import SETTINGS, Config, problems
from backend.rewards.catalogue.scorable import scorable
from backend.utils.errors import UserError
from backend.utils.text import quote

if TYPE_CHECKING:
    from backend.sampling.chat.chat import Chat, ChatQuestion, Reply
    from backend.sampling.chat.sides import SideName

Name = Annotated[
    str,
    typer.Argument(
        metavar="RUN|MODEL", help="A run (folder or name), or a model (folder or id).", autocompletion=run_names
    ),
]
CheckpointKey = Annotated[
    str, typer.Option("--checkpoint", help="Of a run: end, best, or a step.", autocompletion=checkpoints)
]
Temperature = Annotated[float | None, typer.Option("--temperature", help="0 takes the likeliest token.")]
TopP = Annotated[float | None, typer.Option("--top-p", help="1 keeps all tokens.")]
TopK = Annotated[int | None, typer.Option("--top-k", help="0 keeps all tokens.")]
MinP = Annotated[float | None, typer.Option("--min-p", help="0 keeps all tokens.")]
MaxTokens = Annotated[int | None, typer.Option("--max-tokens", help="Longest answer.")]
Seed = Annotated[int, typer.Option("--seed", help="The same seed gives the same answer.")]
System = Annotated[str | None, typer.Option("--system", help="A system message in place of the run's.")]
FreeOutput = Annotated[
    bool, typer.Option("--free-output", help="Do not hold answers to the run's regex or JSON schema.")
]
Score = Annotated[bool, typer.Option("--score", help="Score each answer with the run's reward functions.")]


@dataclass(slots=True)
class Asking:
    """How prompts are answered: by the run's own settings where nothing else is given."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    seed: int = 0
    system: str | None = None
    free_output: bool = False

    def question(self, config: Config, prompt: str, **more: Any) -> ChatQuestion:
        """Raises UserError naming the setting for a value that it may not have."""
        from backend.sampling.chat.chat import ChatQuestion
        from backend.sampling.sampler import Sampling

        given = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p}
        changes = {key: value for key, value in given.items() if value is not None}
        limit = self.max_tokens if self.max_tokens is not None else config.max_completion_length
        most = int(SETTINGS["max_completion_length"].high or 0)
        # Temperature 0, which a run may not have, is greedy here.
        checked = {key: value for key, value in changes.items() if (key, value) != ("temperature", 0)}
        faults = [fault for fault in problems({"model": "-", "data": "-", **checked}) if fault.setting in checked]
        if faults:
            raise UserError(faults)
        if not 1 <= limit <= most:
            raise UserError("max_tokens", f"Max tokens must be from 1 to {most:,}, not {quote(limit)}.")
        of_run = Sampling.of(config)
        if self.free_output:
            of_run = replace(of_run, grammar=None)
        return ChatQuestion(
            prompt, sampling=replace(of_run, **changes), max_tokens=limit, seed=self.seed, system=self.system, **more
        )


def open_chat(name: str, checkpoint: str, runs_dir: Path | None, wanted: Sequence[SideName], asking: Asking) -> Chat:
    """Load a chat; notes go to stderr. `wanted` is what is loaded where the sides share no weights. Raises UserError, for settings of
    `asking` before anything is loaded."""
    from backend.sampling.chat.chat import Chat
    from backend.sampling.chat.sides import load_sides
    from backend.sampling.chat.source import find_source

    source = find_source(name, checkpoint, runs_dir)
    asking.question(source.config, "")
    wanted = wanted if source.run is not None else ("base",)
    return Chat(source, load_sides(source, wanted, lambda sentence: tell(sentence, file=sys.stderr, flush=True)))


@dataclass(slots=True)
class AnswerPrinter:
    """Prints answers as they come; with `labels` each under the name of its side, in colour on a terminal."""

    labels: bool
    texts: dict[SideName, str] = field(default_factory=dict)
    """What has been printed of each side."""

    def print_label(self, side: str) -> None:
        if self.labels:
            from backend.cli.consoles import new_console

            new_console(highlight=False, markup=True).print(
                f"[bold cyan]{side}[/]" if side == "tuned" else f"[bold]{side}[/]"
            )

    def print_text(self, side: SideName, text: str) -> None:
        self.texts[side] = self.texts.get(side, "") + text
        tell(text, end="", flush=True)


def answer(chat: Chat, question: ChatQuestion, sides: Sequence[SideName], printer: AnswerPrinter | None) -> list[Reply]:
    """Answers one after the other, which a terminal can show, where the window shows both at once."""
    replies: list[Reply] = []
    for side in sides:
        if printer is None:
            replies.append(chat.reply(question, [side])[side])
            continue
        printer.print_label(side)
        replies.append(chat.reply(question, [side], printer.print_text)[side])
        tell(flush=True)
    return replies


def score(config: Config, replies: Sequence[Reply]) -> list[dict[str, Any]]:
    """{"rewards": {function: score}, "reward"} of each reply, by the run's functions in the sandbox. Functions that need an answer are
    left out where none is known. Raises UserError where a function fails."""
    from backend.rewards.completion_lines import line_of
    from backend.rewards.sandbox.client import SandboxClient
    from backend.rewards.trial_scoring import ScoringSettings, score_lines

    has_answer = bool(replies[0].problem.answer)
    names, weights, _ = scorable(config.reward_functions, config.reward_weights, has_answer=has_answer)
    if not names:
        return [{"rewards": {}, "reward": None} for _ in replies]
    sandbox = SandboxClient()
    settings = replace(ScoringSettings.of(config), names=names, weights=weights)
    try:
        scored = score_lines(sandbox, [line_of(reply.group) for reply in replies], settings)
    finally:
        sandbox.close()
    errors = [function["error"]["sentence"] for function in scored["functions"] if function["error"]]
    if errors:
        raise UserError("reward_functions", " ".join(errors))
    return [{"rewards": row["rewards"], "reward": row["reward"]} for (row,) in scored["scored"]]


def scores_line(scored: dict[str, Any]) -> str:
    """“reward 1.6  r1_accuracy_reward_func 1  …”."""
    from backend.cli.progress import format_number

    parts = {"reward": scored["reward"], **scored["rewards"]}
    return "  ".join(f"{name} {format_number(value)}" for name, value in parts.items())
