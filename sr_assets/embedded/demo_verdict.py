"""The verdict of a demo that ends: what CONTRACT promises of it, asked of the tables and of the servers.

Not here: running it (`demo`), the failed runs, which Dagster knows.
"""

from typing import Any

from sr_assets.adapters.fleet import count_rows, open_fleet, read_rows
from sr_assets.adapters.jetstream import Cluster
from sr_assets.domain.tracking import Event
from sr_assets.settings import Settings
from sr_assets.stages.lag import measure_lag


def judge(settings: Settings, seconds: float) -> dict[str, Any]:
    """Return what the demo did, with the lag as of now; `failed` has what it promises and did not keep."""
    streams, failed = {}, []
    with open_fleet(settings.home) as connection:
        counts = read_rows(connection, "SELECT name, stream, copied_messages, skipped_messages FROM replication").values
        events = read_rows(connection, "SELECT event, count(*) FROM node_advisories GROUP BY event").values
    counters = {(name, stream): numbers for name, stream, *numbers in counts}
    for stream, lag in zip(settings.streams, measure_lag(settings), strict=True):
        copied, skipped = counters.get((stream.name, stream.stream), (0, 0))
        with Cluster(stream.source, "sr-assets demo") as source, Cluster(stream.target, "sr-assets demo") as target:
            source_messages = source.stream_info(stream.stream).messages
            target_messages = target.stream_info(stream.target_stream).messages
        if lag.messages != 0:
            failed.append(f"{stream.label}: the lag is {lag.messages} messages")
        if copied != target_messages:
            failed.append(f"{stream.label}: {copied} messages were copied, the target holds {target_messages}")
        streams[stream.label] = {
            "source_messages": source_messages,
            "copied": copied,
            "skipped": skipped,
            "position": lag.position,
            "lag_messages": lag.messages,
        }
    advisories = {event.value: dict(events).get(event.value, 0) for event in Event}
    failed += [f"no {event} happened" for event, count in advisories.items() if not count]
    return {
        "seconds": round(seconds),
        "streams": streams,
        "advisories": advisories,
        "tables": count_rows(settings.home),
        "failed": failed,
    }
