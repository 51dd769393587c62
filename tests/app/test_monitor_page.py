"""The Monitor page shows what the run folder holds, live or archived, with its findings, and never blocks."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PySide6.QtCore import QPointF, Qt
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QWidget

from app import theme
from app.pages.monitor.monitor_page import MonitorPage, changes
from app.pages.monitor.panels import HealthCards, HealthRow, LogView, MetricTile
from app.pages.runs.run_table import RunModel
from app.state.charts import CHARTS, curves_of
from app.state.guide import place_of
from app.state.run_notices import take_up
from app.state.session import Session
from app.widgets.basic.number_format import DASH, figure
from app.window import Window
from backend.runs.events import METRICS, EventLog
from backend.runs.run_folder import RunFolder, hold_lock
from backend.runs.run_record import compare, read_record, results_table
from backend.runs.run_search import field_of
from backend.runs.steering import run_config
from backend.trainer.health.rules import RULES
from backend.trainer.health.watch import Episode
from tests.support import made_up_runs
from tests.support.diaries import recording
from tests.support.trainer_by_hand import add_checkpoints
from tests.support.windows import table_texts


def rows_of(cards: HealthCards) -> list[HealthRow]:
    return [row for row in cards._rows if not row.isHidden()]


@pytest.fixture(scope="module")
def shared_page(qapp) -> Iterator[MonitorPage]:
    """The page with its eighteen plots, made once; every test leaves it without a run."""
    theme.apply(qapp, "light")
    shown = MonitorPage(Session())
    shown.resize(1060, 700)
    yield shown
    shown.close()
    shown.deleteLater()


@pytest.fixture
def page(qtbot, qapp, shared_page: MonitorPage) -> Iterator[MonitorPage]:
    shared_page.show()
    yield shared_page
    shared_page.session.close_run()
    shared_page.hide()


@pytest.fixture
def session(page: MonitorPage) -> Session:
    return page.session


@pytest.fixture
def show_run(qtbot, session: Session, page: MonitorPage):
    """Open a folder and wait until the page has painted it."""

    def open_run(folder: RunFolder) -> None:
        session.open_run(folder.path)
        qtbot.waitUntil(lambda: session.run.has_caught_up)
        session.run.changed.emit()
        qtbot.waitUntil(lambda: not page.grid.turns.isActive())

    return open_run


def plot(page: MonitorPage, title: str):
    return next(candidate for candidate in page.grid.plots if candidate.title == title)


def button_texts(page: MonitorPage) -> list[str]:
    return [button.text() for button in page.verdict.buttons]


def test_a_log_shows_the_beginning_of_long_lines(qtbot, tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text(f"{'a' * 900}\n{'b' * 400}\n")
    view = LogView()
    view.follow(tmp_path / "log.txt")
    qtbot.show(view, 600, 300)
    view.unfold()
    QTest.qWait(20)
    assert view.text.horizontalScrollBar().maximum() > 0 == view.text.horizontalScrollBar().value()


def test_every_metric_of_the_event_log_has_a_chart_of_its_own() -> None:
    names = [*METRICS, *(f"rewards/{name}/{kind}" for name in made_up_runs.REWARDS for kind in ("mean", "std"))]
    named = [chart for chart in CHARTS if chart.title != "Other" and not chart.held_out]
    assert [name for name in names if not any(chart.shows(name) for chart in named)] == []
    assert curves_of(CHARTS[-1], names, list(made_up_runs.REWARDS)) == []
    ranks = next(chart for chart in CHARTS if chart.title.startswith("Waiting of each"))
    curves = curves_of(ranks, [ranks.pattern.replace("*", rank) for rank in ("10", "1", "0")], [])
    assert [curve.label for curve in curves] == ["Rank 0", "Rank 1", "Rank 10"], "as the log happens to have them"


def test_an_unknown_metric_appears_in_other_and_nowhere_else() -> None:
    titles = {
        chart.title: [c.metric for c in curves_of(chart, ["reward", "mine/own", "time/extra"], [])]
        for chart in CHARTS
        if not chart.held_out
    }
    assert titles["Other"] == ["mine/own"]
    assert "time/extra" in titles["Step time"]
    assert [title for title, metrics in titles.items() if "mine/own" in metrics] == ["Other"]


def test_a_finished_run_shows_its_result_first(page: MonitorPage, show_run, tmp_path: Path, session: Session) -> None:
    show_run(made_up_runs.make_run(tmp_path / "run", steps=60))
    rewards = session.run.series("reward")[1]
    before, after = changes(session.run)[0].before, changes(session.run)[0].after
    assert (before, after) == (pytest.approx(rewards[:10].mean()), pytest.approx(rewards[-10:].mean()))
    assert page.verdict.isVisible() and page.verdict.title.text().startswith("Finished: 60 steps in 1")
    assert button_texts(page) == ["Export to LM Studio…", "Chat", "Evaluate", "Open folder"]
    assert page.tiles["reward"].figure() == figure(after), "tiles compare the same steps as the card"
    assert page.tiles["reward"].caption.text() == f"+{after - before:.2f} since start"
    assert page.tiles["peak_memory_gb"].caption.text() == "" and page.tiles["correct"].isHidden()
    assert page.tiles["clip_ratio_total"].figure().endswith("%")


def test_charts_draw_what_the_event_log_says(page: MonitorPage, show_run, tmp_path: Path, session: Session) -> None:
    show_run(made_up_runs.make_run(tmp_path / "run", steps=30))
    reward = plot(page, "Reward").traces[0]
    spread = session.run.series("reward_std")[1]
    assert np.array_equal(reward.y, session.run.series("reward")[1])
    assert np.allclose(reward.high - reward.low, 2 * spread)
    assert [trace.colour for trace in plot(page, "Rewards per function").traces] == [
        f"reward:{n}" for n in made_up_runs.REWARDS
    ]
    assert not plot(page, "Other").isVisible()


def of_mode(folder: Path, metrics: list[dict[str, float]], evals: dict[int, float], **settings) -> RunFolder:
    """A run with these metrics of its steps, and the held-out loss after some."""
    run = made_up_runs.make_run(folder, steps=0, ending=None, **settings)
    log = EventLog(run.events)
    for step, of_step in enumerate(metrics, 1):
        log.write("step", step=step, metrics=of_step)
        if step in evals:
            log.write("eval", step=step, metrics={"loss": evals[step]})
    log.write("finished", step=len(metrics), reason="done", sentence="")
    log.close()
    return run


def test_an_sft_run_is_judged_by_its_loss(page: MonitorPage, show_run, tmp_path: Path, session: Session) -> None:
    steps = [{"loss": 3.0 - step / 10, "entropy": 1.0, "learning_rate": 1e-5, "num_tokens": 9.0} for step in range(20)]
    run = of_mode(tmp_path / "sft", steps, {10: 2.5, 20: 2.2}, train_mode="sft", reward_functions=[])
    show_run(run)
    shown = [each.title for each in page.grid.plots if each.isVisible() and each.section in ("Learning", "Held-out")]
    assert shown == ["Loss", "Entropy", "Learning rate", "Held-out loss"]
    tiles = [metric for metric, tile in page.tiles.items() if not tile.isHidden()]
    assert tiles == ["loss", "entropy", "train_tokens_per_second", "peak_memory_gb"]
    found = [(each.label, round(each.before, 2), round(each.after, 2)) for each in changes(session.run)]
    assert found == [("Loss in training", 2.8, 1.3), ("Loss on held-out prompts", 2.5, 2.2)]
    _, (result,) = compare([run])
    assert result["held_out_best"] == 2.2 and result["best_step"] == 20, "the lowest loss is the best"
    assert results_table([result])[1][3:6] == ["loss 2.8", "loss 1.3", "loss 2.5"]
    row, fields = read_record(run), [field_of(key) for key in ("reward", "change", "held_out")]
    assert [field.value(row) for field in fields] == [None] * 3, "no search for a reward finds a loss"
    model = RunModel()
    model.set_columns(["reward", "change", "held_out"])
    assert [model.text(row, column) for column in range(1, 4)] == ["loss 1.30", DASH, "loss 2.20"]
    assert row.curve[0] > row.curve[-1] > 0


def test_sft_whose_evaluations_have_rewards_has_no_empty_charts_of_them(page, show_run, tmp_path: Path) -> None:
    run = of_mode(tmp_path / "sft", [{"loss": 2.0}], {}, train_mode="sft", reward_functions=["a"])
    log = EventLog(run.events)
    log.write("eval", step=1, metrics={"loss": 2.0, "reward": 1.0, "rewards/a/mean": 1.0, "rewards/a/std": 0.0})
    log.close()
    show_run(run)
    shown = [each.title for each in page.grid.plots if each.isVisible()]
    assert shown == ["Loss", "Held-out reward", "Held-out loss", "Held-out spread"]


def test_the_end_of_a_warm_up_is_marked(page: MonitorPage, show_run, tmp_path: Path, session: Session) -> None:
    warm = [{"warmup/loss": 2.0, "warmup/entropy": 1.0, "warmup/learning_rate": 1e-5} for _ in range(3)]
    show_run(of_mode(tmp_path / "warm", [*warm, *({"reward": 0.5, "loss": 0.0} for _ in range(3))], {}))
    assert [(mark.step, mark.sentence) for mark in session.run.data.marks] == [(4, "The supervised warm-up is over.")]
    assert plot(page, "Warm-up loss").isVisible() and plot(page, "Reward").isVisible()
    assert not plot(page, "Warm-up pass rate").isVisible()


def test_the_kl_chart_and_tile_say_that_kl_is_off(page: MonitorPage, show_run, tmp_path: Path) -> None:
    folder = made_up_runs.make_run(tmp_path / "run", steps=1, beta=0, ending=None)
    text = folder.events.read_text(encoding="utf-8")
    folder.events.write_text(text.replace('"kl": ', '"other": '), encoding="utf-8")
    show_run(folder)
    assert "KL is off" in plot(page, "KL from the reference").waiting.text()
    assert page.tiles["kl"].caption.text() == "off: Beta 0"


def test_flat_clip_chart(page: MonitorPage, show_run, tmp_path: Path, session: Session) -> None:
    """With one update per rollout it was a line at 0, and who followed the guide waited for it to move."""
    folder = made_up_runs.make_run(tmp_path / "run", steps=3, ending=None)
    clipping = plot(page, "Clip ratios")
    show_run(folder)
    assert clipping.traces and not clipping.offer.isVisible(), "what was clipped is drawn, whatever the settings say"
    text = folder.events.read_text(encoding="utf-8")
    folder.events.write_text(re.sub(r'("clip_ratio_(low|high|total)": )[0-9.e-]+', r"\g<1>0.0", text), encoding="utf-8")
    session.close_run()
    show_run(folder)
    assert not clipping.traces and "one update per rollout" in clipping.waiting.text()
    assert page.tiles["clip_ratio_total"].caption.text() == "ratio always 1"
    session.draft.reset()
    assert session.draft.value("num_iterations") == 1
    clipping.offer.click()
    assert session.draft.value("num_iterations") == 2
    session.draft.reset()
    folder.config.write_text(folder.config.read_text(encoding="utf-8") + "\nnum_iterations: 2\n", encoding="utf-8")
    session.close_run()
    show_run(folder)
    assert clipping.traces and not clipping.offer.isVisible(), "with two updates 0 is news"


def test_failed_run(page: MonitorPage, show_run, tmp_path: Path, session: Session, started) -> None:
    folder = made_up_runs.make_run(tmp_path / "run", steps=12, ending="failed")
    add_checkpoints(folder, {10: None})
    show_run(folder)
    assert page.verdict.title.text() == "Failed after step 12"
    assert made_up_runs.SENTENCES["failed"] in page.verdict.sentence.text()
    assert button_texts(page) == ["Resume from step 10", "Edit settings", "Open log"]
    page.verdict.buttons[0].click()
    assert started[0][1] == folder and session.run.state == "starting"
    assert not page.verdict.isVisible()


def test_a_tile_shows_the_change_with_the_precision_of_its_figure(qtbot) -> None:
    tile = MetricTile("Memory", unit="GB")
    qtbot.addWidget(tile)
    close = [(0.1062, 0.1056, "+0.001"), (0.1062, 0.1061, ""), (0.0467, 0.0441, "+2.6")]
    for now, start, expected in (*close, (2.5, 1.0, "+1.50"), (0.0, 0.5, "−0.500"), (2.5e6, 1e6, "+1.50M")):
        tile.show_value(now, start)
        assert tile.caption.text().removesuffix(" since start") == expected


def test_a_point_leads_to_its_completions(qtbot, page: MonitorPage, show_run, tmp_path: Path, session: Session) -> None:
    show_run(made_up_runs.make_run(tmp_path / "run", steps=30))
    reward = plot(page, "Reward")
    view = reward.view
    at = view.mapFromScene(view.box.mapViewToScene(QPointF(12, reward.traces[0].at(12))))
    with qtbot.waitSignal(session.completions_requested) as requested:
        QTest.mouseClick(view.viewport(), Qt.MouseButton.LeftButton, pos=at)
    assert requested.args == [12, None]


def test_marks_and_resume(qtbot, page: MonitorPage, show_run, tmp_path: Path, session: Session) -> None:
    folder = made_up_runs.make_run(tmp_path / "run", steps=3, ending=None)
    size = folder.events.stat().st_size
    event_log = EventLog(folder.events)
    event_log.write("checkpoint", step=3, path="checkpoints/000003")
    event_log.write("change", step=4, settings={"learning_rate": [1e-4, 5e-5], "beta": [0.1, None]})
    event_log.write("health", code="kl", sentence="KL is high.", advice="Lower it.", step=2)
    event_log.write("change", step=None, settings=3)
    event_log.write("started", iterations=9)
    event_log.close()
    show_run(folder)
    assert [(mark.step, mark.kind, mark.sentence) for mark in session.run.data.marks] == [
        (1, "eval", "Evaluated: held-out reward 1.33."),
        (3, "checkpoint", "Saved: a checkpoint."),
        (4, "change", "From step 4 on: Learning Rate 0.0001 → 5e-05, Beta (KL weight) 0.1 → empty."),
        (2, "health", "KL is high."),
        (3, "resume", "Resumed after step 3."),
    ]
    reward = plot(page, "Reward")
    assert len(reward.marks) == 5
    page.grid.marks.setChecked(False)
    qtbot.waitUntil(lambda: len(reward.marks) == 0)
    page.grid.marks.setChecked(True)
    qtbot.waitUntil(lambda: len(reward.marks) == 5)
    with folder.events.open("rb+") as file:
        file.truncate(size)
    EventLog(folder.events).write("started", iterations=9)
    qtbot.waitUntil(lambda: [mark.kind for mark in session.run.data.marks] == ["eval", "resume"])


def test_save_now_says_when_it_is_saved(page: MonitorPage, show_run, tmp_path: Path, session: Session, told) -> None:
    folder = made_up_runs.make_run(tmp_path / "run", steps=3, ending=None)
    show_run(folder)
    event_log = EventLog(folder.events)
    event_log.write("checkpoint", step=3, path="checkpoints/000003")
    session.run.poll()
    assert told == [], "nobody asked for that one"
    session.run.send("save")
    for _ in range(2):
        event_log.write("checkpoint", step=4, path="checkpoints/000004")
    session.run.poll()
    assert told == ["Saved: the run can be resumed from step 4."]


def test_log_being_read(page: MonitorPage, show_run, tmp_path: Path, session: Session, monkeypatch) -> None:
    """An archived run of 100,000 steps was "starting", with days of work and no time left."""
    show_run(made_up_runs.make_run(tmp_path / "run", steps=9))
    assert session.run.read_share is None
    monkeypatch.setattr(session.run, "has_caught_up", False)
    session.run._follower.offset //= 2
    page._show_progress(session.run)
    assert page.header.doing.text() == "Step 9 of 60 · reading the event log, 50%"


def test_a_run_that_is_read_for_the_first_time_is_not_starting(window: Window, tmp_path: Path) -> None:
    """One of 20,000 steps, finished long ago, was “Starting” for seconds, with its percentage and a Stop."""
    session = window.session
    session.open_run(made_up_runs.make_run(tmp_path / "run", steps=9, ending="finished").path)
    window.show_page("monitor")
    assert session.run.state == "reading" and "%" not in window.windowTitle()
    assert not window.menus["stop"].isEnabled() and window.menus["run"].isEnabled()
    session.run.poll()
    session.run.poll()
    assert session.run.state == "finished"


def test_several_machines(tmp_path: Path, page: MonitorPage, show_run, monkeypatch) -> None:
    show_run(made_up_runs.make_run(tmp_path / "alone", steps=3, total=3))
    assert page.ranks_card.isHidden()
    assert not [chart.title for chart in page.grid.plots if "each rank" in chart.title and chart.isVisible()]
    show_run(made_up_runs.make_run(tmp_path / "three", steps=3, total=3, ranks=3, ending="failed", lost_rank=2))
    assert page.ranks_card.isVisible()
    cells = table_texts(page.ranks.model())
    assert [row[1] for row in cells] == ["anna-mbp.local", "studio.local", "air.local"]
    assert [row[-1] for row in cells] == ["", "", "Lost"]
    assert cells[1][5] == "6" and cells[1][6].endswith("of 128\u202fGB") and cells[2][7].endswith("%")


def episode(code: str, since: int = 12, until: int | None = None, **fields) -> Episode:
    rule = RULES[code]
    known = {"sentence": "“KL from the reference” is 0.8 nats a token.", "advice": rule.advice, "setting": rule.setting}
    return Episode(code, title=rule.title, level=rule.level, since=since, until=until, **known | fields)


DRIFTING = episode("drifting", settings={"learning_rate": 5e-5})
OVER = episode("cut_off", 3, 40)


@pytest.fixture
def cards(qtbot, qapp) -> HealthCards:
    page = QWidget()
    qtbot.addWidget(page)
    shown = HealthCards(Session(), page)
    qtbot.addWidget(shown)
    shown.resize(1060, 300)
    return shown


def test_a_card_says_all_of_it_and_offers_what_can_be_done(qtbot, cards: HealthCards) -> None:
    cards.show_episodes([DRIFTING])
    (row,) = rows_of(cards)
    offered = ["Read completions", "Go to the setting", "Do it: Learning Rate 5e-05", "Guide", "Dismiss"]
    assert [link.text() for link in row.links] == offered
    session = cards._session
    for signal, index, expected in (
        (session.completions_requested, 0, [12, None]),
        (session.field_requested, 1, ["learning_rate"]),
        (session.guide_requested, 3, [place_of("health", "drifting")]),
    ):
        with qtbot.waitSignal(signal) as caught:
            row.links[index].click()
        assert caught.args == expected
    row.links[2].click()
    assert session.draft.value("learning_rate") == 5e-5
    assert all(link.accessibleName().endswith("Drifting from the reference") for link in row.links)


def test_more_than_two_fold_and_past_ones_say_until_when(cards: HealthCards) -> None:
    cards.show_episodes([DRIFTING, episode("no_signal"), episode("flat"), OVER])
    assert len(rows_of(cards)) == 2 and cards.more.text() == "2 more"
    cards.more.click()
    assert len(rows_of(cards)) == 4 and cards.more.text() == "Show less"
    past = rows_of(cards)[-1]
    assert past.accessibleName() == "Cut off at the limit, step 3 until step 40"
    assert [link.text() for link in past.links] == ["Read completions", "Guide", "Dismiss"]
    cards.unfold(False)
    cards.show_episodes([OVER])
    assert rows_of(cards) == [] and cards.more.text() == "1 finding of earlier steps"
    cards.show_episodes([])
    assert cards.isHidden()


def test_the_page_shows_the_findings_of_a_run_and_dismisses_one(page: MonitorPage, show_run, tmp_path: Path) -> None:
    show_run(recording("lr-high").unpack(tmp_path / "sick"))
    cards = page.findings
    assert not cards.isHidden()
    cards.unfold(True)
    titles = [row.episode.title for row in rows_of(cards)]
    assert "KL exploding" in titles and "Drifting from the reference" in titles
    assert rows_of(cards)[0].episode.level == "error"
    rows_of(cards)[0].links[-1].click()
    assert [row.episode.title for row in rows_of(cards)] == titles[1:]
    show_run(recording("healthy-grpo").unpack(tmp_path / "well"))
    assert cards.isHidden()


def revive(folder: RunFolder) -> str:
    """Take the ending off a run and lock it, as if it still trained; returns the whole event log."""
    whole = folder.events.read_text()
    folder.events.write_text("".join(whole.splitlines(keepends=True)[:-1]))
    hold_lock(folder)
    return whole


def test_a_solved_run_can_be_stopped(qtbot, page: MonitorPage, show_run, tmp_path: Path) -> None:
    folder = recording("solved").unpack(tmp_path / "run")
    whole = revive(folder)
    show_run(folder)
    training, held_out = changes(page.session.run)
    assert (training.label, training.unit) == ("Correct in training", "share") and held_out.unit == "share"
    assert training.after == pytest.approx(0.9875, abs=1e-4)
    page.findings.unfold(True)
    solved = next(row for row in rows_of(page.findings) if row.episode.title == "Solved")
    next(link for link in solved.links if link.text() == "Stop the run").click()
    assert folder.control.read_text().strip() == "stop"
    folder.events.write_text(whole)

    def links() -> list[str]:
        return [link.text() for row in rows_of(page.findings) for link in row.links]

    qtbot.waitUntil(lambda: not page.session.run.is_live and "Stop the run" not in links())
    assert "Dismiss" in links()


def test_do_it(page: MonitorPage, show_run, tmp_path: Path) -> None:
    folder, session = recording("lr-high").unpack(tmp_path / "run"), page.session
    before = session.draft.value("learning_rate")
    revive(folder)
    show_run(folder)
    assert session.run.is_live
    take_up(session, session.run, {"learning_rate": 3e-6})
    assert json.loads(folder.change_request.read_text())["settings"] == {"learning_rate": 3e-6}
    session.launched = folder
    take_up(session, session.run, {"learning_rate": run_config(folder).learning_rate})
    assert session.draft.value("learning_rate") == before, (
        "a second press, once the run has it, is no change of the form"
    )
    take_up(session, session.run, {"group_size": 32})  # fixed during a run: into the form
    assert session.draft.value("group_size") == 32 and session.draft.value("learning_rate") == before
    session.messages.said.connect((told := list[str]()).append)
    session.launched = None  # it was opened on Runs: the form may have any other run's settings
    take_up(session, session.run, {"group_size": 16})
    now = session.draft.values()
    assert now["group_size"] == 16 and now["learning_rate"] == run_config(folder).learning_rate != before
    assert told[-1].startswith("These are the settings of ") and told[-1].endswith(", with Group 16.")
    session.draft.history.undo()
    assert session.draft.value("group_size") == 32 and session.draft.value("learning_rate") == before
    session.run.config.update({"train_type": "full", "beta": 0.0})
    take_up(session, session.run, {"beta": 0.02})
    assert session.draft.value("beta") == 0.02, "a full fine-tuning that began without a reference stays without one"


def test_the_card_acts_for_the_run_on_show(page: MonitorPage, show_run, tmp_path: Path, session: Session) -> None:
    """Two runs that failed alike: Edit settings loaded those of the first."""
    session.settings_requested.connect((edited := list[RunFolder]()).append)
    for name in ("first", "second"):
        show_run(made_up_runs.make_run(tmp_path / name, steps=12, ending="failed"))
        next(each for each in page.verdict.buttons if each.text() == "Edit settings").click()
    assert [run.name for run in edited] == ["first", "second"]
