"""The streams of a simulated nats-server: messages, limits, duplicates, consumers. Time is an argument of every call.

A message expires with the first call after its time, as seen from outside a server's own sweep.
"""

from __future__ import annotations

import bisect
import itertools
import json
import re
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

SECOND_NS: Final = 10**9
#: What the server adds to a stream's configuration, in its order; a create may replace them.
_DEFAULTS: Final[dict[str, Any]] = {
    "retention": "limits",
    "max_consumers": -1,
    "max_msgs": -1,
    "max_bytes": -1,
    "max_age": 0,
    "max_msgs_per_subject": -1,
    "max_msg_size": -1,
    "discard": "old",
    "storage": "file",
    "num_replicas": 1,
    "duplicate_window": 120 * SECOND_NS,
    "compression": "none",
    "allow_direct": False,
    "mirror_direct": False,
    "sealed": False,
    "deny_delete": False,
    "deny_purge": False,
    "allow_rollup_hdrs": False,
    "consumer_limits": {},
    "allow_msg_ttl": False,
}
_UNLIMITED: Final = ("max_msgs", "max_bytes", "max_msgs_per_subject", "max_msg_size", "max_consumers")
_HEADER: Final = re.compile(rb"([^:\r\n]+):[ \t]*([^\r\n]*)\r\n")
_TTL: Final = re.compile(r"(?:(\d+(?:\.\d+)?)([hms]))+")
_ZERO_TIME: Final = "0001-01-01T00:00:00Z"


class Refusal(Exception):  # noqa: N818  a response, not a failure
    """The server's error: HTTP-like code, `err_code`, description."""

    def __init__(self, code: int, err_code: int, description: str) -> None:
        super().__init__(description)
        self.code, self.err_code, self.description = code, err_code, description

    def json(self) -> dict[str, Any]:
        """Return the error as the server sends it."""
        return {"code": self.code, "err_code": self.err_code, "description": self.description}


NOT_FOUND: Final = Refusal(404, 10037, "no message found")


class Stored(NamedTuple):
    """A stored message; `expires_ns` by its own TTL, 0 without."""

    sequence: int
    subject: str
    headers: bytes
    payload: bytes
    at_ns: int
    expires_ns: int = 0

    def bytes_in(self, storage: str) -> int:
        """Return the size that the server counts."""
        size = len(self.subject) + len(self.headers) + len(self.payload)
        return size + 16 if storage == "memory" else size + (34 if self.headers else 30)


def rfc3339(ns: int) -> str:
    """Return a time as the server writes it: without trailing zeros of the fraction."""
    if ns == 0:
        return _ZERO_TIME
    second, fraction = divmod(ns, SECOND_NS)
    text = f"{datetime.fromtimestamp(second, UTC):%Y-%m-%dT%H:%M:%S}"
    return text + (f".{fraction:09d}".rstrip("0") if fraction else "") + "Z"


def header(headers: bytes, name: str) -> str | None:
    """Return the first value of a header; the server compares names without case."""
    wanted = name.lower().encode()
    for key, value in _HEADER.findall(headers):
        if key.lower() == wanted:
            return str(value.strip(), "utf-8", "replace")
    return None


def matches(pattern: str, subject: str) -> bool:
    """Return whether a subject, which may be a pattern, is covered by a pattern."""
    wanted, tokens = pattern.split("."), subject.split(".")
    for place, token in enumerate(wanted):
        if token == ">":
            return len(tokens) > place
        if place >= len(tokens) or tokens[place] == ">" or (token != "*" and token != tokens[place]):
            return False
    return len(tokens) == len(wanted)


def overlap(one: str, other: str) -> bool:
    """Return whether two patterns have a common subject."""
    for left, right in itertools.zip_longest(one.split("."), other.split(".")):
        if left is None or right is None:
            return False
        if ">" in (left, right):
            return True
        if "*" not in (left, right) and left != right:
            return False
    return True


def seconds_of(text: str) -> float | None:
    """Return the seconds of a TTL such as `1.5s` or `90`, or None if it is none."""
    if text.isdigit():
        return float(text)
    if _TTL.fullmatch(text):
        return sum(
            float(count) * {"h": 3600, "m": 60, "s": 1}[unit] for count, unit in re.findall(r"([\d.]+)([hms])", text)
        )
    return None


