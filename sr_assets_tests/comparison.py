"""Comparison of a site's copies, counters, tables and advisories with the expectations of `reference`."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from sr_assets_tests import reference
from sr_assets_tests.reference import Expected, Rules, Seen
from sr_assets_tests.source_rollback import Past

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from sr_assets.domain.messages import Message
    from sr_assets.embedded.nats_server import NatsServer
    from sr_assets_tests.rig import Rig

_ORIGIN = re.compile(rb"\r\nChoria-SR-Source: \S+ (\d+) ")
_BEGINNING = re.compile(rb"\r\nNats-Msg-Id: \S+/\d+/\d+/r(\d+)\r\n")
_ADVISED = ("event", "age_seconds", "previous", "transition", "returned", "outage_seconds")
_NO_PAST = Past()
_Key = tuple[int, int]


class Kind(StrEnum):
    """The kinds of differences."""

    LOST = "losses"
    DUPLICATE = "duplicates"
    UNWANTED = "unwanted"
    ALTERED = "altered"
    DISORDERED = "disordered"
    TRANSITION_MISSING = "transitions_missing"
    TRANSITION_DOUBLED = "transitions_doubled"
    TRANSITION_WRONG = "transitions_wrong"
    ROW_WRONG = "rows_wrong"
    GAP_WRONG = "gaps_wrong"
    BLIND_WRONG = "blind_wrong"
    VIEW_WRONG = "views_wrong"


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference from the rules."""

    kind: Kind
    text: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of one stream: the number of messages read, the expected results up to the committed watermark,
    and the differences.
    """

    messages: int
    expected: Expected
    differences: list[Difference]


def compare(
    rig: Rig,
    rules: Rules,
    *,
    prefix: str = "",
    target: str | None = None,
    feed: str | None = None,
    pasts: Mapping[str, Past] | None = None,
    until: int | None = None,
) -> Comparison:
    """Compare all results of a stream: its `target` (the stream's name by default), its rows, and its advisories in
    `feed`.

    `pasts` are the histories of the streams whose source was rolled back. A growing stream is compared as far as it was
    read, at least up to sequence `until`.
    """
    past = (pasts or {}).get(rules.stream, _NO_PAST)
    counted = rig.row(f"SELECT *, epoch_us(watermark) AS now_us FROM replication WHERE stream = '{rules.stream}'")
    held = held_now(rig, rules.stream)
    now = held if until is None else [message for message in held if message.sequence < counted["next_sequence"]]
    seen = past.read(now)
    info = rig.info(rules.stream)
    epochs = _epochs(rig, rules.stream)
    expected = reference.expect(rules, seen, counted["now_us"] * 1000, past.blind, past.known_ns)
    for advisory in expected.advisories:
        advisory["epoch"] = epochs.get(advisory["event_id"], max(epochs.values(), default=0))
    # A message that is read again was stored before the watermark.
    again = sum(message.beginning > 0 and message.stored_ns < past.known_ns[message.beginning - 1] for message in seen)
    again = again if rules.inspect_field else 0
    copies = _Copies(rules, seen, expected, past.beyond(), prefix)
    differences = [
        *copies.compare(rig.copies(target or rules.stream), info.created_ns),
        *_lost(rig, rules.stream, copies.lost),
        *_counters(counted, len(seen) + copies.besides, len(expected.copied) + copies.besides, len(copies.lost), again),
        *_nodes(rig, rules, expected),
        *_snapshots(rig, rules, [message for message in seen if message.key in copies.made]),
        *_transitions(rig, rules.stream, expected, info.created_ns, len(past.beginnings), published=feed is not None),
    ]
    if until is None and counted["lag_messages"]:
        differences.append(Difference(Kind.ROW_WRONG, f"replication {rules.stream}: lag {counted['lag_messages']}"))
    if counted["next_sequence"] <= (len(held) if until is None else until):
        differences.append(
            Difference(Kind.LOST, f"{rules.stream}: read until {counted['next_sequence']} of {len(held)}")
        )
    if rules.inspect_field:
        differences += [Difference(Kind.BLIND_WRONG, text) for text in past.misjudged(now)]
    if feed is not None:
        sent = [*(pasts or {}).get(feed, _NO_PAST).held, held_now(rig, feed)]
        differences += _advisories(rules.stream, sent, expected, feed)
    return Comparison(len(seen), expected, differences)


def held_now(rig: Rig, stream: str, server: NatsServer | None = None) -> list[Seen]:
    """Return all messages of a stream on the source, or on another server."""
    return [Seen(m.sequence, m.stored_ns, m.subject, m.headers, m.payload) for m in rig.stored(stream, server)]


class _Copies:
    """The copies of a stream: those `lost` with a rolled-back source, and those that must have been `made`.

    An interrupted batch may have made `besides` before they counted as read; they count as copied.
    """

    def __init__(self, rules: Rules, seen: list[Seen], expected: Expected, beyond: list[Seen], prefix: str) -> None:
        self._rules, self._expected, self._prefix = rules, expected, prefix
        self._wanted = set(expected.copied)
        #: A batch of an untracked stream may have copied it and been interrupted before its source was rolled back.
        self._allowed = {} if rules.inspect_field else {message.key: message for message in beyond}
        self._originals = self._allowed | {message.key: message for message in seen}
        self.made: set[_Key] = set()
        self.lost: set[_Key] = set()
        self.besides = 0

    def compare(self, copies: Iterable[Message], created_ns: int) -> Iterator[Difference]:
        """Compare each copy in a target with its original."""
        stream, reasons = self._rules.stream, self._expected.reasons
        times: Counter[_Key] = Counter()
        highest = (0, 0)
        for copy in copies:
            origins, beginnings = _ORIGIN.findall(copy.headers), _BEGINNING.findall(copy.headers)
            key = (int(beginnings[-1]) if beginnings else 0, int(origins[-1]) if origins else 0)
            times[key] += 1
            label = f"{stream} {key} at {copy.sequence}"
            if key < highest:
                yield Difference(Kind.DISORDERED, f"{label}, behind {highest}")
            highest = max(highest, key)
            if times[key] > 1:
                yield Difference(Kind.DUPLICATE, label)
            if key not in self._wanted and key not in self._allowed:
                yield Difference(Kind.UNWANTED, f"{label}: {reasons.get(key, 'not in the source')}")
                continue
            self.besides += key not in self._wanted
            original = self._originals[key]
            demanded = (
                self._prefix + original.subject,
                reference.copied_headers(original, self._rules, created_ns),
                original.payload,
            )
            if (copy.subject, copy.headers, copy.payload) != demanded:
                yield Difference(Kind.ALTERED, f"{label}: {copy.subject} {copy.headers!r}")
        last = max((message.beginning for message in self._originals.values()), default=0)
        for key in sorted(self._wanted - times.keys()):
            if key[0] < last:
                self.lost.add(key)
            else:
                yield Difference(Kind.LOST, f"{stream} {key}: {reasons[key]}")
        self.made = self._wanted - self.lost


def _lost(rig: Rig, stream: str, lost: set[_Key]) -> Iterator[Difference]:
    """Compare the rows of messages that were lost with their source before they were copied."""
    rows = rig.rows(f"SELECT * FROM gaps WHERE stream = '{stream}'")
    if {row["reason"] for row in rows} - {"lost"} or sum(row["messages"] for row in rows) != len(lost):
        yield Difference(Kind.GAP_WRONG, f"gaps {stream}: {rows}, demanded {len(lost)} lost")
    for _, sequence in sorted(lost):
        if not any(row["first_sequence"] <= sequence <= row["last_sequence"] for row in rows):
            yield Difference(Kind.GAP_WRONG, f"gaps {stream}: {sequence} is lost and in no row")


def _counters(counted: Mapping[str, Any], seen: int, copied: int, lost: int, again: int) -> Iterator[Difference]:
    wanted = {
        "seen_messages": seen - lost,
        "copied_messages": copied - lost,
        "skipped_messages": seen - copied,
        "gap_messages": lost,
        "late_sightings": again,
        **dict.fromkeys(("too_old_messages", "parked_messages", "queued_messages"), 0),
    }
    yield from _row(f"replication {counted['stream']}", counted, wanted)


def _nodes(rig: Rig, rules: Rules, expected: Expected) -> Iterator[Difference]:
    """Compare the tables with a row for each node."""
    since = ("status", "status_since", "first_seen", "last_seen")
    alive = (*since, "last_sequence", "last_copied", "copied_bytes")
    present = {node: state for node, state in expected.nodes.items() if state["status"] != "retired"}
    retired = {node: {**state, "retired_at": state["status_since"]} for node, state in expected.nodes.items()}
    tables = {
        "node_availability": {node: _only(state, since) for node, state in expected.nodes.items()},
        "last_seen_nodes": {node: _only(state, alive) for node, state in present.items()},
        "retired_nodes": {
            node: _only(state, ("first_seen", "last_seen", "retired_at", "times_retired"))
            for node, state in retired.items()
            if node not in present
        },
    }
    for table, wanted in tables.items():
        rows = rig.rows(f"SELECT * FROM {table} WHERE stream = '{rules.stream}'")
        by_node = {row["node"]: row for row in rows}
        if len(by_node) < len(rows):
            yield Difference(Kind.ROW_WRONG, f"{table} {rules.stream}: {len(rows)} rows for {len(by_node)} nodes")
        for node in sorted(by_node.keys() - wanted.keys()):
            yield Difference(Kind.ROW_WRONG, f"{table} {rules.stream} {node}: nobody demands it")
        for node, row in wanted.items():
            yield from _row(f"{table} {rules.stream} {node}", by_node.get(node, {}), row)


def _epochs(rig: Rig, stream: str) -> dict[str, int]:
    """Return the epoch of each transition."""
    rows = rig.rows(f"SELECT event_id, epoch FROM node_advisories WHERE stream = '{stream}'")
    return {row["event_id"]: row["epoch"] for row in rows}


def _snapshots(rig: Rig, rules: Rules, made: list[Seen]) -> Iterator[Difference]:
    """Compare each node's newest copied message, and the history of all nodes."""
    history = rig.rows(
        f"SELECT node, sequence, payload_bytes FROM node_snapshot_history WHERE stream = '{rules.stream}'"
    )
    kept = Counter(tuple(row.values()) for row in history)
    sent = Counter(
        (sender, message.sequence, len(message.payload)) for message in made if (sender := rules.sender(message))
    )
    for row in (kept - sent) | (sent - kept):
        text = f"node_snapshot_history {rules.stream} {row}: {kept[row]} times, demanded {sent[row]}"
        yield Difference(Kind.ROW_WRONG, text)
    newest = {sender: message for message in made if (sender := rules.sender(message))}
    columns = ("sequence", "subject", "payload_bytes")
    rows = rig.rows(f"SELECT * FROM node_snapshots WHERE stream = '{rules.stream}'")
    by_node = {row["node"]: tuple(row[column] for column in columns) for row in rows}
    if len(by_node) < len(rows) or by_node.keys() - newest.keys():
        yield Difference(Kind.ROW_WRONG, f"node_snapshots {rules.stream}: {len(rows)} rows for {len(newest)} nodes")
    for node, latest in newest.items():
        demanded = (latest.sequence, latest.subject, len(latest.payload))
        if by_node.get(node) != demanded:
            text = f"node_snapshots {rules.stream} {node}: {by_node.get(node)}, demanded {demanded}"
            yield Difference(Kind.ROW_WRONG, text)


def _transitions(
    rig: Rig, stream: str, expected: Expected, created_ns: int, beginnings: int, *, published: bool
) -> Iterator[Difference]:
    """Compare the table of transitions, including the times of publication."""
    wanted = {advisory["event_id"]: advisory for advisory in expected.advisories}
    rows = rig.rows(
        "SELECT *, epoch_us(event_time) // 1000000 AS timestamp, epoch_us(seen) // 1000000 AS seen_s"
        f" FROM node_advisories WHERE stream = '{stream}' ORDER BY node, transition"
    )
    yield from _ids(f"node_advisories {stream}", [row["event_id"] for row in rows], wanted)
    for row in rows:
        transition = wanted.get(row["event_id"])
        if transition is None:
            continue
        label = f"node_advisories {stream} {row['node']} {row['event']} {row['event_id']}"
        demanded = {
            "node": transition["value"],
            "seen_s": transition["seen"],
            **_only(transition, ("timestamp", *_ADVISED)),
        }
        yield from _row(label, row, demanded, Kind.TRANSITION_WRONG)
        if (row["published_at"] is not None) != published:
            yield Difference(Kind.TRANSITION_WRONG, f"{label}: published_at {row['published_at']}")
    epochs = sorted({row["epoch"] for row in rows})
    turned = [
        after
        for before, after in pairwise(rows)
        if before["node"] == after["node"] and before["epoch"] > after["epoch"]
    ]
    if len(epochs) > beginnings + 1 or turned or any(epoch < created_ns for epoch in epochs):
        yield Difference(Kind.TRANSITION_WRONG, f"node_advisories {stream}: epochs {epochs}, going back {turned}")


def _advisories(stream: str, sent: Iterable[Iterable[Seen]], expected: Expected, feed: str) -> Iterator[Difference]:
    """Compare the sent advisories: one per transition, in order for each node, on a valid subject.

    `sent` are all messages that the feed ever held. Advisories that a rolled-back feed lost may be sent again unless
    they were acknowledged.
    """
    wanted = {advisory["event_id"]: advisory for advisory in expected.advisories}
    known: set[tuple[int, int]] = set()
    ids: set[str] = set()
    order: dict[str, list[int]] = defaultdict(list)
    for held in sent:
        times: Counter[str] = Counter()
        for message in held:
            body = json.loads(message.payload)
            if body["stream"] != stream:
                continue
            times[body["event_id"]] += 1
            if (message.sequence, message.stored_ns) in known:
                continue
            known.add((message.sequence, message.stored_ns))
            order[body["value"]].append(body["transition"])
            late = body.pop("late")
            named = b"Nats-Msg-Id: " + body["event_id"].encode() in message.headers
            placed = message.subject.startswith(f"{feed}.{body['event']}.") and isinstance(late, bool)
            if body != wanted.get(body["event_id"], body) or not (named and placed):
                yield Difference(Kind.TRANSITION_WRONG, f"{feed} {message.sequence}: {body}")
        ids |= times.keys()
        yield from (
            Difference(Kind.TRANSITION_DOUBLED, f"{feed}: {event_id} {count} times")
            for event_id, count in times.items()
            if count > 1
        )
    yield from _ids(feed, ids, wanted)
    for node, numbers in order.items():
        if numbers != sorted(numbers):
            yield Difference(Kind.TRANSITION_WRONG, f"{feed} {node}: in the order {numbers}")


def _ids(where: str, ids: Iterable[str], wanted: Mapping[str, Mapping[str, Any]]) -> Iterator[Difference]:
    """Compare the set of transitions."""
    times = Counter(ids)
    for event_id, advisory in wanted.items():
        if event_id not in times:
            text = f"{where}: {advisory['value']} {advisory['event']} {advisory['event_time']} {event_id}"
            yield Difference(Kind.TRANSITION_MISSING, text)
    for event_id, count in times.items():
        if count > 1:
            yield Difference(Kind.TRANSITION_DOUBLED, f"{where}: {event_id} {count} times")
        if event_id not in wanted:
            yield Difference(Kind.TRANSITION_WRONG, f"{where}: {event_id}, which nobody demands")


def _row(
    label: str, row: Mapping[str, Any], wanted: Mapping[str, Any], kind: Kind = Kind.ROW_WRONG
) -> Iterator[Difference]:
    for name, value in wanted.items():
        if name not in row or row[name] != value:
            yield Difference(kind, f"{label}: {name} {row.get(name)}, demanded {value}")


def _only(row: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: row[name] for name in names}
