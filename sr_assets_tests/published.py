"""A published `fleet.duckdb` for tests that only read it: a few nodes and one message."""

from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
from pyarrow import parquet

from sr_assets.adapters.published import history
from sr_assets.adapters.published.compaction import describe
from sr_assets.adapters.published.fleet_file import Run
from sr_assets.adapters.published.site_publishing import publish_site
from sr_assets.adapters.published.stream_status import PublishedStream
from sr_assets.adapters.state.records import StreamState
from sr_assets.adapters.state.store import SiteState

#: The watermark in all these tables: 2026-01-31T12:00:00Z.
NOW_NS = 1_769_860_800_000_000_000
MINUTE_NS = 60_000_000_000
SITE, STREAM = "london", "REG"


def node_row(node: str, status: str, silent_ns: int, *, copied: bool = True) -> dict[str, object]:
    """Return a node's row in the state: last seen `silent_ns` ago."""
    seen_ns = NOW_NS - silent_ns
    return {
        "node": node,
        "first_seen_ns": NOW_NS - 90 * MINUTE_NS,
        "seen_ns": seen_ns,
        "sequence": 7,
        "copied_ns": seen_ns if copied else None,
        "copied_bytes": 900 if copied else None,
        "status": status,
        "status_since_ns": seen_ns,
        "retired_at_ns": NOW_NS if status == "retired" else None,
        "times_retired": int(status == "retired"),
        "transition": 1,
        "deadline_ns": None,
    }


def publish_nodes(home: Path, *nodes: dict[str, object], sequence: int = 8) -> None:
    """Publish a site with one tracked stream, adding these nodes."""
    with SiteState(home / "sites" / SITE) as state:
        with state.transaction():
            state.save_stream(StreamState(STREAM, 1, sequence, watermark_ns=NOW_NS, as_of_ns=NOW_NS))
            if nodes:
                state.nodes(STREAM).merge(pa.Table.from_pylist(list(nodes)))
        _publish(home, state)


def publish_message(home: Path, node: str) -> None:
    """Publish a node's newest message, a Choria registration with its inventory decoded."""
    day = history.stream_folder(home, SITE, STREAM) / "date=2026-01-31"
    day.mkdir(parents=True)
    message = {
        "node": node,
        "sequence": 7,
        "stored_at": datetime(2026, 1, 31, 11, 59, tzinfo=UTC),
        "subject": f"reg.{node}",
        "payload_bytes": 900,
        "payload": '{"sender": "somebody"}',
        "metadata": '{"classes": ["webserver"], "facts": {}}',
    }
    parquet.write_table(pa.Table.from_pylist([message], schema=history.SCHEMA), day / "1-8.parquet")
    with SiteState(home / "sites" / SITE) as state:
        with state.transaction():
            state.snapshot_index(STREAM).add(1, 8, [describe(day / "1-8.parquet")])
        _publish(home, state)


def _publish(home: Path, state: SiteState) -> None:
    streams = [PublishedStream(STREAM, "LONDON_REG", tracked=True)]
    publish_site(home, SITE, state, streams, sites=[SITE], run=Run(NOW_NS, "run"))
