"""The layout of the history: files of closed hours and days, the number of files, and rewrites of each row."""

import random
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

from sr_assets.domain.history_layout import LARGE_ROWS, HistoryFile, Merge, plan_merges

#: Rows of one batch in one hour of the day.
Chunk = tuple[int, int]


class Day:
    """The simulated files of one day: the number of rows of each chunk in each file, and rewrites of each chunk."""

    def __init__(self) -> None:
        self.files: dict[HistoryFile, dict[Chunk, int]] = {}
        self.rewritten: Counter[Chunk] = Counter()
        self.written: dict[Chunk, int] = {}
        self._batches = 0
        self._names = 0

    def add(self, rows: dict[int, int], mark: str = "") -> None:
        """Write a batch's file, with a number of rows in each of some hours."""
        chunks = {(self._batches, hour): count for hour, count in rows.items() if count}
        self._batches += 1
        self.written |= chunks
        if chunks:
            self._list(chunks, 0, mark)

    def _list(self, chunks: dict[Chunk, int], level: int, mark: str) -> None:
        self._names += 1
        hours, first = [hour for _, hour in chunks], min(batch for batch, _ in chunks)
        file = HistoryFile(Path(f"{self._names}"), first, mark, level, sum(chunks.values()), min(hours), max(hours))
        self.files[file] = chunks

    def compact(self, settled_hour: int, *, over: bool = False, ending: bool = False) -> list[Merge]:
        """Do the planned merges."""
        merges = list(plan_merges(self.files, settled_hour, over=over, ending=ending))
        parts = [part for planned in merges for part in planned.parts]
        assert len(parts) == len(set(parts))
        for planned in merges:
            sides: tuple[dict[Chunk, int], dict[Chunk, int]] = ({}, {})
            for part in planned.parts:
                for chunk, count in self.files.pop(part).items():
                    is_later = planned.cut_hour is not None and chunk[1] >= planned.cut_hour
                    sides[is_later][chunk] = count
                    self.rewritten[chunk] += 1
            for later, chunks in enumerate(sides):
                if chunks:
                    self._list(chunks, planned.level(later=bool(later)), planned.parts[0].mark)
        return merges

    def check_rows(self) -> None:
        """Check that each row is in one file and was rewritten three times at most, as the levels say."""
        held: Counter[Chunk] = Counter()
        for file, chunks in self.files.items():
            held.update(chunks)
            assert all(self.rewritten[chunk] <= file.level <= 3 for chunk in chunks)
        assert held == self.written

    def check_closed(self, settled_hour: int) -> None:
        """Check that each closed hour is in large files, or in one file."""
        sizes: dict[int, list[int]] = defaultdict(list)
        for file, chunks in self.files.items():
            for hour in {hour for _, hour in chunks if hour < settled_hour}:
                sizes[hour].append(file.rows)
        assert all(len(rows) == 1 or min(rows) >= LARGE_ROWS for rows in sizes.values()), sizes


SIZES = (
    (0, 1, 2),
    (1, 30, 300),
    (1_700,),
    (100, 3_999, 4_000, 4_001),
    (0, 1, 20_000, 49_999, 50_000, 60_000),
    (1, 400_000),
)


def spread(chance: random.Random, size: int, hours: Iterable[int]) -> dict[int, int]:
    """Return a batch's rows by hour; the first and the last hour have at least one."""
    hours = list(hours)
    rows = Counter(chance.choices(hours, k=1))
    rows.update({hours[0]: 1, hours[-1]: 1})
    rows[chance.choice(hours)] += size
    return dict(rows)


@pytest.mark.parametrize("seed", range(25))
def test_closed_hours_are_large_files_or_one(seed: int) -> None:
    """Batches of a stream that has caught up: at most one of them spans each boundary of hours."""
    chance, day = random.Random(seed), Day()
    sizes = chance.choice(SIZES)
    hours = range(24) if chance.random() < 0.5 else chance.sample(range(24), 5)
    for hour in sorted(hours):
        for _ in range(chance.choice((0, 1, 3, 40, 90))):
            day.add({hour: chance.choice(sizes)})
            day.compact(hour, ending=chance.random() < 0.1)
        day.compact(hour + 1)
        day.check_closed(hour + 1)
        day.check_rows()
        if chance.random() < 0.5 and hour < 23:
            # The batch is written before the boundary's run, but the hour is closed after it.
            day.add(spread(chance, chance.choice(sizes), [hour + 1, min(23, hour + 2)]))
            day.compact(hour + 1)
            day.check_closed(hour + 1)
    day.compact(24, over=True)
    assert len(day.files) <= 1
    day.check_rows()


