"""For every test: no display, runs folder and preferences of its own, one BLAS thread, one core per worker.

Set before anything imports Qt or numpy, and in the environment, so that child processes inherit it.
"""

import gc
import os
import shutil
import sys
import tempfile
from bisect import bisect_left
from collections.abc import Iterator
from functools import cache
from itertools import accumulate
from multiprocessing.util import Finalize
from pathlib import Path

import pytest

from backend.engine import cpu_setup
from backend.runs.run_folder import LOCK_VARIABLE, RunFolder
from backend.trainer.control import handlers_restored
from backend.utils.machine import TREAT_CPU_AS
from tests.support import shared_kernels
from tests.support.exclusive_lock import MachineLock

cpu_setup.load_openblas()  # before mlx is imported
import mlx.core as mx  # noqa: E402

mx.disable_compile()  # except in tests that ask for `compiled`
# The temporary folder of this process and its children, which may be killed before they tidy up; pytest's own stays. A
# worker's lies in that of the process that started it.
os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
_KERNELS = (Path(tempfile.gettempdir()) / "mlx").resolve()  # what mlx compiles for a CPU is kept for the next session
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    shared_kernels.use(Path(tempfile.gettempdir()))
    _TEST_HOME = Path(tempfile.gettempdir()) / worker
    _TEST_HOME.mkdir()
    # mlx writes a kernel without a lock: a second process could load half of it.
    _KERNELS = _KERNELS.with_name(f"grpo-studio-{worker}")
else:
    _TEST_HOME = Path(tempfile.mkdtemp(prefix="grpo-studio-tests-"))
    # After multiprocessing has deleted its own folder in there (priority -100), and not in a forked child.
    Finalize(None, shutil.rmtree, (_TEST_HOME, True), exitpriority=-1000)
_KERNELS.mkdir(exist_ok=True)
(_TEST_HOME / "mlx").symlink_to(_KERNELS)
os.environ["TMPDIR"] = tempfile.tempdir = str(_TEST_HOME)
TESTS_A_COLLECTION = 40
_tests = 0
os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
os.environ["GRPO_STUDIO_RUNS"] = str(_TEST_HOME / "runs")
os.environ["GRPO_STUDIO_PREFS"] = str(_TEST_HOME / "prefs")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--play-seconds", type=float, default=60, help="how long the window follows a fast run")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One worker more than cores, up to five: one that waits for a process or the disk leaves its core to another."""
    return min(5, (os.cpu_count() or 1) + 1)


def pytest_configure(config: pytest.Config) -> None:
    """Each worker begins to collect at another file, its share of the bytes on. Rewriting the assertions of a fresh
    clone's tests takes longer than all else of collecting, and a file that another worker has rewritten is read from
    its byte code.

    Garbage collections while everything is imported took a fifth of collecting."""
    gc.disable()
    worker = getattr(config, "workerinput", None)
    if worker is not None and config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        share = int(worker["workerid"].removeprefix("gw")) / worker["workercount"]
        files = sorted(Path(__file__).parent.glob("**/test_*.py"))
        ends = list(accumulate(file.stat().st_size for file in files))
        first = bisect_left(ends, share * ends[-1])
        config.args = [str(file) for file in (*files[first:], *files[:first])]


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """The order in which all workers know the tests, time for proofs, and examples that depend on nothing but the test.

    Hypothesis also tries the constants of all modules that are imported by then, which it parses for that: seconds in
    each worker, and a test that fails in the suite would draw other examples by itself."""
    if (providers := sys.modules.get("hypothesis.internal.conjecture.providers")) is not None:
        nothing = providers._local_constants
        assert callable(providers._get_local_constants) and not len(nothing)
        providers._get_local_constants = lambda: nothing
    yield
    items.sort(key=lambda item: item.path)
    for item in items:
        if item.get_closest_marker("proof") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(1800))  # beside other work a proof takes many times its minutes


def pytest_collection_finish() -> None:
    """Leave what importing all tests made out of later garbage collections: each full one took a fifth of a second.

    A test's command line is made from its functions' signatures once, and not for every call: 0.03 s each."""
    if (testing := sys.modules.get("typer.testing")) is not None:
        assert callable(testing._get_command)
        testing._get_command = cache(testing._get_command)
    gc.collect()
    gc.freeze()
    gc.disable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Tests that measure seconds have the machine to themselves, when the suite is spread over several processes."""
    with MachineLock.of_this_run().held(exclusive=item.get_closest_marker("alone") is not None):
        return (yield)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Collect garbage here, in the thread of the windows, and nowhere else. A collection in another thread, such as a
    test's HTTP server or a reward function's, would destroy the timers of windows that earlier tests left in reference
    cycles, and Qt crash when one is due.

    What is left when the fixtures of a file are gone stays: modules and caches. It is left out of later collections,
    which would grow from file to file to a quarter of a second each."""
    global _tests
    _tests += 1
    gc.disable()
    is_last_of_file = nextitem is None or nextitem.path != item.path
    if _tests >= (TESTS_A_COLLECTION / 2 if is_last_of_file else TESTS_A_COLLECTION):
        _tests = 0
        gc.collect()
        if is_last_of_file:
            gc.freeze()


@pytest.fixture(autouse=True)
def signal_handlers_restored() -> Iterator[None]:
    """Training in this process installs handlers for the signals that mean stop, and an ended verb ignores them."""
    with handlers_restored():
        yield


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test its own runs folder and preferences; returns the folder that holds both."""
    monkeypatch.setenv("GRPO_STUDIO_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("GRPO_STUDIO_PREFS", str(tmp_path / "prefs"))
    monkeypatch.delenv(LOCK_VARIABLE, raising=False)  # a test of a restart leaves its lock to no program
    _bury_closed_windows()
    return tmp_path


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run folder that does not exist yet."""
    return RunFolder(tmp_path / "runs" / "mine")


@pytest.fixture
def as_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a test of what only a CPU does, where the whole suite makes a GPU's choices (`make test-as-gpu`)."""
    monkeypatch.delenv(TREAT_CPU_AS, raising=False)


@pytest.fixture
def compiled() -> Iterator[None]:
    """This test runs with mlx's compiler. On a CPU a compiled function costs a g++ run for each fused kernel and each
    layout of its inputs, most of many tests' time, and computes the same."""
    mx.enable_compile()
    yield
    mx.disable_compile()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder for the random models of one test file."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def patched_as_before() -> Iterator[None]:
    """Restore the patches of mlx-lm that were active before the test, since models of other tests rely on them."""
    from backend.engine import patches

    before = [(r.owner, r.attribute, getattr(r.owner, r.attribute)) for r in patches._active]
    yield
    patches.uninstall()
    for owner, attribute, value in before:
        patches.replace(owner, attribute, value)


def _bury_closed_windows() -> None:
    """Windows of earlier tests wait for an event loop to delete them; until then every change of theme redraws them."""
    core = sys.modules.get("PySide6.QtCore")
    if core is not None and core.QCoreApplication.instance() is not None:
        core.QCoreApplication.sendPostedEvents(None, core.QEvent.Type.DeferredDelete.value)
