"""A server with the interface of OpenAI on 127.0.0.1, for tests of judges."""

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Messages = list[dict[str, str]]


def trajectories(messages: Messages) -> dict[str, str]:
    """The completions of a prompt in group mode by their id; of one in single mode, the completion under "1"."""
    text = messages[-1]["content"]
    found = re.findall(r'<trajectory id="(\d+)">\n(.*?)\n</trajectory>', text, re.DOTALL)
    return dict(found) if found else {"1": text.split("<answer>\n")[-1].rsplit("\n</answer>", 1)[0]}


class JudgeServer:
    """`score` of a completion's text, 0 … 1, by default 0.5; `delay_s` of each reply; `reply`: the whole reply to some
    messages instead; `choices`: in place of the reply's. `status` and `failure`: code and body of replies that fail;
    `leads_to`: the URL to which every request is redirected. `calls`: messages of each request for a completion;
    `headers`: of each. `at_once`: the most requests at a time."""

    def __init__(self, models: tuple[str, ...] = ("fake-judge",)) -> None:
        self.models = models
        self.score: Callable[[str], float] = lambda text: 0.5
        self.reply: Callable[[Messages], str] = self._scored
        self.delay_s, self.status, self.leads_to = 0.0, 200, ""
        self.choices: list[Any] | None = None
        self.failure: Any = {"error": {"message": "the judge is ill"}}
        self.calls, self.headers = list[Messages](), list[dict[str, str]]()
        self.at_once = self._now = 0
        self._lock = threading.Lock()
        self._connections = list[socket.socket]()
        self._server: ThreadingHTTPServer | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def start(self) -> None:
        """Begin to answer, at the same port as before."""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version, wbufsize = "HTTP/1.1", 1 << 16  # headers and body in one packet

            def setup(self) -> None:
                super().setup()
                outer._connections.append(self.connection)

            def do_GET(self) -> None:
                self.answer(200, {"object": "list", "data": [{"id": name, "object": "model"} for name in outer.models]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer._lock:
                    outer.calls.append(body["messages"])
                    outer.headers.append({name.lower(): value for name, value in self.headers.items()})
                    outer._now += 1
                    outer.at_once = max(outer.at_once, outer._now)
                time.sleep(outer.delay_s)
                with outer._lock:
                    outer._now -= 1
                if outer.status != 200:
                    return self.answer(outer.status, outer.failure)
                message = {"role": "assistant", "content": outer.reply(body["messages"])}
                choices = outer.choices
                if choices is None:
                    choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
                about = {"id": "1", "object": "chat.completion", "created": 0, "model": body["model"]}
                self.answer(200, about | {"choices": choices})

            def answer(self, status: int, value: Any) -> None:
                data = json.dumps(value).encode()
                try:
                    self.send_response(307 if outer.leads_to else status)
                    if outer.leads_to:
                        self.send_header("Location", outer.leads_to + self.path.removeprefix("/v1"))
                    self.send_header("Content-Type", "application/json")
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)
                except OSError:  # the client has gone
                    self.close_connection = True

            def log_message(self, *_: Any) -> None: ...

        class Server(ThreadingHTTPServer):
            def handle_error(self, *_: Any) -> None: ...  # clients may hang up

            daemon_threads, block_on_close, request_queue_size, allow_reuse_address = True, False, 128, True

        self._server = Server(("127.0.0.1", self.port), Handler)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def stop(self) -> None:
        """End connections, and refuse others."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
            for connection in self._connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            self._connections.clear()

    def _scored(self, messages: Messages) -> str:
        scored = [
            {"trajectory_id": name, "explanation": f"about {text[:20]}", "score": self.score(text)}
            for name, text in trajectories(messages).items()
        ]
        if "trajectory_id" in messages[0]["content"]:
            return json.dumps({"scores": scored})
        criteria = re.findall(r'^- "(.+?)" \(one of: ([^)]*)\)', messages[0]["content"], re.MULTILINE)
        if not criteria:
            return json.dumps({"explanation": scored[0]["explanation"], "score": scored[0]["score"]})
        verdicts = {name: [choice.strip('"') for choice in choices.split(", ")] for name, choices in criteria}
        at = {name: round(scored[0]["score"] * (len(choices) - 1)) for name, choices in verdicts.items()}
        return json.dumps({name: {"reason": "so", "verdict": verdicts[name][place]} for name, place in at.items()})


@contextmanager
def judge_server(models: tuple[str, ...] = ("fake-judge",)) -> Iterator[JudgeServer]:
    server = JudgeServer(models)
    server.start()
    try:
        yield server
    finally:
        server.stop()
