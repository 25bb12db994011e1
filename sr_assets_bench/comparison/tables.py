"""Comparison of the published tables and the sent advisories of a stream with the expected nodes and transitions."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from sr_assets.domain.messages import Message
    from sr_assets_tests.reference import Expected, Rules, Seen

#: What a clock may be set back within a watermark's margin.
_SECOND_NS = 10**9
_ADVISED = ("event", "age_seconds", "previous", "transition", "returned", "outage_seconds")


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
    RULES_WRONG = "rules_wrong"
    DOUBLE_LEADER = "double_leaders"


class Created(Protocol):
    """What is known of a stream."""

    @property
    def created_ns(self) -> int:
        """When it was created (unix ns)."""


class Results(Protocol):
    """What a site has done: its published tables, and the streams of the source and the target."""

    def rows(self, query: str) -> list[dict[str, Any]]:
        """Return rows of the published tables; `query` is SQL or a table's name."""

    def row(self, query: str) -> dict[str, Any]:
        """Return the only row of a query."""

    def info(self, stream: str, /) -> Created:
        """Return the info of a stream of the source."""

    def stored(self, stream: str, server: Any = None, /) -> Sequence[Message]:
        """Return all messages of a stream of the source, or of another server."""

    def copies(self, stream: str, /) -> Sequence[Message]:
        """Return all messages of a stream of the target."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference from the rules."""

    kind: Kind
    text: str


def compare_nodes(results: Results, rules: Rules, expected: Expected) -> Iterator[Difference]:
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
        rows = results.rows(f"SELECT * FROM {table} WHERE stream = '{rules.stream}'")
        by_node = {row["node"]: row for row in rows}
        if len(by_node) < len(rows):
            yield Difference(Kind.ROW_WRONG, f"{table} {rules.stream}: {len(rows)} rows for {len(by_node)} nodes")
        for node in sorted(by_node.keys() - wanted.keys()):
            yield Difference(Kind.ROW_WRONG, f"{table} {rules.stream} {node}: nobody demands it")
        for node, row in wanted.items():
            yield from compare_row(f"{table} {rules.stream} {node}", by_node.get(node, {}), row)


def read_epochs(results: Results, stream: str) -> dict[str, int]:
    """Return the epoch of each transition."""
    rows = results.rows(f"SELECT event_id, epoch FROM node_advisories WHERE stream = '{stream}'")
    return {row["event_id"]: row["epoch"] for row in rows}


def compare_snapshots(
    results: Results, rules: Rules, made: list[Seen], *, lost: list[Seen], whole_history: bool = True
) -> Iterator[Difference]:
    """Compare each node's newest copied message, and the history of all nodes.

    Unless `whole_history`, rows may be missing: another home made these copies. Copies that were `lost` may have rows, because
    the target may have lost them after their commit.
    """
    history = results.rows(
        f"SELECT node, sequence, payload_bytes FROM node_snapshot_history WHERE stream = '{rules.stream}'"
    )
    kept = Counter(tuple(row.values()) for row in history)
    sent, perhaps = (
        Counter(
            (sender, each.sequence, len(each.payload)) for each in messages if (sender := rules.when(each).sender(each))
        )
        for messages in (made, lost)
    )
    for row in (kept - sent - perhaps) | (sent - kept if whole_history else Counter()):
        text = f"node_snapshot_history {rules.stream} {row}: {kept[row]} times, demanded {sent[row]}"
        yield Difference(Kind.ROW_WRONG, text)
    newest = {sender: message for message in made if (sender := rules.when(message).sender(message))}
    columns = ("sequence", "subject", "payload_bytes")
    rows = results.rows(f"SELECT * FROM node_snapshots WHERE stream = '{rules.stream}'")
    by_node = {row["node"]: tuple(row[column] for column in columns) for row in rows}
    if len(by_node) < len(rows) or by_node.keys() - newest.keys() - {sender for sender, *_ in perhaps}:
        yield Difference(Kind.ROW_WRONG, f"node_snapshots {rules.stream}: {len(rows)} rows for {len(newest)} nodes")
    for node in sorted(newest.keys() - {sender for sender, *_ in perhaps}):
        latest = newest[node]
        demanded = (latest.sequence, latest.subject, len(latest.payload))
        if by_node.get(node, None if whole_history else demanded) != demanded:
            text = f"node_snapshots {rules.stream} {node}: {by_node.get(node)}, demanded {demanded}"
            yield Difference(Kind.ROW_WRONG, text)


def compare_transitions(
    results: Results, stream: str, expected: Expected, created_ns: int, beginnings: int, *, published: bool
) -> Iterator[Difference]:
    """Compare the table of transitions, including the times of publication."""
    wanted = {advisory["event_id"]: advisory for advisory in expected.advisories}
    rows = results.rows(
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
        yield from compare_row(label, row, demanded, Kind.TRANSITION_WRONG)
        if (row["published_at"] is not None) != published:
            yield Difference(Kind.TRANSITION_WRONG, f"{label}: published_at {row['published_at']}")
    epochs = sorted({row["epoch"] for row in rows})
    turned = [
        after
        for before, after in pairwise(rows)
        if before["node"] == after["node"] and before["epoch"] > after["epoch"]
    ]
    if len(epochs) > beginnings + 1 or turned or any(epoch < created_ns - _SECOND_NS for epoch in epochs):
        yield Difference(Kind.TRANSITION_WRONG, f"node_advisories {stream}: epochs {epochs}, going back {turned}")


def compare_advisories(
    stream: str, sent: Iterable[Iterable[Seen]], expected: Expected, feed: str
) -> Iterator[Difference]:
    """Compare the sent advisories: one per transition, of rising rank and number for each node, on a valid subject.

    `sent` are all messages that the feed ever held. Advisories that a rolled-back feed lost may be sent again unless
    they were acknowledged.
    """
    wanted = {advisory["event_id"]: advisory for advisory in expected.advisories}
    known: set[tuple[int, int]] = set()
    ids: set[str] = set()
    ranks: dict[str, list[tuple[int, int]]] = defaultdict(list)
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
            ranks[body["value"]].append((body["epoch"], body["transition"]))
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
    for node, given in ranks.items():
        numbers = [number for _, number in given]
        if given != sorted(given) or numbers != sorted(numbers):
            yield Difference(Kind.TRANSITION_WRONG, f"{feed} {node}: in the order {given}")


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
            yield Difference(Kind.TRANSITION_WRONG, f"{where}: {event_id}, which the reference does not have")


def compare_row(
    label: str, row: Mapping[str, Any], wanted: Mapping[str, Any], kind: Kind = Kind.ROW_WRONG
) -> Iterator[Difference]:
    """Compare the values of a row."""
    for name, value in wanted.items():
        if name not in row or row[name] != value:
            yield Difference(kind, f"{label}: {name} {row.get(name)}, demanded {value}")


def _only(row: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: row[name] for name in names}
