"""Comparison of a feed's view and history with `sr_assets_tests.domain.advisory_fold`."""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING, Any

from sr_assets.domain.positions import parse_rfc3339_ns
from sr_assets.domain.received import LIFE_CYCLE, STATUS, Advisory
from sr_assets_bench.comparison.tables import Difference, Kind, Results
from sr_assets_tests.domain.advisory_fold import Standing, fold
from sr_assets_tests.reference import SECOND, clock

if TYPE_CHECKING:
    from collections.abc import Iterator


_EVENTS = [event.value for event in LIFE_CYCLE]


def compare_feed(results: Results, feed: str, server: Any, until: int) -> Iterator[Difference]:
    """Compare a feed's view and history with its stream's contents at the time of reading, at least up to sequence
    `until`.
    """
    position = results.row(f"SELECT next_sequence FROM replication WHERE stream = '{feed}'")["next_sequence"]
    if position <= until:
        yield Difference(Kind.VIEW_WRONG, f"{feed}: read until {position} of {until}")
    received = [
        (_advisory(json.loads(message.payload)), message.stored_ns)
        for message in results.stored(feed, server)
        if message.sequence < position
    ]
    wanted = {key: _row(standing) for key, standing in fold({}, received).items()}
    columns = "replicator, name, stream, node, status, status_since, last_seen, event_time, received_at, source"
    rows = results.rows(f"SELECT {columns} FROM global_availability")
    view = {tuple(row.values())[:4]: tuple(row.values())[4:] for row in rows}
    if len(view) < len(rows):
        yield Difference(Kind.VIEW_WRONG, f"global_availability: {len(rows)} rows for {len(view)} nodes")
    for key in sorted(wanted.keys() | view.keys()):
        if wanted.get(key) != view.get(key):
            yield Difference(Kind.VIEW_WRONG, f"global_availability {key}: {view.get(key)}, demanded {wanted.get(key)}")
    ids = sorted(row["event_id"] for row in results.rows("SELECT event_id FROM global_advisories"))
    demanded = sorted({advisory.event_id for advisory, _ in received})
    if ids != demanded:
        yield Difference(Kind.VIEW_WRONG, f"global_advisories: {len(ids)} rows, demanded {len(demanded)}")


def _advisory(body: dict[str, Any]) -> Advisory:
    return Advisory(
        body["replicator"],
        body["name"],
        body["stream"],
        body["value"],
        body["epoch"],
        body["transition"],
        parse_rfc3339_ns(body["event_time"]),
        _EVENTS.index(body["event"]),
        body["seen"] * SECOND,
        "ours",
        body["event_id"],
        body["age_seconds"],
        body["previous"],
        body["late"],
        body["returned"],
        body["outage_seconds"],
    )


def _row(standing: Standing) -> tuple[str | datetime | None, ...]:
    """Return a node's row of the published view."""
    event_at = clock(standing.event_ns)
    seen_at = event_at if _EVENTS[standing.event_code] in ("new", "recover") else clock(standing.seen_ns)
    status = STATUS[standing.event_code].value
    return (status, event_at, seen_at, event_at, clock(standing.received_ns), standing.origin)
