"""An upload in a process of its own, which a test can kill."""

import multiprocessing
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["backend.export.hub_upload", "tests.support.upload_process"])


def start_upload(url: str, folder: Path, repo_id: str, token: str) -> BaseProcess:
    """Start to upload `folder` to the Hub at `url`."""
    process = FORKS.Process(target=_upload, args=(url, str(folder), repo_id, token))
    process.start()
    return process


def _upload(url: str, folder: str, repo_id: str, token: str) -> None:
    from huggingface_hub import constants

    from backend.export.hub_upload import upload
    from backend.utils.errors import UserError

    constants.ENDPOINT, constants.HF_HUB_DISABLE_XET = url, True
    try:
        upload(repo_id, Path(folder), token, lambda *_, **__: None)
    except UserError as mistake:
        print(mistake)
        sys.exit(2)
