"""Fixtures that every room's tests share."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# OpenMP's threads busy-wait by default. With three processes on two cores, a loop of small torch operations took 60 s;
# with this setting it takes 2 s. torch's OpenMP reads the variable at import, so it is set first.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# On a GPU torch compiles in processes that live as long as pytest: they would count as left behind.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

import pytest

from megarl.cluster.agents.agent_link import AgentLink
from megarl.files.private_folder import PrivateFolder
from megarl.platform.imports import disable_collector
from megarl.processes.fork_server import end_fork_servers
from tests.forked_command import MEGARL
from tests.leftovers import WITHOUT_SLURM, Watch
from tests.shared_fork_servers import shared_fork_servers
from tests.stand_ins.hidden_slurm import path_without_slurm
from tools import runs

if TYPE_CHECKING:
    from tests.rank_pool import RankPool

INSTALLS_SLURM = "launch/test.sh --install-slurm installs Slurm (as root, by apt-get)"
LEFT = "this run of the tests has left:"
OWN_JOBS = ("gpu_environment", "standin_gpu", "fault_runs", "harbor", "long")
TIERS = ("cluster", "end_to_end", "distributed", "types", "fast")
"""Markers, each test has one. A test without one has the tier that its fixtures declare, by using one of the fixtures
`cluster_tier` and `distributed_tier`, or else `fast`. The fixtures' first in this order counts."""
WATCH = pytest.StashKey[Watch]()
SHARED_BY_WORKERS = pytest.StashKey[contextlib.ExitStack]()
"""The fork servers that the workers of `-n` share, in the process that starts the workers."""
_is_interrupted = False


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kills", type=int, default=2, help="how often the run of end_to_end/recovery/test_resume.py is killed"
    )
    parser.addoption("--leftover-seconds", type=float, default=20.0, help="how long processes may take to end at last")


def pytest_configure(config: pytest.Config) -> None:
    """Give what the run starts a folder for its temporary files, and end by a signal as by Ctrl-C: in good order."""
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    config.stash[WATCH] = watch = Watch()
    # Runs of tools start fast, like those of tests.
    runs.program = MEGARL
    # With `-n`, only the workers run tests: names of sockets are too long in a folder within another.
    if not getattr(config.option, "tx", None) or hasattr(config, "workerinput"):
        os.environ["TMPDIR"] = tempfile.tempdir = str(watch.folder)
    # A script's `&` starts programs deaf to Ctrl-C, and so all that they start: tests send these signals to runs.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """Share fork servers among all workers: each server's imports take 10 s to 20 s of processor time."""
    folder = str(config.stash[WATCH].folder)
    config.stash[SHARED_BY_WORKERS] = stack = contextlib.ExitStack()
    # Only the broker has this folder: a worker's own one would have too long a path for sockets within it.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        stack.enter_context(shared_fork_servers())


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, object, object]:
    """End the fork servers that workers shared, and fail the run if a process or shared memory of these is left."""
    result = yield
    if SHARED_BY_WORKERS in session.config.stash:
        session.config.stash[SHARED_BY_WORKERS].close()
        # Workers that failed may have left processes, which their own watching processes are about to end.
        left = [] if _is_interrupted or session.exitstatus else _leftovers(session.config)
        if left:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
            sys.stderr.write("\n".join(["", LEFT, *left, ""]))
    return result


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """Without the garbage collector, which takes half of the time in which the files of tests are imported."""
    with disable_collector():
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give each test the marker of its tier, before `-m` chooses among them."""
    for item in items:
        if not any(item.get_closest_marker(tier) for tier in TIERS):
            fixtures = getattr(item, "fixturenames", ())
            item.add_marker(next((tier for tier in TIERS if f"{tier}_tier" in fixtures), "fast"))
    if hasattr(config, "workerinput"):
        _put_long_files_first(items)
    _leave_out_own_jobs(config, items)


def _put_long_files_first(items: list[pytest.Item]) -> None:
    """By tier, so that none of several workers is left alone with a long file while the others have nothing to do."""
    place: dict[Path, int] = {}
    for item in items:
        own = next(number for number, tier in enumerate(TIERS) if item.get_closest_marker(tier))
        place[item.path] = min(own, place.get(item.path, own))
    items.sort(key=lambda item: place[item.path])


def _leave_out_own_jobs(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that need an environment or minutes of their own run only where `-m` names their marker."""
    own_jobs = [job for job in OWN_JOBS if job not in config.getoption("markexpr")]
    left_out = [item for item in items if any(map(item.get_closest_marker, own_jobs))]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Hide Slurm's programs from a test without the mark `slurm`, and from the fixtures that are set up for it."""
    if item.get_closest_marker("slurm"):
        return (yield)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PATH", _path_without_slurm(item.config.stash[WATCH].folder / WITHOUT_SLURM))
        return (yield)


