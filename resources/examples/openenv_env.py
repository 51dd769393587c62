"""An environment of OpenEnv (https://github.com/meta-pytorch/OpenEnv), which runs in a server with a Python of its own.

Start the server at an address of this machine alone (its default is all addresses), for as many sessions at once as a
step has completions:

    cd echo_env && MAX_CONCURRENT_ENVS=64 uv run uvicorn server.app:app --host 127.0.0.1 --port 8000

and train with `environment: openenv_env.py::OpenEnv` and `reward_network: true`. Needs `pip install websockets`.
"""

import json
from contextlib import suppress

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

URL = "ws://127.0.0.1:8000/ws"


class OpenEnv:
    def __init__(self):
        self.session, self.total = None, 0.0

    def reset(self, **row) -> str:
        """The columns of the row are the arguments of the environment's own `reset`, such as `seed`."""
        self.session = self.session or connect(URL, proxy=None, max_size=None)
        self.total = 0.0
        return self._ask("reset", row)

    def step(self, message: str) -> str:
        """Act in the environment. Name the fields of its action here, as `server/app.py` and `/schema` have them.

        Args:
            message: What to say.
        """
        return self._ask("step", {"message": message})

    def get_reward(self) -> float:
        return self.total

    def close(self) -> None:
        if self.session:
            self.session.close()

    def _ask(self, kind, data) -> str:
        with suppress(ConnectionClosed):  # then the last answer says why, such as that there are too many sessions
            self.session.send(json.dumps({"type": kind, "data": data}, default=str))
        answer = json.loads(self.session.recv())
        if answer["type"] == "error":
            raise RuntimeError(answer["data"]["message"])
        self.total += answer["data"].get("reward") or 0.0
        return json.dumps(answer["data"]["observation"])
