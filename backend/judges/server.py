"""Servers with OpenAI's interface that judges ask: finding them, their keys, and the client."""

import asyncio
import json
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

from backend.tools.mcp_settings import is_here
from backend.utils import keychain
from backend.utils.errors import UserError
from backend.utils.text import quote

SETTING = "reward_functions"
Messages = list[dict[str, str]]
KNOWN_SERVERS = (("LM Studio", 1234), ("Ollama", 11434), ("mlx_lm.server", 8080))
LOOK_S, ASK_S = 0.7, 5.0  # seconds for a server that may be there, and for one that was named
KEY_VARIABLE = "OPENAI_API_KEY"


class UnreachableError(Exception):
    """No server answers at an address."""


class FailedCallError(Exception):
    """A call that brought no reply; its text completes “its server …”."""


class _NoRedirect(HTTPRedirectHandler):
    """Consent is to one host: neither the key nor prompts follow it to another."""

    def redirect_request(self, *_: Any) -> None: ...


def find_servers() -> list[dict[str, Any]]:
    """{"name", "url", "models"} of the usual servers that run on this machine. Takes at most a second."""

    def look(name: str, port: int) -> dict[str, Any] | None:
        url = f"http://127.0.0.1:{port}/v1"
        with suppress(UnreachableError, FailedCallError):
            return {"name": name, "url": url, "models": models_of(url, LOOK_S)}

    with ThreadPoolExecutor(len(KNOWN_SERVERS)) as pool:
        return [found for found in pool.map(look, *zip(*KNOWN_SERVERS, strict=True)) if found]


def models_of(url: str, timeout_s: float = ASK_S, key: str = "") -> tuple[str, ...]:
    """The ids in a server's /models. Raises UnreachableError and FailedCallError."""
    opener = build_opener(_NoRedirect, *([ProxyHandler({})] if is_here(url) else []))
    request = Request(f"{url.rstrip('/')}/models", headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with opener.open(request, timeout=timeout_s) as reply:
            listed = json.loads(reply.read(1 << 22))
        return tuple(str(each["id"]) for each in listed["data"])
    except HTTPError as error:
        raise FailedCallError(f"answered {error.code}") from None
    except OSError as error:
        raise UnreachableError(quote(getattr(error, "reason", error), 60)) from None
    except (ValueError, KeyError, TypeError):
        raise FailedCallError("does not list its models") from None


def _entry(host: str) -> str:
    return f"Key of the judge at {host}"


def save_key(host: str, key: str) -> None:
    """Keep a server's key in the keychain; an empty one deletes it. Raises UserError."""
    if not key.strip():
        keychain.forget(_entry(host), "url", "key")
        return
    if keychain.keychain() is None:
        what = "This system has no keychain that could keep the key (on Linux: GNOME Keyring or KWallet)"
        raise UserError("url", f"{what}; set {KEY_VARIABLE} instead.")
    keychain.store(_entry(host), key.strip(), "url", "key")


class Server:
    """A server that is asked from an event loop in a thread of its own, which ends with `close`. `identity`: the name
    of its model."""

    def __init__(self, url: str, model: str, timeout_s: float) -> None:
        """Looks whether the server is there. `model`: "" for its first. Raises UserError."""
        kept = keychain.stored(_entry(urlsplit(url).hostname or ""))
        self.url, self._timeout_s, self._key = url, timeout_s, kept or os.environ.get(KEY_VARIABLE, "").strip()
        where, models = f"The judge's server at {quote(url, 60)}", tuple[str, ...]()
        try:
            models = models_of(url, key=self._key)
        except UnreachableError as error:
            raise UserError(SETTING, f"{where} does not answer ({error}). Start it, or correct url.") from None
        except FailedCallError as error:
            if not model:
                raise UserError(SETTING, f"{where} {error}. Name a model.") from None
        if not (model or models):
            raise UserError(SETTING, f"{where} has no model. Load one there.")
        self.identity = model or models[0]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="judge", daemon=True)
        self._thread.start()
        self._client = self.begin(self._open())

    def begin(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _open(self) -> Any:
        import openai  # takes a second or more, while the rest of the run loads

        # A proxy of the environment is for other machines.
        http = openai.DefaultAsyncHttpxClient(trust_env=not is_here(self.url), follow_redirects=False)
        key = self._key or "none"
        client = openai.AsyncOpenAI(base_url=self.url, api_key=key, max_retries=0, http_client=http)
        _ = client.chat.completions  # imports more
        return client

    async def reply(self, messages: Messages) -> str:
        """One reply at temperature 0. Raises UnreachableError and FailedCallError."""
        import openai

        client = await asyncio.wrap_future(self._client)
        asked: Any = messages
        try:
            call = client.chat.completions.create(model=self.identity, messages=asked, temperature=0)
            found = await asyncio.wait_for(call, self._timeout_s)
            return found.choices[0].message.content or ""
        except (TimeoutError, openai.APITimeoutError):
            raise FailedCallError(f"did not answer within {self._timeout_s:g} s (timeout)") from None
        except openai.APIConnectionError as error:
            raise UnreachableError(quote(error.__cause__ or error, 60)) from None
        except openai.APIStatusError as error:
            body: Any = error.body
            said = body.get("message") if isinstance(body, dict) else None
            raise FailedCallError(f"answered {error.status_code} ({quote(said or error.message, 80)})") from None
        except (openai.OpenAIError, ValueError, LookupError, TypeError, AttributeError):
            raise FailedCallError("answered without a chat completion") from None

    def close(self) -> None:
        """Cancel what runs and end the thread."""

        async def end() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            if self._client.done() and not self._client.cancelled():
                await self._client.result().close()

        with suppress(TimeoutError):
            self.begin(end()).result(2)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(2)
        if not self._thread.is_alive():
            self._loop.close()
