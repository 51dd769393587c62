"""The process of a run that trains as a Hugging Face job: it submits the job, and writes what the job logs into the
run's files, as the trainer does.

A job costs, so only the command `stop` cancels it. A follower that ends otherwise leaves the event log without a last
line, and `resume` goes on after the last log line that an event came from: each event has its number as `line`.
"""

import json
import os
import queue
import re
import shlex
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub._jobs_api import JobInfo
from huggingface_hub.errors import HfHubHTTPError

from backend.config.config import Config
from backend.export.trl_folder import export_trl, reward_names
from backend.jobs import hub_jobs
from backend.jobs.hub_jobs import REPORT, Hardware
from backend.jobs.job_file import JobFile, write_job
from backend.models.hub_client import explain
from backend.models.hub_client import host as hub_host
from backend.runs.events import (
    ENDINGS,
    EventLog,
    JsonLines,
    end_of_step,
    is_number,
    is_step,
    read_events,
    truncate_file,
)
from backend.runs.metric_names import EVALUATION, our_name
from backend.runs.run_folder import RunFolder
from backend.trainer.control import look_for_stop_word, read_word
from backend.utils.disk import whole_folder
from backend.utils.errors import UserError
from backend.utils.hub_cache import local_folder
from backend.utils.text import visible

POLL_S, STATE_EVERY_S, RETRY_S = 0.3, 10.0, 30.0
LAST_LINES, LINE = 5, 300  # of the log in the message of a failed job
FAILED, STOPPED = 2, 3
_TIMED = re.compile(r"(train|test|eval.*)_(runtime|samples_per_second|steps_per_second|loss)|epoch|total_flos")
"""What transformers logs of its own speed, and its losses of evaluations, which are 0 in GRPO."""

Say = Callable[[str], None]


def submit_run(run: RunFolder, config: Config, machine: Hardware, timeout_h: float, owner: str, say: Say) -> None:
    """Export, upload and submit a run whose lock this process holds. Raises UserError and StopPending."""
    with TemporaryDirectory(prefix=".upload-", dir=run.path) as draft:
        folder = export_trl(config, "trl", Path(draft), tell=say).path
        say(f"Uploading to {hub_host()}.")
        arguments = ("--logging_steps", str(config.updates_per_step), "--log_completions", "False")
        look = partial(look_for_stop_word, run)
        job = hub_jobs.submit(folder, run.name, machine, timeout_h, owner, arguments, look)
        write_job(run, job)
    log = EventLog(run.events)
    log.write("note", level="info", sentence=f"Submitted to {job.flavor} for {timeout_h:g} hours at most: {job.url}")
    log.close()


