"""The verbs `generate` and `chat`: answers of a tuned model, its base, or both."""

from __future__ import annotations

import atexit
import contextlib
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from backend.cli.common import AllowCode, AsJson, RunsDir, tell, tell_error, tell_json, verb
from backend.cli.completions import RunOrModel, checkpoints
from backend.config.config import SETTINGS, Config, parse
from backend.rewards.allowed_code import require_allowed
from backend.rewards.catalogue import scorable
from backend.utils.documents import written_whole
from backend.utils.errors import UserError
from backend.utils.files import user_path
from backend.utils.text import quote

if TYPE_CHECKING:
    from backend.sampling.chat import AnswerTurn, Chat, ChatQuestion, Reply, SideName, Turn

COMMANDS = {
    "/base": "the model before training answers",
    "/tuned": "the tuned model answers",
    "/both": "both answer, with the same random numbers",
    "/image FILE": "show the next prompt a picture, after those given before",
    "/row N": "ask row N of the test split, or a random one, in a new conversation",
    "/reset": "begin a new conversation",
    "/system TEXT": "another system message, in a new conversation; without a text none",
    "/seed N": "another seed",
    "/help": "this list",
    "/quit": "end",
}


@verb
def chat(
    name: RunOrModel,
    checkpoint: CheckpointKey = "",
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    max_tokens: MaxTokens = None,
    seed: Seed = 0,
    system: System = None,
    free_output: FreeOutput = False,
    images: Images = None,
    with_scores: Score = False,
    allow_code: AllowCode = False,
    runs_dir: RunsDir = None,
) -> None:
    """Chat with a run's model and its base model in the terminal; /help lists the commands."""
    asking = Asking(temperature, top_p, top_k, min_p, max_tokens, seed, system, free_output)
    loaded = open_chat(name, checkpoint, runs_dir, ("base", "tuned"), asking)
    scores = with_scores and loaded.source.run is not None
    if scores:
        require_allowed(loaded.source.config.model_dump(), allow=allow_code)
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # gives input() a history and editing
    TerminalChat(loaded, asking, paths_of(images), with_scores=scores).talk()


class TerminalChat:
    """Reads lines and commands until the end of the input or /quit."""

    def __init__(self, chat: Chat, asking: Asking, images: list[str], *, with_scores: bool) -> None:
        """`images`: of the first prompt."""
        self._chat, self._asking, self._images, self._with_scores = chat, asking, images, with_scores
        self._sides: list[SideName] = list(chat.sides)
        self._turns: dict[SideName, list[Turn]] = {}
        self._row: int | None = None

    def talk(self) -> None:
        source = self._chat.source
        where = f" ({source.weights.label.lower()})" if source.weights else ""
        tell_error(f"{source.name}{where}: {' and '.join(self._sides)} loaded. /help lists the commands.")
        while True:
            try:
                line = input("> " if sys.stdin.isatty() else "").strip()
            except (EOFError, KeyboardInterrupt):
                return tell_error("")
            word, _, rest = line.partition(" ")
            if word == "/quit":
                return
            try:
                if line.startswith("/"):
                    self._obey(word, rest.strip())
                elif line:
                    self._ask(line)
            except UserError as error:  # the conversation continues
                tell_error(" ".join(problem.sentence for problem in error.faults))

    def _obey(self, word: str, text: str) -> None:
        match word:
            case "/base" | "/tuned" | "/both":
                sides: dict[str, list[SideName]] = {"/base": ["base"], "/tuned": ["tuned"], "/both": ["base", "tuned"]}
                names = sides[word]
                if missing := [name for name in names if name not in self._chat.sides]:
                    raise UserError("chat", f"{' and '.join(missing).capitalize()} is not loaded here.")
                self._sides = names
            case "/image":
                self._images += paths_of([Path(text)])
            case "/row":
                source, rows = self._chat.held_out_rows()
                number = written_whole(text) if text else random.randint(1, len(rows))
                if number is None or not 1 <= number <= len(rows):
                    raise UserError("row", f"Rows are numbered from 1 to {len(rows)}, as in /row 3.")
                self._turns, self._row, self._images = {}, number - 1, []
                question = self._asking.question(self._chat.source.config, "", row=self._row)
                problem = self._chat.problem(question, self._sides[0])
                where = f"row {number} of {len(rows)} of {Path(source).name}"
                tell_error(f"{where}, answer {problem.answer or '–'}: {problem.prompt}")
                if problem.prompt:
                    self._ask(problem.prompt)
            case "/reset":
                self._turns, self._row = {}, None
            case "/system":
                self._asking.system = text
                self._turns, self._row = {}, None
            case "/seed":
                if (seed := written_whole(text)) is None:
                    raise UserError("seed", "A seed is a whole number, as in /seed 7.")
                self._asking.seed = seed
            case "/help":
                width = max(map(len, COMMANDS))
                for command, meaning in COMMANDS.items():
                    tell_error(f"  {command:<{width}}  {meaning}")
            case _:
                raise UserError("chat", f"There is no command {quote(word, 40)}; /help lists them.")

    def _ask(self, prompt: str) -> None:
        from backend.sampling.chat import Turn

        config = self._chat.source.config
        images, self._images = self._images, []
        question = self._asking.question(config, prompt, turns=self._turns, row=self._row, images=images)
        texts: dict[SideName, str] = {}
        replies: list[Reply] = []
        try:
            replies = answer(self._chat, question, self._sides, texts)
        except KeyboardInterrupt:
            tell_error(" … stopped")
        with_tools = {reply.side: [turn.row() for turn in reply.completion.turns] for reply in replies}
        for side, text in texts.items():
            self._turns.setdefault(side, []).append(Turn(prompt, text, with_tools.get(side, ()), images))
        if self._with_scores and replies:
            score(config, replies, show=True)


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
FreeOutput = Annotated[bool, typer.Option("--free-output", help="Without the run's regex or JSON schema.")]
Images = Annotated[list[Path] | None, typer.Option("--image", help="A picture for the prompt; may be repeated.")]
Score = Annotated[bool, typer.Option("--score", help="Score each answer with the run's reward functions.")]


