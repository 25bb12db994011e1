"""Latency of a stream's copies over the last hour, in `state.duckdb`: copies per hop, five minutes and bucket."""

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Final

from sr_assets.adapters.state.heartbeats import admit
from sr_assets.adapters.state.stream_table import StreamTable
from sr_assets.domain.hops import Hop, bucket_of
from sr_assets.domain.positions import SECOND_NS

SCHEMA: Final = """
CREATE TABLE latencies (
    stream VARCHAR, hop_name VARCHAR, hop_stream VARCHAR, slot BIGINT, bucket INTEGER, copies BIGINT);
"""
SLOT_NS: Final = 300 * SECOND_NS
_SLOTS: Final = 12
_MOST_ROWS: Final = 10_000


class Latencies(StreamTable):
    """The latency of one stream's copies."""

    def add(self, hops: Sequence[Hop], now_ns: int, own: str = "") -> int:
        """Add hops, delete all that did not arrive within the last hour, and return how many of too many were ignored.

        The hops of the entry `own` come first. Call it inside a transaction.

        The times of hops are no clock: a publisher may have written them. The hour after `now_ns` counts too, because the
        clocks of servers differ.
        """
        if not hops:
            return 0
        last = now_ns // SLOT_NS
        known = "SELECT DISTINCT hop_name, hop_stream FROM latencies WHERE stream = ? AND slot BETWEEN ? AND ?"
        between = [last - _SLOTS + 1, last + _SLOTS]
        places = set[Hashable](self._connection.execute(known, [self._stream, *between]).fetchall())
        ordered = sorted(hops, key=lambda hop: hop.name != own)
        admitted = [hop for hop in ordered if admit((hop.name, hop.stream), places)]
        counts = Counter(
            (hop.name, hop.stream, hop.arrived_ns // SLOT_NS, bucket_of(hop.arrived_ns - hop.stored_ns))
            for hop in admitted
        )
        if counts:
            columns = [list(column) for column in zip(*counts, strict=True)]
            # Adding rows takes 1.5 ms, merging them with the stored ones 20.
            self._connection.execute(
                """
                INSERT INTO latencies
                SELECT ?::VARCHAR, unnest(?::VARCHAR[]), unnest(?::VARCHAR[]), unnest(?::BIGINT[]), unnest(?::INTEGER[]),
                    unnest(?::BIGINT[])
                """,
                [self._stream, *columns, list(counts.values())],
            )
        self._connection.execute(
            "DELETE FROM latencies WHERE stream = ? AND slot NOT BETWEEN ? AND ?",
            [self._stream, *between],
        )
        if self._value("SELECT count(*) FROM latencies WHERE stream = ?") > _MOST_ROWS:
            self._merge()
        return len(hops) - len(admitted)

    def _merge(self) -> None:
        """Merge the rows of equal hop, slot and bucket."""
        query = """
            SELECT stream, hop_name, hop_stream, slot, bucket, sum(copies)::BIGINT AS copies FROM latencies
            WHERE stream = ? GROUP BY ALL
            """
        self._connection.register("merged", self._connection.sql(query, params=[self._stream]).to_arrow_table())
        try:
            self._connection.execute("DELETE FROM latencies WHERE stream = ?", [self._stream])
            self._connection.execute("INSERT INTO latencies BY NAME SELECT * FROM merged")
        finally:
            self._connection.unregister("merged")
