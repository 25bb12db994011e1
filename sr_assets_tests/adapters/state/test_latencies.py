"""The latency of copies in the state: its precision, its window and its size."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sr_assets.adapters.copying.receipt import Receipt
from sr_assets.adapters.published.tables import LATENCY
from sr_assets.adapters.state.store import SiteState
from sr_assets.domain.hops import GROWTH, SLOT_NS, Hop, bucket_of

MS = 1_000_000
HOUR = 12 * SLOT_NS


def hop(took_ms: float, arrived_ns: int = HOUR) -> Hop:
    """Return a hop that arrived at a time."""
    return Hop("london", "REG", "", "", None, arrived_ns - round(took_ms * MS), arrived_ns)


def latencies(state: SiteState) -> list[tuple[int, float, float, float]]:
    """Return copies, p50, p95 and maximum of each hop."""
    query = f"SELECT copies, p50_seconds, p95_seconds, max_seconds FROM ({LATENCY})"
    return state.connection.execute(query).fetchall()


@given(st.floats(1, 1e9))
def test_bucket_keeps_a_latency_within_two_percent(took_ms: float) -> None:
    bucket = bucket_of(round(took_ms * MS))
    assert GROWTH ** (bucket - 0.5) == pytest.approx(took_ms, rel=0.021)
    assert bucket_of(-round(took_ms * MS)) == -bucket


def test_quantiles_are_exact_to_two_percent_and_rows_stay_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sr_assets.adapters.state.stream_tables._MOST_LATENCY_ROWS", 2000)
    with SiteState(tmp_path / "site") as state:
        for batch in range(60):
            with state.transaction():
                state.latencies("REG").add(
                    [hop(took, batch // 2 * SLOT_NS) for took in range(1, 1001)], batch // 2 * SLOT_NS
                )
        ((copies, *quantiles),) = latencies(state)
        ((rows,),) = state.connection.execute("SELECT count(*) FROM latencies").fetchall()
    assert copies == 24 * 1000, "of the last hour"
    assert quantiles == pytest.approx([0.5, 0.95, 1], rel=0.03)
    assert rows <= 2000


def test_hops_between_different_clocks_are_negative(tmp_path: Path) -> None:
    with SiteState(tmp_path / "site") as state:
        with state.transaction():
            state.latencies("REG").add([hop(-2000), hop(-2000), hop(0.3)], HOUR)
        assert latencies(state) == [pytest.approx((3, -2, 0, 0), rel=0.03)]


def test_hop_of_another_time_does_not_delete_the_latencies_of_now(tmp_path: Path) -> None:
    with SiteState(tmp_path / "site") as state:
        with state.transaction():
            state.latencies("REG").add([hop(5)], HOUR)
            state.latencies("REG").add([hop(7, 2**63 - 1), hop(7, 3 * HOUR), hop(7, 0)], HOUR)
        ((copies, *_),) = latencies(state)
    assert copies == 1, "of the hour around now"


@given(st.lists(st.integers(1, 60), max_size=8), st.integers(1, 1 << 22))
def test_receipt_measures_spread_copies_within_its_bytes(lengths: list[int], mean_bytes: int) -> None:
    receipt, at = Receipt(), 1
    for length in lengths:
        for _ in range(length):
            receipt.locate(at, at)
            receipt.count(1, mean_bytes)
            at += 1
        at += 1
    held = {run[0] + step for run in receipt.copied_ranges for step in range(run[2])}
    measured = receipt.measured()
    assert measured == sorted(set(measured))
    assert set(measured) <= held
    assert len(measured) == min(sum(lengths), max(1, min(24, (1 << 20) // mean_bytes)))
    receipt.hops = [hop(1), hop(2)]
    assert Receipt.decode(receipt.encode()) == receipt
