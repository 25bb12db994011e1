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
from dataclasses import dataclass
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
#: What an update cannot turn off again, with the server's words.
_LASTING: Final = {
    "sealed": "stream configuration update can not unseal a sealed stream",
    "deny_delete": "stream configuration update can not cancel deny message deletes",
    "deny_purge": "stream configuration update can not cancel deny purge",
    "allow_msg_ttl": "message TTL status can not be disabled",
}
_CONSUMER_DEFAULTS: Final[dict[str, Any]] = {
    "deliver_policy": "all",
    "ack_policy": "none",
    "max_deliver": -1,
    "replay_policy": "instant",
    "max_waiting": 512,
    "num_replicas": 0,
}
#: Of a consumer with acknowledgements.
_ACK_DEFAULTS: Final = {"ack_wait": 30 * SECOND_NS, "max_ack_pending": 1000}
#: The reply subject of a message in a fast-ingest batch: id, flow, number, operation.
_BATCHED: Final = re.compile(r".*\.([^.]+)\.(\d+)\.fail\.(\d+)\.([013])\.\$FI")
_START, _COMMIT_WITHOUT_STORING = "0", "3"
_BATCH_NS: Final = 10 * SECOND_NS
_BATCH_ACKS: Final = 500
_NO_NUMBER: Final = (1 << 64) - 1
_TTL: Final = re.compile(r"\+?((\d+(\.\d*)?)(h|ms|m|s))+")
_ZERO_TIME: Final = "0001-01-01T00:00:00Z"


class Refusal(Exception):  # noqa: N818  a response, not a failure
    """The server's error: HTTP-like code, `err_code`, description."""

    def __init__(self, code: int, err_code: int, description: str) -> None:
        super().__init__(description)
        self.code, self.err_code, self.description = code, err_code, description

    def json(self) -> dict[str, Any]:
        """Return the error as the server sends it."""
        return {"code": self.code, "err_code": self.err_code, "description": self.description}


_SUBJECT_FULL: Final = 503, 10077, "maximum messages per subject exceeded"


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


def header(headers: bytes, name: str) -> str:
    """Return the first value of a header, empty if there is none; the server compares names with case."""
    value = re.search(rb"\r\n%b: *(.*?)(\r\n|\Z)" % name.encode(), headers, re.DOTALL)
    return value[1].decode(errors="replace") if value else ""


def number(text: str) -> int:
    """Return a number as the server reads it: another text is one that no sequence has."""
    return int(text) if text.isascii() and text.isdigit() else _NO_NUMBER


def matches(pattern: str, subject: str) -> bool:
    """Return whether a subject, which may be a pattern, is covered by a pattern."""
    wanted, tokens = pattern.split("."), subject.split(".")
    for place, token in enumerate(wanted):
        if token == ">":
            return len(tokens) > place
        if place >= len(tokens) or tokens[place] == ">" or (token != "*" and token != tokens[place]):
            return False
    return len(tokens) == len(wanted)


def overlap(pattern: str, other: str) -> bool:
    """Return whether two patterns have a common subject."""
    for left, right in itertools.zip_longest(pattern.split("."), other.split(".")):
        if left is None or right is None:
            return False
        if ">" in (left, right):
            return True
        if "*" not in (left, right) and left != right:
            return False
    return True


def ttl_seconds(text: str) -> int | None:
    """Return the whole seconds of a TTL such as `1.5s` or `90`, 0 without one, -1 for `never`, or None if it is invalid."""
    if text.lower() in {"", "never"}:
        return -1 if text else 0
    if _TTL.fullmatch(text):
        units = {"h": 3600, "m": 60, "s": 1, "ms": 0.001}
        seconds = sum(float(count) * units[unit] for count, unit in re.findall(r"([\d.]+)(h|ms|m|s)", text))
        return int(seconds) if seconds >= 1 else None
    return number(text) if text != "0" and number(text) != _NO_NUMBER else None


@dataclass(eq=False)
class Pull:
    """A request for messages; `bytes` is 0 without a limit, `expires_ns` without an end."""

    reply: str
    messages: int
    bytes: int
    no_wait: bool
    expires_ns: int
    delivered: int = 0