@dataclass(slots=True)
class Asking:
    """Sampling settings of the answers; unset ones come from the run."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    seed: int = 0
    system: str | None = None
    free_output: bool = False

    def question(self, config: Config, prompt: str, **more: Any) -> ChatQuestion:
        """Raises UserError naming the setting for an invalid value."""
        from backend.sampling.chat import ChatQuestion
        from backend.sampling.sampler import Sampling

        given = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p}
        changes: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
        limit = self.max_tokens if self.max_tokens is not None else config.max_completion_length
        most = int(SETTINGS["max_completion_length"].high or 0)
        # Temperature 0, which a run may not have, is greedy here.
        checked = {key: value for key, value in changes.items() if (key, value) != ("temperature", 0)}
        parse({"model": "-", "data": "-", **checked})
        if not 1 <= limit <= most:
            raise UserError("max_tokens", f"Max tokens must be from 1 to {most:,}, not {quote(limit)}.")
        if self.free_output:
            changes["grammar"] = None
        sampling = replace(Sampling.of(config), **changes)
        return ChatQuestion(prompt, sampling=sampling, max_tokens=limit, seed=self.seed, system=self.system, **more)


def open_chat(name: str, checkpoint: str, runs_dir: Path | None, wanted: Sequence[SideName], asking: Asking) -> Chat:
    """Load a chat and print notes on stderr. Raises UserError."""
    from backend.sampling.chat import Chat, find_source, load_sides
    from backend.tools.load import begin_tools

    source = find_source(name, checkpoint, runs_dir)
    asking.question(source.config, "")
    wanted = wanted if source.run is not None else ("base",)
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    sides, (host, why_not) = load_sides(source, wanted, tell_error), begin_tools(source.config, stack)
    if why_not:
        tell_error(why_not)
    return Chat(source, sides, host)


def paths_of(images: Sequence[Path] | None) -> list[str]:
    return [str(user_path(str(file), "image", Path.cwd())) for file in images or []]


def answer(chat: Chat, question: ChatQuestion, sides: Sequence[SideName], texts: dict[SideName, str]) -> list[Reply]:
    """Generate the answers of the sides in turn; print them, and collect them in `texts`, as they arrive."""
    from backend.cli.display import new_console

    def print_text(side: SideName, text: str) -> None:
        texts[side] = texts.get(side, "") + text
        tell(text, end="", flush=True)

    def print_results(side: SideName, turns: Sequence[AnswerTurn]) -> None:
        tell("".join(f"\n→ {result.name}: {result.content}" for result in turns[-1].results))

    replies: list[Reply] = []
    for side in sides:
        if len(sides) > 1:
            new_console(highlight=False).print(side, style="bold cyan" if side == "tuned" else "bold")
        replies.append(chat.reply(question, [side], print_text, on_turns=print_results)[side])
        tell(flush=True)
    return replies


def score(config: Config, replies: Sequence[Reply], *, show: bool) -> list[dict[str, Any]]:
    """{"rewards": {function: score}, "reward"} of each reply; without an answer, of functions that need none."""
    from backend.cli.display import format_number
    from backend.cli.rewards import score_all

    has_answer = bool(replies[0].problem.answer)
    names, weights = scorable(config.reward_functions, config.reward_weights, has_answer=has_answer)
    found: list[dict[str, Any]] = [{"rewards": {}, "reward": None} for _ in replies]
    if names:
        settings = config.model_copy(update={"reward_functions": names, "reward_weights": weights})
        scored = score_all([reply.group for reply in replies], settings)
        found = [{"rewards": row["rewards"], "reward": row["reward"]} for (row,) in scored["scored"]]
    for reply, scores in zip(replies, found, strict=True) if show else ():
        parts = {"reward": scores["reward"], **scores["rewards"]}
        line = "  ".join(f"{name} {format_number(value)}" for name, value in parts.items())
        tell_error(f"{reply.side}: {line}")
    return found


@verb
def generate(
    name: RunOrModel,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="What to answer; - reads it from stdin.")] = None,
    row: Annotated[int | None, typer.Option("--row", help="Or a row of the run's test split, from 1.")] = None,
    base: Annotated[bool, typer.Option("--base", help="The model before training.")] = False,
    both: Annotated[bool, typer.Option("--both", help="The base, then the tuned model, with the same seed.")] = False,
    checkpoint: CheckpointKey = "",
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    max_tokens: MaxTokens = None,
    seed: Seed = 0,
    system: System = None,
    free_output: FreeOutput = False,
    images: Images = None,
    expected: Annotated[str, typer.Option("--answer", help="The expected answer, for --score.")] = "",
    with_scores: Score = False,
    as_json: AsJson = False,
    allow_code: AllowCode = False,
    runs_dir: RunsDir = None,
) -> None:
    """Answer one prompt with a run's model, its base, or both; the run supplies settings that you omit."""
    if (prompt is None) == (row is None):
        raise UserError("prompt", "Give a prompt with --prompt, or a row of the test split with --row.")
    if row is not None and images:
        raise UserError("image", "A row of the test split has its own pictures; leave --image or --row out.")
    asking = Asking(temperature, top_p, top_k, min_p, max_tokens, seed, system, free_output)
    wanted = ("base", "tuned") if both else ("base",) if base else ("tuned",)
    chat = open_chat(name, checkpoint, runs_dir, wanted, asking)
    config, sides = chat.source.config, chat.sides
    if with_scores:
        if chat.source.run is None:
            raise UserError("score", f"{name} is a model and no run, so it has no reward functions for --score.")
        require_allowed(config.model_dump(), allow=allow_code)
    if prompt == "-":
        prompt = sys.stdin.read()
    if row is None and not (prompt or "").strip():
        raise UserError("prompt", "The prompt is empty.")
    place = None if row is None else row - 1
    question = asking.question(config, prompt or "", row=place, answer=expected, images=paths_of(images))
    if as_json:
        replies = [chat.reply(question, [side])[side] for side in sides]
    else:
        replies = answer(chat, question, list(sides), {})
    scored = score(config, replies, show=not as_json) if with_scores else []
    if not as_json:
        return
    lines: dict[str, Any] = {reply.side: reply.figures() for reply in replies}
    for reply, scores in zip(replies, scored, strict=bool(scored)):
        lines[reply.side] |= scores
    about = {"model": name, "checkpoint": chat.source.weights.step if chat.source.weights else None, "seed": seed}
    tell_json({**about, "prompt": replies[0].problem.prompt, "answers": lines})
