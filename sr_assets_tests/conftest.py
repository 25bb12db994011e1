"""What every test may ask for: real servers, one warm Spark engine, and names nobody else uses. No fakes.

Here too: which tests are fast. A test that starts a server, Spark or any other process has the marker `process`, by its
fixtures or by hand; one without it cannot start any.
"""

import itertools
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import dagster  # noqa: F401  its first import asks the system for the platform by a process, which no fast test may start
import pytest
from hypothesis import HealthCheck, settings

from sr_assets.adapters.spark.engine import stop_engine
from sr_assets.cli import run_command
from sr_assets.embedded.nats_server import NatsServer
from sr_assets_tests.rig import Command, Rig

_numbers = itertools.count(1)
#: The fixtures that start servers and Spark.
_PROCESS_FIXTURES = {"nats_pair", "engine_home"}
_PROCESS_EVENTS = {"subprocess.Popen", "os.exec", "os.fork", "os.posix_spawn", "os.system"}
#: The fast test that is being set up or run, if there is one.
_fast: list[str] = []


def _refuse_processes(event: str, _arguments: tuple[object, ...]) -> None:
    """Refuse, as an audit hook, what a fast test must not do."""
    if event in _PROCESS_EVENTS and _fast:
        raise AssertionError(f"{_fast[0]} starts a process: mark it with pytest.mark.process")


sys.addaudithook(_refuse_processes)

# A shell's `&` and `nohup` have these ignored, which what tests start would inherit. A handler of ours ends with exec.
for _number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number is signal.SIGINT else signal.SIG_DFL)

# The gate tries the same examples each time, without limits of time, which a busy machine would break. `make properties`
# searches for others.
settings.register_profile("gate", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(
    "search", settings.get_profile("gate"), derandomize=False, max_examples=2_000, print_blob=True
)
settings.load_profile("gate")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what starts servers or Spark by its fixtures, and all faults."""
    for item in items:
        if "faults" in item.path.parts or _PROCESS_FIXTURES.intersection(getattr(item, "fixturenames", ())):
            item.add_marker("process")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None]:
    """Hold a test without the marker to it, from its fixtures on."""
    if item.get_closest_marker("process") is None:
        _fast.append(item.nodeid)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None]:
    """Let the session's servers and Spark be stopped by whichever test is the last."""
    _fast.clear()
    return (yield)


@pytest.fixture(autouse=True)
def _own_dagster_home() -> Iterator[None]:
    """Take back the Dagster home that a test has set for the processes it starts: the next test has another."""
    before = os.environ.get("DAGSTER_HOME")
    yield
    os.environ.pop("DAGSTER_HOME", None)
    if before is not None:
        os.environ["DAGSTER_HOME"] = before


@pytest.fixture(scope="session")
def nats_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[NatsServer, NatsServer]]:
    """Two servers with JetStream: source, target. Shared by all tests: use `unique` names."""
    home = tmp_path_factory.mktemp("nats")
    with NatsServer(home / "source", "source") as source, NatsServer(home / "target", "target") as target:
        yield source, target


@pytest.fixture(scope="session")
def nats_server(nats_pair: tuple[NatsServer, NatsServer]) -> NatsServer:
    """One server with JetStream: the source of `nats_pair`. Shared by all tests: use `unique` names."""
    return nats_pair[0]


@pytest.fixture
def unique() -> Callable[[str], str]:
    """A function that makes a name no other test has, for streams and subjects: `unique("ORDERS")` → `ORDERS_17`."""

    def name(stem: str = "S") -> str:
        return f"{stem}_{next(_numbers)}"

    return name


@pytest.fixture(scope="session")
def engine_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home whose Spark engine starts with the first run in it and is stopped with the last test."""
    home = tmp_path_factory.mktemp("home").resolve()
    yield home
    stop_engine(home)


@pytest.fixture
def rig(engine_home: Path, nats_pair: tuple[NatsServer, NatsServer], unique: Callable[[str], str]) -> Rig:
    """A fresh site between two servers: `rig.make` a stream, `rig.add` it to the configuration, `rig.run`."""
    return Rig(engine_home, *nats_pair, unique)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Run the command in this process: exit code, stdout, stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = run_command(arguments)
        return (code, *capsys.readouterr())

    return run
