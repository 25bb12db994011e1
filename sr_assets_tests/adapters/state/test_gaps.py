"""Gaps: adjacent holes of a source are one row, whatever the batch boundaries."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sr_assets.adapters.state.store import SiteState
from sr_assets.adapters.state.stream_tables import Gap, Gaps, gap_row
from sr_assets.domain.positions import DAY_NS, SequenceRange
from sr_assets_tests.examples import one_in

APART = 10


@pytest.fixture
def gaps(tmp_path: Path) -> Iterator[Gaps]:
    with SiteState(tmp_path) as state, state.transaction():
        yield state.gaps("S")


def gap(first: int, last: int, reason: str = "deleted", noticed_ns: int = 5) -> Gap:
    return gap_row("S", SequenceRange(first, last + 1), last + 1 - first, reason, noticed_ns)


def rows(gaps: Gaps) -> list[tuple[int, int, int, str]]:
    return gaps._connection.execute(
        "SELECT first_sequence, last_sequence, messages, reason FROM gaps ORDER BY ALL"
    ).fetchall()


holes = st.lists(
    st.tuples(st.integers(0, APART + 2), st.integers(1, 3), st.sampled_from(["deleted", "filtered", "lost"])),
    min_size=1,
    max_size=12,
)


@one_in(4)
@given(holes, st.data())
def test_gap_rows_do_not_depend_on_batch_boundaries(
    gaps: Gaps, distances: list[tuple[int, int, str]], data: st.DataObject
) -> None:
    all_gaps, at = [], 1
    for distance, length, reason in distances:
        all_gaps.append(gap(at + distance, at + distance + length - 1, reason))
        at += distance + length
    merged = []
    for cut in (0, data.draw(st.integers(0, len(all_gaps)))):
        gaps._connection.execute("DELETE FROM gaps")
        added = sum(gaps.add(part, apart=APART) for part in (all_gaps[:cut], all_gaps[cut:]))
        merged.append(rows(gaps))
        assert added == len(merged[-1])
    assert merged[0] == merged[1]
    assert sum(row[2] for row in merged[0]) == sum(length for _, length, _ in distances)


def test_gap_extends_the_last_row_of_its_reason(gaps: Gaps) -> None:
    gaps.add([gap(1, 4), gap(7, 7, "filtered")], apart=APART)
    gaps.add([gap(5, 6), gap(9, 9), gap(18, 18, "filtered")], apart=APART)
    gaps.add([gap(30, 30, "filtered")], apart=APART)
    assert rows(gaps) == [(1, 6, 6, "deleted"), (7, 18, 2, "filtered"), (9, 9, 1, "deleted"), (30, 30, 1, "filtered")]
    # A recreated source restarts at low sequences.
    gaps.add([gap(2, 2, "filtered")], apart=APART)
    assert (2, 2, 1, "filtered") in rows(gaps)


def test_gap_starts_a_new_row_each_day(gaps: Gaps) -> None:
    gaps.add([gap(1, 4, noticed_ns=DAY_NS - 1)])
    gaps.add([gap(5, 6, noticed_ns=DAY_NS)])
    gaps.add([gap(7, 8, noticed_ns=2 * DAY_NS - 1)])
    assert rows(gaps) == [(1, 4, 4, "deleted"), (5, 8, 4, "deleted")]


def test_gap_beyond_the_row_limit_counts_in_the_last_row(gaps: Gaps) -> None:
    assert gaps.add([gap(at, at) for at in range(1, 20, 2)], most=3) == 3
    assert gaps.add([gap(at, at) for at in range(21, 30, 2)], most=0) == 0
    # There is no row of this reason yet.
    assert gaps.add([gap(5, 5, "lost"), gap(9, 9, "lost")], most=0) == 1
    assert rows(gaps) == [(1, 1, 1, "deleted"), (3, 3, 1, "deleted"), (5, 9, 2, "lost"), (5, 29, 13, "deleted")]