class Consumer:
    """A pull consumer whose messages are never acknowledged."""

    def __init__(self, stream: Stream, name: str, config: dict[str, Any], now_ns: int) -> None:
        self.stream, self.name, self.config = stream, name, full_consumer_config(config)
        self.created_ns = self.active_ns = now_ns
        #: The first sequence that it may deliver next.
        self.next = max(config.get("opt_start_seq", 1), stream.state()["first_seq"])
        if config.get("deliver_policy") == "new":
            self.next = stream.last + 1
        self.started = self.next - 1
        self.delivered = 0
        self.waiting: list[Pull] = []

    @property
    def pattern(self) -> str:
        """The subjects that it delivers."""
        return str(self.config.get("filter_subject") or ">")

    def pending(self) -> int:
        """Return the number of messages that it has not delivered."""
        return sum(1 for _ in self.stream.from_sequence(self.next, self.pattern))

    def info(self, now_ns: int) -> dict[str, Any]:
        """Return its info."""
        at = {"consumer_seq": self.delivered, "stream_seq": self.next - 1}
        return {
            "stream_name": self.stream.name,
            "name": self.name,
            "created": rfc3339(self.created_ns),
            "config": self.config,
            "delivered": at,
            "ack_floor": at,
            "num_ack_pending": 0,
            "num_redelivered": 0,
            "num_waiting": len(self.waiting),
            "num_pending": self.pending(),
            "ts": rfc3339(now_ns),
        }


