"""What came of a source's history, held against what `reference` demands of it: copies, counters, tables, advisories.

Here: every difference, with its kind. Not here: the rules (`reference`), and how the history came about.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from sr_assets_tests import reference
from sr_assets_tests.reference import Expected, Rules, Seen

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from sr_assets.domain.messages import Message
    from sr_assets_tests.rig import Rig

_ORIGIN = re.compile(rb"\r\nChoria-SR-Source: \S+ (\d+) ")
_ADVISED = ("event", "age_seconds", "previous", "transition", "returned", "outage_seconds")


class Kind(StrEnum):
    """What can differ."""

    LOST = "losses"
    DUPLICATE = "duplicates"
    UNWANTED = "unwanted"
    ALTERED = "altered"
    DISORDERED = "disordered"
    TRANSITION_MISSING = "transitions_missing"
    TRANSITION_DOUBLED = "transitions_doubled"
    TRANSITION_WRONG = "transitions_wrong"
    ROW_WRONG = "rows_wrong"


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that is not as the rules demand, and which."""

    kind: Kind
    what: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """One stream: what its source holds, what is demanded of it until its committed watermark, and what differs."""

    seen: list[Seen]
    expected: Expected
    differences: list[Difference]


def compare(rig: Rig, rules: Rules, *, prefix: str = "", feed: str | None = None) -> Comparison:
    """Compare everything that came of a stream: its target of the same name, its rows, its advisories in `feed`."""
    seen = [Seen(m.sequence, m.stored_ns, m.subject, m.headers, m.payload) for m in rig.stored(rules.stream)]
    counted = rig.row(f"SELECT *, epoch_us(watermark) AS now_us FROM replication WHERE stream = '{rules.stream}'")
    created_ns = rig.info(rules.stream).created_ns
    expected = reference.expect(_with_epoch(rig, rules, created_ns), seen, counted["now_us"] * 1000)
    differences = [
        *_copies(rules, seen, expected, rig.copies(rules.stream), created_ns, prefix),
        *_counters(counted, len(seen), len(expected.copied)),
        *_nodes(rig, rules, seen, expected),
        *_transitions(rig, rules.stream, expected, published=feed is not None),
    ]
    if feed is not None:
        differences += _advisories(rules.stream, rig.stored(feed), expected, feed)
    return Comparison(seen, expected, differences)


def _copies(
    rules: Rules, seen: list[Seen], expected: Expected, copies: list[Message], created_ns: int, prefix: str
) -> Iterator[Difference]:
    originals = {one.sequence: one for one in seen}
    wanted = set(expected.copied)
    times: Counter[int] = Counter()
    highest = 0
    for copy in copies:
        origins = _ORIGIN.findall(copy.headers)
        sequence = int(origins[-1]) if origins else 0
        times[sequence] += 1
        what = f"{rules.stream} {sequence} at {copy.sequence}"
        if sequence < highest:
            yield Difference(Kind.DISORDERED, f"{what}, behind {highest}")
        highest = max(highest, sequence)
        if times[sequence] > 1:
            yield Difference(Kind.DUPLICATE, what)
        if sequence not in wanted:
            yield Difference(Kind.UNWANTED, f"{what}: {expected.reasons.get(sequence, 'not in the source')}")
            continue
        one = originals[sequence]
        demanded = (prefix + one.subject, reference.copied_headers(one, rules, created_ns), one.payload)
        if (copy.subject, copy.headers, copy.payload) != demanded:
            yield Difference(Kind.ALTERED, f"{what}: {copy.subject} {copy.headers!r}")
    for sequence in sorted(wanted - times.keys()):
        yield Difference(Kind.LOST, f"{rules.stream} {sequence}: {expected.reasons[sequence]}")


def _counters(counted: Mapping[str, Any], seen: int, copied: int) -> Iterator[Difference]:
    wanted = {"seen_messages": seen, "copied_messages": copied, "skipped_messages": seen - copied, "lag_messages": 0}
    none = ("too_old_messages", "gap_messages", "parked_messages", "late_sightings")
    yield from _row(f"replication {counted['stream']}", counted, {**wanted, **dict.fromkeys(none, 0)})


def _nodes(rig: Rig, rules: Rules, seen: list[Seen], expected: Expected) -> Iterator[Difference]:
    """Compare the tables that have a row for each node."""
    since = ("status", "status_since", "first_seen", "last_seen")
    alive = (*since, "last_sequence", "last_copied", "copied_bytes")
    present = {node: one for node, one in expected.nodes.items() if one["status"] != "retired"}
    retired = {node: {**one, "retired_at": one["status_since"]} for node, one in expected.nodes.items()}
    tables = {
        "node_availability": {node: _only(one, since) for node, one in expected.nodes.items()},
        "last_seen_nodes": {node: _only(one, alive) for node, one in present.items()},
        "retired_nodes": {
            node: _only(one, ("first_seen", "last_seen", "retired_at", "times_retired"))
            for node, one in retired.items()
            if node not in present
        },
        "node_snapshots": _snapshots(rules, seen, expected),
    }
    for table, wanted in tables.items():
        rows = rig.rows(f"SELECT * FROM {table} WHERE stream = '{rules.stream}'")
        found = {row["node"]: row for row in rows}
        if len(found) < len(rows):
            yield Difference(Kind.ROW_WRONG, f"{table} {rules.stream}: {len(rows)} rows for {len(found)} nodes")
        for node in sorted(found.keys() - wanted.keys()):
            yield Difference(Kind.ROW_WRONG, f"{table} {rules.stream} {node}: nobody demands it")
        for node, row in wanted.items():
            yield from _row(f"{table} {rules.stream} {node}", found.get(node, {}), row)


