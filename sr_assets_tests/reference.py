"""A second, minimal implementation of the rules of sampling and availability, for comparison with the platform.

It processes a whole history at once, sender by sender and gap by gap, without saved state, batches or sweeps. It uses
only the standard library and nothing of `sr_assets`; it cannot detect an error that both implementations share. Blind
spans are half-open pairs of unix ns in any order, and may overlap.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SECOND = 10**9
STAYING = (
    ("nats-expected-", "nats-batch-", "nats-schedule", "nats-trace-"),
    {
        *("nats-msg-id", "nats-rollup", "nats-ttl", "nats-incr", "nats-stream-source", "nats-required-api-level"),
        *("nats-stream", "nats-subject", "nats-sequence", "nats-time-stamp", "nats-num-pending", "nats-last-sequence"),
    },
)


@dataclass(frozen=True)
class Seen:
    """One message of the source."""

    sequence: int
    stored_ns: int
    subject: str
    headers: bytes
    payload: bytes
    beginning: int = 0
    """The number of restarts after rollbacks of the source when it was read."""

    @property
    def key(self) -> tuple[int, int]:
        """The key of a message, unique among the messages read: a rolled-back source gives the same sequences to other
        messages.
        """
        return self.beginning, self.sequence


@dataclass(frozen=True)
class Act:
    """What an operator did to a sender before the sequence `first` was read, at a watermark: retire or restore it."""

    first: int
    watermark_ns: int
    sender: str
    retires: bool


@dataclass(frozen=True)
class Rules:
    """One tracked entry of the configuration."""

    replicator: str
    name: str
    stream: str
    interval_ns: int
    warning_ns: int
    inspect_field: str
    sender: Callable[[Seen], str | None]
    forced: Callable[[Seen], bool] = lambda _: False
    trigger_bytes: int = 0
    epoch_ns: int = 0
    #: The interval and the warning of a message's class, if the entry has classes.
    durations: Callable[[Seen], tuple[int, int]] | None = None
    #: The rules of later configurations, each with the first sequence that it read and the watermark before it.
    later: tuple[tuple[int, int, Rules], ...] = ()
    #: What operators did, in this order.
    acts: tuple[Act, ...] = ()

    def when(self, message: Seen) -> Rules:
        """Return the rules of the configuration that read a message."""
        return next((rules for first, _, rules in reversed(self.later) if first <= message.sequence), self)

    def of(self, message: Seen) -> Rules:
        """Return the rules of a message's class."""
        if self.durations is None:
            return self
        interval_ns, warning_ns = self.durations(message)
        return replace(self, interval_ns=interval_ns, warning_ns=warning_ns)

    @property
    def tolerance_ns(self) -> int:
        """The limits of an interval."""
        return SECOND if self.interval_ns >= 10 * SECOND else self.interval_ns // 10

    def splay_ns(self, sender: str) -> int:
        """Return the limits of an interval for this sender."""
        u = int.from_bytes(blake2b(sender.encode()).digest()[:8], "big")
        return self.interval_ns * u // (10 * 2**64)


@dataclass
class Expected:
    """The expected results of a history: the reason for each message, the transitions, the nodes."""

    reasons: dict[tuple[int, int], str] = field(default_factory=dict)
    advisories: list[dict[str, Any]] = field(default_factory=list)
    nodes: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def copied(self) -> list[tuple[int, int]]:
        """The keys of the copied messages, in order."""
        return sorted(key for key, reason in self.reasons.items() if reason != "sampled")


def by_field(message: Seen) -> str | None:
    """Return the sender in a payload's field `sender`, if it is text."""
    try:
        document = json.loads(message.payload)
    except ValueError:
        return None
    sender = document.get("sender") if isinstance(document, dict) else None
    return sender if isinstance(sender, str) else None


def blind_spans(history: Sequence[Seen], gone: Sequence[int], end_ns: int) -> list[tuple[int, int]]:
    """Return the blind spans of sequences that were lost before they were read; `end_ns` is the last watermark."""
    spans = []
    for sequence in gone:
        before = [message.stored_ns for message in history if message.sequence < sequence]
        after = [message.stored_ns for message in history if message.sequence > sequence]
        if before:
            spans.append((max(before), next((at for at in after if at > max(before)), end_ns)))
    return spans


def covered(spans: Sequence[tuple[int, int]], since: int, until: int) -> int:
    """Return how much of the time from `since` to `until` is inside a span, summed over the intervals between all
    boundaries.
    """
    if until <= since:
        return 0
    times = sorted({since, until, *(min(max(at, since), until) for span in spans for at in span)})
    pieces = pairwise(times)
    return sum(end - start for start, end in pieces if any(first <= start < last for first, last in spans))


