"""The verb `generate`: one answer to one prompt, by the tuned model, by the base, or by both."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

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
from backend.cli.options import AllowCode, AsJson, ExistingRunsDir
from backend.cli.output import tell, tell_json
from backend.rewards.catalogue.allowed_code import require_allowed
from backend.utils.errors import UserError
from backend.utils.files import TEXT_LIMIT


@verb
def generate(
    name: Name,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="What to answer; - reads it from stdin.")] = None,
    row: Annotated[
        int | None, typer.Option("--row", help="In its place a row of the run's test split, from 1.")
    ] = None,
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
    expected: Annotated[str, typer.Option("--answer", help="The expected answer, for --score.")] = "",
    with_scores: Score = False,
    as_json: AsJson = False,
    allow_code: AllowCode = False,
    runs_dir: ExistingRunsDir = None,
) -> None:
    """Answer one prompt with a run's model, its base, or both; settings that are not given are the run's."""
    if (prompt is None) == (row is None):
        raise UserError("prompt", "Give a prompt with --prompt, or a row of the test split with --row.")
    asking = Asking(temperature, top_p, top_k, min_p, max_tokens, seed, system, free_output)
    wanted = ("base", "tuned") if both else ("base",) if base else ("tuned",)
    chat = open_chat(name, checkpoint, runs_dir, wanted, asking)
    config, sides = chat.source.config, chat.sides.sides
    chosen = list(sides) if both else ["base"] if base or "tuned" not in sides else ["tuned"]
    if with_scores and chat.source.run is not None:
        require_allowed(config.model_dump(), allow=allow_code)
    text = _from_stdin() if prompt == "-" else prompt or ""
    question = asking.question(config, text, row=None if row is None else row - 1, answer=expected)
    printer = None if as_json else AnswerPrinter(labels=len(chosen) > 1)
    replies = answer(chat, question, [side for side in sides if side in chosen], printer)
    scored = score(config, replies) if with_scores and chat.source.run is not None else []
    if as_json:
        lines: dict[str, Any] = {reply.side: reply.figures() for reply in replies}
        for reply, scores in zip(replies, scored, strict=bool(scored)):
            lines[reply.side] |= scores
        about = {"model": name, "checkpoint": chat.source.weights.step if chat.source.weights else None, "seed": seed}
        tell_json({**about, "prompt": replies[0].problem.prompt, "answers": lines})
        return
    for reply, scores in zip(replies, scored, strict=bool(scored)):
        tell(f"{reply.side}: {scores_line(scores)}", file=sys.stderr)


def _from_stdin() -> str:
    """Raises UserError for more than a prompt could be: something that never ends may be at the other end."""
    text = sys.stdin.read(TEXT_LIMIT + 1)
    if len(text) > TEXT_LIMIT:
        raise UserError("prompt", f"The prompt from stdin is longer than {TEXT_LIMIT:,} characters.")
    return text