def _with_epoch(rig: Rig, rules: Rules, created_ns: int) -> Rules:
    """Return the rules with the stream's epoch: one for all its transitions, not before the source was made."""
    epochs = {
        row["epoch"] for row in rig.rows(f"SELECT DISTINCT epoch FROM node_advisories WHERE stream = '{rules.stream}'")
    }
    assert len(epochs) <= 1, epochs
    assert all(epoch >= created_ns for epoch in epochs), (epochs, created_ns)
    return replace(rules, epoch_ns=next(iter(epochs), 0))


def _snapshots(rules: Rules, seen: list[Seen], expected: Expected) -> dict[str, dict[str, Any]]:
    """Return what is demanded of each node's newest copied message."""
    newest = {rules.sender(one): one for one in seen if expected.reasons[one.sequence] != "sampled"}
    return {
        node: {"sequence": one.sequence, "subject": one.subject, "payload_bytes": len(one.payload)}
        for node, one in newest.items()
        if node
    }


def _transitions(rig: Rig, stream: str, expected: Expected, *, published: bool) -> Iterator[Difference]:
    """Compare the table of transitions, which say so when they are published."""
    wanted = {one["event_id"]: one for one in expected.advisories}
    found = rig.rows(
        "SELECT *, epoch_us(event_time) // 1000000 AS timestamp, epoch_us(seen) // 1000000 AS seen_s"
        f" FROM node_advisories WHERE stream = '{stream}'"
    )
    yield from _ids(f"node_advisories {stream}", [row["event_id"] for row in found], wanted)
    for row in found:
        one = wanted.get(row["event_id"])
        if one is None:
            continue
        what = f"node_advisories {stream} {row['node']} {row['event']} {row['event_id']}"
        demanded = {"node": one["value"], "seen_s": one["seen"], **_only(one, ("timestamp", *_ADVISED))}
        yield from _row(what, row, demanded, Kind.TRANSITION_WRONG)
        if (row["published_at"] is not None) != published:
            yield Difference(Kind.TRANSITION_WRONG, f"{what}: published_at {row['published_at']}")


def _advisories(stream: str, sent: Iterable[Message], expected: Expected, feed: str) -> Iterator[Difference]:
    """Compare what went out: once for each transition, in order for each node, on a subject no name can break."""
    wanted = {one["event_id"]: one for one in expected.advisories}
    ids: list[str] = []
    order: dict[str, list[int]] = defaultdict(list)
    for message in sent:
        body = json.loads(message.payload)
        if body["stream"] != stream:
            continue
        ids.append(body["event_id"])
        order[body["value"]].append(body["transition"])
        late = body.pop("late")
        named = b"Nats-Msg-Id: " + body["event_id"].encode() in message.headers
        placed = message.subject.startswith(f"{feed}.{body['event']}.") and isinstance(late, bool)
        if body != wanted.get(body["event_id"], body) or not (named and placed):
            yield Difference(Kind.TRANSITION_WRONG, f"{feed} {message.sequence}: {body}")
    yield from _ids(feed, ids, wanted)
    for node, numbers in order.items():
        if numbers != sorted(numbers):
            yield Difference(Kind.TRANSITION_WRONG, f"{feed} {node}: in the order {numbers}")


def _ids(where: str, found: Iterable[str], wanted: Mapping[str, Mapping[str, Any]]) -> Iterator[Difference]:
    """Compare which transitions there are."""
    times = Counter(found)
    for one, advisory in wanted.items():
        if one not in times:
            what = f"{where}: {advisory['value']} {advisory['event']} {advisory['event_time']} {one}"
            yield Difference(Kind.TRANSITION_MISSING, what)
    for one, count in times.items():
        if count > 1:
            yield Difference(Kind.TRANSITION_DOUBLED, f"{where}: {one} {count} times")
        if one not in wanted:
            yield Difference(Kind.TRANSITION_WRONG, f"{where}: {one}, which nobody demands")


def _row(
    what: str, found: Mapping[str, Any], wanted: Mapping[str, Any], kind: Kind = Kind.ROW_WRONG
) -> Iterator[Difference]:
    for name, value in wanted.items():
        if name not in found or found[name] != value:
            yield Difference(kind, f"{what}: {name} {found.get(name)}, demanded {value}")


def _only(row: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: row[name] for name in names}
