"""An `ssh` on PATH that runs commands here, with a home folder for each host, or in a network namespace."""

import os
from pathlib import Path

import psutil
import pytest

SSH = """#!/bin/sh
while :; do case "$1" in -T) shift;; -o) shift 2;; *) break;; esac; done
host=$FAKE_HOSTS/$1
shift
[ -d "$host" ] || { echo "ssh: Could not resolve hostname: Name or service not known" >&2; exit 255; }
[ -f "$host/refusal" ] && { cat "$host/refusal" >&2; exit 255; }
[ -f "$host/hang" ] && exec sleep 1000
[ -f "$host/noise" ] && cat "$host/noise"
export HOME="$host" HF_HOME="$host/huggingface"
unset HF_HUB_CACHE HUGGINGFACE_HUB_CACHE XDG_CACHE_HOME PYTHONPATH
cd "$host"
[ -f "$host/namespace" ] && exec ip netns exec "$(cat "$host/namespace")" sh -c "$*"
exec sh -c "$*"
"""


class FakeHosts:
    """Hosts that the fake ssh knows."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder / "hosts"
        programs = folder / "programs"
        self.folder.mkdir()
        programs.mkdir()
        ssh = programs / "ssh"
        ssh.write_text(SSH)
        ssh.chmod(0o755)
        monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setenv("FAKE_HOSTS", str(self.folder))

    def add(self, name: str, **files: str) -> Path:
        """The home folder of a new host, with `files` in it."""
        home = self.folder / name
        home.mkdir()
        for file, text in files.items():
            (home / file).write_text(text)
        return home

    def processes(self) -> list[str]:
        """What still runs on any host, or is called by its ssh."""
        found: list[str] = []
        for process in psutil.process_iter():
            try:
                runs_there = process.environ().get("FAKE_HOSTS") == str(self.folder)
                if runs_there and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(" ".join(process.cmdline()))
            except psutil.Error:
                continue
        return found
