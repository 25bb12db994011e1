"""The result of a demo: the JSON of `--json` with its failures, from the tables and the servers.

Add a check here for each new promise of the demo.
"""

from collections import Counter
from typing import Any, Final

from sr_assets.adapters import times
from sr_assets.adapters.nats.cluster import Cluster
from sr_assets.adapters.published.reading import count_rows, open_fleet, read_rows
from sr_assets.domain.tracking.rules import Event
from sr_assets.settings import ClusterSettings, Settings
from sr_assets.stages.source.lag import measure_lag
from sr_assets.stages.topology.planning import find_drift, topology_of
from sr_assets.stages.topology.report import make_report
from sr_assets.stages.topology.survey import Survey

#: Differences between the centre's view and the sites' own tables: site, stream, text.
_DIFFERENCES: Final = """
    WITH site AS (SELECT name, stream, node, status, status_since FROM node_availability),
        centre AS (SELECT name, stream, node, status, status_since FROM global_availability)
    SELECT name, stream, count(DISTINCT node) || ' nodes differ between the centre and their site' FROM (
        (FROM site EXCEPT FROM centre) UNION ALL (FROM centre EXCEPT FROM site)
    ) GROUP BY name, stream
    UNION ALL
    SELECT name, stream, 'the centre receives no heartbeat of it'
    FROM (SELECT DISTINCT name, stream FROM site) LEFT JOIN global_summary USING (name, stream)
    WHERE coalesce(blind, true) OR observer_alive_at IS NULL
"""
#: Time limit for the servers' native copies of the last messages.
_ARRIVAL_SECONDS: Final = 30.0


def check_demo(settings: Settings, seconds: float) -> dict[str, Any]:
    """Return the demo's counts and current lag; `failed` has a line for each broken promise."""
    with open_fleet(settings.home) as connection:
        counts = read_rows(connection, "SELECT name, stream, copied_messages, skipped_messages FROM replication").values
        events = read_rows(connection, "SELECT event, count(*) FROM node_advisories GROUP BY event").values
        differences = read_rows(connection, _DIFFERENCES).values
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
        if (stored := _messages(target, name)) != copied:
            failed.append(f"{name}: contains {stored} messages after {copied} copies")
    native, native_failed = _check_native(settings)
    failed += native_failed
    advisories = {event.value: dict(events).get(event.value, 0) for event in Event}
    failed += [f"no {event} happened" for event, count in advisories.items() if not count]
    failed += [f"{name}/{stream}: {difference}" for name, stream, difference in differences]
    return {
        "seconds": round(seconds),
        "streams": streams,
        "native": native,
        "advisories": advisories,
        "tables": count_rows(settings.home),
        "failed": failed,
    }


def _check_native(settings: Settings) -> tuple[dict[str, Any], list[str]]:
    """Wait for native copies to arrive; return them, and a line for each that differs from its origins."""
    deadline = times.monotonic() + _ARRIVAL_SECONDS
    with Survey(settings, "sr-assets demo") as survey:
        while True:
            shown, failed = _compare_native(settings, survey.refresh())
            if not failed or times.monotonic() > deadline:
                return shown, failed
            times.sleep(0.5)


def _compare_native(settings: Settings, survey: Survey) -> tuple[dict[str, Any], list[str]]:
    """Return each native stream's messages, its origins' messages and its lag, and a line for each problem."""
    report = make_report(settings, survey)
    held = {(row.cluster, row.stream): row.messages for row in report.streams}
    failed = [f"{wanted.label}: {drift.key} is {drift.found}" for wanted, drift in find_drift(settings, survey)]
    links, shown = [link for link in report.links if link.native], {}
    for wanted in topology_of(settings).streams:
        own = [link for link in links if (link.cluster, link.stream) == (wanted.cluster, wanted.stream)]
        lags = [link.lag_messages for link in own]
        stream = {
            "messages": held.get((wanted.cluster, wanted.stream)),
            "origin_messages": sum(held.get((upstream.cluster, upstream.stream)) or 0 for upstream in wanted.upstreams),
            "lag_messages": None if None in lags else sum(filter(None, lags)),
        }
        shown[wanted.label] = stream
        if stream["messages"] != stream["origin_messages"] or stream["lag_messages"] != 0:
            failed.append(f"{wanted.label}: the servers have not copied everything: {stream}")
        failed += [f"{wanted.label}: the link to {link.origin_cluster} is dead" for link in own if link.dead]
    return shown, failed


def _messages(settings: ClusterSettings, stream: str) -> int:
    with Cluster(settings, "sr-assets demo") as cluster:
        return cluster.stream_info(stream).messages
