"""What the Chat page says: in place of a conversation, about what is loaded, and below each answer."""

from __future__ import annotations

from typing import NamedTuple

from app.state.chat import ChatAnswer, ChatWithModel
from app.state.chat_choice import ChatChoice, memory_sentence
from app.widgets.basic.number_format import THIN, figure
from app.widgets.completions.completion_model import STOP_LABELS
from backend.runs.run_folder import RunFolder


class NoticeWords(NamedTuple):
    """Title, sentence and button; "" is no button."""

    title: str
    sentence: str
    button: str = ""


def notice(chat: ChatWithModel, choice: ChatChoice | None, checkpoint: str, live: RunFolder | None) -> NoticeWords:
    """What stands in place of a conversation. `choice` is what the page offers to load, `live` a run that is training."""
    if live is not None:
        sentence = f"{live.name} needs this machine's memory. The chat is back when it has ended."
        return NoticeWords("A run is training", sentence)
    if chat.state == "loading" and chat.choice is not None:
        return NoticeWords(f"Loading {chat.choice.label}", "Reading its weights into memory.", "Cancel")
    if chat.state == "failed":
        return NoticeWords("That did not work", chat.problem, "Try again")
    if chat.is_loaded:
        has_rows = chat.choice is not None and chat.choice.is_run
        sentence = f"Type a prompt below{', or take one of the dataset' if has_rows else ''}."
        return NoticeWords("Ask it something", sentence)
    if choice is None:
        sentence = "Train a run, and ask it and its base the same things here."
        return NoticeWords("Nothing to talk to yet", sentence, "Go to Train")
    if choice.problem:
        return NoticeWords(choice.label, choice.problem)
    what = "Base and tuned answer side by side, with the same random numbers. " if choice.is_run else ""
    return NoticeWords(choice.label, what + memory_sentence(choice, checkpoint), "Load")


def about(chat: ChatWithModel, choice: ChatChoice | None, checkpoint: str) -> str:
    """What is loaded and its memory; where something else has been chosen since, what that would take."""
    if not chat.is_loaded or chat.choice is None:
        return ""
    weights = f"{figure(chat.bytes / 1e9, 'GB')} of weights."
    if choice is None or chat.has_loaded(choice, checkpoint):
        what = "Base and tuned are" if len(chat.sides) > 1 else "It is"
        return " ".join([f"{what} loaded, {weights}", *chat.notes])
    saved = next((saved.label for saved in chat.choice.checkpoints if saved.key == chat.checkpoint), "")
    loaded = f"{chat.choice.label}, {saved.lower()}" if saved else chat.choice.label
    return f"Loaded: {loaded}, {weights} {choice.label}: {memory_sentence(choice, checkpoint)}"


def status(answer: ChatAnswer) -> str:
    """“23 tokens, ended, the first after 50 ms, then 190 a second”."""
    if answer.state != "done":
        return {"waiting": "Reading the prompt…", "writing": "Writing…", "stopped": "Stopped"}.get(answer.state, "")
    figures, kept = answer.figures, ", kept as a case" if answer.kept else ""
    later, seconds = figures["tokens"] - 1, figures["seconds"] - figures["first_token_s"]
    rate = f", then {figure(later / seconds)} a second" if later and seconds > 0 else ""
    first = f"{1000 * figures['first_token_s']:.0f}{THIN}ms"
    return f"{figure(figures['tokens'])} tokens, {STOP_LABELS[figures['stop']]}, the first after {first}{rate}{kept}"
