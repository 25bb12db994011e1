"""Heartbeats among a stream's copies of the last hour, in `state.duckdb`: the transit time of each hop."""

from collections.abc import Sequence
from typing import Final

from sr_assets.adapters.state.stream_table import StreamTable
from sr_assets.domain.heartbeats import Hop
from sr_assets.domain.positions import SECOND_NS

SCHEMA: Final = """
CREATE TABLE heartbeats (
    stream VARCHAR, hop_name VARCHAR, hop_stream VARCHAR, subject VARCHAR, originator VARCHAR, sent_ns BIGINT,
    stored_ns BIGINT, arrived_ns BIGINT);
"""
_RETENTION_NS: Final = 3600 * SECOND_NS
_OVERDUE: Final = 3
#: Tolerated delay of a run.
_GRACE_NS: Final = 60 * SECOND_NS
_INSERT: Final = "INSERT INTO heartbeats VALUES (?, ?, ?, ?, ?, ?, ?, ?)"


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

    def add(self, hops: Sequence[Hop], now_ns: int) -> None:
        """Add hops, and delete hops that arrived over an hour ago. Call it inside a transaction.

        The times of hops are no clock: a publisher may have written them.
        """
        if not hops:
            return
        self._connection.executemany(_INSERT, [(self._stream, *hop) for hop in hops])
        self._connection.execute(
            "DELETE FROM heartbeats WHERE stream = ? AND arrived_ns < ?",
            [self._stream, now_ns - _RETENTION_NS],
        )
