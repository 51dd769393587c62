"""Draws every page into a picture for the self-test, and reports which are empty."""

import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from PySide6.QtCore import QEventLoop, Qt, QTimer
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import QApplication

from app import theme
from app.pages import PAGES
from app.state.prefs import Prefs
from app.state.session import Session
from app.window import Window

SIZE = (1000, 700)
SETTLE_MS = 120  # how long a page may take to lay itself out before it is drawn
FEWEST_COLOURS = 12  # anti-aliased text alone has more
GRID = 7  # every so many pixels are looked at, in both directions


def draw_pages(result: Path) -> int:
    """Write a list of {title, fault, seconds, platform} to `result`; `fault` is "" for a page with something on it."""
    app = QApplication(sys.argv[:1])
    theme.apply(app, "light")
    session = Session(Prefs())
    window = Window(session)
    session.restore()
    window.setAttribute(Qt.WidgetAttribute.WA_DontShowOnScreen)
    window.resize(*SIZE)
    window.show()
    result.write_text(json.dumps([draw_page(window, page.key, page.title) for page in PAGES]), encoding="utf-8")
    session.service.close()
    return 0


def draw_page(window: Window, key: str, title: str) -> dict[str, Any]:
    began = time.perf_counter()
    try:
        window.show_page(key)
        loop = QEventLoop()
        QTimer.singleShot(SETTLE_MS, loop.quit)
        loop.exec()
        image = window.pages[key].grab().toImage()
        places = ((x, y) for x in range(0, image.width(), GRID) for y in range(0, image.height(), GRID))
        count = len({image.pixel(x, y) for x, y in places})
        fault = "" if count >= FEWEST_COLOURS else f"its picture is empty, with {count} colours."
    except Exception as error:
        traceback.print_exc()
        fault = f"{type(error).__name__}: {error}"
    seconds = round(time.perf_counter() - began, 2)
    return {"title": title, "fault": fault, "seconds": seconds, "platform": QGuiApplication.platformName()}
