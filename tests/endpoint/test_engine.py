"""The engine's answers: what is decoded together, and the parts of an answer's text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from starlette.testclient import TestClient

from backend.config.config import parse
from backend.endpoint import engine as engine_module
from backend.endpoint.engine import Engine, Job, Lane, PrefixCache
from backend.endpoint.models import ServedModel, load_models
from backend.endpoint.openai_api import AnswerText
from backend.endpoint.recording import Recorder
from backend.endpoint.server import Endpoint
from backend.runs.completion_rows import Stop
from backend.sampling import cached_sequence
from backend.sampling.cached_sequence import CachedSequence, SampledToken
from backend.sampling.chat import find_source
from backend.sampling.sampler import Sampling
from backend.utils.disk import DiskError
from backend.utils.errors import UserError
from tests.support import small_run
from tests.support.random_models import tiny_model
from tests.support.tool_tokenizers import tool_tokenizer

CITY_AND_DAYS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY_AND_DAYS}}


def model_of(folder: Path) -> ServedModel:
    return load_models(find_source(str(folder)), [], None, lambda _: None)[0]


def test_answers_join_and_leave_and_prompts_continue_what_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(tiny_model(tmp_path / "model", layers=2))
    reused: list[int] = []
    longest = PrefixCache.longest

    def counted(self: PrefixCache, *arguments: Any) -> Any:
        found = longest(self, *arguments)
        reused.extend([found.read] if found else [])
        return found

    monkeypatch.setattr(PrefixCache, "longest", counted)
    engine, left, answers = Engine(8), [16], dict[int, tuple[Job, list[SampledToken]]]()
    random = np.random.default_rng(0)

    def job(number: int, prompt: list[int], goes_on: bool) -> Job:
        def tell(new: Sequence[SampledToken], end: Stop | UserError | None) -> None:
            answers[number][1].extend(new)
            if end is None:
                return
            assert not isinstance(end, UserError), end
            if goes_on:  # the next turn of a conversation
                ids = [*prompt, *(token.token for token in answers[number][1]), 5, 6, 7]
                engine.submit(job(100 + number, ids, False))
                return
            left[0] -= 1
            if not left[0]:
                engine.stop()

        most = 4 + 2 * (number % 100)
        made = Job(model, prompt, Sampling(1.0 if number % 3 else 0.8), most, number, tell)
        answers[number] = made, []
        return made

    for number in range(16):
        engine.submit(job(number, random.integers(4, 300, 5 + 8 * number).tolist(), number % 2 == 0))
    engine.run()
    assert len(answers) == 24 and len(reused) > 5 and max(reused) > 100
    for made, tokens in answers.values():
        alone = CachedSequence(model.policy.model, model.policy.split_model)
        steps = alone.generate(made.prompt, made.sampling, made.uniforms())
        expected = [next(steps) for _ in tokens]
        assert [token.token for token in tokens] == [token.token for token in expected]
        for token, other in zip(tokens, expected, strict=True):
            assert token.logp == pytest.approx(other.logp, abs=1e-3)


def answered(jobs: Sequence[Job]) -> list[Any]:
    """The ends of these jobs' answers."""
    engine, ends = Engine(8), list[Any]()

    def tell(new: Sequence[SampledToken], end: Stop | UserError | None) -> None:
        ends.extend([end] if end else [])
        if len(ends) == len(jobs):
            engine.stop()

    for job in jobs:
        job.tell = tell
        engine.submit(job)
    engine.run()
    return ends


def test_a_model_whose_rows_cannot_be_decoded_together_answers_in_turns(tmp_path: Path) -> None:
    model = model_of(tiny_model(tmp_path / "model", arch="mamba", layers=2))
    assert not model.sampler.has_continuous_batching
    ends = answered([Job(model, [5, 6, 7 + number], Sampling(), 5, number, print) for number in range(3)])
    assert all(end in ("eos", "length") for end in ends)


def test_answers_wait_for_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(tiny_model(tmp_path / "model", layers=1))
    monkeypatch.setattr(engine_module, "machine_bytes", lambda active: active + 2 * 100 * model.bytes_per_token)
    advance, together = Lane.advance, list[int]()

    def counted(self: Lane) -> bool:
        goes_on = advance(self)
        together.append(len(self._jobs))
        return goes_on

    monkeypatch.setattr(Lane, "advance", counted)
    # 30 columns each, of 100; the last one takes more alone
    jobs = [Job(model, [5 + number] * 10, Sampling(), 20, number, print) for number in range(8)]
    ends = answered([*jobs, Job(model, [5] * 101, Sampling(), 5, 0, print)])
    assert max(together) == 3 and set(ends) <= {"eos", "length"}


