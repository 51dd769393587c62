"""The boundary to the Hugging Face Hub: the HTTP client of this process, and error messages.

Importing this module makes huggingface_hub, and with it datasets and mlx-lm, use the client: a hostile or broken
server cannot fill memory or disk, or name a place outside the cache.
"""

import contextlib
import errno
import json
import re
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from huggingface_hub import constants, errors, get_token, set_client_factory
from huggingface_hub.utils import _http, logging

from backend.utils.errors import UserError
from backend.utils.hub_cache import ENDPOINT_VARIABLE

SETTING = {"model": "model", "dataset": "data"}  # setting that names a repository of this type
SILENCE_S = 60.0  # seconds of silence after which a connection counts as broken, where a request sets no other limit
ANSWER_S = 120.0  # seconds for a whole answer that is not a file
MOST_BYTES = 128 << 20  # bytes of an answer that does not announce its length, or is not a file, after decompression
HASH_HEADERS = ("ETag", "X-Linked-Etag", "X-Repo-Commit", "X-Xet-Hash")
HASH_KEYS = ("sha", "oid", "sha256", "blobId", "xetHash")  # the Hub's hashes, file names of huggingface_hub
LOG_IN = "log in with `hf auth login`"
TOKENS_PAGE = f"{constants.HUGGINGFACE_CO_URL_HOME}settings/tokens"
KEPT = "what has arrived there is kept, so start the upload again to go on"
NOT_A_NAME = "cannot be the name of a repository: write owner/name, of letters, digits, -, _ and full stops"

_NO_ADDRESS = ("Name or service not known", "nodename nor servname", "name resolution", "No address")
"""Resolver errors of Linux and macOS, which usually mean no network."""


class NotTheHubError(errors.OfflineModeIsEnabled):
    """An answer that the Hub would not give. For huggingface_hub as if offline: it uses its cache."""


def _client() -> Any:
    client = _http.default_client_factory()
    client.timeout = SILENCE_S
    client.event_hooks["response"] = [_check_response]
    return client


def _check_response(response: Any) -> None:
    headers, path = response.headers, response.url.path
    if any("/" in headers.get(name, "").removeprefix("W/") for name in HASH_HEADERS):
        raise NotTheHubError("a hash in a header is a path")
    ranges = (response.request.headers.get("Range", ""), headers.get("Content-Range", ""))
    begins = [re.findall(r"bytes.(\d+)-", each) for each in ranges]
    if response.status_code == 206 and begins[0] != begins[1]:
        raise NotTheHubError("other bytes than asked for")
    is_log = headers.get("Content-Type", "").startswith("text/event-stream")  # of a job: it ends when the job does
    is_api = "/api/" in path and "/api/resolve-cache/" not in path  # where the Hub sends those who ask for a small file
    is_file = not is_api and response.is_success and response.request.method == "GET"
    length = headers.get("Content-Length", "")
    most = max(int(length), MOST_BYTES) if is_file and length.isdecimal() else MOST_BYTES
    ends, pieces, count = time.monotonic() + ANSWER_S, response.iter_bytes, 0

    def iter_bytes(chunk_size: int | None = None) -> Iterator[bytes]:
        nonlocal count
        for piece in pieces(chunk_size):
            count = len(piece) + (0 if is_log and b"\n" in piece else count)
            if count > most or not (is_file or is_log or time.monotonic() < ends):
                raise NotTheHubError("the answer does not end")
            yield piece

    response.iter_bytes = iter_bytes
    if is_api and not is_log and response.is_success and response.request.method != "HEAD":
        try:
            json.loads(response.read(), object_pairs_hook=_check_hashes)
        except (ValueError, RecursionError):
            raise NotTheHubError("the answer is not JSON") from None


def _check_hashes(pairs: list[tuple[str, Any]]) -> None:
    if any(key in HASH_KEYS and "/" in str(value) for key, value in pairs):
        raise NotTheHubError("a hash is a path")


set_client_factory(_client)
logging.set_verbosity_error()  # it would log every retry


