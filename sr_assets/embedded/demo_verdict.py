"""The verdict of a demo that ends: what CONTRACT promises of it, asked of the tables and of the servers.

Not here: running it (`demo`), the failed runs, which Dagster knows.
"""

from collections import Counter
from typing import Any, Final

from sr_assets.adapters.nats.cluster import Cluster
from sr_assets.adapters.published.reading import count_rows, open_fleet, read_rows
from sr_assets.domain.tracking import Event
from sr_assets.settings import ClusterSettings, Settings
from sr_assets.stages.source.lag import measure_lag

#: How far the centre's view is from what the sites themselves know: site, stream, and what of it.
_DISAGREEMENTS: Final = """
    WITH site AS (SELECT name, stream, node, status, status_since FROM node_availability),
        centre AS (SELECT name, stream, node, status, status_since FROM global_availability)
    SELECT name, stream, count(DISTINCT node) || ' nodes are not at the centre as they are at their site' FROM (
        (FROM site EXCEPT FROM centre) UNION ALL (FROM centre EXCEPT FROM site)
    ) GROUP BY name, stream
    UNION ALL
    SELECT name, stream, 'the centre does not hear that it is watched'
    FROM (SELECT DISTINCT name, stream FROM site) LEFT JOIN global_summary USING (name, stream)
    WHERE coalesce(blind, true) OR observer_alive_at IS NULL
"""


def judge(settings: Settings, seconds: float) -> dict[str, Any]:
    """Return what the demo did, with the lag as of now; `failed` has what it promises and did not keep."""
    with open_fleet(settings.home) as connection:
        counts = read_rows(connection, "SELECT name, stream, copied_messages, skipped_messages FROM replication").values
        events = read_rows(connection, "SELECT event, count(*) FROM node_advisories GROUP BY event").values
        disagreements = read_rows(connection, _DISAGREEMENTS).values
    counters = {(name, stream): numbers for name, stream, *numbers in counts}
    lags = {(lag.name, lag.stream): lag for lag in measure_lag(settings)}
    failed = [
        f"{name}/{stream}: the lag is {lag.messages} messages"
        for (name, stream), lag in lags.items()
        if lag.messages != 0
    ]
    streams, copied_into = {}, Counter[tuple[ClusterSettings, str]]()
    for stream in settings.streams:
        key = stream.name, stream.stream
        copied, skipped = counters.get(key, (0, 0))
        copied_into[stream.target, stream.target_stream] += copied
        streams[stream.label] = {
            "source_messages": _messages(stream.source, stream.stream),
            "copied": copied,
            "skipped": skipped,
            "position": lags[key].position,
            "lag_messages": lags[key].messages,
        }
    for (target, name), copied in copied_into.items():
        if (held := _messages(target, name)) != copied:
            failed.append(f"{name}: {copied} messages were copied into it, it holds {held}")
    advisories = {event.value: dict(events).get(event.value, 0) for event in Event}
    failed += [f"no {event} happened" for event, count in advisories.items() if not count]
    failed += [f"{name}/{stream}: {what}" for name, stream, what in disagreements]
    return {
        "seconds": round(seconds),
        "streams": streams,
        "advisories": advisories,
        "tables": count_rows(settings.home),
        "failed": failed,
    }


def _messages(settings: ClusterSettings, stream: str) -> int:
    with Cluster(settings, "sr-assets demo") as cluster:
        return cluster.stream_info(stream).messages
