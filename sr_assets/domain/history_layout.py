"""Layout of the Parquet history: the files of a day that compaction merges.

A file's level is the number of rewrites of its rows. No merge exceeds level 3, and one is left for the end of the day:

- In the present hour, small files are merged once, into row groups of thousands of rows. Their number grows with the
  square root of the number of batches. Merged files of many rows are merged a second time, into large files.
- A closed hour becomes large files, or one file.
- A day that is over becomes one file.

Hours are those of the stored times, counted since 1970. A batch may span hours. The merge that closes an hour therefore
writes the rows of open hours into a second file: otherwise these rows would be rewritten at the end of each hour.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

HOUR_NS: Final = 3_600 * 1_000_000_000
#: Rows of a file that needs no other one in its hours.
LARGE_ROWS: Final = 50_000
#: Rows of a file that is merged with others of the present hour only to limit their number.
GROUP_ROWS: Final = 4_000
#: Files of one hour that an hour with few merges has at most.
_FILES: Final = 16
_LAST_LEVEL: Final = 3
#: Highest level before the end of the day.
_DAY_LEVEL: Final = _LAST_LEVEL - 1


class HistoryFile(NamedTuple):
    """A file of the history: its rows, and the first and the last hour of their stored times.

    `mark` identifies the source. `first` is the first sequence in its name.
    """

    path: Path
    first: int
    mark: str
    level: int
    rows: int
    first_hour: int
    last_hour: int


class Merge(NamedTuple):
    """Files to merge into one, or into two: rows of `cut_hour` and later hours have a file of their own."""

    parts: tuple[HistoryFile, ...]
    cut_hour: int | None = None

    @property
    def rows(self) -> int:
        """Number of rows of the parts."""
        return sum(part.rows for part in self.parts)

    def level(self, *, later: bool = False) -> int:
        """Return the level of the merged file; `later`: of the file from `cut_hour` on."""
        return 1 + max(
            part.level
            for part in self.parts
            if self.cut_hour is None or (part.last_hour >= self.cut_hour if later else part.first_hour < self.cut_hour)
        )


def plan_merges(
    files: Iterable[HistoryFile], settled_hour: int, *, over: bool, ending: bool = False
) -> Iterator[Merge]:
    """Yield the merges of the files of a day; no file is in two of them.

    Hours before `settled_hour` are closed: no further rows are expected. `over`: all hours of the day are closed. `ending`: a run
    ends, so fewer files of the present hour are enough. Only files of one source are merged with each other.
    """
    by_source: dict[str, list[HistoryFile]] = defaultdict(list)
    for file in sorted(files, key=lambda file: (file.first, file.path)):
        by_source[file.mark].append(file)
    for of_source in by_source.values():
        if over:
            yield from _plan_day([file for file in of_source if file.level < _LAST_LEVEL])
            continue
        present: dict[int, list[HistoryFile]] = defaultdict(list)
        for file in of_source:
            if settled_hour <= file.first_hour == file.last_hour:
                present[file.first_hour].append(file)
        for of_hour in present.values():
            yield from _plan_present_hour(of_hour, ending=ending)
        for sharing in _sharing_hours([file for file in of_source if file.first_hour < settled_hour], settled_hour):
            yield from _plan_closed_hours(sharing, settled_hour)


def _plan_day(files: Sequence[HistoryFile]) -> Iterator[Merge]:
    """Yield the merge of a whole day; a single batch is rewritten too, because a lookup needs files sorted by node."""
    if len(files) > 1 or any(file.level == 0 for file in files):
        yield Merge(tuple(files))


def _plan_present_hour(files: Sequence[HistoryFile], *, ending: bool) -> Iterator[Merge]:
    """Yield the merges of files within an hour that is not closed."""
    fresh = [file for file in files if file.level == 0 and file.rows < LARGE_ROWS]
    merged = [file for file in files if file.level == 1 and file.rows < LARGE_ROWS]
    small = [file for file in fresh if file.rows < GROUP_ROWS]
    # A share of the hour's rows, so that the number of merged files grows with the logarithm of the rows.
    enough = sum(file.rows for file in small) >= max(GROUP_ROWS, sum(file.rows for file in files) // 12)
    if len(fresh) >= max(_FILES - len(merged), 6 + len(merged)):
        yield Merge(tuple(fresh))
    elif len(small) > 1 and (enough or (ending and len(small) >= max(4, len(merged) // 2))):
        yield Merge(tuple(small))
    # At least the rows of another large file are left: a small rest could not be merged with a file of the day's level.
    left, parts = sum(file.rows for file in merged), list[HistoryFile]()
    for file in merged:
        if left < 2 * LARGE_ROWS:
            break
        parts.append(file)
        if sum(part.rows for part in parts) >= LARGE_ROWS:
            left -= sum(part.rows for part in parts)
            if left >= LARGE_ROWS:
                yield Merge(tuple(parts))
            parts = []


def _sharing_hours(files: Iterable[HistoryFile], settled_hour: int) -> Iterator[list[HistoryFile]]:
    """Yield the groups of files whose closed hours overlap, each in source order."""
    groups: list[list[HistoryFile]] = []
    last_hour = -1
    for file in sorted(files, key=lambda file: file.first_hour):
        if not groups or file.first_hour > last_hour:
            groups.append([])
        groups[-1].append(file)
        last_hour = max(last_hour, min(file.last_hour, settled_hour - 1))
    for group in groups:
        yield sorted(group, key=lambda file: (file.first, file.path))


def _plan_closed_hours(files: Sequence[HistoryFile], settled_hour: int) -> Iterator[Merge]:
    """Yield the merges after which overlapping files are large, or one."""
    if len(files) == 1 or all(file.rows >= LARGE_ROWS for file in files):
        return
    chosen: list[list[HistoryFile]] = []
    rest: list[HistoryFile] = []
    for file in files:
        # Late rows of a closed hour wait for the end of the day.
        if file.level < _DAY_LEVEL:
            rest.append(file)
            if _closed_rows(rest, settled_hour) >= LARGE_ROWS:
                chosen.append(rest)
                rest = []
    if rest and chosen:
        min(chosen, key=lambda parts: sum(part.rows for part in parts)).extend(rest)
    elif len(rest) == len(files) or len(rest) >= _FILES:
        chosen.append(rest)
    for parts in chosen:
        if len(parts) > 1:
            cut = any(part.last_hour >= settled_hour for part in parts)
            yield Merge(tuple(parts), settled_hour if cut else None)


def _closed_rows(files: Iterable[HistoryFile], settled_hour: int) -> int:
    """Return the least number of rows that a merge leaves together."""
    return sum(file.rows for file in files if file.last_hour < settled_hour)
