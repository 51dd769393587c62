"""The endpoint's HTTP: a starlette application around the engine."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from pydantic import BaseModel, FiniteFloat, ValidationError
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from backend.config.checks import RESERVED_TEMPLATE_OPTIONS
from backend.data.problems import TooLong, tokenize_if_fits
from backend.endpoint import openai_api as api
from backend.endpoint.engine import MODEL_FAILED, Engine, Job
from backend.endpoint.models import ServedModel
from backend.endpoint.recording import Answer, Recorder
from backend.runs.completion_rows import Stop
from backend.sampling.cached_sequence import SampledToken
from backend.tools.mcp_settings import LOOPBACK
from backend.utils.disk import DiskError
from backend.utils.errors import UserError

MOST_BYTES = 16 << 20  # of a request's body
R = TypeVar("R", bound=BaseModel)
Message = dict[str, Any]
Piece = tuple[Sequence[SampledToken], Stop | UserError | None]


class RequestError(Exception):
    """An answer with an error: HTTP status, and OpenAI's fields."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    @classmethod
    def of(cls, error: UserError) -> RequestError:
        problem = error.faults[0]
        is_ours = isinstance(error, DiskError) or problem.setting == MODEL_FAILED
        return cls(500 if is_ours else 400, problem.sentence, problem.setting)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request ready to compute, with `n` answers to each of its prompts."""

    request: api.ChatRequest | api.TextRequest
    model: ServedModel
    prompts: list[list[int]]
    tools: list[Message]
    messages: list[Message]
    session: str

    @property
    def is_chat(self) -> bool:
        return isinstance(self.request, api.ChatRequest)


def too_long(model: ServedModel, param: str) -> RequestError:
    sentence = f"The prompt is too long: {model.name} reads {model.context:,} tokens with its answer."
    return RequestError(400, sentence, param, "context_length_exceeded")


class Endpoint:
    """Answers requests with `models`; the first is the base. `key`: what clients have to send, "" for none."""

    def __init__(
        self, engine: Engine, models: Sequence[ServedModel], *, key: str = "", recorder: Recorder | None = None
    ) -> None:
        self.engine, self.models = engine, {model.name: model for model in models}
        self._key, self._recorder = key, recorder

    def app(self, host: str) -> Starlette:
        """Listening on loopback, it answers no web page of another site that has its name point there."""
        hosts, prefixes = [*LOOPBACK] if host in LOOPBACK else ["*"], ["/v1"]
        routes = [Route("/health", lambda _: JSONResponse({"status": "ok", "running": self.engine.running}))]
        if self._recorder is not None:
            prefixes.append("/sessions/{session}/v1")
            routes.append(Route("/sessions/{session}/reward", self._guarded(self.reward), methods=["POST"]))
        for prefix in prefixes:
            routes.append(Route(f"{prefix}/models", self._guarded(self.list_models)))
            routes.append(Route(f"{prefix}/chat/completions", self._guarded(self.chat), methods=["POST"]))
            routes.append(Route(f"{prefix}/completions", self._guarded(self.text), methods=["POST"]))
        return Starlette(routes=routes, middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts)])

    def _guarded(self, answer: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def guarded(request: Request) -> Response:
            try:
                given = request.headers.get("authorization", "").removeprefix("Bearer ")
                if self._key and not secrets.compare_digest(given.encode(), self._key.encode()):
                    raise RequestError(401, "The API key is missing or wrong.", code="invalid_api_key")
                return await answer(request)
            except (RequestError, UserError) as error:
                failed = RequestError.of(error) if isinstance(error, UserError) else error
                return JSONResponse(failed.body, failed.status)
            except ClientDisconnect:
                return Response(status_code=499)

        return guarded

    async def list_models(self, request: Request) -> Response:
        models = [{"id": name, "object": "model", "created": 0, "owned_by": "grpo-studio"} for name in self.models]
        return JSONResponse({"object": "list", "data": models})

    async def reward(self, request: Request) -> Response:
        assert self._recorder is not None
        posted = await _body(request, _Reward)
        self._recorder.reward(request.path_params["session"], posted.reward, posted.group)
        return JSONResponse({"status": "ok"})

    async def chat(self, request: Request) -> Response:
        asked = await _body(request, api.ChatRequest)
        model = self._model(asked.model)
        messages = api.chat_messages(asked, model)
        tools = asked.tools or [] if asked.tool_choice != "none" else []
        if tools and model.turn_format.fault:
            raise RequestError(400, model.turn_format.fault, "tools")
        if reserved := asked.chat_template_kwargs.keys() & set(RESERVED_TEMPLATE_OPTIONS):
            raise RequestError(400, f"{reserved.pop()} is not an option to choose.", "chat_template_kwargs")
        variables = {**model.config.chat_template_kwargs, **asked.chat_template_kwargs}
        variables |= {"tools": tools} if tools else {}

        def rendered() -> list[int]:
            try:
                tokens = tokenize_if_fits(messages, model.policy.tokenizer, variables, "the messages", model.context)
            except UserError as error:
                raise RequestError(400, error.faults[0].sentence, "messages") from None
            if isinstance(tokens, TooLong):
                raise too_long(model, "messages")
            return tokens

        session = request.path_params.get("session", "")
        if self._recorder is None or not session:
            prompt = await asyncio.to_thread(rendered)  # megabytes take seconds, in which others are answered
        else:
            prompt = self._recorder.prompt(session, model.name, messages, tools, model.turn_format, rendered)
        return await self._answer(request, Asked(asked, model, [prompt], tools, messages, session))

    async def text(self, request: Request) -> Response:
        asked = await _body(request, api.TextRequest)
        model, given = self._model(asked.model), asked.prompt
        several: list[Any] = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else list(given)
        tokenizer, session = model.policy.tokenizer, request.path_params.get("session", "")
        prompts: list[list[int]] = await asyncio.to_thread(
            lambda: [tokenizer.encode(each) if isinstance(each, str) else list(each) for each in several]
        )
        vocabulary = model.policy.split_model.vocab_size
        if not prompts or any(not prompt or not 0 <= min(prompt) <= max(prompt) < vocabulary for prompt in prompts):
            raise RequestError(400, "A prompt is empty, or has ids that the model does not know.", "prompt")
        messages = [{"role": "user", "content": tokenizer.decode(prompts[0])}] if session else []
        return await self._answer(request, Asked(asked, model, prompts, [], messages, session))

    def _model(self, name: str) -> ServedModel:
        """Without a name the one that was trained, else the base."""
        model = self.models.get(name or [*self.models][min(1, len(self.models) - 1)])
        if model is None:
            there = ", ".join(self.models)
            raise RequestError(404, f"There is no model {name[:80]}; there are {there}.", "model", "model_not_found")
        return model

    async def _answer(self, request: Request, asked: Asked) -> Response:
        rooms = [asked.model.context - len(prompt) for prompt in asked.prompts]
        if min(rooms) < 1:
            raise too_long(asked.model, "messages" if asked.is_chat else "prompt")
        most = getattr(asked.request, "max_completion_tokens", None) or asked.request.max_tokens or api.MAX_TOKENS
        limits = [min(most, room) for room in rooms for _ in range(asked.request.n)]
        choices = [Choice(self.engine, asked, index, limit) for index, limit in enumerate(limits)]
        if asked.request.stream:
            return StreamingResponse(self._events(asked, choices), media_type="text/event-stream")
        answers = asyncio.gather(*(choice.read() for choice in choices))
        gone = asyncio.ensure_future(request.receive())  # comes when the client has left
        try:
            await asyncio.wait((answers, gone), return_when=asyncio.FIRST_COMPLETED)
            if not answers.done():
                raise ClientDisconnect
            await answers
        finally:
            for choice in choices:
                choice.job.is_cancelled = True
            for task in (answers, gone):
                task.cancel()
            await asyncio.gather(answers, gone, return_exceptions=True)  # else asyncio logs a traceback
        self._record(asked, choices)
        shown = [choice.whole() for choice in choices]
        kind = "chat.completion" if asked.is_chat else "text_completion"
        whole = api.head(kind, asked.model.name) | {"choices": shown, "usage": _usage(asked, choices)}
        if asked.request.return_token_ids:
            whole["prompt_token_ids"] = asked.prompts[0]
        return JSONResponse(whole)

    async def _events(self, asked: Asked, choices: Sequence[Choice]) -> AsyncIterator[str]:
        kind = "chat.completion.chunk" if asked.is_chat else "text_completion"
        head, arrived = api.head(kind, asked.model.name), asyncio.Queue[Message | None]()

        async def follow(choice: Choice) -> None:
            try:
                async for chunk in choice.chunks():
                    arrived.put_nowait(head | {"choices": [chunk]})
            except UserError as error:
                arrived.put_nowait(RequestError.of(error).body)
            arrived.put_nowait(None)

        tasks = [asyncio.ensure_future(follow(choice)) for choice in choices]
        try:
            for _ in choices:
                while (chunk := await arrived.get()) is not None:
                    yield f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"
            try:
                self._record(asked, choices)
            except UserError as error:
                yield f"data: {json.dumps(RequestError.of(error).body)}\n\n"
            options = asked.request.stream_options
            if options is not None and options.include_usage:
                yield f"data: {json.dumps(head | {'choices': [], 'usage': _usage(asked, choices)})}\n\n"
            yield "data: [DONE]\n\n"
        finally:
            for choice, task in zip(choices, tasks, strict=True):
                choice.job.is_cancelled = True
                task.cancel()

    def _record(self, asked: Asked, choices: Sequence[Choice]) -> None:
        if self._recorder is None or not asked.session:
            return
        for choice in choices:
            if choice.text.stop is not None:
                answer = Answer(choice.job.prompt, choice.text.completion(), choice.job.sampling, asked.model.name)
                self._recorder.add(asked.session, asked.messages, asked.tools, choice.message, answer)


class _Reward(BaseModel):
    reward: FiniteFloat
    group: str = ""


class Choice:
    """One answer to one of the prompts."""

    def __init__(self, engine: Engine, asked: Asked, index: int, max_tokens: int) -> None:
        request, model = asked.request, asked.model
        prompt = asked.prompts[index // request.n]
        self.asked, self.index = asked, index
        self.text = api.AnswerText(model, asked.tools, request.stop_strings, prompt, is_chat=asked.is_chat)
        loop, self._pieces = asyncio.get_running_loop(), asyncio.Queue[Piece]()

        def tell(new: Sequence[SampledToken], end: Stop | UserError | None) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._pieces.put_nowait, (new, end))

        seed = secrets.randbits(32) if request.seed is None else request.seed
        top = request.top_logprobs if isinstance(request, api.ChatRequest) else request.logprobs or 0
        self.job = Job(model, prompt, request.sampling(model), max_tokens, seed, tell, index, top)
        engine.submit(self.job)

    @cached_property
    def message(self) -> Message:
        """The finished answer, whose calls get their ids here."""
        return self.text.message()

    @property
    def has_logprobs(self) -> bool:
        return self.asked.request.logprobs is not (False if self.asked.is_chat else None)

    def logprobs(self, tokens: Sequence[SampledToken]) -> Message | None:
        tokenizer = self.asked.model.policy.tokenizer
        shown = api.chat_logprobs if self.asked.is_chat else api.text_logprobs
        return shown(tokens, tokenizer) if self.has_logprobs else None

    async def pieces(self) -> AsyncIterator[tuple[list[tuple[str, str]], Sequence[SampledToken]]]:
        """(pieces of text, their tokens) as they arrive. Raises UserError where the model failed."""
        while self.text.stop is None:
            new, end = await self._pieces.get()
            if isinstance(end, UserError):
                raise end
            before = len(self.text.tokens)
            parts = self.text.push(new, end)
            yield parts, self.text.tokens[before:]
        self.job.is_cancelled = True  # at a stop string

    async def read(self) -> None:
        async for _ in self.pieces():
            pass

    def whole(self) -> Message:
        text, tokens = self.text, self.text.tokens
        shown: Message = {"index": self.index, "finish_reason": text.finish_reason, "logprobs": self.logprobs(tokens)}
        shown |= {"message": self.message} if self.asked.is_chat else {"text": text.content}
        return shown | ({"token_ids": [each.token for each in tokens]} if self.asked.request.return_token_ids else {})

    async def chunks(self) -> AsyncIterator[Message]:
        """The answer as the choices of a stream's events."""

        def chunk(delta: Message, tokens: Sequence[SampledToken] = (), finish: str | None = None) -> Message:
            shown: Message = {"delta": delta} if self.asked.is_chat else {"text": delta.get("content", "")}
            shown |= {"index": self.index, "finish_reason": finish}
            if self.has_logprobs and tokens:
                shown["logprobs"] = self.logprobs(tokens)
            if self.asked.request.return_token_ids and tokens:
                shown["token_ids"] = [each.token for each in tokens]
            return shown

        if self.asked.is_chat:
            yield chunk({"role": "assistant", "content": ""})
        async for parts, tokens in self.pieces():
            for part, text in parts or [("content", "")] * bool(self.has_logprobs):
                yield chunk({part: text}, tokens)
                tokens = ()
        if calls := [{"index": i, **call} for i, call in enumerate(self.message.get("tool_calls", ()))]:
            yield chunk({"tool_calls": calls})
        yield chunk({}, finish=self.text.finish_reason)


def _usage(asked: Asked, choices: Sequence[Choice]) -> Message:
    prompt, tokens = sum(map(len, asked.prompts)), sum(len(choice.text.tokens) for choice in choices)
    return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}


async def _body(request: Request, kind: type[R]) -> R:
    if "application/json" not in request.headers.get("content-type", ""):  # which a web page may not send unasked
        raise RequestError(415, "The content type must be application/json.")
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MOST_BYTES:
            raise RequestError(413, f"The request is larger than {MOST_BYTES >> 20} MB.")
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        param = ".".join(map(str, first["loc"])) or None
        raise RequestError(400, f"{param or 'The request'}: {first['msg']}.", param) from None
