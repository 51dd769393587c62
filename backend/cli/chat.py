"""The verb `chat`: a conversation in the terminal, with the tuned model, its base, or both on the same prompts.

Lines that begin with / are commands (COMMANDS); Ctrl-C stops an answer, Ctrl-D ends the chat.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from backend.cli.chat_session import (
    AnswerPrinter,
    Asking,
    CheckpointKey,
    FreeOutput,
    MaxTokens,
    MinP,
    Name,
    Score,
    Seed,
    System,
    Temperature,
    TopK,
    TopP,
    answer,
    open_chat,
    score,
    scores_line,
)
from backend.cli.exit_codes import verb
from backend.cli.options import AllowCode, ExistingRunsDir
from backend.cli.output import tell
from backend.rewards.catalogue.allowed_code import require_allowed
from backend.utils.errors import UserError
from backend.utils.numbers import written_whole
from backend.utils.text import quote

if TYPE_CHECKING:
    from backend.sampling.chat.chat import Chat, Turn
    from backend.sampling.chat.sides import SideName

COMMANDS = {
    "/base": "the model before training answers",
    "/tuned": "the tuned model answers",
    "/both": "both answer, with the same random numbers",
    "/row N": "ask row N of the test split, or a random one, in a new conversation",
    "/reset": "begin a new conversation",
    "/system TEXT": "another system message, in a new conversation; without a text none",
    "/seed N": "another seed",
    "/help": "this list",
    "/quit": "end",
}


@verb
def chat(
    name: Name,
    checkpoint: CheckpointKey = "",
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    max_tokens: MaxTokens = None,
    seed: Seed = 0,
    system: System = None,
    free_output: FreeOutput = False,
    with_scores: Score = False,
    allow_code: AllowCode = False,
    runs_dir: ExistingRunsDir = None,
) -> None:
    """Talk to a run's model in the terminal, with its base beside it; /help lists the commands."""
    asking = Asking(temperature, top_p, top_k, min_p, max_tokens, seed, system, free_output)
    loaded = open_chat(name, checkpoint, runs_dir, ("base", "tuned"), asking)
    if with_scores and loaded.source.run is not None:
        require_allowed(loaded.source.config.model_dump(), allow=allow_code)
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # gives input() a history and editing
    TerminalChat(loaded, asking, with_scores=with_scores and loaded.source.run is not None).talk()


class TerminalChat:
    """Reads lines, obeys commands and has the others answered, until the end of the input or /quit."""

    def __init__(self, chat: Chat, asking: Asking, *, with_scores: bool) -> None:
        self._chat, self._asking, self._with_scores = chat, asking, with_scores
        self._sides: list[SideName] = list(chat.sides.sides)
        self._turns: dict[SideName, list[Turn]] = {}
        self._row: int | None = None
        self._has_ended = False
        self._commands: dict[str, Callable[[str], None]] = {
            "/base": lambda _: self._choose("base"),
            "/tuned": lambda _: self._choose("tuned"),
            "/both": lambda _: self._choose("base", "tuned"),
            "/row": self._ask_row,
            "/reset": lambda _: self._reset(),
            "/system": self._set_system,
            "/seed": self._set_seed,
            "/help": lambda _: self._help(),
            "/quit": lambda _: self._end(),
        }

    def talk(self) -> None:
        tell(self._introduction(), file=sys.stderr)
        while not self._has_ended:
            try:
                line = input("> " if sys.stdin.isatty() else "").strip()
            except (EOFError, KeyboardInterrupt):
                tell(file=sys.stderr)
                return
            try:
                self._obey(line) if line.startswith("/") else self._ask(line)
            except UserError as mistake:  # the conversation goes on
                tell(" ".join(fault.sentence for fault in mistake.faults), file=sys.stderr)

    def _introduction(self) -> str:
        source = self._chat.source
        where = f" ({source.weights.label.lower()})" if source.weights else ""
        return f"{source.name}{where}: {' and '.join(self._sides)} loaded. /help lists the commands."

    # ── commands ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _obey(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        command = self._commands.get(word)
        if command is None:
            raise UserError("chat", f"There is no command {quote(word, 40)}; /help lists them.")
        command(rest.strip())

    def _choose(self, *names: SideName) -> None:
        missing = [name for name in names if name not in self._chat.sides.sides]
        if missing:
            raise UserError("chat", f"{' and '.join(missing).capitalize()} is not loaded here.")
        self._sides = list(names)

    def _reset(self) -> None:
        self._turns, self._row = {}, None

    def _set_system(self, text: str) -> None:
        self._asking.system = text
        self._reset()

    def _set_seed(self, text: str) -> None:
        if (seed := written_whole(text)) is None:
            raise UserError("seed", "A seed is a whole number, as in /seed 7.")
        self._asking.seed = seed

    def _help(self) -> None:
        width = max(map(len, COMMANDS))
        for command, meaning in COMMANDS.items():
            tell(f"  {command:<{width}}  {meaning}", file=sys.stderr)

    def _end(self) -> None:
        self._has_ended = True

    def _ask_row(self, text: str) -> None:
        _, rows = self._chat.held_out_rows()
        number = written_whole(text) if text else random.randint(1, len(rows))
        if number is None or not 1 <= number <= len(rows):
            raise UserError("row", f"Rows are numbered from 1 to {len(rows)}, as in /row 3.")
        self._reset()
        row = number - 1
        problem = self._chat.problem(self._asking.question(self._chat.source.config, "", row=row), self._sides[0])
        tell(f"row {row + 1} of {len(rows)}, answer {problem.answer or '–'}: {problem.prompt}", file=sys.stderr)
        self._row = row
        self._ask(problem.prompt)

    # ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _ask(self, prompt: str) -> None:
        from backend.sampling.chat.chat import Turn

        if not prompt:
            return
        question = self._asking.question(self._chat.source.config, prompt, turns=self._turns, row=self._row)
        printer = AnswerPrinter(labels=len(self._sides) > 1)
        try:
            replies = answer(self._chat, question, self._sides, printer)
        except KeyboardInterrupt:
            tell(" … stopped", file=sys.stderr)
            replies = []
        for side, text in printer.texts.items():
            self._turns.setdefault(side, []).append(Turn(prompt, text))
        if self._with_scores and replies:
            for reply, scores in zip(replies, score(self._chat.source.config, replies), strict=True):
                tell(f"{reply.side}: {scores_line(scores)}", file=sys.stderr)
