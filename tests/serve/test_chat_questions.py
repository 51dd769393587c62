"""The Chat page's questions: what is loaded, the text as it comes, an answer with what scores it, a cancelled one."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backend.serve import chat_questions
from backend.serve.chat_questions import chat_load, chat_reply, chat_row
from backend.serve.questions import Cancelled, QuestionCall
from backend.serve.reward_questions import score
from backend.utils.errors import UserError
from tests.support.trained_run import make_run

HOW = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_tokens": 20, "seed": 3}


@pytest.fixture(scope="module")
def loaded(models: Path) -> dict[str, Any]:
    run = make_run(models / "run", models)
    return chat_load(QuestionCall(), name=str(run.path), checkpoint="8")


def replies(prompt: str = "Hello", **more: Any) -> dict[str, Any]:
    """The whole answers, by side."""
    return {report["side"]: report for report in ask(prompt, **more) if "side" in report}


def ask(prompt: str = "Hello", call: QuestionCall | None = None, **more: Any) -> list[dict[str, Any]]:
    """The reports of an answered question."""
    reports: list[dict[str, Any]] = []
    call = call or QuestionCall()
    call.report = reports.append
    request = {"prompt": prompt, "sides": ["base", "tuned"], "turns": {}, **HOW, **more}
    assert chat_reply(call, **request) == {}
    return reports


def test_text_comes_in_pieces_and_ends_with_all_of_it(loaded: dict[str, Any]):
    assert loaded["sides"] == ["base", "tuned"] and loaded["notes"] == [] and loaded["bytes"] > 10_000
    reports = ask()
    answers = {report["side"]: report for report in reports if "side" in report}
    assert list(answers) == ["base", "tuned"] or list(answers) == ["tuned", "base"]
    for side, answer in answers.items():
        pieces = [report["new_text"].get(side, "") for report in reports if "new_text" in report]
        assert "".join(pieces) == answer["text"]
        assert answer["tokens"] <= 20 and answer["stop"] in ("eos", "length")
        assert 0 < answer["first_token_s"] <= answer["seconds"]


def test_a_row_is_answered_with_its_answer_and_columns(loaded: dict[str, Any]):
    row = chat_row(QuestionCall(), row=8 + 3)
    assert (row["row"], row["of"], row["prompt"], row["answer"]) == (3, 8, "What is 3 plus 3?", "6")
    assert chat_row(QuestionCall(), row=-1)["row"] == 7
    group = next(iter(replies(row["prompt"], row=3).values()))["group"]
    assert (group["prompt"], group["answer"]) == ("What is 3 plus 3?", "6")
    assert group["columns"] == {"prompt": "What is 3 plus 3?", "answer": "6"}
    settings = {"reward_functions": ["r1_int", "r1_count_xml"], "reward_weights": [1.0, 0.5]}
    scored = score(QuestionCall(), settings=settings, groups=[group], with_cases=False)
    assert set(scored["scored"][0][0]["rewards"]) == {"r1_int_reward_func", "r1_count_xml"}


def test_answers_are_held_as_the_run_s_unless_they_are_to_be_free(loaded: dict[str, Any], monkeypatch):
    chat = chat_questions._chat()
    config = chat.source.config.model_copy(update={"output_regex": "ab[0-9]{2}", "presence_penalty": 0.5})
    monkeypatch.setattr(chat, "source", replace(chat.source, config=config))
    held, free = replies()["tuned"], replies(free_output=True)["tuned"]
    assert re.fullmatch("ab[0-9]{2}", held["text"]) and held["stop"] == "eos"
    assert not free["text"].startswith("ab")


def test_later_turns_are_sent_by_side(loaded: dict[str, Any]):
    turns = {"base": [["Hello", "one"]], "tuned": [["Hello", "two"], ["again", "three"]]}
    sides = replies("more", turns=turns)
    base, tuned = ([message["content"] for message in sides[side]["group"]["messages"]] for side in turns)
    assert base == ["Hello", "one", "more"] and tuned[1::2] == ["two", "three"]


def test_a_cancelled_answer_ends_at_once(loaded: dict[str, Any]):
    call = QuestionCall()
    call.cancel()
    with pytest.raises(Cancelled):
        ask(call=call)


def test_nothing_can_be_asked_before_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chat_questions, "_loaded", [])
    with pytest.raises(UserError, match="No model is loaded"):
        ask()
