"""Sessions of an endpoint: ids that continue, and rows to train on."""

import json
from pathlib import Path
from typing import Any

import pytest

from backend.endpoint.recording import Answer, Recorder
from backend.endpoint.sessions import FILE, ROWS
from backend.sampling.sampler import Sampling
from backend.sampling.turn_format import TurnFormat
from backend.types import Completion, Stop
from backend.utils.errors import UserError
from tests.support.tool_tokenizers import tool_tokenizer
from tests.support.verbs import call, run_ok

Chat = list[dict[str, Any]]
ASKED: Chat = [{"role": "user", "content": "What is 1 plus 2?"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tool_tokenizer(tmp_path_factory.mktemp("qwen3"), special=["<think>", "</think>"])


class Agent:
    """An agent's loop whose model says what it is given."""

    def __init__(self, folder: Path, tokenizer: Any) -> None:
        self.recorder, self.tokenizer, self.turns = Recorder(folder, print), tokenizer, TurnFormat(tokenizer, {})

    def rendered(self, messages: Chat) -> list[int]:
        return list(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True))

    def ask(
        self,
        session: str,
        messages: Chat,
        text: str,
        stop: Stop = "eos",
        model: str = "run",
        warm: float = 1,
        **reply: Any,
    ) -> tuple[list[int], Chat]:
        """(the ids that the model has read and written, the messages with its answer)."""
        prompt = self.recorder.prompt(session, model, messages, None, self.turns, lambda: self.rendered(messages))
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        ids += [self.tokenizer.eos_token_id] if stop == "eos" else []
        message = {"role": "assistant", "content": text.rpartition("</think>")[2].strip(), **reply}
        completion = Completion(ids, [-0.5] * len(ids), text, stop, log_kept=[-0.25] * len(ids))
        self.recorder.add(session, messages, None, message, Answer(prompt, completion, Sampling(warm), model))
        return prompt + ids, [*messages, message]


def said(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def test_ids_continue_where_the_template_would_drop_the_reasoning(tmp_path: Path, tokenizer: Any) -> None:
    agent = Agent(tmp_path, tokenizer)
    first, _ = agent.ask("a", ASKED, "<think>1 + 2</think> \n Three. ")
    more = [*ASKED, said("assistant", "Three.", refusal=None), said("user", [{"type": "text", "text": "Sure?"}])]
    second, _ = agent.ask("a", more, "Yes.")
    assert second[: len(first)] == first != agent.rendered(more)[: len(first)]
    text = tokenizer.decode(second[len(first) :])
    assert text == "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>"


def test_results_of_calls_continue_as_in_a_run_with_tools(tmp_path: Path, tokenizer: Any) -> None:
    agent, written = Agent(tmp_path, tokenizer), {"id": "call_1", "type": "function"}
    as_text = written | {"function": {"name": "add", "arguments": '{"a": 1}'}}
    as_mapping = written | {"function": {"name": "add", "arguments": {"a": 1}}}
    first, _ = agent.ask("a", ASKED, "<think>So</think>", tool_calls=[as_text])
    chat = [*ASKED, said("assistant", None, tool_calls=[as_mapping]), said("tool", "3", tool_call_id="call_1")]
    second, _ = agent.ask("a", chat, "Three.")
    assert second[: len(first)] == first
    after = (
        "\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\nThree.<|im_end|>"
    )
    assert tokenizer.decode(second[len(first) :]) == after


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
    agent, kept = Agent(tmp_path, tokenizer), list[int]()
    first, chat = agent.ask("a", ASKED, "<think>1 + 2</think>Three.")
    agent.ask("a", [*chat, said("user", "Sure?")], "Yes.")
    whole = (tmp_path / FILE).read_bytes()
    for end in range(0, len(whole), 97):
        folder = tmp_path / str(end)
        folder.mkdir()
        (folder / FILE).write_bytes(whole[:end])
        ids, _ = Agent(folder, tokenizer).ask("a", [*chat, said("user", "Sure?")], "Yes.")
        kept.append(whole[:end].count(b"\n"))
        assert (ids[: len(first)] == first) is (kept[-1] > 0)
        assert (folder / FILE).read_bytes().count(b"\n") == kept[-1] + 1
    assert max(kept) == 1


def session_rows(folder: Path, *options: object) -> list[dict[str, Any]]:
    run_ok("sessions", folder, *options)
    return [json.loads(line) for line in (folder / ROWS).read_text().splitlines()]


def test_sessions_become_rows_of_whole_groups(tmp_path: Path, tokenizer: Any) -> None:
    agent = Agent(tmp_path, tokenizer)
    for number in range(5):
        _, chat = agent.ask(f"s{number}", [said("system", f"Session {number}"), *ASKED], "Thr", "length")
        agent.ask(f"s{number}", [*chat, said("user", "Go on.")], "ee.")
        agent.ask("again", ASKED, "No")
        if number < 4:
            agent.recorder.reward(f"s{number}", 0.0, "another")
            agent.recorder.reward(f"s{number}", number / 4, "sums" if number < 3 else "alone")
    another: Chat = [*ASKED, said("user", "Anew")]
    agent.ask("s0", another, "Three.")
    agent.recorder.reward("unheard", 1.0, "sums")
    (row,) = session_rows(tmp_path, "--group-size", 2)
    assert (row["group"], row["answer"], row["prompt"]) == ("sums", "", another)
    last, merged = row["recorded"]
    assert (last["reward"], merged["reward"]) == (0.0, 0.25)
    assert tokenizer.decode(last["tokens"]) == "Three.<|im_end|>"
    # The cut answer is ended by the template.
    text = "Thr<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\nee.<|im_end|>"
    assert tokenizer.decode(merged["tokens"]) == text
    own = [token for token, own in zip(merged["tokens"], merged["mask"], strict=True) if own]
    assert tokenizer.decode(own) == "Three.<|im_end|>"
    assert merged["logps"] == [-0.5 * own for own in merged["mask"]]
    assert merged["log_kept"] == [-0.25 * own for own in merged["mask"]]
    report = json.loads(run_ok("sessions", tmp_path, "--group-size", 2, "--json").stdout)
    reasons = {"their group has fewer than 2": 1, "their group has fewer than 2 more": 1}
    assert report["left_out"] == reasons | {"no reward was posted": 2, "they have no request": 1}
    assert (report["sessions"], report["requests"], report["in_parts"]) == (7, 16, 2)


def test_sessions_without_a_reward_are_grouped_by_their_prompt(tmp_path: Path, tokenizer: Any) -> None:
    agent = Agent(tmp_path, tokenizer)
    for number in range(4):
        agent.ask(f"s{number}", ASKED if number < 2 else [said("user", "Else?")], "Three.")
    _, chat = agent.ask("warm", ASKED, "No", warm=0.5)
    agent.ask("warm", [*chat, said("user", "Why?")], "So.")
    assert call("sessions", tmp_path).exit_code == 2
    rows = session_rows(tmp_path, "--without-reward")
    assert [[each["session"] for each in row["recorded"]] for row in rows] == [["s0", "s1"], ["s2", "s3"]]


def test_one_endpoint_records_into_a_folder(tmp_path: Path, tokenizer: Any) -> None:
    first = Agent(tmp_path, tokenizer)
    with pytest.raises(UserError, match="record: Another endpoint records into"):
        Recorder(tmp_path, print)
    first.recorder.close()
    Recorder(tmp_path, print).close()


def test_a_template_that_cannot_continue_is_told_once(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    agent = Agent(tmp_path, tokenizer)
    agent.recorder = Recorder(tmp_path / "other", notes.append)
    monkeypatch.setattr(agent.turns, "continuation", lambda *_: 1 / 0)
    chat: Chat = ASKED
    for _ in range(3):
        ids, chat = agent.ask("s", [*chat, said("user", "And?")], "Three.")
        assert tokenizer.decode(ids).count("<|im_start|>assistant") == chat.count(chat[-1])  # rendered
    assert notes == ["The chat template cannot continue a turn, so a part begins: division by zero."]
