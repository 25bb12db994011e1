"""Comparison of the announcements of the streams under the rules of operators with `sr_assets_tests.naive_rules`."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final

from sr_assets.domain.positions import parse_rfc3339_ns
from sr_assets_bench.comparison.streams import held_now
from sr_assets_bench.comparison.tables import Difference, Kind
from sr_assets_bench.soak.ruled import (
    BY_HAND,
    DARK,
    DURATIONS,
    FLAPPING,
    GUARDED,
    HOLD_SECONDS,
    MIN_NODES,
    PARTIAL,
    QUIET_SECONDS,
    RULED,
    RULINGS,
    WINDOW_NODES,
    class_of,
    windows_of,
)
from sr_assets_tests import naive_rules, reference
from sr_assets_tests.naive_rules import NaiveGuard, Row
from sr_assets_tests.reference import SECOND, Rules, Seen, by_field
from sr_assets_tests.rig import SITE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sr_assets.embedded.nats_server import NatsServer
    from sr_assets_bench.soak.ruled import Troupe
    from sr_assets_tests.rig import Rig

_TRANSITIONS: Final = ("new", "timeout", "recover", "expire")
#: The announced transitions of a node that was retired by hand, by its role.
_BY_HAND: Final = {
    "stays": [("new", False), ("expire", False)],
    "restored": [("new", False), ("expire", False)],
    "returns": [("new", False), ("expire", False), ("new", True)],
}


@dataclass(slots=True)
class RuledStream:
    """A stream's results: its messages, its expected transitions before the watermark, its stored announcements.

    `wanted` has the announced transitions, `events` the other announced events: event, node or "", unix ns, and a count.
    """

    rig: Rig
    stream: str
    seen: list[Seen]
    rows: dict[Row, dict[str, Any]]
    end_ns: int
    bodies: list[dict[str, Any]]
    wanted: list[Row] = field(default_factory=list)
    events: list[tuple[str, str, int, int]] = field(default_factory=list)

    @property
    def sightings(self) -> list[tuple[int, str]]:
        """Each message's stored time and node."""
        return [(message.stored_ns, by_field(message) or "") for message in self.seen]

    def differences(self) -> Iterator[Difference]:
        """Compare the table of transitions, and the announcements in JetStream: each exactly once, in order by node."""
        table = self.rig.rows(f"SELECT * FROM node_advisories WHERE stream = '{self.stream}'")
        recorded = {row["event_id"]: row for row in table}
        known = {advisory["event_id"]: row for row, advisory in self.rows.items()}
        for event_id in known.keys() - recorded.keys():
            yield Difference(Kind.TRANSITION_MISSING, f"node_advisories {self.stream}: {known[event_id]}")
        for event_id, row in recorded.items():
            if event_id not in known and not row["node"].startswith(BY_HAND):
                yield Difference(
                    Kind.TRANSITION_WRONG, f"node_advisories {self.stream}: {row}, which the reference does not have"
                )
        own = Counter(body["event_id"] for body in self.bodies if body["event"] in _TRANSITIONS and self.expects(body))
        wanted = {self.rows[row]["event_id"] for row in self.wanted}
        for event_id in own.keys() | wanted:
            if own[event_id] != (event_id in wanted):
                text = f"{self.stream} {known.get(event_id, event_id)}: announced {own[event_id]} times, of {event_id in wanted}"
                yield Difference(Kind.RULES_WRONG, f"{text}: {recorded.get(event_id)}")
        for event_id in known.keys() & recorded.keys():
            if (recorded[event_id]["announced_at"] is not None) != (event_id in wanted):
                yield Difference(Kind.RULES_WRONG, f"node_advisories {self.stream}: {recorded[event_id]}")
        yield from self._order()
        yield from self._other_events()

    def expects(self, body: dict[str, Any]) -> bool:
        """Return whether the reference knows the node's transitions: no operator retires it."""
        return not body["value"].startswith(BY_HAND)

    def _order(self) -> Iterator[Difference]:
        numbers: dict[str, list[int]] = defaultdict(list)
        for body in self.bodies:
            if body["event"] in _TRANSITIONS:
                numbers[body["value"]].append(body["transition"])
        for node, order in numbers.items():
            if order != sorted(order):
                yield Difference(Kind.RULES_WRONG, f"{self.stream} {node}: announced in the order {order}")

    def _other_events(self) -> Iterator[Difference]:
        sent = Counter(
            (
                body["event"],
                body.get("value", ""),
                parse_rfc3339_ns(body["event_time"]),
                body["transitions"] if "value" in body else body["silent"],
            )
            for body in self.bodies
            if body["event"] not in (*_TRANSITIONS, "observer_alive", "unretired")
        )
        for event in sent.keys() | set(self.events):
            if sent[event] != (event in self.events):
                yield Difference(
                    Kind.RULES_WRONG, f"{self.stream} {event}: {sent[event]} times, of {event in self.events}"
                )
        tables = self.rig.rows(
            "SELECT event, '' AS node, epoch_us(event_time) AS us, silent AS count FROM site_events"
            f" WHERE stream = '{self.stream}'"
            " UNION ALL SELECT event, node, epoch_us(event_time), transitions FROM node_events"
            f" WHERE stream = '{self.stream}' AND event <> 'unretired'"
        )
        published = sorted(tuple(row.values()) for row in tables)
        demanded = sorted((event, node, ns // 1000, count) for event, node, ns, count in self.events)
        if published != demanded:
            yield Difference(Kind.RULES_WRONG, f"{self.stream}: events {published}, demanded {demanded}")


def compare_ruled(rig: Rig, server: NatsServer, troupe: Troupe) -> tuple[dict[str, int], list[Difference]]:
    """Return how often each rule acted, and the differences of both streams; the runs have read them to their ends."""
    guarded, ruled = _read(rig, server, GUARDED), _read(rig, server, RULED)
    guard = _fold_guard(guarded)
    _fold_windows_and_flapping(ruled, list(windows_of(troupe)))
    differences = [*guarded.differences(), *ruled.differences(), *_by_hand(ruled, troupe)]
    suppressed = rig.row(f"SELECT count(suppressed_by) AS count FROM node_advisories WHERE stream = '{RULED}'")["count"]
    counts = {
        "outages": len(guard.outages),
        "held": len(guard.holding),
        "suppressed": suppressed,
        "flapping": sum(event == "flapping" for event, *_ in ruled.events),
        "by_hand": len(troupe.retired),
        "unretired": ruled.rig.row(f"SELECT count(undone_at) AS count FROM node_advisories WHERE stream = '{RULED}'")[
            "count"
        ],
    }
    return counts, differences


def _fold_guard(guarded: RuledStream) -> NaiveGuard:
    guard = NaiveGuard(PARTIAL, DARK, QUIET_SECONDS * SECOND, HOLD_SECONDS * SECOND, MIN_NODES)
    guard.run(guarded.sightings, list(guarded.rows), guarded.end_ns)
    guarded.wanted = naive_rules.announced_by_guard(
        list(guarded.rows), guard, lambda node: DURATIONS[class_of(GUARDED, node)][0] * SECOND, guarded.end_ns
    )
    guarded.events = [(event, "", at, silent) for event, at, _, silent, _ in guard.events]
    return guard


def _fold_windows_and_flapping(ruled: RuledStream, windows: Sequence[tuple[str, int, int]]) -> None:
    """Windows are about the nodes `work…`, which never have enough transitions for flapping."""
    in_windows = [row for row in ruled.rows if fnmatchcase(row[0], WINDOW_NODES)]
    others = [row for row in ruled.rows if row not in set(in_windows)]
    most, within = FLAPPING
    announced, reports = naive_rules.announced_with_flapping(others, most, within * SECOND, 0, ruled.end_ns)
    ruled.wanted = [*announced, *naive_rules.announced_in_windows(in_windows, windows, ruled.end_ns)]
    ruled.events = [(event, node, at, count) for node, event, at, count in reports]


def _by_hand(ruled: RuledStream, troupe: Troupe) -> Iterator[Difference]:
    """Compare the nodes that were retired by hand: one `expire` and one `unretired`, whatever was killed meanwhile, and
    their status.
    """
    undone = Counter(body["value"] for body in ruled.bodies if body["event"] == "unretired")
    if undone != Counter(node for node, role in troupe.retired.items() if role == "restored"):
        yield Difference(Kind.RULES_WRONG, f"unretired: announced {undone}")
    sent: dict[str, list[tuple[str, bool]]] = defaultdict(list)
    for body in ruled.bodies:
        if body["event"] in _TRANSITIONS and not ruled.expects(body):
            sent[body["value"]].append((body["event"], body["returned"]))
    states = {row["node"]: row for row in ruled.rig.rows(f"SELECT * FROM node_availability WHERE stream = '{RULED}'")}
    for node, role in troupe.retired.items():
        if sent[node] != _BY_HAND[role]:
            yield Difference(Kind.RULES_WRONG, f"{node}: announced {sent[node]}")
        status = states.get(node, {}).get("status")
        if status != ("retired" if role == "stays" else "up"):
            yield Difference(Kind.RULES_WRONG, f"{node}: is {status}")


def _read(rig: Rig, server: NatsServer, stream: str) -> RuledStream:
    """Read a stream's messages and announcements, without the nodes that are retired by hand."""
    now_us = rig.row(f"SELECT epoch_us(watermark) AS us FROM replication WHERE stream = '{stream}'")["us"]
    seen = [each for each in held_now(rig, stream, server) if not str(by_field(each)).startswith(BY_HAND)]

    def durations(message: Seen) -> tuple[int, int]:
        warning, interval = DURATIONS[class_of(stream, by_field(message) or "")]
        return interval * SECOND, warning * SECOND

    warning, interval = DURATIONS[stream]
    rules = Rules(SITE, SITE, stream, interval * SECOND, warning * SECOND, "sender", by_field, durations=durations)
    advisories = reference.expect(rules, seen, now_us * 1000).advisories
    rows = {(each["value"], each["event"], parse_rfc3339_ns(each["event_time"])): each for each in advisories}
    ordered = dict(sorted(rows.items(), key=lambda item: (item[0][2], item[0][0], item[1]["transition"])))
    bodies = [json.loads(message.payload) for message in rig.stored(RULINGS, server)]
    own = [body for body in bodies if body["stream"] == stream]
    return RuledStream(rig, stream, seen, ordered, now_us * 1000, own)
