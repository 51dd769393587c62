"""The verb `endpoint`, an OpenAI-compatible server for the models of this machine, and `sessions`, what it recorded."""

import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Annotated

import typer

from backend.cli.chat import CheckpointKey
from backend.cli.common import USER_ERROR, AsJson, RunsDir, tell, tell_error, tell_json, verb
from backend.cli.completions import RunOrModel
from backend.tools.mcp_settings import LOOPBACK
from backend.utils.errors import UserError
from backend.utils.text import quote

KEY = "GRPO_STUDIO_KEY"  # environment variable with the key that clients have to send
PARENT_EVERY_S = 1.0


@verb
def endpoint(
    name: RunOrModel,
    checkpoint: CheckpointKey = "",
    adapters: Annotated[
        list[str] | None, typer.Option("--adapter", help="A further run, checkpoint or adapter; may be repeated.")
    ] = None,
    host: Annotated[str, typer.Option("--host", help="0.0.0.0 lets other machines ask.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes a free one.")] = 8080,
    rows: Annotated[int, typer.Option("--rows", min=1, max=512, help="Most answers decoded together.")] = 32,
    record: Annotated[
        Path | None, typer.Option("--record", help="Keep the sessions in this folder, to train on them.")
    ] = None,
    as_json: AsJson = False,
    runs_dir: RunsDir = None,
    parent: Annotated[int | None, typer.Option("--parent", hidden=True, help="End with this process.")] = None,
) -> None:
    """Answer the requests of OpenAI clients with a run's model and its base."""
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    import uvicorn

    from backend.engine import cpu_setup

    cpu_setup.load_openblas()  # before mlx
    from mlx_lm.utils import maybe_set_recommended_wired_limit

    from backend.endpoint.engine import Engine
    from backend.endpoint.models import load_models
    from backend.endpoint.recording import Recorder
    from backend.endpoint.server import Endpoint
    from backend.sampling.chat import find_source

    source = find_source(name, checkpoint, runs_dir)
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(256)  # who asks while the model loads waits
    except OSError as error:
        listening.close()
        setting = "host" if isinstance(error, socket.gaierror) else "port"
        raise UserError(setting, f"Cannot listen on {host}:{port}: {error.strerror}.") from None
    recorder = Recorder(record, tell_error) if record is not None else None
    maybe_set_recommended_wired_limit()  # on a Mac, keeps memory in use from being paged out
    models = load_models(source, adapters or [], runs_dir, tell_error)
    key, engine = os.environ.pop(KEY, ""), Engine(rows)
    app = Endpoint(engine, models, key=key, recorder=recorder).app(host)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1, lifespan="off"))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: engine.stop())
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    address = f"http://{host}:{listening.getsockname()[1]}/v1"
    names = [model.name for model in models]
    if host not in LOOPBACK and not key:
        tell_error(f"Anyone who reaches this machine may ask: set {KEY} to a key of your choice to prevent it.")
    if as_json:
        tell_json({"url": address, "models": names, "needs_key": bool(key)})
    else:
        tell(f"Listening on {address}; models: {', '.join(names)}. Ctrl-C ends it.", flush=True)
    engine.run()
    server.should_exit = True
    thread.join(5)
    if recorder is not None:
        recorder.close()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_EVERY_S)
    os.kill(os.getpid(), signal.SIGTERM)


@verb
def sessions(
    folder: Annotated[Path, typer.Argument(help="The folder that endpoint --record has filled.")],
    group_size: Annotated[int | None, typer.Option(min=2, help="Sessions of a row; default: the usual number.")] = None,
    without_reward: Annotated[
        bool, typer.Option("--without-reward", help="Take sessions without a posted reward too.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List recorded sessions, and write them as train.jsonl into their folder, for data: FOLDER."""
    from backend.cli.display import format_number
    from backend.endpoint.sessions import ROWS, write_rows

    found = write_rows(folder, group_size, without_reward=without_reward)
    if as_json:
        tell_json(found)
    else:
        tell(f"sessions: {found['sessions']:,}, requests: {found['requests']:,}")
        for group in found["groups"]:
            rewards = "  ".join(map(format_number, group["rewards"]))
            about = f"{quote(group['group'], 40)}  {group['model']}  sessions: {len(group['rewards'])}"
            tell(f"{about}  rewards: {rewards}")
        if found["in_parts"]:
            parts = f"several parts, of which the last is taken: {found['in_parts']:,}"
            tell(f"{parts} (a request that does not continue an earlier one starts a part)")
        for reason, count in found["left_out"].items():
            tell(f"left out: {count:,} ({reason})")
        tell(f"{folder / ROWS}: {found['rows']:,} rows with group_size {found['group_size']}")
    if not found["rows"]:
        tell_error("sessions: No group is whole, so there is nothing to train on.")
        raise typer.Exit(USER_ERROR)
