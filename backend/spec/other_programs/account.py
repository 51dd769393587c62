"""What was made of a file for another program, as lines for people."""

from __future__ import annotations

from backend.spec.other_programs.translation import Translation

OURS_FOR_THE_REST = (
    "What the file leaves out has GRPO Studio's defaults; python -m backend import FILE writes those of {name} instead."
)
_MIXED = "Words of several programs stand in this file; gradient_accumulation_steps and iters mean what they mean here."


def account(translation: Translation) -> list[str]:
    """A line for the program, a line a word. Nothing for a file that has no word of another program."""
    lines = [f"{word.word}: {_said(word.fate, word.sentence)}." for word in translation.words]
    if not lines:
        return []
    if translation.program is None:
        return [*([_MIXED] if translation.is_mixed else []), *lines]
    return [
        f"This is a file for {translation.program.name}. {OURS_FOR_THE_REST.format(name=translation.program.name)}",
        *lines,
    ]


def _said(fate: str, sentence: str) -> str:
    return {"translated": f"read as {sentence}", "without effect": f"without effect here: {sentence}"}.get(
        fate, sentence
    )
