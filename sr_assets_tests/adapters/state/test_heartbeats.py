"""Heartbeats in the state: their retention, and silent subjects."""

from pathlib import Path

from sr_assets.adapters.state.store import SiteState
from sr_assets.domain.heartbeats import Hop

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
