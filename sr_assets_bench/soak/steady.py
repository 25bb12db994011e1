"""Two streams of nodes that never fall silent: one from a server with a wrong clock, one with few messages per subject.

Whatever happens to their times and messages, each node is announced once, as new.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from sr_assets.domain.positions import format_rfc3339_ns
from sr_assets_bench.comparison.tables import Difference, Kind

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sr_assets_tests.rig import Rig

#: A stream that is read through `WrongClock`, and one that holds four seconds of messages and is read with a filter.
CLOCK: Final = "CLOCK"
LATEST: Final = "LATEST"
NODES: Final = 20
INTERVAL_SECONDS: Final = 0.5
#: Longer than any absence of the source in a soak, and much shorter than the clock's error.
_ENTRY: Final[dict[str, Any]] = {
    "inspect_field": "sender",
    "inspect_duration": "60s",
    "warn_duration": "30s",
    # The growing nodes are copied often, because the first copies may be lost with their source.
    "size_trigger": 200,
    "on_source_reset": "recopy",
}
_KEY: Final = re.compile(rb"\r\nNats-Msg-Id: (\S+)\r\n")


def add_steady_streams(rig: Rig, clock_url: str) -> None:
    """Create both streams and add them to the configuration; the first one is read at `clock_url`."""
    rig.create(CLOCK)
    rig.create(LATEST, max_msgs_per_subject=8)
    # By default a new target has the source's limits, and would keep only the last copies.
    rig.create(LATEST, rig.target)
    rig.add(CLOCK, **_ENTRY, source_url=clock_url)
    rig.add(LATEST, **_ENTRY, filter_subject=f"{LATEST}.>")


def compare_steady(rig: Rig, stream: str) -> Iterator[Difference]:
    """Compare a stream's transitions, copies and counters; the runs have read it to its end."""
    counted = rig.row(f"SELECT * FROM replication WHERE stream = '{stream}'")
    if counted["lag_messages"] or counted["next_sequence"] <= rig.info(stream).last_sequence:
        yield Difference(Kind.LOST, f"{stream}: read until {counted['next_sequence']}, {counted['lag_messages']} wait")
    times = Counter(_KEY.findall(copy.headers)[-1] for copy in rig.copies(stream))
    for key, count in times.items():
        if count > 1:
            yield Difference(Kind.DUPLICATE, f"{stream}: {key.decode()} {count} times")
    parts = ("copied_messages", "skipped_messages", "too_old_messages", "parked_messages", "no_sender_messages")
    outcomes = sum(counted[part] for part in parts)
    if counted["copied_messages"] != len(times) or counted["seen_messages"] != outcomes:
        yield Difference(Kind.ROW_WRONG, f"replication {stream}: {counted}, {len(times)} copies")
    if not times:
        yield Difference(Kind.LOST, f"{stream}: no copy of {NODES} nodes")
    # The last runs may take long, so that the nodes fall silent after the end of their fleet.
    stored = sorted(message.stored_ns for message in rig.stored(stream))
    events = rig.rows(
        "SELECT node, event, event_time FROM node_advisories"
        f" WHERE stream = '{stream}' AND epoch_us(event_time) <= {stored[-1] // 1_000}"
    )
    for row in events:
        if row["event"] != "new":
            yield Difference(Kind.TRANSITION_WRONG, f"node_advisories {stream}: {row}; silences: {_silences(stored)}")
    if len(events) < NODES:
        yield Difference(Kind.TRANSITION_MISSING, f"node_advisories {stream}: {len(events)} rows of {NODES} nodes")


def _silences(stored: Sequence[int]) -> str:
    """Return the three longest times between messages, in seconds, and their ends; `stored` ascends (unix ns)."""
    gaps = sorted(((after - before) / 1e9, after) for before, after in itertools.pairwise(stored))[-3:]
    return ", ".join(f"{seconds:.1f} s until {format_rfc3339_ns(after)}" for seconds, after in gaps)