class Follower:
    """Follows the job of a run whose lock this process holds. `write_log` gets the lines of the job's log."""

    def __init__(self, run: RunFolder, config: Config, job: JobFile, echo: Any, write_log: Say, say: Say) -> None:
        from backend.trainer.telemetry import report_health

        self.run, self.config, self.job, self.write_log, self.say = run, config, job, write_log, say
        events = list(read_events(run.events))
        if events and events[-1].get("kind") in ENDINGS:  # resumed, perhaps because the adapter could not be fetched
            last = run.events.read_bytes().splitlines(keepends=True)[-1]
            truncate_file(run.events, run.events.stat().st_size - len(last))
            events.pop()
        self.step = max((event["step"] for event in events if event.get("kind") == "step"), default=0)
        self.first = max((event["line"] for event in events if is_step(event.get("line"))), default=-1) + 1
        truncate_file(run.completions, end_of_step(run.completions, self.step))
        self.log, self.completions = EventLog(run.events, echo), JsonLines(run.completions)
        report_health(self.log, config.model_dump(), events)
        # TRL names rewards by functions, which need names of Python.
        self.rewards = {name: metric for metric, name in reward_names(config).items()}
        self.tail: deque[str] = deque(maxlen=LAST_LINES)
        self.heard: queue.Queue[tuple[int, str] | JobInfo | UserError | None] = queue.Queue()

    def close(self) -> None:
        self.log.close()
        self.completions.close()

    def follow(self) -> tuple[int, str]:
        """Returns (exit code, sentence) once the job has ended."""
        self.log.write("phase", phase="loading")
        threading.Thread(target=self._listen, name="job log", daemon=True).start()
        looked, status = 0.0, ""
        while True:
            self._obey()
            try:
                heard = self.heard.get(timeout=POLL_S)
            except queue.Empty:
                if not self.tail and time.monotonic() - looked > STATE_EVERY_S:  # it waits for its machine
                    looked, before = time.monotonic(), status
                    with suppress(Exception):  # the log's reader tells
                        status = hub_jobs.inspect(self.job).status.message or ""
                    if status and status != before:
                        self.log.write("phase", phase="waiting", sentence=status)
                continue
            match heard:
                case (number, text):
                    self._take(number, text)
                case JobInfo():
                    return self._end(heard)
                case UserError():
                    advice = "the job itself may go on; resume the run to follow it again"
                    return self._ended("failed", f"{heard.faults[0].sentence.rstrip('.')}; {advice}.", FAILED)
                case None:
                    self._note(f"{hub_host()} does not answer; the job goes on, and its log is tried again.", "warning")

    def _listen(self) -> None:
        """Put every log line into `heard`, then the job's state, or the error that ends it; None for an outage."""
        seen, is_told = 0, False
        while True:
            try:
                for number, text in enumerate(hub_jobs.log_lines(self.job)):
                    if number >= seen:
                        self.heard.put((number, text))
                        seen, is_told = number + 1, False
                return self.heard.put(hub_jobs.inspect(self.job))
            except UserError as error:
                return self.heard.put(error)
            except Exception as error:  # of any kind: the library parses what a server answered
                status = error.response.status_code if isinstance(error, HfHubHTTPError) else 0
                if 400 <= status < 500 and status != 429:
                    return self.heard.put(UserError("job", explain(error, self.job.id, "job", is_upload=False)))
                if not is_told:
                    self.heard.put(None)
                is_told = True
                time.sleep(RETRY_S)

    def _obey(self) -> None:
        if not (word := read_word(self.run.control)):
            return
        with suppress(OSError):
            self.run.control.unlink(missing_ok=True)
        self.log.write("command", word=word)
        if word != "stop":
            return self._note(f"A job cannot {word}: it trains on until it has ended or is stopped.")
        try:
            hub_jobs.cancel(self.job)
        except UserError as error:
            self._note(f"The job could not be cancelled: {error.faults[0].sentence}", "warning")

    def _take(self, number: int, text: str) -> None:
        is_new = number >= self.first
        _, is_report, told = text.partition(f"{REPORT} ")
        if not is_report:
            self.tail.append(visible(text)[:LINE])
            return self.write_log(f"{visible(text)}\n") if is_new else None
        with suppress(ValueError, TypeError, KeyError, AttributeError):  # a line that the log has cut
            if is_new:
                self._take_report(number, json.loads(told))

    def _take_report(self, number: int, report: dict[str, Any]) -> None:
        updates = self.config.updates_per_step
        if "updates" in report:
            machine, about = f"{self.job.flavor} on {hub_host()}", {"command": shlex.join(sys.argv), "pid": os.getpid()}
            about |= {"model": self.config.model, "device": machine, "iterations": int(report["updates"]) // updates}
            self.log.write("started", **about, versions={}, resumed_from=None, line=number)
            return
        step = int(report["update"]) // updates
        if "group" in report:
            rows = [self._completion(row) for row in report["group"]["completions"]]
            row = {"step": step, "prompt": str(report["group"]["prompt"]), "answer": "", "type": None}
            return self.completions.append(row | {"completions": rows})
        logs = report["logs"]
        found = {name: value for name, value in logs.items() if is_number(value) and not _TIMED.fullmatch(name)}
        if "loss" in logs:
            self.step = step
            self.log.write("step", step=step, metrics=self._metrics(found), line=number)
        elif "test_runtime" in logs:
            test = {name.removeprefix("eval_test_"): value for name, value in found.items()}
            self.log.write("eval", step=step, split="test", metrics=self._metrics(test), line=number)
        elif any(name.startswith("eval_") for name in found):
            metrics = self._metrics(found)
            plain = {name.removeprefix(EVALUATION).removeprefix("valid/"): value for name, value in metrics.items()}
            self.log.write("eval", step=step, split="valid", metrics=plain, line=number)

    def _metrics(self, logs: dict[str, Any]) -> dict[str, Any]:
        """Under our names. TRL times an update."""
        metrics: dict[str, Any] = {}
        for name, value in logs.items():
            ours = re.sub(r"(?<=rewards/)\w+", lambda found: self.rewards.get(found[0], found[0]), our_name(name))
            metrics[ours] = value * self.config.updates_per_step if ours == "time/step" else value
        return metrics

    def _completion(self, row: dict[str, Any]) -> dict[str, Any]:
        names = [self.rewards.get(name, name) for name in row["rewards"]]
        scores = dict(zip(names, row["rewards"].values(), strict=True))
        weights = self.config.reward_weights or [1.0] * len(scores)
        total = sum(
            weight * score for weight, score in zip(weights, scores.values(), strict=False) if score is not None
        )
        return {"text": str(row["text"]), "rewards": scores, "reward": total, "advantage": row["advantage"]}

    def _end(self, job: JobInfo) -> tuple[int, str]:
        stage, message = str(getattr(job.status.stage, "value", job.status.stage)), job.status.message or ""
        reached = f"at step {self.step}" if self.step else "before its first step"
        try:
            has_weights = self._bring_home()
        except UserError as error:
            has_weights = False
            if stage == "COMPLETED":
                again = "the job has ended and its files are kept; resume the run to fetch them again"
                return self._ended("failed", f"{error}; {again}.".replace(".;", ";"), FAILED)
            self._note(f"What the job has saved cannot be used: {error}", "warning")
        if stage == "COMPLETED" and has_weights:
            return self._ended("finished", f"Finished after {self.step} step{'' if self.step == 1 else 's'}.", 0)
        saved = " Its newest checkpoint is here." if has_weights else ""
        if stage == "CANCELED":
            return self._ended("stopped", f"Stopped {reached}: the job was cancelled.{saved}", STOPPED)
        why = "it has left no adapter" if stage == "COMPLETED" else message or f"its state is {stage}"
        last = "".join(f"\n{line}" for line in self.tail)
        return self._ended("failed", f"The job has failed {reached}: {why.rstrip('.')}.{saved}{last}", FAILED)

    def _bring_home(self) -> bool:
        """Fetch the adapter and write it as the run's own, or the model of full fine-tuning."""
        with TemporaryDirectory(prefix=".download-", dir=self.run.path) as draft:
            if not hub_jobs.download(self.job, Path(draft)):
                return False
            if self.config.train_type == "full":
                with whole_folder(self.run.model) as model:
                    shutil.copytree(draft, model, dirs_exist_ok=True)
                return True
            from backend.export.peft_files import import_adapter
            from backend.models.loading import fetch

            name = self.config.model
            if local_folder(name) is None:
                self.say(f"Downloading {name}, to put the adapter onto it.")
                fetch(name, "model")
            self.log.write("phase", phase="exporting")
            try:
                imported = import_adapter(Path(draft), name, self.run.adapters, overwrite=True)
            except RuntimeError as error:  # its logits differ
                raise UserError("adapter", str(error)) from None
            for sentence in imported.sentences:
                self._note(sentence)
        return True

    def _note(self, sentence: str, level: str = "info") -> None:
        self.log.write("note", level=level, sentence=sentence)

    def _ended(self, kind: str, sentence: str, exit_code: int) -> tuple[int, str]:
        self.log.write(kind, step=self.step, reason=kind, sentence=sentence)
        return exit_code, sentence
