"""The small file of what a person has allowed on this machine: code that may run, and hosts files whose machines may be contacted.

`backend.rewards.catalogue.allowed_code` and `backend.distributed.hosts_file` say what its entries mean.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from backend.utils import places
from backend.utils.disk_faults import DiskError
from backend.utils.files import make_private_folder
from backend.utils.whole_file import replace_file

FILE = "trusted.json"


class TrustRecord:
    """The record in `file`; by default the one in the folder of preferences, which window and command line share."""

    def __init__(self, file: Path | None = None) -> None:
        self.file = file or places.preferences_folder() / FILE

    def read(self) -> dict[str, Any]:
        """Every entry; none where there is no file, or a damaged one."""
        try:
            stored = json.loads(self.file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return cast("dict[str, Any]", stored) if isinstance(stored, dict) else {}

    def add(self, new: Mapping[str, Any]) -> None:
        """Keep these entries beside the others. Where the file cannot be written they are not kept, and a person is asked again."""
        if not new:
            return
        with suppress(OSError, UnicodeError, DiskError):
            make_private_folder(self.file.parent)
            text = json.dumps(self.read() | dict(new), indent=1, ensure_ascii=False)
            replace_file(self.file, text, mode=stat.S_IRUSR | stat.S_IWUSR)