def reached(spans: Sequence[tuple[int, int]], seen: int, limit: int) -> int:
    """Return the last time at which the silence since `seen` is not longer than `limit`."""
    ends = [last for _, last in spans if last > seen]
    starts = [first for first, _ in spans if first > seen]
    instants = [seen, *starts, *ends]
    instants += [at + limit - (at - seen - covered(spans, seen, at)) for at in instants]
    return max(at for at in instants if at >= seen and at - seen - covered(spans, seen, at) <= limit)


def expect(
    rules: Rules,
    history: Sequence[Seen],
    now_ns: int,
    blind: Sequence[tuple[int, int]] = (),
    known_ns: Sequence[int] = (),
) -> Expected:
    """Return the expected results of a history at the watermark `now_ns`.

    A rolled-back source is read again from its start: `known_ns` are the watermarks at the rollbacks. Messages stored
    before them do not end a silence. Rules without a field track no senders, and forget those before.
    """
    expected = Expected()
    by_sender: dict[str, list[Seen]] = {}
    for message in history:
        sender = rules.when(message).sender(message)
        if sender:
            by_sender.setdefault(sender, []).append(message)
        else:
            expected.reasons[message.key] = "no_sender"
    plain = [index for index, (_, _, each) in enumerate(rules.later) if not each.inspect_field]
    first, number = 0, 0
    for index in [*plain, len(rules.later)]:
        end, at_ns, _ = rules.later[index] if index < len(rules.later) else (None, now_ns, rules)
        era = replace(rules, later=rules.later[:index])
        expected.nodes.clear()
        for sender, messages in by_sender.items():
            if read := [each for each in messages if first <= each.sequence and (end is None or each.sequence < end)]:
                _Sender(era, sender, blind, expected, number).live(read, at_ns, known_ns)
        first, number = end or 0, max([number, *(advisory["transition"] for advisory in expected.advisories)])
    return expected


@dataclass
class _Sender:
    """The history of one sender, gap by gap."""

    rules: Rules
    name: str
    blind: Sequence[tuple[int, int]]
    expected: Expected
    number: int = 0
    retired: int = 0
    status: str | None = None
    since: int = 0
    at: int = 0
    sequence: int = 0
    copied_at: int | None = None
    copied_bytes: int = 0

    def live(self, messages: list[Seen], now_ns: int, known_ns: Sequence[int]) -> None:
        first = messages[0].stored_ns
        later: list[tuple[int, int, Rules | Act]] = [
            each for each in self.rules.later if each[0] > messages[0].sequence
        ]
        later += [(act.first, act.watermark_ns, act) for act in self.rules.acts if act.sender == self.name]
        later.sort(key=lambda each: each[:2])
        beginning, self.rules = 0, self.rules.when(messages[0])
        for message in messages:
            while later and message.sequence >= later[0][0]:
                self.change(*later.pop(0)[1:])
            while beginning < message.beginning:
                self.fall_silent(known_ns[beginning])
                beginning += 1
            known = known_ns[beginning - 1] if beginning else None
            if self.status not in (None, "up") and known is not None and message.stored_ns <= known:
                self.expected.reasons[message.key] = "sampled"
            else:
                self.expected.reasons[message.key] = self.report(message)
        for _, watermark_ns, change in later:
            self.change(watermark_ns, change)
        self.fall_silent(now_ns)
        self.expected.nodes[self.name] = {
            "status": self.status,
            "status_since": clock(self.since),
            "first_seen": clock(first),
            "last_seen": clock(self.at),
            "last_sequence": self.sequence,
            "last_copied": clock(self.copied_at),
            "copied_bytes": None if self.copied_at is None else self.copied_bytes,
            "times_retired": self.retired,
        }

    def change(self, watermark_ns: int, change: Rules | Act) -> None:
        """Follow a new configuration from a watermark on, or an operator."""
        self.fall_silent(watermark_ns)
        if isinstance(change, Rules):
            self.rules = change
        elif change.retires and self.status != "retired":
            self.since = max(watermark_ns, self.at + 1, self.since + 1)
            self.advise("expire", self.since, self.at, self.since - self.at, self.sequence, self.status)
            self.status, self.copied_at, self.retired = "retired", None, self.retired + 1
        elif not change.retires and self.status == "retired":
            silent = watermark_ns - self.at - covered(self.blind, self.at, watermark_ns)
            if silent <= self.rules.interval_ns:
                self.status = "up" if silent <= self.rules.warning_ns else "timeout"
                self.since = max(watermark_ns, self.since + 1)

    def report(self, message: Seen) -> str:
        """Process a message; return the reason for its copy, or `sampled`."""
        t = message.stored_ns if self.status is None else max(message.stored_ns, self.at, self.since)
        if self.status is None:
            self.advise("new", t, t, 0, message.sequence, None)
            self.status, self.since = "up", t
        else:
            self.fall_silent(t)
            outage = t - self.at
            if self.status == "timeout":
                self.advise("recover", t, self.at, outage, message.sequence, "timeout", outage=outage)
            elif self.status == "retired":
                self.advise("new", t, t, 0, message.sequence, "retired", returned=True, outage=outage)
            if self.status != "up":
                self.status, self.since = "up", t
        self.at, self.sequence = t, message.sequence
        self.rules = self.rules.of(message)
        size, interval = len(message.payload), self.rules.interval_ns
        if self.copied_at is None:
            reason = "new"
        elif self.rules.forced(message):
            reason = "forced"
        elif (self.copied_bytes == 0 and size > 0) or 0 < self.rules.trigger_bytes <= abs(size - self.copied_bytes):
            reason = "size"
        elif t - self.copied_at >= interval - self.rules.tolerance_ns - self.rules.splay_ns(self.name):
            reason = "interval"
        else:
            return "sampled"
        self.copied_at, self.copied_bytes = t, size
        return reason

    def fall_silent(self, until: int) -> None:
        """Advance the time."""
        silent = until - self.at - covered(self.blind, self.at, until)
        if self.status == "up" and silent > self.rules.warning_ns:
            self.since = reached(self.blind, self.at, self.rules.warning_ns)
            self.advise("timeout", self.since, self.at, self.since - self.at, self.sequence, "up")
            self.status = "timeout"
        if self.status == "timeout" and silent > self.rules.interval_ns:
            self.since = max(self.since, reached(self.blind, self.at, self.rules.interval_ns))
            self.advise("expire", self.since, self.at, self.since - self.at, self.sequence, "timeout")
            self.status, self.copied_at, self.retired = "retired", None, self.retired + 1

    def advise(
        self, event: str, at: int, seen: int, age: int, sequence: int, previous: str | None, **more: Any
    ) -> None:
        self.number += 1
        advisory = _advisory(self.rules, self.name, event, at, seen, age, sequence, previous, self.number, **more)
        self.expected.advisories.append(advisory)


