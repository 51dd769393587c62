"""Sessions of an endpoint: ids that continue, and rows to train on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from backend.endpoint.recording import FILE, Answer, Recorder
from backend.sampling.sampler import Sampling
from backend.sampling.turn_format import TurnFormat
from backend.types import Completion, Stop
from tests.support.tool_tokenizers import tool_tokenizer

CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
ASKED = [{"role": "user", "content": "What is 1 plus 2?"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tool_tokenizer(tmp_path_factory.mktemp("qwen3"), special=["<think>", "</think>"])


class Agent:
    """An agent's loop whose model says what it is given."""

    def __init__(self, folder: Path, tokenizer: Any) -> None:
        self.recorder, self.tokenizer, self.turns = Recorder(folder), tokenizer, TurnFormat(tokenizer, {})

    def rendered(self, messages: list[dict[str, Any]]) -> list[int]:
        return list(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True))

    def ask(
        self,
        session: str,
        messages: list[dict[str, Any]],
        text: str,
        *,
        stop: Stop = "eos",
        model: str = "run",
        temperature: float = 1.0,
        **reply: Any,
    ) -> tuple[list[int], dict[str, Any]]:
        """(the ids that the model has read and written, the messages with its answer)."""
        arguments = session, model, messages, None, self.turns, lambda: self.rendered(messages)
        prompt = self.recorder.prompt(*arguments)
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        ids += [self.tokenizer.eos_token_id] if stop == "eos" else []
        message = {"role": "assistant", "content": text.rpartition("</think>")[2].strip(), **reply}
        completion = Completion(ids, [-0.5] * len(ids), text, stop)
        self.recorder.add(session, messages, None, message, Answer(prompt, completion, Sampling(temperature), model))
        return prompt + ids, [*messages, message]


def said(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def test_ids_continue_where_the_template_would_drop_the_reasoning(tmp_path: Path, tokenizer: Any) -> None:
    agent = Agent(tmp_path, tokenizer)
    first, chat = agent.ask("a", ASKED, "<think>1 + 2</think> \n Three. ")
    more = [*ASKED, said("assistant", "Three.", refusal=None), said("user", [{"type": "text", "text": "Sure?"}])]
    second, _ = agent.ask("a", more, "Yes.")
    assert second[: len(first)] == first
    text = tokenizer.decode(second[len(first) :])
    assert text == "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>"
    assert second[: len(first)] != agent.rendered(more)[: len(first)]


def test_results_of_calls_continue_as_in_a_run_with_tools(tmp_path: Path, tokenizer: Any) -> None:
    agent = Agent(tmp_path, tokenizer)
    first, chat = agent.ask("a", ASKED, "<tool_call></tool_call>", tool_calls=[CALL])
    as_mapping = {**CALL, "function": {"name": "add", "arguments": {"a": 1}}}
    chat = [*ASKED, said("assistant", None, tool_calls=[as_mapping]), said("tool", "3", tool_call_id="call_1")]
    chat[1]["content"] = "<tool_call></tool_call>"
    second, _ = agent.ask("a", chat, "Three.")
    assert second[: len(first)] == first
    after = (
        "\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\nThree.<|im_end|>"
    )
    assert tokenizer.decode(second[len(first) :]) == after


def test_a_cut_answer_is_ended_by_the_template(tmp_path: Path, tokenizer: Any) -> None:
    agent = Agent(tmp_path, tokenizer)
    first, chat = agent.ask("a", ASKED, "Thr", stop="length")
    second, _ = agent.ask("a", [*chat, said("user", "Go on.")], "ee.")
    assert second[: len(first)] == first
    assert tokenizer.decode(second[len(first) :]).startswith("<|im_end|>\n<|im_start|>user\nGo on.")


@pytest.mark.parametrize("changed", ["messages", "model", "session"])
def test_another_chat_is_rendered(tmp_path: Path, tokenizer: Any, changed: str) -> None:
    agent = Agent(tmp_path, tokenizer)
    _, chat = agent.ask("a", ASKED, "<think>1 + 2</think>Three.")
    chat = [*(chat if changed != "messages" else [ASKED[0], said("assistant", "3.")]), said("user", "Sure?")]
    session, model = "b" if changed == "session" else "a", "base" if changed == "model" else "run"
    ids, _ = agent.ask(session, chat, "Yes.", model=model)
    rendered = agent.rendered(chat)
    assert ids[: len(rendered)] == rendered


def test_a_session_survives_a_kill_at_any_byte(tmp_path: Path, tokenizer: Any) -> None:
    agent = Agent(tmp_path, tokenizer)
    first, chat = agent.ask("a", ASKED, "<think>1 + 2</think>Three.")
    agent.ask("a", [*chat, said("user", "Sure?")], "Yes.")
    whole, tried = (tmp_path / FILE).read_bytes(), 0
    for end in range(0, len(whole), 97):
        folder = tmp_path / str(end)
        folder.mkdir()
        (folder / FILE).write_bytes(whole[:end])
        ids, _ = Agent(folder, tokenizer).ask("a", [*chat, said("user", "Sure?")], "Yes.")
        kept = whole[:end].count(b"\n")
        assert (ids[: len(first)] == first) is (kept > 0)
        assert (folder / FILE).read_bytes().count(b"\n") == kept + 1
        tried += kept > 0
    assert tried