@pytest.mark.parametrize("seed", range(25))
def test_catching_up_rewrites_each_row_three_times(seed: int) -> None:
    """Batches that span hours, where the newest hour is the only open one."""
    chance, day, hour = random.Random(seed), Day(), 0
    sizes = chance.choice(SIZES)
    while hour < 23:
        after = min(23, hour + chance.choice((0, 0, 1, 1, 2, 7)))
        day.add(spread(chance, chance.choice(sizes), range(hour, after + 1)))
        hour = after
        day.compact(hour)
        day.check_closed(hour)
        day.check_rows()
    day.compact(24, over=True)
    assert len(day.files) == 1
    day.check_rows()


@pytest.mark.parametrize("seed", range(25))
def test_late_rows_and_clock_jumps_keep_the_limit_of_rewrites(seed: int) -> None:
    """Rows of any hour at any time: the layout of their hour waits for the end of the day."""
    chance, day, settled = random.Random(seed), Day(), 0
    for _ in range(300):
        settled = min(23, settled + (chance.random() < 0.1))
        first = chance.randrange(24)
        day.add(spread(chance, chance.choice((1, 200, 70_000)), range(first, min(24, first + 3))))
        day.compact(settled, ending=chance.random() < 0.1)
        day.check_rows()
    for _ in range(200):
        day.compact(24, over=True)
        day.check_rows()
        day.add({chance.randrange(24): 5})
    day.check_rows()


@pytest.mark.parametrize("rows", (1, 20, 300, 1_230, 1_700, 5_000))
def test_minute_of_small_batches_is_few_files(rows: int) -> None:
    day, most = Day(), 0
    for _ in range(40):
        day.add({5: rows})
        day.compact(5)
        most = max(most, len(day.files))
    day.compact(5, ending=True)
    assert most <= 18
    if 40 * rows >= 12_000:
        assert statistics.median(file.rows for file in day.files) >= 4_000
        assert sum(file.rows for file in day.files) >= 4_000 * len(day.files)


def test_end_of_a_run_leaves_files_with_enough_rows() -> None:
    day = Day()
    for rows in (20_000, 100, 20_000, 100, 4_000, 100, 4_000, 100):
        day.add({5: rows})
    (planned,) = day.compact(5, ending=True)
    assert [part.rows for part in planned.parts] == [100] * 4
    for _ in range(200):
        day.add({5: 20_000})
        day.compact(5, ending=True)
        assert len(day.files) <= 100
    day.check_rows()


def test_hour_of_tiny_batches_has_a_limited_number_of_files() -> None:
    day = Day()
    for _ in range(2_400):
        day.add({5: 1})
        day.compact(5)
        assert len(day.files) <= 140
    day.check_rows()


def test_batch_up_to_the_boundary_leaves_no_second_file() -> None:
    day = Day()
    for hour in (5, 5, 6):
        day.add({hour: 10})
    (planned,) = day.compact(6)
    assert planned.cut_hour is None
    assert sorted((file.rows, file.last_hour) for file in day.files) == [(10, 6), (20, 5)]


def test_files_of_different_sources_are_not_merged() -> None:
    day = Day()
    for mark in ("", "-7-1", "", "-7-1"):
        day.add({5: 1}, mark)
    assert [planned.parts[0].mark for planned in day.compact(24, over=True)] == ["", "-7-1"]
    assert day.compact(24, over=True) == []


@pytest.mark.parametrize("counts", ([], [0], [1]))
def test_day_without_more_than_one_row_is_one_file_at_most(counts: list[int]) -> None:
    day = Day()
    for count in counts:
        day.add({5: count})
    assert day.compact(5) == day.compact(6) == []
    assert len(day.compact(24, over=True)) == sum(counts)
    assert day.compact(24, over=True) == []