@dataclass
class Consumer:
    """A pull consumer without acknowledgements."""

    stream: Stream
    name: str
    config: dict[str, Any]
    created_ns: int
    active_ns: int
    next: int
    delivered: int = 0
    #: Requests that wait for messages: reply, messages, bytes (0: no limit), deadline.
    waiting: list[list[Any]] = field(default_factory=list)

    @property
    def pattern(self) -> str:
        """The subjects that it delivers."""
        return str(self.config.get("filter_subject") or ">")

    def pending(self) -> int:
        """Return the number of messages that it has not delivered."""
        return sum(1 for _ in self.stream.from_sequence(self.next, self.pattern))

    def info(self, now_ns: int) -> dict[str, Any]:
        """Return its info."""
        config = {"name": self.name} | self.config
        at = {"consumer_seq": self.delivered, "stream_seq": self.next - 1 if self.delivered else 0}
        return {
            "stream_name": self.stream.name,
            "name": self.name,
            "created": rfc3339(self.created_ns),
            "config": config,
            "delivered": at,
            "ack_floor": at,
            "num_ack_pending": 0,
            "num_redelivered": 0,
            "num_waiting": len(self.waiting),
            "num_pending": self.pending(),
            "ts": rfc3339(now_ns),
        }


class Stream:
    """One stream."""

    def __init__(self, config: dict[str, Any], now_ns: int) -> None:
        self.name = str(config["name"])
        self.created_ns = now_ns
        self.messages: dict[int, Stored] = {}
        self.order: list[int] = []
        self.first, self.last, self.last_ns = 0, 0, 0
        self.bytes = 0
        self.last_id = ""
        #: Message id → sequence and time, oldest first.
        self.ids: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self.consumers: dict[str, Consumer] = {}
        self.by_subject: Counter[str] = Counter()
        self.configure(config)

    def configure(self, config: dict[str, Any]) -> None:
        """Take over a configuration."""
        subjects = {} if config.get("mirror") else {"subjects": [self.name]}
        full = {"name": self.name, **subjects, **_DEFAULTS, **config}
        for key in _UNLIMITED:
            full[key] = full[key] or -1
        if 0 < full["max_age"] < full["duplicate_window"]:
            full["duplicate_window"] = full["max_age"]
        if full.get("subject_delete_marker_ttl"):
            full["allow_rollup_hdrs"] = True
        full.pop("metadata", None)
        self.config = full

    # ------------------------------------------------------------------------------------------------------- reading

    def live(self, now_ns: int) -> Stream:
        """Remove what has expired, and return self."""
        max_age, window = self.config["max_age"], self.config["duplicate_window"]
        while max_age and self.order and self.messages[self.order[0]].at_ns + max_age <= now_ns:
            self._expire(self.messages[self.order[0]], now_ns)
        if self.config["allow_msg_ttl"]:
            for message in [each for each in self.messages.values() if 0 < each.expires_ns <= now_ns]:
                self._expire(message, now_ns)
        while self.ids and next(iter(self.ids.values()))[1] + window <= now_ns:
            self.ids.popitem(last=False)
        for consumer in [*self.consumers.values()]:
            idle_ns = consumer.config.get("inactive_threshold") or 0
            if idle_ns and not consumer.waiting and consumer.active_ns + idle_ns <= now_ns:
                del self.consumers[consumer.name]
        return self

    def from_sequence(self, sequence: int, pattern: str = ">") -> Iterator[Stored]:
        """Yield the messages of a pattern from a sequence on."""
        for each in self.order[bisect.bisect_left(self.order, sequence) :]:
            if pattern == ">" or matches(pattern, self.messages[each].subject):
                yield self.messages[each]

    def last_of(self, pattern: str) -> Stored | None:
        """Return the last message of a pattern."""
        return next(
            (self.messages[at] for at in reversed(self.order) if matches(pattern, self.messages[at].subject)), None
        )

    def get(self, request: dict[str, Any]) -> Stored:
        """Return the message that a get request names; raises Refusal."""
        if pattern := request.get("last_by_subj"):
            message = self.last_of(pattern)
        elif pattern := request.get("next_by_subj"):
            message = next(self.from_sequence(request.get("seq", 0), pattern), None)
        else:
            message = self.messages.get(request.get("seq", 0))
        if message is None:
            raise NOT_FOUND
        return message

    def state(self, *, deleted: bool = False, subjects: str | None = None) -> dict[str, Any]:
        """Return the state of a stream info."""
        first_ns = self.messages[self.order[0]].at_ns if self.order else 0
        state: dict[str, Any] = {
            "messages": len(self.order),
            "bytes": self.bytes,
            "first_seq": self.order[0] if self.order else self.first,
            "first_ts": rfc3339(first_ns),
            "last_seq": self.last,
            "last_ts": rfc3339(self.last_ns),
        }
        if self.by_subject:
            state["num_subjects"] = len(self.by_subject)
        if subjects is not None and (
            held := {name: n for name, n in self.by_subject.items() if matches(subjects, name)}
        ):
            state["subjects"] = held
        if self.order and (
            missing := self.order[-1] - self.order[0] + 1 - len(self.order) + self.last - self.order[-1]
        ):
            state["num_deleted"] = missing
            if deleted:
                state["deleted"] = [at for at in range(self.order[0], self.last + 1) if at not in self.messages]
        state["consumer_count"] = len(self.consumers)
        return state

    def info(self, now_ns: int) -> dict[str, Any]:
        """Return what every response about a stream holds."""
        return {
            "config": self.config,
            "created": rfc3339(self.created_ns),
            "state": self.state(),
            "ts": rfc3339(now_ns),
        }

    # ------------------------------------------------------------------------------------------------------- changing

    def store(self, subject: str, headers: bytes, payload: bytes, now_ns: int) -> dict[str, Any]:
        """Store a message; return the acknowledgement, raises Refusal."""
        config = self.config
        self._expect(subject, headers)
        message_id = header(headers, "Nats-Msg-Id")
        if message_id and message_id in self.ids:
            return {"stream": self.name, "seq": self.ids[message_id][0], "duplicate": True}
        if config["sealed"]:
            raise Refusal(400, 10109, "invalid operation on sealed stream")
        if 0 <= config["max_msg_size"] < len(headers) + len(payload):
            raise Refusal(400, 10054, "message size exceeds maximum allowed")
        if len(headers) >= 1 << 16:
            raise Refusal(400, 10097, "header size exceeds maximum allowed of 64k")
        expires_ns = self._expiry(headers, now_ns)
        rollup = header(headers, "Nats-Rollup")
        if rollup and not config["allow_rollup_hdrs"]:
            raise Refusal(400, 10111, "rollup not permitted")
        message = Stored(self.last + 1, subject, headers, payload, max(now_ns, self.last_ns), expires_ns)
        self._check_room(message)
        self._append(message)
        if message_id:
            self.ids[message_id] = message.sequence, now_ns
        self.last_id = message_id or ""
        if rollup:
            for old in [each for each in self.order if each < message.sequence]:
                if rollup == "all" or self.messages[old].subject == subject:
                    self.remove(old)
        self._limit(subject)
        return {"stream": self.name, "seq": message.sequence}

    def _expect(self, subject: str, headers: bytes) -> None:
        if not headers:
            return
        if header(headers, "Nats-Expected-Stream") not in {None, "", self.name}:
            raise Refusal(400, 10060, "expected stream does not match")
        if (text := header(headers, "Nats-Expected-Last-Sequence")) and int(text) != self.last:
            raise Refusal(400, 10071, f"wrong last sequence: {self.last}")
        if text := header(headers, "Nats-Expected-Last-Subject-Sequence"):
            last = self.last_of(header(headers, "Nats-Expected-Last-Subject-Sequence-Subject") or subject)
            if int(text) != (last.sequence if last else 0):
                raise Refusal(400, 10071, f"wrong last sequence: {last.sequence if last else 0}")
        if (text := header(headers, "Nats-Expected-Last-Msg-Id")) is not None and text != self.last_id:
            raise Refusal(400, 10070, f"wrong last msg ID: {self.last_id}")

    def _expiry(self, headers: bytes, now_ns: int) -> int:
        text = header(headers, "Nats-TTL")
        if not text or text == "never":
            return 0
        if not self.config["allow_msg_ttl"]:
            raise Refusal(400, 10166, "per-message TTL is disabled")
        seconds = seconds_of(text)
        if seconds is None or seconds < 1:
            raise Refusal(400, 10165, "invalid per-message TTL")
        return now_ns + int(seconds * SECOND_NS)

    def _check_room(self, message: Stored) -> None:
        config = self.config
        if config["discard"] != "new":
            return
        per_subject = config["max_msgs_per_subject"]
        replaces = 0 < per_subject <= self.by_subject[message.subject]
        if not self.by_subject[message.subject]:
            del self.by_subject[message.subject]
        if 0 < config["max_msgs"] <= len(self.order) and not replaces:
            raise Refusal(503, 10077, "maximum messages exceeded")
        if 0 < config["max_bytes"] < self.bytes + message.bytes_in(config["storage"]) and not replaces:
            raise Refusal(503, 10077, "maximum bytes exceeded")
        if replaces and config.get("discard_new_per_subject"):
            raise Refusal(503, 10077, "maximum messages per subject exceeded")

    def _append(self, message: Stored) -> None:
        self.messages[message.sequence] = message
        self.order.append(message.sequence)
        self.by_subject[message.subject] += 1
        self.bytes += message.bytes_in(self.config["storage"])
        self.last, self.last_ns = message.sequence, message.at_ns
        self.first = self.order[0]

    def follow(self, origin: Stream) -> None:
        """Take over what a mirror's origin has stored since; do nothing for the origin itself."""
        for message in [*origin.from_sequence(self.last + 1)] if origin is not self else ():
            self._append(message)
            self._limit(message.subject)

    def _limit(self, subject: str) -> None:
        config = self.config
        while 0 < config["max_msgs_per_subject"] < self.by_subject[subject]:
            self.remove(next(self.from_sequence(0, subject)).sequence)
        while (0 < config["max_msgs"] < len(self.order)) or (0 < config["max_bytes"] < self.bytes):
            self.remove(self.order[0])

    def _expire(self, message: Stored, now_ns: int) -> None:
        self.remove(message.sequence)
        ttl_ns = self.config.get("subject_delete_marker_ttl")
        if ttl_ns and message.subject not in self.by_subject and not header(message.headers, "Nats-Marker-Reason"):
            headers = b"NATS/1.0\r\nNats-Marker-Reason: MaxAge\r\nNats-TTL: %ds\r\n\r\n" % (ttl_ns // SECOND_NS)
            self._append(Stored(self.last + 1, message.subject, headers, b"", now_ns, now_ns + ttl_ns))

    def remove(self, sequence: int) -> None:
        """Delete a message; raises Refusal if there is none."""
        message = self.messages.pop(sequence, None)
        if message is None:
            raise Refusal(400, 10043, f"sequence {sequence} not found")
        del self.order[bisect.bisect_left(self.order, sequence)]
        self.by_subject[message.subject] -= 1
        if not self.by_subject[message.subject]:
            del self.by_subject[message.subject]
        self.bytes -= message.bytes_in(self.config["storage"])
        self.first = self.order[0] if self.order else self.last + 1

    def purge(self, request: dict[str, Any]) -> int:
        """Delete messages; return their number."""
        pattern, before, keep = (
            request.get("filter") or ">",
            request.get("seq") or self.last + 1,
            request.get("keep") or 0,
        )
        doomed = [each.sequence for each in self.from_sequence(0, pattern) if each.sequence < before]
        if keep:
            doomed = doomed[: max(0, sum(1 for _ in self.from_sequence(0, pattern)) - keep)]
        for sequence in doomed:
            self.remove(sequence)
        if not self.order:
            self.first = self.last + 1
        return len(doomed)

    def roll_back(self, last: int) -> list[Stored]:
        """Lose the messages after a sequence, as a restored copy or a failed disk does; return them."""
        lost = [self.messages[at] for at in self.order if at > last]
        for message in lost:
            self.remove(message.sequence)
        self.last = min(self.last, last)
        self.first = self.order[0] if self.order else self.last + 1 if self.last else 0
        self.last_ns = self.messages[self.order[-1]].at_ns if self.order else 0
        self.ids = OrderedDict((key, at) for key, at in self.ids.items() if at[0] <= last)
        return lost


def encoded(value: dict[str, Any]) -> bytes:
    """Return JSON as Go writes it."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    for special in "&<>":
        text = text.replace(special, f"\\u{ord(special):04x}")
    return text.encode()
