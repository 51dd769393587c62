"""Try every model type of the installed mlx-lm, and write docs/architectures.json.

    python -m tests.support.architectures                      all of them (`make architectures`)
    python -m tests.support.architectures --only qwen3_5 llama these; the rest of the record stays
    python -m tests.support.architectures --missing            those that the record does not have yet

Each type is tried in a process of its own with a limit on time and memory, so that none can end the others. The record
is written after each type. Exit code 1 where a type neither works nor is refused.
"""

import argparse
import sys
import time
from importlib.metadata import version

from tests.support.architectures.apart import try_apart
from tests.support.architectures.outcome import Outcome, read_record, write_record
from tests.support.architectures.tiny_configs import model_types


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="TYPE")
    parser.add_argument("--missing", action="store_true")
    options = parser.parse_args()
    types = model_types()
    if unknown := [arch for arch in options.only if arch not in types]:
        parser.error(f"mlx-lm has no {', '.join(unknown)}")
    record = {arch: outcome for arch, outcome in read_record().items() if arch in types}
    wanted = options.only or [arch for arch in types if not (options.missing and arch in record)]
    versions = {name: version(name) for name in ("mlx", "mlx-lm")}
    for number, arch in enumerate(wanted, 1):
        started = time.monotonic()
        record[arch] = try_apart(arch)
        write_record(record, versions)
        print(
            f"{number}/{len(wanted)} {arch} {_verdict(record[arch])} ({time.monotonic() - started:.0f} s)", flush=True
        )
    return int(any(record[arch].failures for arch in wanted))


def _verdict(outcome: Outcome) -> str:
    if outcome.failures:
        return "FAILED: " + " ".join(outcome.failures)
    if outcome.refusal:
        return f"is refused: {outcome.refusal}"
    return f"works, {len(outcome.slow_paths)} slow paths" + "".join(f", no {kind}" for kind in outcome.refused)


if __name__ == "__main__":
    sys.exit(main())
