"""Heartbeats among a stream's copies of the last hour, in `state.duckdb`: the transit time of each hop."""

from collections.abc import Hashable, Sequence
from typing import Final

from sr_assets.adapters.state.stream_table import StreamTable
from sr_assets.domain.hops import Hop
from sr_assets.domain.positions import CLOCK_TOLERANCE_NS, SECOND_NS

SCHEMA: Final = """
CREATE TABLE heartbeats (
    stream VARCHAR, hop_name VARCHAR, hop_stream VARCHAR, subject VARCHAR, originator VARCHAR, sent_ns BIGINT,
    stored_ns BIGINT, arrived_ns BIGINT);
"""
_RETENTION_NS: Final = 3600 * SECOND_NS
_OVERDUE: Final = 3
#: Tolerated delay of a run.
_GRACE_NS: Final = 60 * SECOND_NS


class Heartbeats(StreamTable):
    """One stream's heartbeats."""

    def silent(self, name: str, now_ns: int) -> dict[str, int]:
        """Return the age in ns of each subject's last heartbeat, for overdue subjects only.

        The hop at the stream's own source, of entry `name`, decides. A heartbeat is overdue after three mean intervals
        of the last hour, and never within a minute.
        """
        rows = self._connection.execute(
            """
            SELECT subject, ? - max(stored_ns), (max(stored_ns) - min(stored_ns)) // (count(*) - 1) FROM heartbeats
            WHERE stream = ? AND hop_stream = stream AND hop_name = ? GROUP BY subject HAVING count(*) > 1
            """,
            [now_ns, self._stream, name],
        ).fetchall()
        return {subject: age for subject, age, spacing in rows if age > max(_OVERDUE * spacing, _GRACE_NS)}

    def add(self, hops: Sequence[Hop], now_ns: int, own: str = "") -> int:
        """Add hops that arrived within the last hour, delete the others, and return how many of too many were ignored.

        The times of hops are no clock: a publisher may have written them, and subjects and names too. The hour after
        `now_ns` counts as well, because the clocks of servers differ. The hops of the entry `own` come first. Call it inside a
        transaction.
        """
        first, last = now_ns - _RETENTION_NS, now_ns + CLOCK_TOLERANCE_NS
        recent = sorted((hop for hop in hops if first <= hop.arrived_ns <= last), key=lambda hop: hop.name != own)
        if not hops:
            return 0
        self._connection.execute(
            "DELETE FROM heartbeats WHERE stream = ? AND arrived_ns NOT BETWEEN ? AND ?", [self._stream, first, last]
        )
        known = "SELECT DISTINCT hop_name, hop_stream, subject FROM heartbeats WHERE stream = ?"
        rows = self._connection.execute(known, [self._stream]).fetchall()
        subjects = set[Hashable](subject for *_, subject in rows)
        places = set[Hashable]((name, stream) for name, stream, _ in rows)
        admitted = [hop for hop in recent if admit(hop.subject, subjects) and admit((hop.name, hop.stream), places)]
        if admitted:
            columns = [list(column) for column in zip(*admitted, strict=True)]
            kinds = ("VARCHAR",) * 4 + ("BIGINT",) * 3
            self._connection.execute(
                f"INSERT INTO heartbeats SELECT ?::VARCHAR, {', '.join(f'unnest(?::{kind}[])' for kind in kinds)}",
                [self._stream, *columns],
            )
        return len(recent) - len(admitted)


def admit(key: Hashable, known: set[Hashable], most: int = 100) -> bool:
    """Return whether a key that a publisher may have chosen is known or one of the first `most`; it is known then."""
    if key not in known and len(known) >= most:
        return False
    known.add(key)
    return True