@pytest.mark.parametrize("top", [0, 3], ids=["batched", "by itself"])
def test_a_long_prompt_is_read_between_the_tokens_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, top: int
) -> None:
    """Three prompts, of which one is cancelled while it is read; the answers are those of each alone."""
    model = model_of(tiny_model(tmp_path / "model", layers=1, own={"max_position_embeddings": 4096}))
    monkeypatch.setattr(engine_module, "PIECE", 32)
    monkeypatch.setattr(cached_sequence, "PREFILL_CHUNK", 32)
    engine, heard, ids = Engine(8), list[str](), np.random.default_rng(0).integers(4, 300, 640).tolist()
    jobs = {"short": Job(model, ids[:5], Sampling(), 200, 1, print)}
    jobs |= {
        "long": Job(model, ids, Sampling(), 4, 2, print, top=top),
        "left": Job(model, ids[::-1], Sampling(), 4, 3, print),
    }
    tokens, ended = {name: list[int]() for name in jobs}, list[str]()

    def tell(name: str, new: Sequence[SampledToken], end: Any) -> None:
        heard.append(name)
        tokens[name] += [token.token for token in new]
        if heard == ["short"]:
            engine.submit(jobs["left"])
        if heard.count("short") == 10 and name == "short":
            jobs["left"].is_cancelled = True
            engine.submit(jobs["long"])
        ended.extend([name] if end else [])
        if len(ended) == 2:
            engine.stop()

    for name, job in jobs.items():
        job.tell = partial(tell, name)
    engine.submit(jobs["short"])
    engine.run()
    before = heard.index("long")
    assert before > 20 and heard[-1] == "short" and not tokens["left"], "read in 20 pieces, while the other went on"
    for name in ("short", "long"):
        alone = CachedSequence(model.policy.model, model.policy.split_model)
        steps = alone.generate(jobs[name].prompt, Sampling(), jobs[name].uniforms())
        assert tokens[name] == [next(steps).token for _ in tokens[name]] and tokens[name]


def test_a_failing_model_fails_its_requests_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(tiny_model(tmp_path / "model", layers=1))
    prefill = model.sampler.prefill_pieces

    def broken(prompts: Any) -> Any:
        if prompts[0][0] == [9]:
            raise RuntimeError("out of memory")
        return prefill(prompts)

    monkeypatch.setattr(model.sampler, "prefill_pieces", broken)
    monkeypatch.setattr(engine_module, "CachedSequence", Mock(side_effect=RuntimeError("out of memory")))
    warm = Sampling(0.5)  # of another lane
    failing = [Job(model, [9], Sampling(), 3, 0, print), Job(model, [5], Sampling(), 3, 0, print, top=1)]
    ends = answered([*failing, Job(model, [5, 6], warm, 3, 0, print)])
    failures = [end for end in ends if isinstance(end, UserError)]
    assert len(failures) == 2 and all("out of memory" in str(failure) for failure in failures)
    assert {*ends} - {*failures} <= {"eos", "length"}


class Scripted:
    """An engine that gives these answers."""

    def __init__(self, *answers: list[int]) -> None:
        self.answers = list(answers)

    def submit(self, job: Job) -> None:
        *ids, eos = self.answers.pop(0)
        job.tell([SampledToken(token, -1.0, 0.0) for token in ids], None)
        job.tell([SampledToken(eos, -1.0, 0.0)], "eos")

    def client(self, speaker: Speaker, recorder: Recorder) -> TestClient:
        endpoint = Endpoint(self, [speaker.model], recorder=recorder)  # type: ignore[arg-type]
        return TestClient(endpoint.app("127.0.0.1"), base_url="http://localhost")


class Speaker:
    """Feeds texts to an `AnswerText` as tokens of a tokenizer with tools and reasoning."""

    def __init__(self, folder: Path, **fields: Any) -> None:
        tiny_model(folder)
        self.tokenizer = tool_tokenizer(folder, special=("<think>", "</think>"))
        self.model = model_of(folder)
        self.fields = fields

    def say(self, text: str, **fields: Any) -> tuple[AnswerText, list[tuple[str, str]]]:
        answer, pieces = AnswerText(self.model, **fields), list[tuple[str, str]]()
        for token in [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]:
            if answer.stop is None:
                end = "eos" if token == self.tokenizer.eos_token_id else None
                pieces += answer.push([SampledToken(token, -1.0, 0.0)], end)
        return answer, pieces


