"""The handler that imports an adapter of peft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from backend.models.peft_import import import_adapter as carry
from backend.runs.saved_weights import imported_folder
from backend.serve.question_call import QuestionCall
from backend.utils.files import resolved


def import_adapter(request: dict[str, Any], call: QuestionCall) -> dict[str, Any]:
    """{folder, model: id or path} → {path: the new folder beside it, sentences: what is to be said of it}. An earlier import is replaced."""

    def report(sentence: str, done: float | None = None) -> None:
        call.check()
        call.report({"sentence": sentence, "done": done})

    folder = resolved(Path(request["folder"]))
    imported = carry(folder, request["model"], imported_folder(folder), overwrite=True, progress=report)
    return {"path": str(imported.path), "sentences": imported.sentences()}