@contextlib.contextmanager
def hub_errors(repo_id: str, repo_type: str = "model", setting: str = "", token: str = "") -> Iterator[None]:
    """Raise network, Hub, token and disk errors as a UserError naming the repository, without an upload's `token`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # of any kind: the library parses what a server answered
        cause: BaseException = error
        while isinstance(cause, (RuntimeError, errors.LocalEntryNotFoundError)) and cause.__cause__ is not None:
            cause = cause.__cause__  # the library wraps errors of one file
        sentence = explain(cause, repo_id, repo_type, is_upload=bool(token and repo_id))
        shown = UserError(setting or SETTING[repo_type], sentence.replace(token or "\0", "…"))
        raise shown from (None if token else error)


def host() -> str:
    """Hugging Face, or the host in HF_ENDPOINT."""
    netloc = urlsplit(constants.ENDPOINT).netloc
    return "Hugging Face" if netloc == "huggingface.co" else f"{netloc} ({ENDPOINT_VARIABLE})"


def explain(error: BaseException, repo_id: str, repo_type: str, *, is_upload: bool) -> str:
    name = f"{repo_type} {repo_id}".strip()
    # hf-xet raises Python's own.
    is_offline = isinstance(error, errors.OfflineModeIsEnabled)
    is_broken = isinstance(error, errors.HTTPError | ConnectionError) and not is_offline
    match error:
        case _ if is_offline and not isinstance(error, NotTheHubError):
            return "HF_HUB_OFFLINE is set, so Hugging Face is not contacted."
        case errors.HFValidationError():
            return f"{repo_id} {NOT_A_NAME}."
        case errors.GatedRepoError() if not is_upload:
            page = f"{constants.ENDPOINT}/{'datasets/' if repo_type == 'dataset' else ''}{repo_id}"
            return f"The {name} is gated: accept its conditions at {page}, and {LOG_IN}."
        case errors.RepositoryNotFoundError() if not is_upload:
            may = "the token of this machine may not see it" if get_token() else f"it is private: then {LOG_IN}"
            return f"{host()} has no {name}, or {may}."
        case errors.HfHubHTTPError():
            message = (error.server_message or "").strip().rstrip(".")
            return _explain_status(error.response.status_code, repo_id, name, message if is_upload else "", is_upload)
        case _ if is_broken and is_upload:
            broke = "does not answer" if "Timeout" in type(error).__name__ else "broke the connection off"
            return f"{host()} {broke}; {KEPT}."
        case _ if is_broken:
            message = re.sub(r"\[Errno -?\d+\]\s*", "", str(error)).strip().rstrip(".") or type(error).__name__
            reason = "this machine seems to be offline" if any(words in message for words in _NO_ADDRESS) else message
            reason = "it does not answer" if "Timeout" in type(error).__name__ else reason
            unreached = f"{host()} cannot be reached: {reason}"
            if not repo_id:
                return f"{unreached}; check the connection, or choose what is on this machine."
            return f"The {name} is not on this machine, and {unreached}; connect, or choose a {repo_type} that is here."
        case OSError() if error.errno in (errno.ENOSPC, errno.EDQUOT):
            full = f"The disk that holds {constants.HF_HUB_CACHE} is full"
            return f"{full}; what has arrived is kept, so make room and resume."
        case OSError() if error.errno:
            failed = "read" if is_upload else "written"
            return f"{error.filename or constants.HF_HUB_CACHE} cannot be {failed}: {error.strerror or error}."
    last_line = (str(error).strip().splitlines() or [""])[-1].lstrip("- ").strip("`").rstrip(".")
    if is_upload and "metadata in README.md" in str(error):
        return f"{host()} does not accept the settings at the top of the card: {last_line}."
    if is_upload and "LFS batch API" in str(error):
        return f"{host()} does not take a file: {last_line}."
    reason = str(error) if isinstance(error, NotTheHubError) else type(error).__name__
    about = f" for the {name}" if repo_id and not is_upload else ""
    return f"The answer{about} is not {host()}'s ({reason}); if this network has a login page, log in there first."


def _explain_status(status: int, repo_id: str, name: str, message: str, is_upload: bool) -> str:
    why, more = (f" ({message})", f": {message}") if message else ("", "" if is_upload else f" for the {name}")
    uploading = {
        403: f"The token may not write to {repo_id}{why}; use one with write access, or another owner.",
        404: f"{host()} has no repository {repo_id} that this token may see.",
        409: f"Someone else has changed {repo_id} meanwhile; look at it, and start the upload again.",
        413: f"{host()} says that this is too large{why}; free storage there, or choose fewer bits.",
    }
    sentences = {
        401: f"{host()} does not accept the token; log in again with a token of {TOKENS_PAGE}, or correct HF_TOKEN.",
        403: f"{host()} does not let the token of this machine read the {name}.",
        404: f"{host()} has no such file or revision of the {name}.",
        429: f"{host()} has been asked too often; wait some minutes{f': {KEPT}' if is_upload else ''}.",
    } | (uploading if is_upload else {})
    if status >= 500:
        return f"{host()} reports an error of its own ({status}); try again later."
    return sentences.get(409 if status == 412 else status) or f"{host()} answers with an error ({status}){more}."
