"""The counts and findings of a soak, and the processes that it must not leave behind."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import psutil

from sr_assets_bench.comparison.tables import Difference, Kind
from sr_assets_tests import forks
from sr_assets_tests.marked import marked

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sr_assets_bench.comparison.streams import Comparison

#: The variable that marks all processes of a soak.
MARK: Final = "SR_ASSETS_SOAK"
#: A writer that outlives its run may wait 30 s for acknowledgements before it fails.
_LEAVE_SECONDS: Final = 45.0
#: The pause between two steps of a soak.
TICK_SECONDS: Final = 0.05
#: The maximum number of printed differences of each kind.
_SHOWN: Final = 10


@dataclass(frozen=True, slots=True)
class Verdict:
    """The counts of a soak; `particular` are those of its kind, such as restarts of streams or fail-overs.

    `others` are differences outside the streams: at the centre, of the steady streams, of leaders. `complaints` are the
    problems of runs and processes.
    """

    seed: int
    seconds: float
    runs: Counter[str]
    faults: Counter[str]
    particular: Mapping[str, int | float]
    comparisons: list[Comparison]
    others: list[Difference]
    complaints: list[str]

    @property
    def _all(self) -> list[Difference]:
        return [*(difference for comparison in self.comparisons for difference in comparison.differences), *self.others]

    @property
    def differences(self) -> Counter[Kind]:
        """The number of differences of each kind; an order that a refusal has changed is counted but allowed."""
        return Counter(difference.kind for difference in self._all)

    @property
    def failed(self) -> bool:
        """Whether there is any difference that is not allowed."""
        return bool(self.complaints) or any(kind is not Kind.DISORDERED for kind in self.differences)

    def counts(self) -> dict[str, Any]:
        """Return all counts."""
        expected = [comparison.expected for comparison in self.comparisons]
        return {
            "seed": self.seed,
            "seconds": self.seconds,
            "messages": sum(comparison.messages for comparison in self.comparisons),
            "copies": sum(len(expectation.copied) for expectation in expected),
            "transitions": dict(
                Counter(advisory["event"] for expectation in expected for advisory in expectation.advisories)
            ),
            **self.particular,
            "faults": dict(self.faults),
            "runs": dict(self.runs),
            **{kind: self.differences[kind] for kind in Kind},
            "complaints": len(self.complaints),
        }

    def findings(self) -> Iterator[str]:
        """Yield the complaints, and some differences of each kind."""
        yield from self.complaints
        shown: Counter[Kind] = Counter()
        for difference in self._all:
            shown[difference.kind] += 1
            if shown[difference.kind] <= _SHOWN:
                yield f"{difference.kind}: {difference.text}"


def left_behind() -> list[str]:
    """Return the processes that are still active some time after everything was stopped, and end them."""
    forks.stop()
    deadline = time.monotonic() + _LEAVE_SECONDS
    while (left := marked(MARK, os.environ[MARK])) and time.monotonic() < deadline:
        time.sleep(TICK_SECONDS)
    lines = []
    for process in left:
        with contextlib.suppress(psutil.Error):
            lines.append(f"left behind: {' '.join(process.cmdline())[:200]}")
            process.kill()
    return lines


def say(line: str) -> None:
    """Print a line of the soak."""
    sys.stderr.write(f"{line}\n")
