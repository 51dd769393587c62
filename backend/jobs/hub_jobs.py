"""Jobs of Hugging Face by means of huggingface_hub: hardware and prices, a job's start, log, end, and files."""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from secrets import token_hex

from huggingface_hub import BucketFile, HfApi, Volume
from huggingface_hub._jobs_api import DEFAULT_UV_IMAGE, JobInfo
from huggingface_hub.constants import HF_JOBS_ARTIFACTS_BUCKET_NAME
from huggingface_hub.utils import disable_progress_bars

from backend.export.hub_upload import files_of, find_token, need_token, whose
from backend.jobs.job_file import JobFile
from backend.models.hub_client import hub_errors
from backend.utils.errors import UserError

REPORT = "GRPO_STUDIO_JOB"  # variable that makes train.py print its metrics, and the beginning of each such line.
MOUNT = "/run"
OUTPUT = "output"
KEPT = (".safetensors", ".json", ".jinja", ".model", ".txt")  # of an adapter or model; pickles are not fetched
HOURS = {"second": 1 / 3600, "minute": 1 / 60, "hour": 1.0}


@dataclass(frozen=True, slots=True)
class Hardware:
    """A machine with a GPU. `name`: the flavor of a job. `accelerator`: “T4”. `memory`: of the GPU, “16 GB”."""

    name: str
    title: str
    accelerator: str
    memory: str
    usd_per_hour: float


def hardware() -> list[Hardware]:
    """Machines with one GPU, which is what train.py uses, and their prices, cheapest first. Raises UserError."""
    token = find_token()
    with hub_errors("", setting="flavor"):
        listed = HfApi(token=token.value if token else False).list_jobs_hardware()
        found: list[Hardware] = []
        for each in listed:
            gpu = each.accelerator
            if gpu is not None and gpu.type == "gpu" and int(gpu.quantity) == 1:
                price = round(each.unit_cost_usd / HOURS[each.unit_label], 2)
                found.append(Hardware(each.name, each.pretty_name, gpu.model, gpu.vram, price))
    return sorted(found, key=lambda each: each.usd_per_hour)


def choose(flavor: str) -> Hardware:
    """The machine of that name. Raises UserError naming the choices."""
    offered = {each.name: each for each in hardware()}
    if flavor not in offered:
        sentence = f"Hugging Face has no machine {flavor!r} with one GPU; choose one of {', '.join(offered)}."
        raise UserError("flavor", sentence)
    return offered[flavor]


def submit(
    folder: Path,
    name: str,
    machine: Hardware,
    timeout_h: float,
    owner: str,
    arguments: Sequence[str],
    look: Callable[[], None],
) -> JobFile:
    """Upload a folder for TRL to a private bucket of `owner` ("": the token's account) and train it as a job.
    `look` is called before the job starts to cost, and may raise. Raises UserError."""
    token = need_token()
    owner = owner or whose(token).name
    api, bucket = HfApi(token=token.value), f"{owner}/{HF_JOBS_ARTIFACTS_BUCKET_NAME}"
    place = f"{re.sub('[^a-zA-Z0-9_-]', '-', name)[:60]}-{token_hex(3)}"
    disable_progress_bars()
    with hub_errors(owner, setting="job", token=token.value):
        api.create_bucket(bucket, private=True, exist_ok=True)
        if not api.bucket_info(bucket).private:
            public = f"The bucket {bucket} is public, and the run's rows and code would be too"
            raise UserError("owner", f"{public}; make it private on its page.")
        files = [(path, f"{place}/{path.relative_to(folder).as_posix()}") for path in files_of(folder)]
        api.batch_bucket_files(bucket, add=[*files])
        look()
        job = api.run_job(
            image=DEFAULT_UV_IMAGE,
            command=["uv", "run", f"{MOUNT}/train.py", *arguments],
            env={REPORT: "1", "TQDM_DISABLE": "1"},
            secrets={"HF_TOKEN": token.value},
            flavor=machine.name,
            timeout=round(timeout_h * 3600),
            name=place,
            volumes=[Volume(type="bucket", source=bucket, path=place, mount_path=MOUNT, read_only=False)],
            namespace=owner,
        )
    price = machine.usd_per_hour
    return JobFile(job.id, owner, machine.name, timeout_h, price, job.url, f"{bucket}/{place}", time.time())


def log_lines(job: JobFile) -> Iterator[str]:
    """Every line of the job's log from its beginning, until the job ends. Raises errors of huggingface_hub."""
    return iter(_api().fetch_job_logs(job_id=job.id, namespace=job.owner, follow=True))


def inspect(job: JobFile) -> JobInfo:
    """Raises errors of huggingface_hub."""
    return _api().inspect_job(job_id=job.id, namespace=job.owner)


def cancel(job: JobFile) -> None:
    """Raises UserError."""
    with hub_errors(job.id, "job", setting="job"):
        _api().cancel_job(job_id=job.id, namespace=job.owner)


def download(job: JobFile, to: Path) -> bool:
    """Fetch the job's adapter or model, or its newest checkpoint. False if there is none. Raises UserError."""
    bucket, _, place = job.bucket.rpartition("/")
    top = PurePosixPath(place, OUTPUT)
    with hub_errors(job.id, "job", setting="job"):
        folders: dict[PurePosixPath, list[BucketFile]] = {}
        for file in _api().list_bucket_tree(bucket, prefix=f"{top}/", recursive=True):
            if isinstance(file, BucketFile) and file.path.endswith(KEPT):
                folders.setdefault(PurePosixPath(file.path).parent, []).append(file)
        saved = {path: found for path, found in folders.items() if any(".safetensors" in f.path for f in found)}
        steps = {int(name[1]): path for path in saved if (name := re.fullmatch(r"checkpoint-(\d+)", path.name))}
        chosen = top if top in saved else steps[max(steps)] if steps else None
        if chosen is None:
            return False
        disable_progress_bars()
        files = [(file, to / PurePosixPath(file.path).name) for file in saved[chosen]]
        _api().download_bucket_files(bucket, files=[*files])
    return True


def _api() -> HfApi:
    return HfApi(token=need_token().value)
