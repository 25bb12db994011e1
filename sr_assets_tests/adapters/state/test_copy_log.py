"""The copy log: the target sequence of each copy for an hour, and the resend requests."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from sr_assets.adapters.state.cached_connection import AttachedFile, StateConnection
from sr_assets.adapters.state.copy_tables import RETENTION_NS, CopyLog, Resend
from sr_assets.adapters.state.schema import TABLES
from sr_assets.adapters.state.store import SiteState
from sr_assets.domain.positions import SequenceRange


def copies(state: SiteState, stream: str) -> list[tuple[int, int]]:
    """Return target sequence and source sequence of every copy in the log, in the target's order."""
    rows = state.connection.execute(
        """
        SELECT place + step, sequence + step FROM (
            SELECT unnest(target_sequences) AS place, unnest(sequences) AS sequence, unnest(lengths) AS length
            FROM copies WHERE stream = ?), LATERAL (SELECT unnest(range(length)) AS step)
        ORDER BY ALL
        """,
        [stream],
    )
    return rows.fetchall()


def test_copy_log_keeps_the_copies_of_an_hour_and_the_batch_before(tmp_path: Path) -> None:
    with SiteState(tmp_path) as state:
        copy_log = state.copy_log("S")
        copy_log.add([(1, 11, 2), (5, 20, 1)], now_ns=0)
        copy_log.add([(6, 21, 2)], now_ns=RETENTION_NS)
        assert copies(state, "S") == [(1, 11), (2, 12), (5, 20), (6, 21), (7, 22)]
        assert copies(state, "OTHER") == []
        copy_log.add([], now_ns=2 * RETENTION_NS)
        assert len(copies(state, "S")) == 5
        copy_log.add([], now_ns=2 * RETENTION_NS + 1)
        assert copies(state, "S") == [(6, 21), (7, 22)]


def test_keep_until_drops_copies_that_the_target_lost(tmp_path: Path) -> None:
    with SiteState(tmp_path) as state:
        copy_log = state.copy_log("S")
        copy_log.add([(1, 11, 3), (5, 20, 4)], now_ns=0)
        copy_log.add([(9, 30, 1)], now_ns=1)
        copy_log.keep_until(6)
        assert copies(state, "S") == [(1, 11), (2, 12), (3, 13), (5, 20), (6, 21)]


@given(
    sequences=st.sets(st.integers(1, 60), min_size=1),
    chunk=st.integers(1, 20),
)
def test_resends_come_once_and_in_order_for_any_portion(sequences: set[int], chunk: int) -> None:
    with AttachedFile(Path(":memory:")) as file:
        file.main.execute(TABLES["resends"].ddl)
        copy_log = CopyLog(StateConnection(file), "S")
        copy_log.add_resends([SequenceRange(sequence, sequence + 1) for sequence in sorted(sequences)], was_copied=True)
        sent: list[int] = []
        while resends := copy_log.resends(chunk):
            until = resends[-1].covered.next
            assert copy_log.resends(until=until) == resends
            part = [sequence for resend in resends for sequence in range(resend.covered.first, resend.covered.next)]
            assert len(part) <= chunk
            sent += part
            copy_log.settle_resends(until)
        assert sent == sorted(sequences)


def test_resends_cut_a_long_range_at_the_limit(tmp_path: Path) -> None:
    with SiteState(tmp_path) as state:
        copy_log = state.copy_log("S")
        copy_log.add_resends([SequenceRange(1, 101), SequenceRange(200, 200)], was_copied=False)
        assert copy_log.resends(30) == [Resend(SequenceRange(1, 31), was_copied=False)]
        copy_log.settle_resends(31)
        assert copy_log.resends() == [Resend(SequenceRange(31, 101), was_copied=False)]
        copy_log.clear()
        assert copy_log.resends() == []
