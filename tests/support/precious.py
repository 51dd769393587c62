"""Somebody's run, which hostile code must leave as it was."""

from pathlib import Path


def made_run(parent: Path) -> Path:
    folder = parent / "run"
    (folder / "checkpoints" / "000004").mkdir(parents=True)
    for name in ("events.jsonl", "run.lock", "checkpoints/000004/adapters.safetensors"):
        (folder / name).write_text(f"precious {name}")
    return folder


def contents(folder: Path) -> dict[str, tuple[int, int, str]]:
    """Mode, time of change and text of the folder and of every file and folder in it."""
    return {
        str(path): (path.lstat().st_mode, path.lstat().st_mtime_ns, path.read_text() if path.is_file() else "")
        for path in (folder, *sorted(folder.rglob("*")))
    }
