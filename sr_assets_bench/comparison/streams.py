"""Comparison of a site's copies, counters, tables and advisories with the expectations of `reference`."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sr_assets_bench.comparison.source_rollback import Past
from sr_assets_bench.comparison.tables import (
    Difference,
    Kind,
    Results,
    compare_advisories,
    compare_nodes,
    compare_row,
    compare_snapshots,
    compare_transitions,
    read_epochs,
)
from sr_assets_tests import reference
from sr_assets_tests.reference import Expected, Rules, Seen

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from sr_assets.domain.messages import Message

_ORIGIN = re.compile(rb"\r\nChoria-SR-Source: \S+ (\d+) ")
_BEGINNING = re.compile(rb"\r\nNats-Msg-Id: \S+/\d+/\d+/r(\d+)\r\n")
_NO_PAST = Past()
_Key = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of one stream: the number of messages read, the expected results up to the committed watermark,
    and the differences.
    """

    messages: int
    expected: Expected
    differences: list[Difference]


def compare(
    results: Results,
    rules: Rules,
    *,
    prefix: str = "",
    target: str | None = None,
    feed: str | None = None,
    pasts: Mapping[str, Past] | None = None,
    until: int | None = None,
    whole_history: bool = True,
    gone: int = 0,
    recovered: bool = False,
) -> Comparison:
    """Compare all results of a stream: its `target` (the stream's name by default), its rows, and its advisories in
    `feed`.

    `pasts` are the histories of the streams whose source was rolled back. A growing stream is compared as far as it was
    read, at least up to sequence `until`. Unless `whole_history`, the home may lack rows of copies that another made.
    The source lost `gone` more messages before they were read. A `recovered` state lacks the transitions before it, so epochs
    and numbers are those of the feed, where each node's must rise.
    """
    past = (pasts or {}).get(rules.stream, _NO_PAST)
    counted = results.row(f"SELECT *, epoch_us(watermark) AS now_us FROM replication WHERE stream = '{rules.stream}'")
    held = held_now(results, rules.stream)
    now = held if until is None else [message for message in held if message.sequence < counted["next_sequence"]]
    seen = past.read(now)
    info = results.info(rules.stream)
    epochs = read_epochs(results, rules.stream)
    expected = reference.expect(rules, seen, counted["now_us"] * 1000, past.blind, past.known_ns)
    for advisory in expected.advisories:
        advisory["epoch"] = epochs.get(advisory["event_id"], max(epochs.values(), default=0))
    if recovered and feed is not None:
        told = {body["event_id"]: body for body in (json.loads(each.payload) for each in held_now(results, feed))}
        for advisory in expected.advisories:
            body = told.get(advisory["event_id"], advisory)
            advisory |= {key: body[key] for key in ("epoch", "transition")}
    copies = _Copies(rules, seen, expected, past, info.created_ns, prefix)
    differences = [
        *copies.compare(results.copies(target or rules.stream)),
        *_position(counted, len(held), until),
        *_lost(results, rules.stream, copies.lost, gone),
        *_counters(counted, copies, _late_sightings(rules, seen, past), gone),
        *compare_nodes(results, rules, expected),
        *compare_snapshots(
            results,
            rules,
            [message for message in seen if message.key in copies.made],
            lost=[message for message in seen if message.key in copies.lost],
            whole_history=whole_history,
        ),
        *compare_transitions(
            results,
            rules.stream,
            expected,
            min([*past.created, info.created_ns]),
            len(past.beginnings),
            published=feed is not None,
        ),
    ]
    if rules.inspect_field:
        differences += [Difference(Kind.BLIND_WRONG, text) for text in past.misjudged(now)]
    if feed is not None:
        sent = [*(pasts or {}).get(feed, _NO_PAST).held, held_now(results, feed)]
        differences += compare_advisories(rules.stream, sent, expected, feed)
    return Comparison(len(seen), expected, differences)


def held_now(results: Results, stream: str, server: Any = None) -> list[Seen]:
    """Return all messages of a stream on the source, or on another server."""
    return [Seen(m.sequence, m.stored_ns, m.subject, m.headers, m.payload) for m in results.stored(stream, server)]