@cache
def _path_without_slurm(folder: Path) -> str:
    return path_without_slurm(os.environ["PATH"], folder)


def pytest_keyboard_interrupt() -> None:
    global _is_interrupted
    _is_interrupted = True


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The tests that this machine cannot run, and why."""
    skipped = terminalreporter.getreports("skipped")
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    if reasons:
        terminalreporter.section("left out on this machine")
    for reason, count in sorted(reasons.items()):
        terminalreporter.line(f"{count} test{'s' * (count > 1)}: {reason}")
    if any("slurm" in report.keywords for report in skipped):
        terminalreporter.line(f"for those marked slurm: {INSTALLS_SLURM}")


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left(pytestconfig: pytest.Config) -> Iterator[None]:
    """The run ends with an error if it leaves processes, shared memory or temporary files. Torn down last.

    All drivers of the run share their fork servers: it is the imports that would take most of a small run's time.
    """
    is_worker = hasattr(pytestconfig, "workerinput")
    with contextlib.nullcontext() if is_worker else shared_fork_servers():
        yield
        end_fork_servers()
    if _is_interrupted:
        return
    # The folder of a driver that a test has killed is removed by the next run; none comes after the last test.
    seconds = pytestconfig.getoption("--leftover-seconds")
    left = pytestconfig.stash[WATCH].leftovers_at_end(seconds, lambda: PrivateFolder().remove())
    if left:
        pytest.fail("\n".join([LEFT, *left]), pytrace=False)


def _leftovers(config: pytest.Config) -> list[str]:
    return config.stash[WATCH].leftovers(config.getoption("--leftover-seconds"))


@pytest.fixture(autouse=True)
def fast_tests_start_no_ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test of the fast tier that starts a rank fails."""
    if not request.node.get_closest_marker("fast"):
        return

    async def fork_no_rank(*_: Any, **options: Any) -> None:
        pytest.fail("a test of the fast tier starts ranks: mark it as distributed, end_to_end or cluster")

    monkeypatch.setattr(AgentLink, "fork", fork_no_rank)


@pytest.fixture(scope="session")
def distributed_tier() -> None:
    """Tests whose fixtures use this one have the tier `distributed`."""


@pytest.fixture(scope="session")
def cluster_tier() -> None:
    """Tests whose fixtures use this one have the tier `cluster`."""


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Run async tests and fixtures on asyncio, by the pytest plugin of anyio (a dependency of vLLM)."""
    return "asyncio"


@pytest.fixture
def num_kills(request: pytest.FixtureRequest) -> int:
    return request.config.getoption("--kills")


@contextmanager
def _no_file_may_grow() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def no_file_may_grow() -> Callable[[], AbstractContextManager[None]]:
    """`with no_file_may_grow():` each write to a file fails, as on a disk without room."""
    return _no_file_may_grow


@pytest.fixture
def cuda_factories(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own factories, for fake tensors on a GPU: those that run Megatron on the CPU make them there."""
    import torch

    from megarl.platform.cpu import megatron_patches

    for name in megatron_patches.FACTORIES:
        factory = getattr(torch, name)
        monkeypatch.setattr(torch, name, getattr(factory, "__wrapped__", factory))


@pytest.fixture(scope="session")
def ranks(distributed_tier: None) -> Iterator[RankPool]:
    """Four processes that live as long as the session; `ranks.run(function, ..., world_size=2)` uses two of them."""
    # Whoever starts no ranks goes without torch, as does the process that hands the tests to others.
    from tests.rank_pool import RankPool

    with RankPool(4) as pool:
        yield pool


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_model(family="llama", num_kv_heads=4, ...)` is a model folder, made once a session for equal arguments.

    The arguments are those of `tools/make_tiny_model.py`. The folder is shared: copy it before changing it.
    """
    from tools.make_tiny_model import make_tiny_model

    made: dict[tuple[tuple[str, Any], ...], Path] = {}

    def make(**arguments: Any) -> Path:
        key = tuple(sorted(arguments.items()))
        if key not in made:
            folder = tmp_path_factory.mktemp("tiny_model")
            made[key] = make_tiny_model(folder, **arguments)
        return made[key]

    return make


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """`small_disk(options)` is a file system in memory with those mount options."""
    with contextlib.ExitStack() as stack:

        def mount(options: str) -> Path:
            folder = tmp_path / options
            folder.mkdir()
            done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True)
            if done.returncode:
                pytest.skip(f"this user may not mount a file system: {done.stderr.decode().strip()}")
            stack.callback(subprocess.run, ["umount", folder], check=True)
            return folder

        yield mount
