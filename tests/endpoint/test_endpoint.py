"""The verb `endpoint` as OpenAI's own client uses it, in a process of its own."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from backend.runs.run_folder import RunFolder
from backend.utils.command import backend_environment
from tests.support import small_run
from tests.support.trained_run import make_run
from tests.support.verbs import refused, run_ok

KEY = "a key of the test"
ASK: list[Any] = [{"role": "user", "content": "What is 2 plus 2?"}]


@dataclass
class Served:
    process: subprocess.Popen[str]
    runs: Path
    about: dict[str, Any]

    @property
    def root(self) -> str:
        return self.about["url"].removesuffix("/v1")

    @property
    def recorded(self) -> Path:
        return self.runs.parent / "recorded"

    def client(self, path: str = "", key: str = KEY) -> Any:
        import openai  # takes a second, in each worker of the suite

        return openai.OpenAI(base_url=f"{self.root}{path}/v1", api_key=key, max_retries=0, timeout=60)

    def post(self, path: str, **request: Any) -> httpx2.Response:
        headers = {"Authorization": f"Bearer {KEY}"} | request.pop("headers", {})
        return httpx2.post(f"{self.root}{path}", headers=headers, timeout=60, **request)

    def running(self) -> int:
        return httpx2.get(f"{self.root}/health").json()["running"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("endpoint")
    runs = folder / "runs"
    for number, name in enumerate(("first", "second"), 1):
        make_run(runs / name, folder / "inputs", (0.5,) * number, temperature=0.9, system_prompt="Be short.")
    command = [sys.executable, "-m", "backend", "endpoint", "first", "--adapter", "second", "--runs-dir", str(runs)]
    command += ["--port", "0", "--record", str(folder / "recorded"), "--json"]
    environment = backend_environment() | {"GRPO_STUDIO_KEY": KEY}
    with (folder / "stderr").open("w") as stderr:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True)
    assert process.stdout is not None
    yield Served(process, runs, json.loads(process.stdout.readline()))
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    assert "Traceback" not in (folder / "stderr").read_text(), "whatever clients did"


def test_the_calls_of_openais_client(served: Served) -> None:
    assert served.about["models"] == ["model", "first", "second"] and served.about["needs_key"]
    client = served.client()
    assert [model.id for model in client.models.list()] == served.about["models"]
    texts = set[str | None]()
    for name in served.about["models"]:
        answers = [
            client.chat.completions.create(model=name, messages=ASK, max_tokens=20, seed=3, logprobs=True, n=2)
            for _ in range(2)
        ]
        first, again = ([choice.message.content for choice in answer.choices] for answer in answers)
        assert first == again and first[0] != first[1]
        texts.add(first[0])
        choice = answers[0].choices[0]
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert len(choice.logprobs.content) == 20 or choice.finish_reason == "stop"
        assert (
            choice.logprobs.content[0].token == (choice.message.content or "")[: len(choice.logprobs.content[0].token)]
        )
        assert all(each.logprob < 0 for each in choice.logprobs.content)
    assert len(texts) == 3  # the base and each adapter answer differently
    assert answers[0].usage is not None and answers[0].usage.completion_tokens <= 40


def test_a_stream_is_the_whole_answer(served: Served) -> None:
    client = served.client()
    asked: dict[str, Any] = {"model": "first", "messages": ASK, "max_tokens": 30, "seed": 5}
    whole = client.chat.completions.create(**asked)
    stream = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    pieces = [chunk.choices[0] for chunk in stream if chunk.choices]
    assert "".join(piece.delta.content or "" for piece in pieces) == whole.choices[0].message.content
    assert pieces[0].delta.role == "assistant" and len(pieces) > 4
    assert pieces[-1].finish_reason == whole.choices[0].finish_reason and stream[-1].usage == whole.usage


def test_text_completions_and_the_likeliest_tokens(served: Served) -> None:
    client = served.client()
    asked: dict[str, Any] = {"model": "second", "prompt": "What is", "temperature": 0, "max_tokens": 8}
    answer = client.completions.create(**asked, logprobs=3)
    (choice,) = answer.choices
    assert choice.logprobs is not None and choice.logprobs.tokens is not None
    assert "".join(choice.logprobs.tokens).startswith(choice.text)
    for token, logp, best in zip(
        choice.logprobs.tokens, choice.logprobs.token_logprobs or [], choice.logprobs.top_logprobs or [], strict=True
    ):
        assert len(best) <= 3 and max(best, key=lambda each: best[each]) == token  # temperature 0
        assert best[token] == pytest.approx(logp, abs=1e-4)
    sampled = client.completions.create(**asked, logprobs=0).choices[0].logprobs
    assert sampled is not None and sampled.token_logprobs == pytest.approx(choice.logprobs.token_logprobs, abs=1e-4)
    # Batched, it is the same
    assert client.completions.create(**asked).choices[0].text == choice.text
    several = client.completions.create(model="first", prompt=["What", "What is 3"], max_tokens=4, n=2)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    ids = served.post("/v1/completions", json={"prompt": [5, 6, 7], "max_tokens": 3, "return_token_ids": True}).json()
    assert ids["prompt_token_ids"] == [5, 6, 7] and len(ids["choices"][0]["token_ids"]) <= 3
    assert ids["model"] == "first"  # the trained one, without a name


def test_a_stop_string_and_a_schema(served: Served) -> None:
    client = served.client()
    asked: dict[str, Any] = {"model": "first", "messages": ASK, "max_tokens": 40, "seed": 8}
    text = client.chat.completions.create(**asked).choices[0].message.content
    assert text
    word = text[7:10]
    cut = client.chat.completions.create(**asked, stop=[word]).choices[0]
    assert cut.message.content == text[: text.index(word)] and cut.finish_reason == "stop"
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    held = client.chat.completions.create(
        **asked, response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    )
    assert json.loads(held.choices[0].message.content or "") in ({"a": 1}, {"a": 2})


def test_a_bad_request_gets_one_sentence_and_harms_nobody(served: Served) -> None:
    import openai

    client = served.client()
    chat = client.chat.completions.create
    with pytest.raises(openai.AuthenticationError, match="key is missing or wrong"):
        served.client(key="wrong").models.list()
    with pytest.raises(openai.NotFoundError, match="no model other; there are model, first, second"):
        chat(model="other", messages=ASK)
    for request, sentence in (
        ({"messages": []}, "messages: List should have"),
        ({"messages": [{"role": "wizard", "content": ""}]}, "role must be"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "Only text"),
        ({"messages": ASK, "temperature": -1}, "temperature: "),
        ({"messages": [{"role": "user", "content": "long " * 5000}]}, "reads 4,096"),
        ({"messages": ASK, "tools": [{"type": "function"}]}, "cannot use tools"),
        (
            {"messages": ASK, "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "no"}}}},
            "schema cannot be used",
        ),
        *(
            ({"messages": ASK, "response_format": {"type": "json_schema", "json_schema": form}}, "needs its schema")
            for form in (None, {"schema": "x"})
        ),
        ({"messages": ASK, "chat_template_kwargs": {"tokenize": False}}, "tokenize is not an option"),
    ):
        answer = served.post("/v1/chat/completions", json=request)
        assert answer.status_code == 400 and sentence in answer.json()["error"]["message"], answer.text
    assert served.post("/v1/chat/completions", content=b"{").status_code == 415
    huge = served.post("/v1/chat/completions", content=b" " * (17 << 20), headers={"Content-Type": "application/json"})
    assert huge.status_code == 413
    assert served.post("/v1/models", headers={"Host": "example.com"}).status_code == 400
    with socket.create_connection(("127.0.0.1", int(served.root.rsplit(":", 1)[1]))) as slow:
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9000\r\n\r\n{")
        assert chat(model="first", messages=ASK, max_tokens=4).choices
    assert served.running() == 0 and served.process.poll() is None


def test_others_are_answered_while_a_long_text_is_read(served: Served) -> None:
    with ThreadPoolExecutor() as pool:
        long = pool.submit(served.post, "/v1/completions", json={"prompt": "1+2= " * 80_000})
        answered = 0
        while not long.done():
            answered += served.running() == 0
    assert long.result().status_code == 400 and answered > 2, "else one before it and one after"


def test_clients_that_leave_free_their_rows(served: Served) -> None:
    import openai

    client = served.client()
    # At temperature 0 none of these answers ends by itself.
    asked: dict[str, Any] = {"model": "first", "prompt": "What is", "max_tokens": 3000, "temperature": 0}
    with client.completions.create(**asked, n=20, stream=True) as stream:
        next(iter(stream))
        assert served.running() > 10
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).completions.create(**asked, n=20)
    deadline = time.monotonic() + 60
    while served.running():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_many_at_once_are_answered_as_one_by_one(served: Served) -> None:
    client = served.client()

    def ask(number: int) -> str:
        name, temperature = served.about["models"][number % 3], (0.7, 1.0)[number % 2]
        words = f"What is {number} plus {'1 ' * number}?"
        answer = client.completions.create(
            model=name, prompt=words, max_tokens=5 + number, seed=number, temperature=temperature
        )
        return answer.choices[0].text

    with ThreadPoolExecutor(18) as pool:
        together = list(pool.map(ask, range(18)))
    assert together == [ask(number) for number in range(18)]


def test_a_recorded_session_trains_with_a_ratio_of_one(served: Served) -> None:
    for number in range(4):
        client = served.client(f"/sessions/s{number}")
        chat = list(ASK)
        for turn in range(2):
            seed = 2 * number + turn
            answer = client.chat.completions.create(model="first", messages=chat, max_tokens=12, top_p=1, seed=seed)
            chat += [answer.choices[0].message.model_dump(), {"role": "user", "content": "And 3?"}]
        reward = {"reward": number, "group": f"g{number % 2}"}
        assert served.post(f"/sessions/s{number}/reward", json=reward).status_code == 200
    assert "several parts" not in run_ok("sessions", served.recorded, "--group-size", 2).stdout
    raw = small_run.settings_for(served.runs.parent / "inputs", data=str(served.recorded), adapter="first", iters=1)
    raw |= {"reward_functions": ["session_reward"], "reward_weights": [], "max_completion_length": 80}
    raw |= {"temperature": 0.9, "batch_size": 2, "validation_split": 0.0}
    run = RunFolder(served.runs / "recorded")
    assert small_run.train_here(raw, run).kind == "finished"
    (step,) = small_run.metrics(run)
    assert step["sampling/logp_gap/max"] < 1e-4 and step["grad_norm"] > 0


def test_what_cannot_be_served(served: Served) -> None:
    port = served.root.rsplit(":", 1)[1]
    here = ("--runs-dir", served.runs)
    assert f"port: Cannot listen on 127.0.0.1:{port}" in refused("endpoint", "first", "--port", port, *here)
    assert "no run or model nothing" in refused("endpoint", "nothing", "--port", 0, *here)
    assert "There is no adapter nowhere" in refused("endpoint", "first", "--adapter", "nowhere", "--port", 0, *here)
    same = refused("endpoint", "first", "--adapter", "first", "--port", 0, *here)
    assert "Two models have the name first" in same
    assert os.environ.get("GRPO_STUDIO_KEY") is None
