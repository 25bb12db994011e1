"""Heartbeats in the state: their retention, and silent subjects."""

from pathlib import Path

from sr_assets.adapters.state.store import SiteState
from sr_assets.domain.hops import Hop

S = 1_000_000_000
HOUR = 3600 * S


def hop(subject: str, stored_ns: int, name: str = "london") -> Hop:
    """Return one heartbeat's hop."""
    return Hop(name, "BEATS", subject, "sr1", None, stored_ns, stored_ns + S)


def test_subject_is_silent_after_three_heartbeat_intervals(tmp_path: Path) -> None:
    with SiteState(tmp_path / "site") as state:
        beats = state.heartbeats("BEATS")
        with state.transaction():
            beats.add([hop("fast", at * S) for at in range(0, 300, 30)], 300 * S)
            beats.add(
                [hop("slow", 0), hop("slow", 250 * S), hop("once", 0), hop("far", 0, "paris"), hop("far", S, "paris")],
                300 * S,
            )
        assert beats.silent("london", 360 * S) == {}
        assert beats.silent("london", 361 * S) == {"fast": 91 * S}
        assert beats.silent("london", 2_000 * S) == {"fast": 1_730 * S, "slow": 1_750 * S}


def test_heartbeats_are_kept_for_an_hour(tmp_path: Path) -> None:
    with SiteState(tmp_path / "site") as state:
        beats = state.heartbeats("BEATS")
        with state.transaction():
            beats.add([hop("a", 0), hop("a", S)], 2 * S)
            beats.add([hop("a", HOUR), hop("a", HOUR + S)], HOUR + 2 * S)
        stored = state.connection.execute("SELECT stored_ns FROM heartbeats ORDER BY stored_ns").fetchall()
        assert stored == [(S,), (HOUR,), (HOUR + S,)]


def test_forged_times_delete_no_heartbeat_and_are_not_kept(tmp_path: Path) -> None:
    now_ns = 10 * HOUR
    with SiteState(tmp_path / "site") as state:
        beats = state.heartbeats("BEATS")
        with state.transaction():
            beats.add([hop("site", now_ns - 60 * S)], now_ns)
            for forged_ns in (0, now_ns - HOUR - 2 * S, now_ns + HOUR + S, 2**63 - 1 - S):
                assert beats.add([hop("site", forged_ns)], now_ns) == 0
        assert beats.silent("london", now_ns) == {}
        rows = state.connection.execute("SELECT subject, stored_ns FROM heartbeats").fetchall()
        assert rows == [("site", now_ns - 60 * S)]
        with state.transaction():
            beats.add([hop("site", 2**62)], 2**62)
            beats.add([hop("other", now_ns)], now_ns)
        rows = state.connection.execute("SELECT subject FROM heartbeats").fetchall()
        assert rows == [("other",)], "a future time is deleted by the present"


def test_subjects_and_hops_beyond_a_hundred_are_counted(tmp_path: Path) -> None:
    with SiteState(tmp_path / "site") as state:
        beats, latencies = state.heartbeats("BEATS"), state.latencies("BEATS")
        forged = [hop(f"s{number}", HOUR, f"n{number}") for number in range(2_000)]
        own = hop("site", HOUR)
        with state.transaction():
            assert beats.add([*forged, own], HOUR, "london") == 1_901
            assert latencies.add([*forged, own], HOUR, "london") == 1_901
            assert beats.add([own], HOUR, "london") == 0
            # A batch of forged hops alone.
            assert (beats.add(forged[-1:], HOUR, "london"), latencies.add(forged[-1:], HOUR, "london")) == (1, 1)
        counts = "SELECT count(DISTINCT subject), count(DISTINCT hop_name), count(*) FROM heartbeats"
        assert state.connection.execute(counts).fetchall() == [(100, 100, 101)]
        assert state.connection.execute("SELECT count(*) FROM latencies").fetchall() == [(100,)]