class _Copies:
    """The copies of a stream: those `lost` with a rolled-back source, and those that must have been `made`.

    An interrupted batch may have made `besides` before they counted as read; they count as copied.
    """

    def __init__(
        self, rules: Rules, seen: list[Seen], expected: Expected, past: Past, created_ns: int, prefix: str
    ) -> None:
        self._past, self._rules, self._expected, self._prefix = past, rules, expected, prefix
        self.wanted = set(expected.copied)
        self.seen = len(seen)
        #: A batch of an untracked stream may have copied it and been interrupted before its source was rolled back.
        self._originals = defaultdict[_Key, list[tuple[int, Seen]]](list)
        for created, message in () if rules.inspect_field else past.beyond(created_ns):
            self._originals[message.key].append((created, message))
        for message in seen:
            self._originals[message.key] = [(past.created_ns(message.beginning, created_ns), message)]
        self.made: set[_Key] = set()
        self.lost: set[_Key] = set()
        self.besides = 0

    def compare(self, copies: Iterable[Message]) -> Iterator[Difference]:
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
            is_wanted = key in self.wanted
            if not is_wanted and (key in reasons or key not in self._originals):
                yield Difference(Kind.UNWANTED, f"{label}: {reasons.get(key, 'not in the source')}")
                continue
            self.besides += not is_wanted
            demanded = {
                (self._prefix + each.subject, reference.copied_headers(each, self._rules, created_ns), each.payload)
                for created_ns, each in self._originals[key]
            }
            if (copy.subject, copy.headers, copy.payload) not in demanded:
                yield Difference(Kind.ALTERED, f"{label}: {copy.subject} {copy.headers!r}")
        for key in sorted(self.wanted - times.keys()):
            if key[0] < len(self._past.beginnings):
                self.lost.add(key)
            else:
                yield Difference(Kind.LOST, f"{stream} {key}: {reasons[key]}")
        self.made = self.wanted - self.lost


def _lost(results: Results, stream: str, lost: set[_Key], gone: int) -> Iterator[Difference]:
    """Compare the rows of messages that were lost with their source before they were copied."""
    rows = results.rows(f"SELECT * FROM gaps WHERE stream = '{stream}'")
    reasons = {"lost", "deleted", "overtaken"} if gone else {"lost"}
    if {row["reason"] for row in rows} - reasons or sum(row["messages"] for row in rows) != len(lost) + gone:
        yield Difference(Kind.GAP_WRONG, f"gaps {stream}: {rows}, demanded {len(lost) + gone} lost")
    for _, sequence in sorted(lost):
        if not any(row["first_sequence"] <= sequence <= row["last_sequence"] for row in rows):
            yield Difference(Kind.GAP_WRONG, f"gaps {stream}: {sequence} is lost and in no row")


def _position(counted: Mapping[str, Any], held: int, until: int | None) -> Iterator[Difference]:
    """Compare how far a stream was read: to its end, or at least up to sequence `until`."""
    stream, position = counted["stream"], counted["next_sequence"]
    if until is None and counted["lag_messages"]:
        yield Difference(Kind.ROW_WRONG, f"replication {stream}: lag {counted['lag_messages']}")
    if position <= (held if until is None else until):
        yield Difference(Kind.LOST, f"{stream}: read until {position} of {held}")


def _late_sightings(rules: Rules, seen: list[Seen], past: Past) -> int:
    """Return the number of messages that were stored before the watermark, because they were read again."""
    if not rules.inspect_field:
        return 0
    return sum(message.beginning > 0 and message.stored_ns < past.known_ns[message.beginning - 1] for message in seen)


def _counters(counted: Mapping[str, Any], copies: _Copies, late: int, gone: int) -> Iterator[Difference]:
    seen, copied, lost = copies.seen + copies.besides, len(copies.wanted) + copies.besides, len(copies.lost)
    wanted = {
        "seen_messages": seen - lost,
        "copied_messages": copied - lost,
        "skipped_messages": seen - copied,
        "gap_messages": lost + gone,
        "late_sightings": late,
        **dict.fromkeys(("too_old_messages", "parked_messages", "queued_messages"), 0),
    }
    yield from compare_row(f"replication {counted['stream']}", counted, wanted)
