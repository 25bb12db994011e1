"""What each test file costs: a recorder, and the order of the files, longest first, so that no worker ends late.

`make costs` writes `costs.json`: per file the number of tests, their wall time, and the CPU seconds of the test process,
its ended children and its living descendants (servers and Spark engines).
"""

import contextlib
import json
import os
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Final, cast

import psutil
import pytest
from xdist.scheduler import LoadFileScheduling

KEPT: Final = Path(__file__).with_name("costs.json")
_PROPERTY: Final = "costs"
#: The files whose tests need a warm Spark engine: one worker runs them all, and starts one.
_WARM: Final = {
    f"sr_assets_tests/{file}"
    for file in (
        "adapters/spark/test_fleet_tables.py",
        "adapters/spark/test_run_session.py",
        "adapters/spark/test_session.py",
        "adapters/spark/test_sink.py",
        "adapters/spark/test_source.py",
        "assets/test_daily.py",
        "assets/test_lake.py",
        "faults/test_crashes.py",
        "faults/test_disk.py",
        "faults/test_partitions.py",
        "faults/test_servers.py",
        "stages/replication/test_partitions.py",
        "stages/test_daily.py",
        "test_documents.py",
        "test_resources.py",
    )
}


def longest_first(items: list[pytest.Item]) -> None:
    """Sort tests by the recorded wall time of their files; files without a record come first."""
    seconds = {file: wall for file, (_, wall, _) in json.loads(KEPT.read_text()).items()}
    items.sort(key=lambda item: -seconds.get(_file(item), float("inf")))


class Scheduling(LoadFileScheduling):  # type: ignore[misc]  # xdist ships no types
    """One worker runs the tests of a file, and one those of all files that need a warm engine."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return "a warm engine" if file in _WARM else file


class Recorder:
    """The plugin that adds up each file's costs and writes them to a file at the end of the session."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._costs: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
        self._began = (0.0, 0.0)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Note the beginning of a test and its fixtures."""
        self._began = _now(), _cpu_seconds(item)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Add the costs to the report on the end of a test, which a worker of pytest-xdist sends."""
        report = yield
        if call.when == "teardown":
            began, cpu_seconds = self._began
            report.user_properties.append(
                (_PROPERTY, (_file(item), 1, _now() - began, _cpu_seconds(item) - cpu_seconds))
            )
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a test's costs to those of its file."""
        for name, value in report.user_properties:
            if name == _PROPERTY:
                file, *costs = cast("tuple[str, float, float, float]", value)
                self._costs[file] = [a + b for a, b in zip(self._costs[file], costs, strict=True)]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the costs, except in a worker."""
        if not hasattr(session.config, "workerinput"):
            ranked = sorted(self._costs.items(), key=lambda entry: -entry[1][1])
            lines = (f'"{file}": [{count:.0f}, {wall:.1f}, {cpu:.1f}]' for file, (count, wall, cpu) in ranked)
            self._file.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _cpu_seconds(item: pytest.Item) -> float:
    """Return the CPU seconds of this process and its ended children; for a test of processes, also of living descendants."""
    used = sum(os.times()[:4])
    for process in psutil.Process().children(recursive=True) if item.get_closest_marker("process") else ():
        with contextlib.suppress(psutil.Error):
            used += sum(process.cpu_times()[:4])
    return used


def _file(item: pytest.Item) -> str:
    return item.path.relative_to(KEPT.parent).as_posix()


def _now() -> float:
    return os.times().elapsed
