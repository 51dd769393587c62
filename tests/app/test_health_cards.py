"""Health findings on the Monitor page: readable, in the charts' words, with buttons that do what they say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from PySide6.QtWidgets import QWidget

from app import theme
from app.pages.monitor.health_cards import HealthCards
from app.pages.monitor.monitor_page import MonitorPage
from app.state.guide import place_of_rule
from app.state.run_notices import take_up
from app.state.session import Session
from backend.runs.run_folder import RunFolder, hold_lock
from backend.trainer.health.rules import RULES
from backend.trainer.health.watch import Episode
from tests.support.diaries import recording


def episode(code: str, since: int = 12, until: int | None = None, **fields) -> Episode:
    rule = RULES[code]
    known = {"sentence": "“KL from the reference” is 0.8 nats a token.", "advice": rule.advice, "setting": rule.setting}
    return Episode(code, rule.title, rule.level, since=since, until=until, **known | fields)


DRIFTING = episode("drifting", settings={"learning_rate": 5e-5})
OVER = episode("cut_off", 3, 40)


@pytest.fixture
def cards(qtbot, qapp) -> HealthCards:
    page = QWidget()
    qtbot.addWidget(page)
    shown = HealthCards(Session(), page)
    qtbot.addWidget(shown)
    shown.resize(1060, 300)
    shown.set_room(400, 400)
    return shown


def texts(cards: HealthCards) -> list[str]:
    return [link.text() for row in cards.rows() for link in row.links]


def test_a_card_says_all_of_it_and_offers_what_can_be_done(qtbot, cards: HealthCards) -> None:
    cards.show_episodes([DRIFTING])
    assert texts(cards) == ["Read completions", "Go to the setting", "Do it: Learning Rate 5e-05", "Guide", "Dismiss"]
    (row,) = cards.rows()
    session = cards._session
    for signal, index, expected in (
        (session.completions_requested, 0, [12, None]),
        (session.field_requested, 1, ["learning_rate"]),
        (session.guide_requested, 3, [place_of_rule("drifting")]),
    ):
        with qtbot.waitSignal(signal) as caught:
            row.links[index].click()
        assert caught.args == expected
    row.links[2].click()
    assert session.draft.value("learning_rate") == 5e-5
    assert all(link.accessibleName().endswith("Drifting from the reference") for link in row.links)


def test_more_than_two_fold_and_past_ones_say_until_when(cards: HealthCards) -> None:
    cards.show_episodes([DRIFTING, episode("no_signal"), episode("flat"), OVER])
    assert len(cards.rows()) == 2 and cards.more.text() == "2 more"
    cards.more.click()
    assert len(cards.rows()) == 4 and cards.more.text() == "Show less"
    past = cards.rows()[-1]
    assert past.accessibleName() == "Cut off at the limit, step 3 until step 40"
    assert [link.text() for link in past.links] == ["Read completions", "Guide", "Dismiss"]
    cards.unfold(False)
    cards.show_episodes([OVER])
    assert cards.rows() == [] and cards.more.text() == "1 finding of earlier steps"
    cards.show_episodes([])
    assert cards.isHidden()


@pytest.fixture(scope="module")
def page(qapp) -> Iterator[MonitorPage]:
    theme.apply(qapp, "light")
    shown = MonitorPage(Session())
    shown.resize(1060, 704)
    shown.show()
    yield shown
    shown.session.close_run()
    shown.close()
    shown.deleteLater()


def open_run(qtbot, page: MonitorPage, folder: RunFolder) -> None:
    page.session.open_run(folder.path)
    qtbot.waitUntil(lambda: page.session.run.has_caught_up)
    page.session.run.changed.emit()


def test_the_page_shows_the_findings_of_a_run_and_dismisses_one(qtbot, page: MonitorPage, tmp_path: Path) -> None:
    open_run(qtbot, page, recording("lr-high").unpack(tmp_path / "sick"))
    cards = page.findings
    assert not cards.isHidden()
    cards.unfold(True)
    titles = [row.episode.title for row in cards.rows()]
    assert "KL exploding" in titles and "Drifting from the reference" in titles
    assert cards.rows()[0].episode.level == "error"
    cards.rows()[0].links[-1].click()
    assert [row.episode.title for row in cards.rows()] == titles[1:]
    open_run(qtbot, page, recording("healthy-grpo").unpack(tmp_path / "well"))
    assert cards.isHidden()


def test_do_it(qtbot, page: MonitorPage, tmp_path: Path) -> None:
    folder = recording("lr-high").unpack(tmp_path / "run")
    open_run(qtbot, page, folder)
    session = page.session
    before = session.draft.value("learning_rate")
    with qtbot.waitSignal(session.draft.edited):
        take_up(session, session.run, {"learning_rate": 3e-6})
    assert session.draft.value("learning_rate") == 3e-6
    session.draft.set("learning_rate", before)

    lines = folder.events.read_text().splitlines(keepends=True)
    folder.events.write_text("".join(lines[:-1]))  # without its ending, and locked: it is alive
    hold_lock(folder)
    open_run(qtbot, page, folder)
    assert session.run.is_live
    take_up(session, session.run, {"learning_rate": 3e-6})
    assert json.loads(folder.change_request.read_text())["settings"] == {"learning_rate": 3e-6}
    assert session.draft.value("learning_rate") == before
    take_up(session, session.run, {"group_size": 32})  # fixed during a run: into the form
    assert session.draft.value("group_size") == 32
