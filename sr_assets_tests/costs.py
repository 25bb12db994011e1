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
from typing import Any, Final

import psutil
import pytest

KEPT: Final = Path(__file__).with_name("costs.json")


def longest_first(items: list[pytest.Item]) -> None:
    """Sort tests by the recorded wall time of their files; files without a record come first."""
    seconds = {file: wall for file, (_, wall, _) in json.loads(KEPT.read_text()).items()}
    items.sort(key=lambda item: -seconds.get(_file(item), float("inf")))


class Recorder:
    """The plugin that records each file's costs and writes them to a file at the end of the session."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._costs: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, bool, bool]:
        """Measure a test with its fixtures."""
        deep = item.get_closest_marker("process") is not None
        wall, cpu = _now(), self._cpu_seconds(deep)
        done = yield
        cost = self._costs[_file(item)]
        for at, amount in enumerate((1, _now() - wall, self._cpu_seconds(deep) - cpu)):
            cost[at] += amount
        return done

    @staticmethod
    def _cpu_seconds(deep: bool) -> float:
        """Return the CPU seconds of this process and its ended children; with `deep`, also of living descendants."""
        used = sum(os.times()[:4])
        for process in psutil.Process().children(recursive=True) if deep else ():
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                used += times.user + times.system
        return used

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Add the costs of a worker of pytest-xdist."""
        for file, cost in getattr(node, "workeroutput", {}).get("costs", {}).items():
            self._costs[file] = [a + b for a, b in zip(self._costs[file], cost, strict=True)]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Hand a worker's costs to the controller, which writes them."""
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["costs"] = dict(self._costs)
            return
        ranked = sorted(self._costs.items(), key=lambda entry: -entry[1][1])
        lines = (f'"{file}": [{count:.0f}, {wall:.1f}, {cpu:.1f}]' for file, (count, wall, cpu) in ranked)
        self._file.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _file(item: pytest.Item) -> str:
    return item.path.relative_to(KEPT.parent).as_posix()


def _now() -> float:
    return os.times().elapsed