def full_consumer_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return a consumer's configuration with the server's defaults, without what is empty."""
    acks = {} if config.get("ack_policy", "none") == "none" else _ACK_DEFAULTS
    given = {key: value for key, value in config.items() if value}
    return {**_CONSUMER_DEFAULTS, **acks, **given}


@dataclass
class Batch:
    """A fast-ingest batch: every so many messages are acknowledged, at most `limit`."""

    limit: int
    every: int
    active_ns: int
    #: Of the last message, and of the last acknowledgement.
    number: int = 0
    acknowledged: int = 0
    #: The sequence of the last stored message.
    last: int = 0

    def acknowledge(self, batches: int) -> list[dict[str, Any]]:
        """Return the acknowledgement that is due, if any; `batches`: their number in the stream."""
        if self.number < self.acknowledged + self.every:
            return []
        self.acknowledged = self.number - (self.number - self.acknowledged) % self.every
        limit = min(self.limit, max(1, _BATCH_ACKS // batches))
        self.every = min(self.every * 2, limit) if self.every < limit else max(self.every // 2, limit)
        return [{"type": "ack", "seq": self.acknowledged, "msgs": self.every}]


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
        self.account_full = False
        #: Message id → sequence and time, oldest first.
        self.ids: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self.consumers: dict[str, Consumer] = {}
        self.batches: dict[str, Batch] = {}
        self.by_subject: Counter[str] = Counter()
        self.configure(config)

    def configure(self, config: dict[str, Any]) -> None:
        """Take over a configuration."""
        given = {key: value for key, value in config.items() if value or key in _DEFAULTS}
        subjects = {} if config.get("mirror") else {"subjects": [self.name]}
        full = {"name": self.name, **subjects, **_DEFAULTS, **given}
        for key in _UNLIMITED:
            full[key] = full[key] or -1
        if full.get("mirror"):
            full["duplicate_window"] = config.get("duplicate_window", 0)
        elif 0 < full["max_age"] < full["duplicate_window"]:
            full["duplicate_window"] = full["max_age"]
        if not full["duplicate_window"]:
            del full["duplicate_window"]
        if full.get("subject_delete_marker_ttl"):
            full["allow_msg_ttl"] = full["allow_rollup_hdrs"] = True
        if full["sealed"]:
            full |= {
                "max_age": 0,
                "discard": "new",
                "deny_delete": True,
                "deny_purge": True,
                "allow_rollup_hdrs": False,
            }
        full.pop("metadata", None)
        self.config = full
        for subject in [*self.by_subject]:
            self._limit(subject)

    def check_update(self, config: dict[str, Any]) -> None:
        """Raise Refusal if a configuration cannot replace this stream's."""
        changed = _DEFAULTS | config
        if changed["storage"] != self.config["storage"]:
            raise Refusal(500, 10052, "stream configuration update can not change storage type")
        for key, refusal in _LASTING.items():
            if self.config[key] and not changed[key]:
                raise Refusal(500, 10052, refusal)

    # ------------------------------------------------------------------------------------------------------- reading

    def live(self, now_ns: int) -> Stream:
        """Remove what has expired, and return self."""
        max_age, window = self.config["max_age"], self.config.get("duplicate_window", 0)
        while max_age and self.order and self.messages[self.order[0]].at_ns + max_age <= now_ns:
            self._expire(self.messages[self.order[0]], now_ns)
        if self.config["allow_msg_ttl"]:
            for message in [each for each in self.messages.values() if 0 < each.expires_ns <= now_ns]:
                self._expire(message, now_ns)
        while self.ids and next(iter(self.ids.values()))[1] + window <= now_ns:
            self.ids.popitem(last=False)
        self.batches = {key: each for key, each in self.batches.items() if each.active_ns + _BATCH_NS > now_ns}
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
            raise Refusal(404, 10037, "no message found")
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
        elif deleted and not self.first and self.config["storage"] == "file":
            # The server counts a sequence 0 of a stream that never held a message.
            state |= {"num_deleted": 1, "deleted": [0]}
        state["consumer_count"] = len(self.consumers)
        return state

    def info(self, now_ns: int) -> dict[str, Any]:
        """Return what every response about a stream holds."""
        times = {"created": rfc3339(self.created_ns), "ts": rfc3339(now_ns)}
        origin = {"name": self.config["mirror"]["name"], "lag": 0, "active": 0} if self.config.get("mirror") else {}
        return {"config": self.config, **times, "state": self.state(), **({"mirror": origin} if origin else {})}

    # ------------------------------------------------------------------------------------------------------- changing

    def store(
        self, subject: str, headers: bytes, payload: bytes, now_ns: int, *, batched: bool = False
    ) -> dict[str, Any]:
        """Store a message; return the acknowledgement, raises Refusal."""
        config, message_id = self.config, header(headers, "Nats-Msg-Id")
        self._check_size(headers, payload)
        self._expect(subject, headers)
        if message_id in self.ids:
            return {"stream": self.name, "seq": self.ids[message_id][0], "duplicate": True}
        if (text := header(headers, "Nats-Expected-Last-Msg-Id")) and text != self.last_id:
            raise Refusal(400, 10070, f"wrong last msg ID: {self.last_id}")
        rollup = self._rollup(headers)
        if len(headers) >= 1 << 16:
            raise Refusal(400, 10097, "header size exceeds maximum allowed of 64k")
        ttl = ttl_seconds(header(headers, "Nats-TTL"))
        if ttl is None:
            raise Refusal(400, 10165, "invalid per-message TTL")
        least = config.get("subject_delete_marker_ttl", 0) // SECOND_NS
        if 0 < ttl < least and config["max_msgs_per_subject"] != 1:
            ttl = least
            headers = re.sub(rb"\r\nNats-TTL:[^\r]*", b"", headers)[:-2] + b"Nats-TTL: %d\r\n\r\n" % ttl
        expires_ns = now_ns + ttl * SECOND_NS if ttl > 0 else 0
        message = Stored(self.last + 1, subject, headers, payload, max(now_ns, self.last_ns), expires_ns)
        self._check_room(message, rollup, batched=batched)
        self._append(message)
        if message_id:
            self.ids[message_id] = message.sequence, now_ns
        self.last_id = message_id
        self._limit(subject)
        if rollup:
            for old in [each for each in self.order if each < message.sequence]:
                if rollup == "all" or self.messages[old].subject == subject:
                    self.remove(old)
        return {"stream": self.name, "seq": message.sequence}

    def store_batched(
        self, reply: str, subject: str, headers: bytes, payload: bytes, now_ns: int
    ) -> list[dict[str, Any]]:
        """Store a message of a fast-ingest batch; return the responses, raises Refusal."""
        self._check_size(headers, payload)
        if not self.config.get("allow_batched"):
            raise Refusal(400, 10205, "batch publish is disabled")
        place = _BATCHED.fullmatch(reply)
        if place is None or not int(place[3]) or (place[4] == _START) != (place[3] == "1"):
            raise Refusal(400, 10206, "batch publish pattern is invalid")
        key, number_in_batch = place[1], int(place[3])
        if number_in_batch > 1 and key not in self.batches:
            raise Refusal(400, 10208, "batch publish ID unknown")
        limit = int(place[2]) or 10
        new = Batch(limit, 1 if self.batches else min(limit, _BATCH_ACKS), now_ns)
        batch = self.batches.setdefault(key, new)
        batch.active_ns, expected = now_ns, batch.number + 1
        if number_in_batch != expected or place[4] == _COMMIT_WITHOUT_STORING:
            gap = {"type": "gap", "last_seq": expected, "seq": number_in_batch}
            return [gap, self._commit(key)] if number_in_batch != expected else [self._commit(key)]
        responses: list[dict[str, Any]] = [{"type": "ack", "seq": 0, "msgs": batch.every}] if expected == 1 else []
        try:
            answer = self.store(subject, headers, payload, now_ns, batched=True)
        except Refusal as refusal:
            if expected > 1:
                return [{"type": "err", "seq": expected, "error": refusal.json()}, self._commit(key)]
            del self.batches[key]
            return [*responses, {"error": refusal.json(), "stream": self.name, "seq": 0}]
        batch.number = expected
        batch.last = batch.last if "duplicate" in answer else answer["seq"]
        return responses + batch.acknowledge(len(self.batches))

    def _commit(self, key: str) -> dict[str, Any]:
        """End a batch."""
        batch = self.batches.pop(key)
        return {"stream": self.name, "seq": batch.last, "batch": key, "count": batch.number}

    def _check_size(self, headers: bytes, payload: bytes) -> None:
        if self.config["sealed"]:
            raise Refusal(400, 10109, "invalid operation on sealed stream")
        if 0 <= self.config["max_msg_size"] < len(headers) + len(payload):
            raise Refusal(400, 10054, "message size exceeds maximum allowed")

    def _expect(self, subject: str, headers: bytes) -> None:
        if header(headers, "Nats-Expected-Stream") not in {"", self.name}:
            raise Refusal(400, 10060, "expected stream does not match")
        if ttl_seconds(header(headers, "Nats-TTL")) and not self.config["allow_msg_ttl"]:
            raise Refusal(400, 10166, "per-message TTL is disabled")
        if text := header(headers, "Nats-Expected-Last-Subject-Sequence"):
            last = self.last_of(header(headers, "Nats-Expected-Last-Subject-Sequence-Subject") or subject)
            if number(text) != (last.sequence if last else 0):
                raise Refusal(400, 10071, f"wrong last sequence: {last.sequence if last else 0}")
        if (text := header(headers, "Nats-Expected-Last-Sequence")) and number(text) != self.last:
            raise Refusal(400, 10071, f"wrong last sequence: {self.last}")

    def _rollup(self, headers: bytes) -> str:
        rollup = header(headers, "Nats-Rollup").lower()
        if rollup and (self.config["deny_purge"] or not self.config["allow_rollup_hdrs"]):
            raise Refusal(500, 10111, "rollup not permitted")
        if rollup not in {"", "sub", "all"}:
            raise Refusal(500, 10111, f'rollup value invalid: "{rollup}"')
        return rollup

    def _check_room(self, message: Stored, rollup: str, *, batched: bool) -> None:
        """Raise Refusal for a message over the limits; one of a batch does not make room for itself."""
        config, held = self.config, self.by_subject.get(message.subject, 0)
        if self.account_full:
            raise Refusal(400, 10002, "resource limits exceeded for account")
        if config["discard"] != "new":
            return
        at_limit = 0 < config["max_msgs_per_subject"] <= held
        replaced = next(self.from_sequence(0, message.subject)) if at_limit and not batched else None
        subject_full = at_limit and config.get("discard_new_per_subject") and not rollup
        if subject_full and not batched:
            raise Refusal(*_SUBJECT_FULL)
        if 0 < config["max_msgs"] <= len(self.order) and not replaced:
            raise Refusal(503, 10077, "maximum messages exceeded")
        storage, size = config["storage"], message.bytes_in(config["storage"])
        if 0 < config["max_bytes"] < self.bytes + size and (not replaced or replaced.bytes_in(storage) < size):
            raise Refusal(503, 10077, "maximum bytes exceeded")
        if subject_full:
            raise Refusal(*_SUBJECT_FULL)

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
            headers = re.sub(rb"\r\nNats-Expected-[^\r]*", b"", message.headers)
            self._append(message._replace(headers=b"" if headers == b"NATS/1.0\r\n\r\n" else headers))
            self._limit(message.subject)

    def _limit(self, subject: str) -> None:
        config = self.config
        while 0 < config["max_msgs_per_subject"] < self.by_subject[subject]:
            self.remove(next(self.from_sequence(0, subject)).sequence)
        while config["discard"] == "old" and (
            0 < config["max_msgs"] < len(self.order) or 0 < config["max_bytes"] < self.bytes
        ):
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
        pattern, before, keep = request.get("filter") or ">", request.get("seq") or 0, request.get("keep") or 0
        doomed = [each.sequence for each in self.from_sequence(0, pattern) if not before or each.sequence < before]
        doomed = doomed[: max(0, len(doomed) - keep)]
        for sequence in doomed:
            self.remove(sequence)
        if pattern == ">" and before > self.last + 1:
            self.last = before - 1
        if not self.order and pattern == ">" and not keep:
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
        self.batches.clear()
        return lost


def encoded(value: dict[str, Any]) -> bytes:
    """Return JSON as Go writes it."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    for special in "&<>":
        text = text.replace(special, f"\\u{ord(special):04x}")
    return text.encode()
