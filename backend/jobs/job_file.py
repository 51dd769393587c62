"""job.json: the Hugging Face job that trains a run. The window reads it, so this module imports nothing heavy."""

import json
from dataclasses import asdict, dataclass

from backend.runs.run_folder import RunFolder
from backend.utils.disk import replace_file
from backend.utils.documents import read_json
from backend.utils.errors import UserError


@dataclass(frozen=True, slots=True)
class JobFile:
    """A submitted job. `owner` pays. `bucket`: owner/name/folder of its files. `submitted`: Unix seconds. No token."""

    id: str
    owner: str
    flavor: str
    timeout_h: float
    usd_per_hour: float
    url: str
    bucket: str
    submitted: float


def read_job(run: RunFolder) -> JobFile | None:
    """The job of a run; None for a run that trains here. Raises UserError for a damaged file."""
    if not run.job.exists():
        return None
    content = read_json(run.job, "run")
    try:
        return JobFile(**content)
    except TypeError:
        sentence = f"{run.job} does not describe a job; the job's page has its log and its files."
        raise UserError("run", sentence) from None


def write_job(run: RunFolder, job: JobFile) -> None:
    """Raises DiskError."""
    replace_file(run.job, json.dumps(asdict(job), indent=1) + "\n")
