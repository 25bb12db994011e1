"""Result files of a measurement: suite.json, and one row per test in requests.csv, times.csv and time_buckets.csv."""

import csv
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import numpy as np

from sr_assets.domain.errors import ConfigurationError, RunError, SrAssetsError, cannot_write

REQUESTS: Final = (
    "test",
    "description",
    "nodes",
    "expected",
    "found",
    "failed",
    "unexpected",
    "p50_ms",
    "p95_ms",
    "max_ms",
)
BUCKET_NS: Final = 10_000_000
_LISTED: Final = 5
_MOST_LISTED: Final = 1_000


@dataclass(slots=True)
class Trial:
    """One test: what it expected and found, and the nanoseconds of each item found.

    `missing` and `extra` are the missing and the unexpected items as text, as far as they have names.
    """

    description: str
    nodes: int
    expected: int
    times_ns: list[int] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    failed: int = 0
    unexpected: int = 0
    extra: list[str] = field(default_factory=list)

    @property
    def found(self) -> int:
        """The number of items found."""
        return len(self.times_ns)

    @property
    def is_exact(self) -> bool:
        """Whether exactly the expected items were found, and none failed."""
        return self.found == self.expected and not (self.failed or self.unexpected or self.missing)

    def percentiles_ms(self) -> tuple[float, float, float]:
        """Return p50, p95 and the maximum, interpolated linearly; zeros without items."""
        if not self.times_ns:
            return 0.0, 0.0, 0.0
        p50, p95, most = np.percentile(self.times_ns, (50, 95, 100)) / 1e6
        return round(float(p50), 6), round(float(p95), 6), round(float(most), 6)

    def buckets(self) -> list[int]:
        """Return the number of items in each bucket of 10 ms, from 0 to the longest time."""
        counts = Counter(time_ns // BUCKET_NS for time_ns in self.times_ns)
        return [counts[number] for number in range(max(counts, default=-1) + 1)]


class ResultFolder:
    """A new directory of result files, as a context manager; until `complete`, and after an error, it is marked partial.

    A partial directory has `"partial": true` in suite.json, its CSV files end in `.partial.csv`, and it has no report.
    """

    def __init__(self, folder: Path, suite: dict[str, Any]) -> None:
        """Create the directory; raises ConfigurationError if it exists with content."""
        try:
            if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                raise ConfigurationError(f"--out {folder}: already exists; name a new directory")
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(cannot_write(folder, error)) from None
        self.path, self.tests = folder, list[Trial]()
        self._suite, self._complete = suite, False
        self._write_suite(partial=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if self._complete:
            return
        reason = str(error) if isinstance(error, SrAssetsError) else "interrupted"
        missing = [item for test in self.tests for item in test.missing]
        extra = [item for test in self.tests for item in test.extra]
        with suppress(RunError):
            self._write_suite(
                partial=True, reason=reason, missing=missing[:_MOST_LISTED], unexpected=extra[:_MOST_LISTED]
            )
            self._write_tables(".partial.csv")

    def check(self) -> None:
        """Raise RunError that lists what is missing if a test is not exact."""
        for number, test in enumerate(self.tests, 1):
            if not test.is_exact:
                raise RunError(
                    f"test {number} ({test.description}, {test.nodes} nodes): found {test.found} of {test.expected}, "
                    f"{test.failed} failed, {test.unexpected} unexpected"
                    f"{listed(test.missing)}{listed(test.extra, 'unexpected')}; no result, see {self.path}/suite.json"
                )

    def complete(self, report: Callable[[], str]) -> None:
        """Write the files of a whole result, with the report's HTML; raises the error of `check`."""
        self.check()
        page = report()
        self._write_tables(".csv")
        self.write("report.html", page)
        self._write_suite(partial=False)
        self._complete = True

    def note(self, **facts: list[float]) -> None:
        """Add facts to suite.json."""
        self._suite.update(facts)

    def write(self, name: str, text: str) -> None:
        """Write a file of the directory."""
        try:
            (self.path / name).write_text(text, encoding="utf-8")
        except OSError as error:
            raise RunError(cannot_write(self.path / name, error)) from None

    def _write_suite(self, **more: bool | str | list[str]) -> None:
        self.write("suite.json", json.dumps({**self._suite, **more}, indent=1) + "\n")

    def _write_tables(self, ending: str) -> None:
        rows = [
            (number, t.description, t.nodes, t.expected, t.found, t.failed, t.unexpected, *t.percentiles_ms())
            for number, t in enumerate(self.tests, 1)
        ]
        self._write_csv(f"requests{ending}", [REQUESTS, *rows])
        self._write_csv(f"times{ending}", [test.times_ns for test in self.tests])
        self._write_csv(f"time_buckets{ending}", [test.buckets() for test in self.tests])

    def _write_csv(self, name: str, rows: Iterable[Sequence[Any]]) -> None:
        try:
            with (self.path / name).open("w", newline="", encoding="utf-8") as file:
                csv.writer(file, lineterminator="\n").writerows(rows)
        except OSError as error:
            raise RunError(cannot_write(self.path / name, error)) from None


def read_results(folder: Path) -> tuple[dict[str, Any], list[Trial]]:
    """Return suite.json and the tests of a whole result; raises RunError for a partial one or another directory."""
    try:
        suite = json.loads((folder / "suite.json").read_text(encoding="utf-8"))
        if suite.get("partial"):
            raise RunError(f"{folder}: the result is partial; measure again")
        with (folder / "requests.csv").open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        with (folder / "times.csv").open(newline="", encoding="utf-8") as file:
            times = [[int(value) for value in row] for row in csv.reader(file)]
        return suite, [
            Trial(row["description"], int(row["nodes"]), int(row["expected"]), found_ns)
            for row, found_ns in zip(rows, times, strict=True)
        ]
    except (OSError, ValueError, KeyError, AttributeError):
        raise RunError(f"{folder}: is not a result of `sr-assets measure`; name its --out directory") from None


def listed(items: Sequence[str], kind: str = "missing") -> str:
    """Return the first missing items and the number of the others, for an error; empty without any."""
    if not items:
        return ""
    more = f" and {len(items) - _LISTED} more" if len(items) > _LISTED else ""
    return f"; {kind}: {', '.join(items[:_LISTED])}{more}"
