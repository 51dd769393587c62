"""What the tests of the window wait with."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from PySide6.QtWidgets import QApplication

from app import theme
from app.pages.train.reward_panel import RewardPanel
from app.pages.train.train_page import TrainPage
from app.state.consent import Consent
from app.state.draft import Draft
from app.state.prefs import Prefs
from app.state.processes import Service
from app.state.reward_bench import RewardBench
from app.state.session import Session
from app.window import Window
from backend.runs.run_folder import RunFolder
from tests.support.windows import PatientQtBot, ServiceByHand

START = Service._start


@pytest.fixture(scope="package", autouse=True)
def silent_helper() -> Iterator[None]:
    """Questions are taken and never answered, unless the test asks for `helper`; nor are those of a window that waits
    to be deleted between two tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Service, "_start", lambda service: setattr(service, "_process", None))
        yield


@pytest.fixture
def helper(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a test that waits for answers of the window's helper process, which takes a second to start."""
    monkeypatch.setattr(Service, "_start", START)


@pytest.fixture
def qtbot(qapp: QApplication, request: pytest.FixtureRequest) -> PatientQtBot:
    """It finds the light theme, whatever an earlier test has set."""
    if theme.mode() != "light":
        theme.apply(qapp, "light")
    return PatientQtBot(request)


@pytest.fixture
def session(tmp_path: Path, qapp: QApplication) -> Iterator[Session]:
    """With preferences of its own."""
    session = Session(Prefs(tmp_path / "prefs"))
    yield session
    session.close_run()


@pytest.fixture
def told(session: Session) -> list[str]:
    """Every message of the session."""
    messages: list[str] = []
    session.messages.said.connect(messages.append)
    return messages


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], RunFolder]]:
    """The trainings that would be started: commands and run folders."""
    found: list[tuple[list[str], RunFolder]] = []
    monkeypatch.setattr("app.state.run_starter.start_detached", lambda *arguments: found.append(arguments))
    return found


@pytest.fixture
def window(session: Session, qtbot) -> Window:
    """Not yet shown."""
    window = Window(session)
    qtbot.addWidget(window, before_close_func=lambda window: window.session.close_run())
    return window


@pytest.fixture(scope="module")
def train_page(qapp: QApplication, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainPage]:
    """The Train page for all tests of a file: to build one takes longer than what most of them do with it."""
    theme.apply(qapp, "light")
    session = Session(Prefs(tmp_path_factory.mktemp("train") / "prefs"))
    session.service = ServiceByHand()  # pyright: ignore
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("app.pages.train.train_page.SETTLE_MS", 0)  # problems are shown once the event loop turns
        page = TrainPage(session)
    page.build_all()
    page.resize(1100, 760)
    page.show()
    yield page
    page.close()
    page.deleteLater()


@pytest.fixture
def draft(qapp: QApplication) -> Draft:
    return Draft()


@pytest.fixture
def panel(qtbot, draft: Draft, tmp_path: Path) -> RewardPanel:
    """The table of rewards with the draft behind it, as the Train page joins them."""
    panel = RewardPanel(RewardBench(draft, ServiceByHand(), Consent(tmp_path / "trusted.json")))  # pyright: ignore
    draft.changed.connect(lambda _key: panel.show_rewards())
    panel.show_rewards()
    return qtbot.show(panel, 900, 700)
