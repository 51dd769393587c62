"""The services' part of the session: what takes time or memory, each created on first use so that the first paint does not wait for it.

Between `app.state.form_session.FormSession`, the form, and `app.state.session.Session`, which adds the runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from PySide6.QtCore import QObject

from app.state.consent import Consent
from app.state.form_session import FormSession
from app.state.prefs import Prefs
from backend.utils.problem_report import ProblemFacts

if TYPE_CHECKING:
    from app.state.dataset import Dataset
    from app.state.downloads import Downloads
    from app.state.evaluations import Evaluations
    from app.state.machines import Machines
    from app.state.reward_bench import RewardBench
    from app.state.service import Service
    from app.state.updates import Updates

BENCH = "bench"
"""The cause of messages about an attempt to sample or score on the bench."""
FAULT_OFFER = (
    "Something went wrong inside GRPO Studio. Help, Report a problem… shows what, as a report that you can send."
)


class ServiceSession(FormSession):
    """The form, and the services that work on it.

    Attributes:
        consent – created with the session.
        service, downloads, dataset, reward_bench, evaluations, machines, updates – created on first use.
        last_fault – the last fault of the helper process, for a report; None while there was none.
    """

    def __init__(self, prefs: Prefs, parent: QObject | None = None) -> None:
        super().__init__(prefs, parent)
        self.consent = Consent(self.prefs.folder / "trusted.json")
        self.last_fault: ProblemFacts | None = None
        self._service: Service | None = None
        self._downloads: Downloads | None = None
        self._dataset: Dataset | None = None
        self._reward_bench: RewardBench | None = None
        self._evaluations: Evaluations | None = None
        self._machines: Machines | None = None
        self._updates: Updates | None = None

    @property
    def service(self) -> Service:
        """The client of the helper process, which answers everything that takes time; created on first use."""
        if self._service is None:
            from app.state.service import Service

            self._service = Service(self)
            self._service.failed.connect(self._remember_fault)
        return self._service

    def _remember_fault(self, sentence: str, trace: str) -> None:
        """Keep what went wrong inside the helper process; the page that asked shows its sentence."""
        self.last_fault = ProblemFacts(sentence, trace, settings=self.draft.values())
        self.message.emit(FAULT_OFFER)

    @property
    def downloads(self) -> Downloads:
        """Downloads from the Hub; created on first use."""
        if self._downloads is None:
            from app.state.downloads import Downloads

            self._downloads = Downloads(self.service, self)
        return self._downloads

    @property
    def dataset(self) -> Dataset:
        """The draft's dataset, shared by every page that shows it; created on first use."""
        if self._dataset is None:
            from app.state.dataset import Dataset

            self._dataset = dataset = Dataset(self.draft, self.service, self)
            self.downloads.finished.connect(lambda _: dataset.reload())  # with a model come the tokens of its prompts
        return self._dataset

    @property
    def reward_bench(self) -> RewardBench:
        """Completions and their scores on the reward bench; created on first use."""
        if self._reward_bench is None:
            from app.state.reward_bench import RewardBench

            self._reward_bench = RewardBench(self.draft, self.service, self.consent, self)
            self._reward_bench.refused.connect(self._say_bench_refused)
            self._reward_bench.busy_changed.connect(self.messages.review)
        return self._reward_bench

    def _say_bench_refused(self, sentence: str) -> None:
        """Say it until the bench is busy with something else, or the form is another."""
        bench, form_stays = self.reward_bench, self.while_form_stays()
        self.messages.say(sentence, BENCH, lambda: not bench.busy and form_stays() and not self._was_allowed(sentence))

    def _was_allowed(self, sentence: str) -> bool:
        from app.state.reward_bench import DECLINED

        return sentence == DECLINED and not self.consent.unconfirmed(self.draft.values())

    @property
    def evaluations(self) -> Evaluations:
        """The evaluations of the run that is shown; created on first use."""
        if self._evaluations is None:
            from app.state.evaluations import Evaluations

            self._evaluations = Evaluations(self.consent, self)
        return self._evaluations

    @property
    def machines(self) -> Machines:
        """The machines of the form's run; created on first use."""
        if self._machines is None:
            from app.state.machines import Machines

            self._machines = Machines(self.draft, lambda: self.service, self.consent, self)
        return self._machines

    @property
    def updates(self) -> Updates:
        """The update check; created on first use."""
        if self._updates is None:
            from app.state.updates import Updates

            self._updates = Updates(self.prefs, lambda: self.service, self)
            self._updates.told.connect(self.message)
        return self._updates
