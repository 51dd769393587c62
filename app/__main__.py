"""The entry point of GRPO Studio: parse arguments, make the application, open the window."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from app.pages import PAGES, read_ahead
from backend.utils import places
from backend.utils.command import backend_command, backend_environment
from backend.utils.errors import UserError
from backend.utils.files import resolved, user_path
from backend.utils.hub_cache import require_hub_address

if TYPE_CHECKING:
    from PySide6.QtWidgets import QApplication

    from app.window import Window

NO_DISPLAY = "No display was found, so the demo runs here in the terminal."
DESKTOP_FILE = "grpo-studio"  # our .desktop file on Linux: Wayland takes the icon of a window from there
SCREENSHOT_MS = 900
LONGEST_READ_S = 60.0
READ_AHEAD_MS = 300  # after the first paint; imports and the last run begin then, not while the form is built


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    try:
        if options.runs_dir:
            os.environ[places.RUNS_VARIABLE] = str(resolved(user_path(options.runs_dir, "runs-dir")))
        for folder in (places.runs_folder, places.preferences_folder):
            folder()  # the environment may name one that no path is
        require_hub_address()
    except UserError as mistake:
        print(mistake, file=sys.stderr)
        return 2
    if options.selftest:
        exec_backend("--selftest", *(["--report", str(options.report)] if options.report else []))
    if options.screenshot:
        os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")  # a screenshot needs no display
    if options.draw_pages:
        from app.page_drawing import draw_pages

        return draw_pages(options.draw_pages)
    if not has_display():
        print(NO_DISPLAY, flush=True)
        exec_backend("demo")
    return show_window(options)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("grpo-studio", description="Fine-tune a language model with GRPO.")
    parser.add_argument("config", nargs="?", type=Path, help="a YAML config to open")
    parser.add_argument("--page", choices=[page.key for page in PAGES], help="the page to show first")
    parser.add_argument("--runs-dir", help="where runs are kept")
    parser.add_argument("--theme", choices=("system", "light", "dark"))
    parser.add_argument("--size", metavar="WxH", type=size, help="size of the window in pixels, such as 1280x800")
    parser.add_argument("--screenshot", type=Path, metavar="PNG", help="draw the page into a picture and quit")
    parser.add_argument(
        "--selftest", action="store_true", help="try everything that training and the window need, and quit"
    )
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="with --selftest: write its report, as JSON and text"
    )
    parser.add_argument("--draw-pages", type=Path, help=argparse.SUPPRESS)  # the self-test's, app/page_drawing.py
    options = parser.parse_args(arguments)
    if options.report and not options.selftest:
        parser.error("--report belongs to --selftest")
    return options


def size(text: str) -> tuple[int, int]:
    width, height = text.lower().split("x")
    return int(width), int(height)


def has_display() -> bool:
    variables = ("DISPLAY", "WAYLAND_DISPLAY", "QT_QPA_PLATFORM")
    return not sys.platform.startswith("linux") or any(os.environ.get(name) for name in variables)


def exec_backend(*arguments: str) -> None:
    command = backend_command(*arguments)
    os.execve(command[0], command, backend_environment())


def show_window(options: argparse.Namespace) -> int:
    from PySide6.QtCore import QTimer
    from PySide6.QtWidgets import QApplication

    from app import theme
    from app.crash_catcher import CrashCatcher
    from app.desktop import FileOpener
    from app.state.prefs import Prefs
    from app.state.session import Session
    from app.widgets.basic.icons import app_icon
    from app.window import FIRST_SIZE, NAME, Window

    # In Qt's event loop Python never sees Ctrl+C. The form is autosaved and the trainer is detached, so just end.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    app = QApplication(sys.argv[:1])
    app.setApplicationName(NAME)
    app.setDesktopFileName(DESKTOP_FILE)
    app.setWindowIcon(app_icon())
    prefs = Prefs()
    prefs.claim()
    prefs.use_folders()
    session = Session(prefs)
    theme.apply(app, options.theme or session.prefs.theme)
    window = Window(session)
    if options.size or options.screenshot:  # the screen of a screenshot is none, and does not limit it
        window.resize(*(options.size or FIRST_SIZE))
    session.restore()
    if options.config:
        session.load_config(options.config)
    live = session.reattach()
    window.show_page("train")  # the slowest page to build: before the first paint it delays no click
    window.show_page(options.page or ("monitor" if live and not options.config else "train"))
    app.installEventFilter(FileOpener(window.open_from_desktop, app))
    catcher = CrashCatcher(prefs.folder / f"native-crash-{prefs.slot}.txt", app)
    left = catcher.install()  # by the process before this one
    window.help.qt_messages = catcher.qt_messages
    catcher.caught.connect(window.help.report_caught)
    app.aboutToQuit.connect(catcher.remove)
    if left:
        QTimer.singleShot(0, window, lambda: window.help.report_caught("GRPO Studio crashed when it last ran.", left))
    window.show()
    QTimer.singleShot(READ_AHEAD_MS, window, session.show_last_run)
    if not options.screenshot:
        connect_desktop(app, window)
        QTimer.singleShot(READ_AHEAD_MS, window, session.queue.ensure_runner)
    QTimer.singleShot(READ_AHEAD_MS, lambda: window.pages["train"].when_built(read_ahead))
    if options.screenshot:
        save_screenshot(app, window, options.screenshot)
    return app.exec()


def connect_desktop(app: QApplication, window: Window) -> None:
    """Show the run's news while the window is not in front."""
    from app.desktop import Notifier, show_percent
    from app.state.run_notices import RunNotices

    session, notices, notifier = window.session, RunNotices(window), Notifier(window)

    def follow() -> None:
        run = session.run
        notices.follow(run, is_launched=run is not None and session.is_launched(run.folder))

    def show(title: str, sentence: str) -> None:
        if session.prefs.notifies and not window.is_in_front():
            app.alert(window)
            notifier.show(title, sentence)

    session.run_changed.connect(follow)
    notices.raised.connect(show)
    notifier.clicked.connect(window.show_run)
    app.aboutToQuit.connect(lambda: show_percent(None))
    app.aboutToQuit.connect(notifier.close)
    follow()


def save_screenshot(app: QApplication, window: Window, path: Path) -> None:
    """Save once the page has settled and its run is read, which takes longer on a busy machine."""
    from PySide6.QtCore import QTimer

    until = time.monotonic() + LONGEST_READ_S

    def save_when_read(was_read: bool) -> None:
        is_read = (run := window.session.run) is None or run.has_caught_up
        if not was_read and time.monotonic() <= until:
            # Once more after it was read: its charts are drawn one after the other.
            QTimer.singleShot(SCREENSHOT_MS, lambda: save_when_read(is_read))
            return
        if not (is_saved := window.grab().save(str(path))):
            print(f"{path} cannot be written.", file=sys.stderr)
        # quit() would close the window, which asks about a live run. One still shown at the end of the interpreter is
        # hidden by Qt then, and its Python methods are called without Python.
        window.hide()
        app.exit(0 if is_saved else 2)

    # Where nothing has to be read, the page has had its time by then.
    QTimer.singleShot(SCREENSHOT_MS, lambda: save_when_read(window.session.run is None))


if __name__ == "__main__":
    sys.exit(main())
