"""Servers with OpenAI's interface that judges ask: finding them, their keys, and the client."""

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import httpx2

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
    try:
        reply = httpx2.get(f"{url.rstrip('/')}/models", timeout=timeout_s, **_options(url, key))
        if not reply.is_success:
            raise FailedCallError(f"answered {reply.status_code}")
        return tuple(str(each["id"]) for each in reply.json()["data"])
    except (httpx2.TransportError, ImportError) as error:  # the latter for a SOCKS proxy of the environment
        raise UnreachableError(quote(error, 60)) from None
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError, KeyError, TypeError, RecursionError):
        raise FailedCallError("does not list its models") from None


def _options(url: str, key: str) -> dict[str, Any]:
    """A proxy of the environment is for other machines. Consent is to one host: nothing follows a redirect."""
    headers = {"Authorization": f"Bearer {key}".encode()} if key else {}  # httpx refuses text that is not ASCII
    return {"headers": headers, "trust_env": not is_here(url), "follow_redirects": False}


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
    """A server, asked from an event loop in its own thread, which ends with `close`. `identity`: its model's name."""

    def __init__(self, url: str, model: str, timeout_s: float) -> None:
        """Looks whether the server is there. `model`: "" for its first. Raises UserError."""
        self.url, self._timeout_s = url, timeout_s
        key = keychain.stored(_entry(urlsplit(url).hostname or "")) or os.environ.get(KEY_VARIABLE, "").strip()
        where, models = f"The judge's server at {quote(url, 60)}", tuple[str, ...]()
        try:
            models = models_of(url, key=key)
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
        limits = httpx2.Limits(max_connections=None)  # the judge's `concurrency` is one
        self._client = httpx2.AsyncClient(timeout=None, limits=limits, **_options(url, key))

    def begin(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def reply(self, messages: Messages) -> str:
        """One reply at temperature 0. Raises UnreachableError and FailedCallError."""
        asked = {"model": self.identity, "messages": messages, "temperature": 0}
        try:
            call = self._client.post(f"{self.url.rstrip('/')}/chat/completions", json=asked)
            reply = await asyncio.wait_for(call, self._timeout_s)
            if reply.is_success:
                content = reply.json()["choices"][0]["message"]["content"] or ""
                if not isinstance(content, str):
                    raise TypeError  # a list of parts, as some servers give for a model that thinks
                return content
        except TimeoutError:
            raise FailedCallError(f"did not answer within {self._timeout_s:g} s (timeout)") from None
        except httpx2.TransportError as error:
            raise UnreachableError(quote(error.__cause__ or error, 60)) from None
        except (httpx2.HTTPError, ValueError, LookupError, TypeError, RecursionError):
            raise FailedCallError("answered without a chat completion") from None
        said = reply.text
        with suppress(ValueError, LookupError, TypeError, AttributeError, RecursionError):
            body = reply.json()
            said = body.get("error", body)["message"]  # vLLM's is not within an error
        raise FailedCallError(f"answered {reply.status_code} ({quote(said or reply.reason_phrase, 80)})")

    def close(self) -> None:
        """Cancel what runs and end the thread."""

        async def end() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await self._client.aclose()

        with suppress(TimeoutError):
            self.begin(end()).result(2)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(2)
        if not self._thread.is_alive():
            self._loop.close()
