"""The copy_log of copies: where each stands, for an hour, and what is to be sent again."""

from pathlib import Path

import duckdb
from hypothesis import given
from hypothesis import strategies as st

from sr_assets.adapters.state.copy_log import KEPT_NS, SCHEMA, CopyLog, Resend
from sr_assets.adapters.state.store import SiteState
from sr_assets.domain.positions import SequenceRange


def test_copies_are_remembered_one_by_one_for_an_hour(tmp_path: Path) -> None:
    with SiteState(tmp_path) as state:
        copy_log = state.copy_log("S")
        copy_log.add([(1, 11, 2), (5, 20, 1)], now_ns=0)
        copy_log.add([(6, 21, 2)], now_ns=KEPT_NS)
        assert copy_log.copies() == [(1, 11), (2, 12), (5, 20), (6, 21), (7, 22)]
        assert state.copy_log("OTHER").copies() == []
        copy_log.add([], now_ns=KEPT_NS + 1)
        assert copy_log.copies() == [(6, 21), (7, 22)]


def test_copies_that_stand_no_more_are_forgotten(tmp_path: Path) -> None:
    with SiteState(tmp_path) as state:
        copy_log = state.copy_log("S")
        copy_log.add([(1, 11, 3), (5, 20, 4)], now_ns=0)
        copy_log.add([(9, 30, 1)], now_ns=1)
        copy_log.keep_until(6)
        assert copy_log.copies() == [(1, 11), (2, 12), (3, 13), (5, 20), (6, 21)]


@given(
    sequences=st.sets(st.integers(1, 60), min_size=1),
    chunk=st.integers(1, 20),
)
def test_what_is_to_be_sent_again_comes_once_and_in_order_however_it_is_cut(sequences: set[int], chunk: int) -> None:
    with duckdb.connect() as connection:
        connection.execute(SCHEMA)
        copy_log = CopyLog(connection, "S")
        copy_log.add_resends([SequenceRange(sequence, sequence + 1) for sequence in sorted(sequences)], stood=True)
        sent: list[int] = []
        while resends := copy_log.resends(chunk):
            until = resends[-1].covered.next
            assert copy_log.resends(until=until) == resends
            part = [sequence for resend in resends for sequence in range(resend.covered.first, resend.covered.next)]
            assert len(part) <= chunk
            sent += part
            copy_log.settle_resends(until)
        assert sent == sorted(sequences)


def test_a_long_range_is_cut_and_the_rest_kept(tmp_path: Path) -> None:
    with SiteState(tmp_path) as state:
        copy_log = state.copy_log("S")
        copy_log.add_resends([SequenceRange(1, 101), SequenceRange(200, 200)], stood=False)
        assert copy_log.resends(30) == [Resend(SequenceRange(1, 31), stood=False)]
        copy_log.settle_resends(31)
        assert copy_log.resends() == [Resend(SequenceRange(31, 101), stood=False)]
        copy_log.clear()
        assert copy_log.resends() == []