def test_reasoning_calls_and_stop_strings_are_told_apart(tmp_path: Path) -> None:
    speaker = Speaker(tmp_path / "model")
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern", "days": 2}}\n</tool_call>'
    answer, pieces = speaker.say(f"<think>\nLook <tool_call>\n</think>\n\nI ask.\n{call}", tools=[WEATHER])
    message = answer.message()
    assert message["reasoning_content"] == "\nLook <tool_call>\n" and message["content"] == "I ask.\n"
    (asked,) = message["tool_calls"]
    assert asked["function"] == {"name": "weather", "arguments": '{"city": "Bern", "days": 2}'}
    assert answer.finish_reason == "tool_calls" and answer.completion().stop == "eos"
    shown = {part: "".join(text for name, text in pieces if name == part) for part in ("content", "reasoning_content")}
    assert shown == {"content": message["content"], "reasoning_content": message["reasoning_content"]}
    broken, pieces = speaker.say('<tool_call>\n{"name": \n</tool_call>', tools=[WEATHER])
    assert (
        not broken.calls
        and "".join(text for _, text in pieces) == broken.content == '<tool_call>\n{"name": \n</tool_call>'
    )
    # Nobody asked for tools
    assert speaker.say(call)[0].content == call
    stopped, pieces = speaker.say("one two, three four", stop_strings=("three f", "zzz"))
    assert (stopped.content, stopped.finish_reason, stopped.stop) == ("one two, ", "stop", "string")
    assert "".join(text for _, text in pieces) == "one two, "
    opened = speaker.tokenizer.encode("<think>\n", add_special_tokens=False)
    assert speaker.say("Hm.</think>Yes", prompt=opened)[0].message()["reasoning_content"] == "Hm."


def test_settings_of_a_run_are_the_defaults_of_a_request(tmp_path: Path) -> None:
    from backend.endpoint.openai_api import ChatRequest

    raw = small_run.settings_for(tmp_path, temperature=0.6, top_k=9, output_regex="[0-9]+")
    model = ServedModel("a", parse(raw), None)  # type: ignore[arg-type]
    request = ChatRequest(messages=[{"role": "user", "content": "a"}], top_p=0.5)
    assert request.sampling(model) == Sampling(0.6, 0.5, 9)
    penalised = ChatRequest(messages=[{"role": "user", "content": "a"}], presence_penalty=1.0, temperature=0)
    assert penalised.sampling(model).penalties.presence == 1.0 and penalised.sampling(model).temperature == 0


def test_calls_of_tools_reach_the_client_and_the_recording(tmp_path: Path) -> None:
    speaker, recorder = Speaker(tmp_path / "model"), Recorder(tmp_path / "recorded", print)
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern", "days": 2}}\n</tool_call>'
    eos, encode = speaker.tokenizer.eos_token_id, speaker.tokenizer.encode
    texts = [f"I ask.\n{call}", "Rain.", f"Again.\n{call}", "Sun."]
    answers = [[*encode(text, add_special_tokens=False), eos] for text in texts]
    client = Scripted(*answers).client(speaker, recorder)
    for session, streams in (("a", False), ("b", True)):
        chat: list[Any] = [{"role": "user", "content": "Weather?"}]
        request = {"tools": [WEATHER], "stream": streams}
        answer = client.post(f"/sessions/{session}/v1/chat/completions", json=request | {"messages": chat})
        if streams:
            events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
            choices = [event["choices"][0] for event in events]
            assert "".join(each["delta"].get("content", "") for each in choices) == "Again.\n"
            (calls,) = [each["delta"]["tool_calls"] for each in choices if "tool_calls" in each["delta"]]
            finish, message = (
                choices[-1]["finish_reason"],
                {"role": "assistant", "content": "Again.\n", "tool_calls": calls},
            )
        else:
            (choice,) = answer.json()["choices"]
            finish, message = choice["finish_reason"], choice["message"]
        assert finish == "tool_calls" and message["tool_calls"][0]["function"]["name"] == "weather"
        chat += [message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "12 degrees"}]
        answer = client.post(f"/sessions/{session}/v1/chat/completions", json={"tools": [WEATHER], "messages": chat})
        assert answer.json()["choices"][0]["message"]["content"] in ("Rain.", "Sun.")
        assert client.post(f"/sessions/{session}/reward", json={"reward": 1, "group": "g"}).status_code == 200
    recorder.close()
    lines = [json.loads(line) for line in (tmp_path / "recorded" / "sessions.jsonl").read_text().splitlines()]
    assert [line["after"] for line in lines if "reply" in line] == [None, 0, None, 0]  # each session is one part


def test_a_full_disk_fails_the_request_that_is_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    speaker, recorder = Speaker(tmp_path / "model"), Recorder(tmp_path / "recorded", print)

    client = Scripted(*[[speaker.tokenizer.eos_token_id]] * 3).client(speaker, recorder)
    monkeypatch.setattr(recorder, "add", Mock(side_effect=DiskError("The disk is full.")))
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
    answer = client.post("/sessions/a/v1/chat/completions", json=asked)
    assert answer.status_code == 500 and answer.json()["error"]["message"] == "The disk is full."
    streamed = client.post("/sessions/a/v1/chat/completions", json=asked | {"stream": True}).text
    assert "The disk is full." in streamed and streamed.endswith("data: [DONE]\n\n")
    assert client.post("/v1/chat/completions", json=asked).status_code == 200
