"""Latency of a stream's copies over the last hour, in `state.duckdb`: copies per hop, five minutes and bucket."""

from collections import Counter
from collections.abc import Sequence
from typing import Final

from sr_assets.adapters.state.stream_table import StreamTable
from sr_assets.domain.heartbeats import Hop
from sr_assets.domain.latencies import bucket_of
from sr_assets.domain.positions import SECOND_NS

SCHEMA: Final = """
CREATE TABLE latencies (
    stream VARCHAR, hop_name VARCHAR, hop_stream VARCHAR, slot BIGINT, bucket INTEGER, copies BIGINT);
"""
SLOT_NS: Final = 300 * SECOND_NS
_SLOTS: Final = 12


class Latencies(StreamTable):
    """The latency of one stream's copies."""

    def add(self, hops: Sequence[Hop]) -> None:
        """Add hops, and delete all that did not arrive within the hour before the last one. Call it inside a transaction."""
        if not hops:
            return
        counts = Counter(
            (hop.name, hop.stream, hop.arrived_ns // SLOT_NS, bucket_of(hop.arrived_ns - hop.stored_ns)) for hop in hops
        )
        last = max(slot for _, _, slot, _ in counts)
        columns = [list(column) for column in zip(*counts, strict=True)]
        self._connection.execute(
            """
            MERGE INTO latencies USING (
                SELECT ?::VARCHAR AS stream, unnest(?::VARCHAR[]) AS hop_name, unnest(?::VARCHAR[]) AS hop_stream,
                    unnest(?::BIGINT[]) AS slot, unnest(?::INTEGER[]) AS bucket, unnest(?::BIGINT[]) AS copies
            ) AS added USING (stream, hop_name, hop_stream, slot, bucket)
            WHEN MATCHED THEN UPDATE SET copies = latencies.copies + added.copies
            WHEN NOT MATCHED THEN INSERT
            """,
            [self._stream, *columns, list(counts.values())],
        )
        self._connection.execute(
            "DELETE FROM latencies WHERE stream = ? AND slot NOT BETWEEN ? AND ?",
            [self._stream, last - _SLOTS + 1, last],
        )
