"""What a model type was found to do: one row of the table of architectures, kept in docs/architectures.json."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

DOCS = Path(__file__).parents[3] / "docs"
RECORD = DOCS / "architectures.json"
FINE_TUNES = ("lora", "dora", "full")


@dataclass(slots=True)
class Outcome:
    """Found by trying."""

    refusal: str = ""  # the program's sentence, where the type cannot be trained at all
    caches: list[str] = field(default_factory=list)  # the kinds of its layers' caches, in the words of the page
    together: bool = False  # whether rows of unequal length are decoded in one batch
    # Whether logits are computed for all tokens, because the model cannot be split into body and head
    whole_logits: bool = False
    shared_prompts: bool = False  # whether a prompt is prefilled once for all completions of its group
    slow_paths: list[str] = field(default_factory=list)  # the sentences of the event log
    # Fine-tune type → the program's sentence, for those of FINE_TUNES that it refuses
    refused: dict[str, str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)  # what went wrong without being refused: mistakes of ours

    @property
    def works(self) -> bool:
        return not self.refusal and not self.failures


def read_record() -> dict[str, Outcome]:
    """Model type → outcome, in alphabetical order; {} before the first run of the script."""
    types = json.loads(RECORD.read_text(encoding="utf-8"))["types"] if RECORD.exists() else {}
    return {arch: Outcome(**row) for arch, row in types.items()}


def write_record(outcomes: Mapping[str, Outcome], versions: Mapping[str, str]) -> None:
    """Without what is empty."""
    types = {
        arch: {name: value for name, value in asdict(outcome).items() if value not in ("", [], {})}
        for arch, outcome in sorted(outcomes.items())
    }
    record = json.dumps({"versions": versions, "types": types}, indent=1, ensure_ascii=False)
    RECORD.write_text(f"{record}\n", encoding="utf-8")