def clock(ns: int | None) -> datetime | None:
    """Return a time as in the tables, truncated to microseconds."""
    return None if ns is None else datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=ns // 1000)


def _advisory(
    rules: Rules,
    sender: str,
    event: str,
    at: int,
    seen: int,
    age: int,
    sequence: int,
    previous: str | None,
    number: int,
    *,
    returned: bool = False,
    outage: int | None = None,
) -> dict[str, Any]:
    """Return an advisory's JSON without `late`, which depends on the time of the run."""
    key = [rules.replicator, rules.name, rules.stream, sender, event, at]
    whole, fraction = divmod(at, SECOND)
    return {
        "protocol": "io.choria.sr.v2.age_advisory",
        "event_id": str(uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(key, separators=(",", ":"), ensure_ascii=False))),
        "inspect_field": rules.inspect_field,
        "age": age // SECOND,
        "seen": seen // SECOND,
        "replicator": rules.replicator,
        "timestamp": whole,
        "event": event,
        "value": sender,
        "stream": rules.stream,
        "name": rules.name,
        "event_time": f"{datetime.fromtimestamp(whole, UTC):%Y-%m-%dT%H:%M:%S}.{fraction:09d}Z",
        "sequence": sequence,
        "transition": number,
        "epoch": rules.epoch_ns,
        "previous": previous,
        "returned": returned,
        "age_seconds": round(age / SECOND, 3),
        "outage_seconds": None if outage is None else round(outage / SECOND, 3),
    }


def copied_headers(message: Seen, rules: Rules, created_ns: int) -> bytes:
    """Return the header block of a message's copy."""
    prefixes, names = STAYING
    kept = []
    for line in message.headers.split(b"\r\n")[1:]:
        name = line.partition(b":")[0].decode("latin-1").lower()
        if line and not name.startswith(prefixes) and name not in names:
            kept.append(line)
    origin = f"{rules.stream} {message.sequence} {rules.replicator} {rules.name} {message.stored_ns // 1_000_000}"
    unique = f"{rules.replicator}/{rules.name}/{rules.stream}/{created_ns}/{message.sequence}"
    unique += f"/r{message.beginning}" if message.beginning else ""
    own = [f"Choria-SR-Source: {origin}".encode(), f"Nats-Msg-Id: {unique}".encode()]
    return b"\r\n".join([b"NATS/1.0", *kept, *own, b"", b""])
