"""The rules of sampling and availability a second time, as plainly as possible, to compare the platform with.

A whole history at once, sender by sender, gap by gap: no state that is carried on, no batches, no sweeps. Only the
standard library, and nothing of `sr_assets`: what both get wrong is not seen.

Blind spans are half-open pairs of unix ns, in any order, which may overlap.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, field
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

    @property
    def tolerance_ns(self) -> int:
        """What an interval may lack."""
        return SECOND if self.interval_ns >= 10 * SECOND else self.interval_ns // 10

    def splay_ns(self, sender: str) -> int:
        """What an interval may lack for this sender besides."""
        u = int.from_bytes(blake2b(sender.encode()).digest()[:8], "big")
        return self.interval_ns * u // (10 * 2**64)


@dataclass
class Expected:
    """What must have come of a history: the reason for each message, the transitions, the nodes."""

    reasons: dict[int, str] = field(default_factory=dict)
    advisories: list[dict[str, Any]] = field(default_factory=list)
    nodes: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def copied(self) -> list[int]:
        """The sequences of the copies, in order."""
        return sorted(sequence for sequence, reason in self.reasons.items() if reason != "sampled")


def by_field(message: Seen) -> str | None:
    """Return the sender in a payload's field `sender`, when it is text."""
    try:
        document = json.loads(message.payload)
    except ValueError:
        return None
    sender = document.get("sender") if isinstance(document, dict) else None
    return sender if isinstance(sender, str) else None


def blind_spans(history: Sequence[Seen], gone: Sequence[int]) -> list[tuple[int, int]]:
    """Return the spans that sequences which were gone before anybody read them blind, but for those behind the last message."""
    spans = []
    for sequence in gone:
        before = [message.stored_ns for message in history if message.sequence < sequence]
        after = [message.stored_ns for message in history if message.sequence > sequence]
        if before and after:
            spans.append((max(before), after[0]))
    return spans


def covered(spans: Sequence[tuple[int, int]], since: int, until: int) -> int:
    """Return how much of the time from `since` to `until` lies in a span: counted between all the times that there are."""
    if until <= since:
        return 0
    times = sorted({since, until, *(min(max(at, since), until) for span in spans for at in span)})
    pieces = pairwise(times)
    return sum(end - start for start, end in pieces if any(first <= start < last for first, last in spans))


def reached(spans: Sequence[tuple[int, int]], seen: int, limit: int) -> int:
    """Return the last instant at which the silence since `seen` is not longer than `limit`."""
    ends = [last for _, last in spans if last > seen]
    starts = [first for first, _ in spans if first > seen]
    instants = [seen, *starts, *ends]
    instants += [at + limit - (at - seen - covered(spans, seen, at)) for at in instants]
    return max(at for at in instants if at >= seen and at - seen - covered(spans, seen, at) <= limit)


def expect(rules: Rules, history: Sequence[Seen], now_ns: int, blind: Sequence[tuple[int, int]] = ()) -> Expected:
    """Say what must have come of a history once time has passed until the watermark `now_ns`."""
    expected = Expected()
    by_sender: dict[str, list[Seen]] = {}
    for message in history:
        sender = rules.sender(message)
        if sender:
            by_sender.setdefault(sender, []).append(message)
        else:
            expected.reasons[message.sequence] = "no_sender"
    for sender, messages in by_sender.items():
        _one_sender(rules, sender, messages, now_ns, blind, expected)
    return expected


def _one_sender(
    rules: Rules,
    sender: str,
    messages: list[Seen],
    now_ns: int,
    blind: Sequence[tuple[int, int]],
    expected: Expected,
) -> None:
    interval, warning = rules.interval_ns, rules.warning_ns
    number = 0
    retired = 0

    def advise(event: str, at: int, seen: int, age: int, sequence: int, previous: str | None, **more: Any) -> None:
        nonlocal number
        number += 1
        expected.advisories.append(_advisory(rules, sender, event, at, seen, age, sequence, previous, number, **more))

    def silence(last: int, sequence: int, until: int) -> str:
        status, silent = "up", until - last - covered(blind, last, until)
        if silent > warning:
            at = reached(blind, last, warning)
            advise("timeout", at, last, at - last, sequence, "up")
            status = "timeout"
        if silent > interval:
            at = reached(blind, last, interval)
            advise("expire", at, last, at - last, sequence, "timeout")
            status = "retired"
        return status

    first: int | None = None
    at: int | None = None
    copied_at: int | None = None
    copied_bytes = since = sequence = 0
    for message in messages:
        t = message.stored_ns if at is None else max(message.stored_ns, at)
        if at is None:
            advise("new", t, t, 0, message.sequence, None)
            first = since = t
        else:
            match silence(at, sequence, t):
                case "timeout":
                    advise("recover", t, at, t - at, message.sequence, "timeout", outage=t - at)
                    since = t
                case "retired":
                    advise("new", t, t, 0, message.sequence, "retired", returned=True, outage=t - at)
                    since, copied_at, retired = t, None, retired + 1
        size = len(message.payload)
        if copied_at is None:
            reason = "new"
        elif rules.forced(message):
            reason = "forced"
        elif (copied_bytes == 0 and size > 0) or 0 < rules.trigger_bytes <= abs(size - copied_bytes):
            reason = "size"
        elif t - copied_at >= interval - rules.tolerance_ns - rules.splay_ns(sender):
            reason = "interval"
        else:
            reason = "sampled"
        expected.reasons[message.sequence] = reason
        if reason != "sampled":
            copied_at, copied_bytes = t, size
        at, sequence = t, message.sequence
    assert at is not None
    status = silence(at, sequence, now_ns)
    if status == "timeout":
        since = reached(blind, at, warning)
    if status == "retired":
        since, copied_at, retired = reached(blind, at, interval), None, retired + 1
    expected.nodes[sender] = {
        "status": status,
        "status_since": clock(since),
        "first_seen": clock(first),
        "last_seen": clock(at),
        "last_sequence": sequence,
        "last_copied": clock(copied_at),
        "copied_bytes": None if copied_at is None else copied_bytes,
        "times_retired": retired,
    }


def clock(ns: int | None) -> datetime | None:
    """Return a time as the tables have it, cut to microseconds."""
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
    """Return an advisory's JSON without `late`, which depends on when a run looks."""
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
    own = [f"Choria-SR-Source: {origin}".encode(), f"Nats-Msg-Id: {unique}".encode()]
    return b"\r\n".join([b"NATS/1.0", *kept, *own, b"", b""])
