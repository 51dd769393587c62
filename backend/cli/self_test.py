"""`--selftest`: run every check in a temporary folder and write the report."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from backend.cli.common import BUG, FINISHED, tell, verb
from backend.utils.errors import UserError


@verb
def run(is_requested: bool, report_file: Path | None, subcommand: str | None) -> int:
    """Returns 0 if all checks pass, else 1. Raises UserError for conflicting options or an unwritable report."""
    if not is_requested:
        raise UserError("report", "--report belongs to --selftest; give both, or a verb (--help lists them).")
    if subcommand:
        raise UserError("selftest", f"--selftest stands alone; leave out {subcommand}.")
    if report_file is not None and (report_file.is_dir() or not report_file.parent.is_dir()):
        sentence = f"The report cannot be written to {report_file}: name a file in a folder that exists."
        raise UserError("report", sentence)
    if report_file is not None and report_file.suffix == ".txt":
        sentence = f"{report_file.name} would hold JSON, and the text goes beside it: name it {report_file.stem}.json."
        raise UserError("report", sentence)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is asked of the network, before anything imports its client
    from backend.selftest import CHECKS, CheckResult, Workbench, run_checks, summary, write_report

    results: list[CheckResult] = []
    with tempfile.TemporaryDirectory(prefix="grpo-studio-selftest-") as folder:
        for result in run_checks(CHECKS, Workbench(Path(folder))):
            tell(result.line(), flush=True)
            results.append(result)
    tell(summary(results))
    if report_file is not None:
        text = write_report(results, report_file)
        tell(
            f"Written: {report_file}, and as text {text}. Neither names you or your files; "
            "send them with your question."
        )
    return BUG if any(result.state == "failed" for result in results) else FINISHED
