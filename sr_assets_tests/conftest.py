"""Shared fixtures: real servers, one warm Spark engine, unique names.

A test that starts a server, Spark or another process has the marker `process`, set by its fixtures or explicitly. A test
without the marker is fast: an audit hook keeps it from starting a process.
"""

import gc
import itertools
import logging
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, Final

import dagster  # noqa: F401  its first import starts a process, which no fast test may do
import pytest
from hypothesis import HealthCheck, settings

from sr_assets.adapters.data import Source, open_source
from sr_assets.adapters.spark.engine import stop_engine
from sr_assets.cli import run_command
from sr_assets.settings import SourceSettings
from sr_assets.settings.loading import VALUES_VARIABLE
from sr_assets_tests import costs
from sr_assets_tests.rig import Command, Rig
from sr_assets_tests.servers import NatsServer
from sr_assets_tests.sourced import kv, make_data_bucket
from sr_assets_tests.travel import Travel

_numbers = itertools.count(1)
#: The fixtures that start servers and Spark.
_PROCESS_FIXTURES = {"nats_pair", "engine_home"}
_PROCESS_EVENTS = {"subprocess.Popen", "os.exec", "os.fork", "os.posix_spawn", "os.system"}
_CRASHED: Final = pytest.StashKey[bool]()
#: The id of the fast test that is being set up or run.
_fast: list[str] = []


def _refuse_processes(event: str, _arguments: tuple[object, ...]) -> None:
    """Keep a fast test from starting a process; an audit hook."""
    if _fast and event in _PROCESS_EVENTS:
        raise AssertionError(f"{_fast[0]} starts a process: mark it with pytest.mark.process")


sys.addaudithook(_refuse_processes)

# `&` and `nohup` ignore these signals, and child processes would inherit that. A handler does not survive exec.
for _number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number is signal.SIGINT else signal.SIG_DFL)

# By default the examples are the same each time and have no time limit. `make properties` searches for others.
settings.register_profile("gate", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(
    "search", settings.get_profile("gate"), derandomize=False, max_examples=2_000, print_blob=True
)
settings.load_profile("gate")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that records what each file costs."""
    parser.addoption("--costs", type=Path, metavar="FILE", help="write each test file's wall and CPU seconds to FILE")


def pytest_configure(config: pytest.Config) -> None:
    """Start the recorder of costs."""
    if file := config.getoption("costs"):
        config.pluginmanager.register(costs.Recorder(file), "costs")


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> costs.Scheduling:
    """Distribute whole files among the workers, whatever `--dist` says."""
    return costs.Scheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Set the marker `process` on tests of faults and on tests whose fixtures start servers or Spark."""
    for item in items:
        if "faults" in item.path.parts or _PROCESS_FIXTURES.intersection(getattr(item, "fixturenames", ())):
            item.add_marker("process")
    costs.longest_first(items)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Note a crashed worker: the tests that it had not run do not count as failed."""
    if error:
        node.config.stash[_CRASHED] = True


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Let no crash of a worker pass for a failed test."""
    if session.config.stash.get(_CRASHED, False):
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR


def pytest_collection_finish() -> None:
    """Exempt modules and collected tests from garbage collection, which would visit them all again and again."""
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None]:
    """Keep a test without the marker, and its fixtures, from starting processes."""
    if item.get_closest_marker("process") is None:
        _fast.append(item.nodeid)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None]:
    """Allow processes again: the teardown of the last test stops the session's servers and Spark."""
    _fast.clear()
    return (yield)


@pytest.fixture(autouse=True)
def _own_variables() -> Iterator[None]:
    """Restore the variables that a test set for its processes."""
    before = {name: os.environ.get(name) for name in ("DAGSTER_HOME", VALUES_VARIABLE)}
    yield
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


@pytest.fixture(autouse=True)
def _own_log() -> Iterator[None]:
    """Remove the handlers that a test's command has opened: pytest closes their stderr after the test."""
    log = logging.getLogger("sr_assets")
    handlers, level = list(log.handlers), log.level
    yield
    for handler in set(log.handlers) - set(handlers):
        handler.close()
    log.handlers = handlers
    log.setLevel(level)


@pytest.fixture(scope="session")
def nats_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[NatsServer, NatsServer]]:
    """Two JetStream servers, source and target, shared by all tests: use `unique` names."""
    home = tmp_path_factory.mktemp("nats")
    with NatsServer(home / "source", "source") as source, NatsServer(home / "target", "target") as target:
        yield source, target


@pytest.fixture(scope="session")
def nats_server(nats_pair: tuple[NatsServer, NatsServer]) -> NatsServer:
    """The source of `nats_pair`, shared by all tests: use `unique` names."""
    return nats_pair[0]


@pytest.fixture
def unique() -> Callable[[str], str]:
    """A function that returns a unique name for a stream or subject: `unique("ORDERS")` → `ORDERS_17`."""

    def name(stem: str = "S") -> str:
        return f"{stem}_{next(_numbers)}"

    return name


@pytest.fixture(scope="session")
def engine_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home whose Spark engine starts with its first run and stops after the last test."""
    home = tmp_path_factory.mktemp("home").resolve()
    yield home
    stop_engine(home)


@pytest.fixture
def rig(
    engine_home: Path,
    nats_pair: tuple[NatsServer, NatsServer],
    unique: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
) -> Rig:
    """A new site between two servers: `rig.make` a stream, `rig.add` it to the configuration, `rig.run`."""
    return Rig(engine_home, *nats_pair, unique, clocks=Travel(monkeypatch))


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """A function that runs `sr-assets` in this process and returns exit code, stdout and stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = run_command(arguments)
        return (code, *capsys.readouterr())

    return run


@pytest.fixture
def data_bucket(rig: Rig) -> str:
    """Return a new bucket of the data source `ops`."""
    return make_data_bucket(rig)


@pytest.fixture
def ops(rig: Rig, data_bucket: str) -> Iterator[Source]:
    """Yield the data source `ops`, open."""
    with open_source("ops", SourceSettings.model_validate(kv(rig, data_bucket))) as source:
        yield source
