"""A simulated nats-server: its sessions speak the client protocol in bytes, its API works on `streams`.

It has no threads and no clock of its own, so the same server answers a simulated network and, in `tcp`, real sockets.
"""

from __future__ import annotations

import base64
import json
import math
import random
import re
from collections.abc import Callable
from typing import Any, Final

from sr_assets_tests.sim.streams import (
    Consumer,
    Pull,
    Refusal,
    Stored,
    Stream,
    encoded,
    full_consumer_config,
    matches,
    overlap,
    rfc3339,
)

VERSION: Final = "2.15.1"
MAX_PAYLOAD: Final = 1 << 20
MAX_PENDING: Final = 64 << 20
_API: Final = "$JS.API."
_SIZES: Final = re.compile(rb"(H?PUB) +(\S+)(?: +(\S+))?? +(?:(\d+) +)?(\d+)")
#: What the answers of some operations hold even if they are errors.
_EMPTY: Final = {"stream_purge": {"purged": 0}, "stream_info": {"total": 0, "offset": 0, "limit": 0}}
_PAGE, _NAMES_PAGE, _SUBJECTS_PAGE = 256, 1024, 100_000


class Session:
    """One client's connection. `emit` takes what the server sends, `closed` ends the connection."""

    def __init__(
        self, server: Server, emit: Callable[[bytes], None], closed: Callable[[], None] = lambda: None
    ) -> None:
        self._server, self._emit, self._closed = server, emit, closed
        self._buffer = b""
        self._options: dict[str, Any] = {"echo": True}
        #: Subscription id → pattern, received messages, and how many it may receive.
        self.subscriptions: dict[bytes, tuple[str, int, float]] = {}
        server.sessions[self] = None
        emit(b"INFO %b \r\n" % encoded(server.greeting()))

    def close(self) -> None:
        """End the session."""
        self._server.sessions.pop(self, None)

    @property
    def echo(self) -> bool:
        """Whether it receives what it publishes."""
        return bool(self._options.get("echo", True))

    def feed(self, data: bytes) -> None:
        """Process bytes of the client."""
        self._buffer += data
        while self in self._server.sessions:
            line, newline, rest = self._buffer.partition(b"\r\n")
            if not newline:
                return
            verb = line[:4].upper()
            if verb.startswith((b"PUB", b"HPUB")):
                if not self._publish(line, rest):
                    return
                continue
            self._buffer = rest
            self._control(line)

    def matching(self, subject: str) -> list[bytes]:
        """Return the subscriptions that receive a message, which counts towards their limits."""
        sids = [sid for sid, (pattern, _, _) in self.subscriptions.items() if matches(pattern, subject)]
        for sid in sids:
            pattern, received, most = self.subscriptions.pop(sid)
            if received + 1 < most:
                self.subscriptions[sid] = pattern, received + 1, most
        return sids

    def deliver(self, sid: bytes, subject: str, reply: str, headers: bytes, payload: bytes) -> None:
        """Send a message of a subscription."""
        head = b"%b %b " % (subject.encode(), sid) + (b"%b " % reply.encode() if reply else b"")
        if headers:
            self._emit(
                b"HMSG %b%d %d\r\n%b%b\r\n" % (head, len(headers), len(headers) + len(payload), headers, payload)
            )
        else:
            self._emit(b"MSG %b%d\r\n%b\r\n" % (head, len(payload), payload))

    def _publish(self, line: bytes, rest: bytes) -> bool:
        """Process a published message; return False if it has not arrived whole."""
        sizes = _SIZES.fullmatch(line)
        assert sizes, line
        verb, subject, reply, headers_bytes, total = sizes.groups()
        end = int(total)
        if end > MAX_PAYLOAD:
            self._emit(b"-ERR 'Maximum Payload Violation'\r\n")
            self.close()
            self._closed()
            return False
        if len(rest) < end + 2:
            return False
        self._buffer, cut = rest[end + 2 :], int(headers_bytes or 0) if verb == b"HPUB" else 0
        self._acknowledge()
        self._server.publish(self, subject.decode(), (reply or b"").decode(), rest[:cut], rest[cut:end])
        return True

    def _control(self, line: bytes) -> None:
        verb, _, rest = line.partition(b" ")
        fields = rest.split()
        match verb.upper():
            case b"CONNECT":
                self._options |= json.loads(rest)
            case b"PING":
                self._emit(b"PONG\r\n")
                return
            case b"SUB":
                self.subscriptions.setdefault(fields[-1], (fields[0].decode(), 0, math.inf))
            case b"UNSUB":
                subscription = self.subscriptions.pop(fields[0], None)
                if subscription and len(fields) > 1 and subscription[1] < int(fields[1]):
                    self.subscriptions[fields[0]] = *subscription[:2], int(fields[1])
            case b"PONG" | b"":
                return
            case _:
                raise AssertionError(line)
        self._acknowledge()

    def _acknowledge(self) -> None:
        if self._options.get("verbose"):
            self._emit(b"+OK\r\n")


class Server:
    """A server of one account. `clock` returns its time (unix ns); `call_at` calls a function at one of its times."""

    clustered = False

    def __init__(
        self,
        clock: Callable[[], int],
        call_at: Callable[[int, Callable[[], None]], None],
        name: str = "simulated",
        seed: int = 0,
    ) -> None:
        self.clock, self._call_at, self.name = clock, call_at, name
        self._chance = random.Random(seed)
        self.streams: dict[str, Stream] = {}
        self.sessions: dict[Session, None] = {}

    def greeting(self) -> dict[str, Any]:
        """Return the INFO of a new session."""
        identity = {"server_id": self.name.upper(), "server_name": self.name, "version": VERSION, "proto": 1}
        return {**identity, "headers": True, "max_payload": MAX_PAYLOAD, "jetstream": True}

    def stream(self, name: str) -> Stream:
        """Return a stream without what has expired; raises Refusal."""
        if name not in self.streams:
            raise Refusal(404, 10059, "stream not found")
        return self.streams[name].live(self.clock())

    # ---------------------------------------------------------------------------------------------------- publishing

    def publish(self, session: Session | None, subject: str, reply: str, headers: bytes, payload: bytes) -> None:
        """Store, answer or pass on a message."""
        if subject.startswith(_API):
            self._request(subject.removeprefix(_API), reply, payload)
            return
        stream = next((each for each in self.streams.values() if self._takes(each, subject)), None)
        passed_on = self._pass_on(session, subject, reply, headers, payload)
        if stream is None:
            if reply and not passed_on:
                status = b"NATS/1.0 503\r\nNats-Subject: %b\r\n\r\n" % subject.encode()
                self._pass_on(None, reply, "", status, b"")
            return
        stream.live(now_ns := self.clock())
        try:
            if reply.endswith(".$FI"):
                answers = stream.store_batched(reply, subject, headers, payload, now_ns)
            else:
                answers = [stream.store(subject, headers, payload, now_ns)]
        except Refusal as refusal:
            answers = [{"error": refusal.json(), "stream": stream.name, "seq": 0}]
        for changed in (stream, *self._mirrors(stream.name)):
            changed.follow(stream)
            self._serve_pulls(changed)
        for answer in answers if reply and not stream.config.get("no_ack") else ():
            self._pass_on(None, reply, "", b"", encoded(answer).replace(b'"duplicate":true', b'"duplicate": true'))

    def _mirrors(self, name: str) -> list[Stream]:
        return [each for each in self.streams.values() if (each.config.get("mirror") or {}).get("name") == name]

    @staticmethod
    def _takes(stream: Stream, subject: str) -> bool:
        return any(matches(pattern, subject) for pattern in stream.config.get("subjects") or ())

    def _pass_on(self, sender: Session | None, subject: str, reply: str, headers: bytes, payload: bytes) -> bool:
        """Deliver to the subscriptions; return whether there was one."""
        some = False
        for session in [*self.sessions]:
            if session is sender and not session.echo:
                continue
            for sid in session.matching(subject):
                session.deliver(sid, subject, reply, headers, payload)
                some = True
        return some

    # ------------------------------------------------------------------------------------------------------ the API

    def _request(self, operation: str, reply: str, payload: bytes) -> None:
        kind, _, rest = operation.partition(".")
        if kind == "DIRECT":
            self._direct(rest.removeprefix("GET."), reply, payload)
            return
        if operation.startswith("CONSUMER.MSG.NEXT."):
            self._pull(operation, reply, payload)
            return
        verb, subjects = rest, ""
        for name in ("MSG.GET", "MSG.DELETE", "CREATE", "UPDATE", "DELETE", "PURGE", "INFO", "NAMES", "LIST"):
            if rest == name or rest.startswith(f"{name}."):
                verb, subjects = name, rest[len(name) + 1 :]
        handler = getattr(self, f"_{kind}_{verb}".replace(".", "_").lower(), None)
        if handler is None:
            return
        label = f"{kind}_{verb}".replace(".", "_").lower() if kind != "INFO" else "account_info"
        answer: dict[str, Any] = {"type": f"io.nats.jetstream.api.v1.{label}_response", **_EMPTY.get(label, {})}
        try:
            body = json.loads(payload) if payload else {}
            answer |= handler(subjects, body)
        except Refusal as refusal:
            answer |= {"error": refusal.json()}
        except (ValueError, KeyError):
            answer |= {"error": Refusal(400, 10025, "invalid JSON").json()}
        self._pass_on(None, reply, "", b"", encoded(answer))
        if label == "consumer_create" and "error" not in answer:
            self._serve_pulls(self.streams[answer["stream_name"]])

    def _info_(self, _subjects: str, _body: dict[str, Any]) -> dict[str, Any]:
        consumers = sum(len(each.consumers) for each in self.streams.values())
        usage = {"memory": 0, "storage": sum(each.bytes for each in self.streams.values())}
        limits = dict.fromkeys(("max_memory", "max_storage", "max_streams", "max_consumers", "max_ack_pending"), -1)
        return {**usage, "streams": len(self.streams), "consumers": consumers, "limits": limits, "api": {"level": 5}}

    def _stream_create(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        if body.get("name") != name:
            raise Refusal(400, 10056, "stream name in subject does not match request")
        created = Stream(body, self.clock())
        if origin := self.streams.get((body.get("mirror") or {}).get("name", "")):
            created.config["mirror_direct"] = origin.config["allow_direct"]
        existing = self.streams.get(name)
        if existing is not None:
            if existing.config != created.config:
                raise Refusal(400, 10058, "stream name already in use with a different configuration")
            return {**existing.live(self.clock()).info(self.clock()), "did_create": True}
        self._refuse_overlap(created)
        if created.config["num_replicas"] > 1 and not self.clustered:
            raise Refusal(500, 10074, "replicas > 1 not supported in non-clustered mode")
        self.streams[name] = created
        answer = {**created.info(self.clock()), "did_create": True}
        if origin:
            created.follow(origin)
        return answer

    def _stream_update(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        if body.get("name") != name:
            raise Refusal(400, 10056, "stream name in subject does not match request")
        stream = self.stream(name)
        changed = Stream(body, stream.created_ns)
        stream.check_update(body)
        self._refuse_overlap(changed)
        stream.configure(body)
        return stream.live(self.clock()).info(self.clock())

    def _refuse_overlap(self, changed: Stream) -> None:
        for other in self.streams.values():
            patterns = (
                (own, theirs)
                for own in changed.config.get("subjects", ())
                for theirs in other.config.get("subjects", ())
            )
            if other.name != changed.name and any(overlap(*pair) for pair in patterns):
                raise Refusal(400, 10065, "subjects overlap with an existing stream")

    def _stream_info(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        stream, pattern = self.stream(name), body.get("subjects_filter")
        info = stream.info(self.clock())
        info["state"] = stream.state(deleted=body.get("deleted_details", False), subjects=pattern)
        if total := len(info["state"].get("subjects", {})):
            info |= {"total": total, "offset": body.get("offset", 0), "limit": _SUBJECTS_PAGE}
        return {**info, "cluster": {"leader": self.name}}

    def _stream_delete(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        if body:
            raise Refusal(400, 10038, "expected an empty request payload")
        for consumer in self.stream(name).consumers.values():
            self._release(consumer)
        del self.streams[name]
        return {"success": True}

    def _stream_purge(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        stream = self.stream(name)
        _refuse_sealed(stream)
        if stream.config["deny_purge"]:
            raise Refusal(500, 10110, "stream purge not permitted")
        return {"success": True, "purged": stream.purge(body)}

    def _stream_names(self, _name: str, body: dict[str, Any]) -> dict[str, Any]:
        wanted, offset = body.get("subject") or ">", body.get("offset", 0)
        names = [
            each.name
            for each in sorted(self.streams.values(), key=lambda stream: stream.name)
            if wanted == ">" or any(overlap(wanted, pattern) for pattern in each.config.get("subjects", ()))
        ]
        page = names[offset : offset + _NAMES_PAGE]
        return {"total": len(names), "offset": offset, "limit": _NAMES_PAGE, "streams": page or None}

    def _stream_list(self, _name: str, body: dict[str, Any]) -> dict[str, Any]:
        offset = body.get("offset", 0)
        infos = [self.stream(name).info(self.clock()) for name in sorted(self.streams)]
        return {"total": len(infos), "offset": offset, "limit": _PAGE, "streams": infos[offset : offset + _PAGE]}

    def _stream_msg_get(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        if not any(body.get(key) for key in ("seq", "last_by_subj", "next_by_subj")):
            raise Refusal(400, 10003, "bad request")
        message = self.stream(name).get(body)
        answer: dict[str, Any] = {"subject": message.subject, "seq": message.sequence}
        for key, value in (("hdrs", message.headers), ("data", message.payload)):
            if value:
                answer[key] = base64.b64encode(value).decode()
        return {"message": {**answer, "time": rfc3339(message.at_ns)}}

    def _stream_msg_delete(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        stream = self.stream(name)
        _refuse_sealed(stream)
        if stream.config["deny_delete"]:
            raise Refusal(500, 10057, "message delete not permitted")
        stream.remove(body["seq"])
        return {"success": True}

    # ---------------------------------------------------------------------------------------------------- direct gets

    def _direct(self, target: str, reply: str, payload: bytes) -> None:
        name, _, last_of = target.partition(".")
        if name not in self.streams or not self.stream(name).config["allow_direct"]:
            self._status(reply, "503", {"Nats-Subject": f"{_API}DIRECT.GET.{target}"})
            return
        mirrors = [each for each in self._mirrors(name) if each.config["mirror_direct"]]
        stream, request = self._chance.choice([self.stream(name), *mirrors]), json.loads(payload) if payload else {}
        request = {"last_by_subj": last_of} if last_of else request
        if not any(request.values()):
            self._status(reply, "408 Empty Request")
            return
        if not request.get("batch"):
            try:
                self._send_direct(stream, reply, stream.get(request))
            except Refusal:
                self._status(reply, "404 Message Not Found")
            return
        pattern, left_bytes = request.get("next_by_subj") or ">", request.get("max_bytes") or MAX_PENDING
        waiting = [*stream.from_sequence(request.get("seq", 0), pattern)]
        if not waiting:
            self._status(reply, "404 Message Not Found")
            return
        before = 0
        for count, message in enumerate(waiting[: request["batch"]], 1):
            pending = {"Nats-Num-Pending": len(waiting) - count, "Nats-Last-Sequence": before}
            self._send_direct(stream, reply, message, pending)
            before = message.sequence
            left_bytes -= len(message.subject) + len(message.headers) + len(message.payload)
            if left_bytes <= 0:
                break
        self._status(reply, "204 EOB", {"Nats-Num-Pending": len(waiting) - count, "Nats-Last-Sequence": before})

    def _send_direct(self, stream: Stream, reply: str, message: Stored, pending: dict[str, int] | None = None) -> None:
        lines = {
            "Nats-Stream": stream.name,
            "Nats-Subject": message.subject,
            "Nats-Sequence": message.sequence,
            "Nats-Time-Stamp": rfc3339(message.at_ns),
            **(pending or {}),
        }
        self._pass_on(None, reply, "", _with_lines(message.headers, lines), message.payload)

    def _status(self, reply: str, status: str, lines: dict[str, Any] | None = None) -> None:
        self._pass_on(None, reply, "", _with_lines(f"NATS/1.0 {status}\r\n\r\n".encode(), lines or {}), b"")

    # ------------------------------------------------------------------------------------------------------ consumers

    def _consumer_create(self, target: str, body: dict[str, Any]) -> dict[str, Any]:
        name, _, rest = target.partition(".")
        stream, config = self.stream(name), dict(body["config"])
        consumer_name = rest.partition(".")[0] or f"{self._chance.getrandbits(40):x}"
        if stream.config["retention"] != "limits" and config["ack_policy"] == "none":
            raise Refusal(400, 10084, "workqueue stream requires explicit ack")
        existing = stream.consumers.get(consumer_name)
        if existing is not None:
            if body.get("action") == "create" and existing.config != full_consumer_config(config):
                raise Refusal(400, 10148, "consumer already exists")
            return existing.info(self.clock())
        created = stream.consumers[consumer_name] = Consumer(stream, consumer_name, config, self.clock())
        return created.info(self.clock())

    def _consumer_info(self, target: str, _body: dict[str, Any]) -> dict[str, Any]:
        return self._consumer(target).info(self.clock())

    def _consumer_delete(self, target: str, _body: dict[str, Any]) -> dict[str, Any]:
        consumer = self._consumer(target)
        self._release(consumer)
        del consumer.stream.consumers[consumer.name]
        return {"success": True}

    def _consumer(self, target: str) -> Consumer:
        name, _, consumer = target.partition(".")
        stream = self.stream(name)
        if consumer not in stream.consumers:
            raise Refusal(404, 10014, "consumer not found")
        return stream.consumers[consumer]

    def _pull(self, operation: str, reply: str, payload: bytes) -> None:
        try:
            consumer = self._consumer(operation.removeprefix("CONSUMER.MSG.NEXT."))
        except Refusal:
            self._status(reply, "503", {"Nats-Subject": f"{_API}{operation}"})
            return
        request = json.loads(payload) if payload.startswith(b"{") else {"batch": int(payload or 1)}
        consumer.active_ns = now_ns = self.clock()
        expires_ns = request.get("expires") or 0
        limits = request.get("batch") or 1, request.get("max_bytes") or 0
        pull = Pull(reply, *limits, bool(request.get("no_wait")), now_ns + expires_ns if expires_ns else 0)
        if pull.no_wait:
            pending = consumer.pending()
            if not pending and not expires_ns:
                self._status(reply, "404 No Messages")
                return
            if 0 < pending < sum(each.messages for each in consumer.waiting):
                self._status(reply, "408 Requests Pending")
                return
        consumer.waiting.append(pull)
        self._serve_pulls(consumer.stream)
        if expires_ns and pull in consumer.waiting:
            self._call_at(pull.expires_ns, lambda: self._time_out(consumer, pull))

    def _time_out(self, consumer: Consumer, pull: Pull) -> None:
        if pull in consumer.waiting:
            self._end_pull(consumer, pull, "408 Request Timeout")

    def _end_pull(self, consumer: Consumer, pull: Pull, status: str) -> None:
        consumer.waiting.remove(pull)
        left = {"Nats-Pending-Messages": pull.messages, "Nats-Pending-Bytes": pull.bytes}
        self._status(pull.reply, status, left)

    def _release(self, consumer: Consumer) -> None:
        """Tell the requests of a consumer that it is being deleted."""
        for pull in consumer.waiting:
            self._status(pull.reply, "409 Consumer Deleted")

    def _serve_pulls(self, stream: Stream) -> None:
        for consumer in stream.consumers.values():
            if to := consumer.config.get("deliver_subject"):
                consumer.waiting = [Pull(to, 1 << 60, 0, no_wait=False, expires_ns=0)]
            while consumer.waiting and self._deliver_next(consumer):
                pass
            for pull in [*consumer.waiting]:
                if pull.no_wait and (pull.delivered or not pull.expires_ns):
                    consumer.waiting.remove(pull)
                    self._status(pull.reply, "404 No Messages")

    def _deliver_next(self, consumer: Consumer) -> bool:
        """Deliver the next message to the request that waits longest; return whether there was one of both."""
        messages = consumer.stream.from_sequence(consumer.next, consumer.pattern)
        message = next(messages, None)
        if message is None:
            return False
        pending = sum(1 for _ in messages)
        place = f"{message.sequence}.{consumer.delivered + 1}.{message.at_ns}.{pending}"
        ack = f"$JS.ACK.{consumer.stream.name}.{consumer.name}.1.{place}"
        headers, payload = message.headers, message.payload
        if consumer.config.get("headers_only"):
            headers, payload = _with_lines(headers, {"Nats-Msg-Size": len(payload)}), b""
        size = len(message.subject) + len(ack) + len(headers) + len(payload)
        while consumer.waiting and 0 < consumer.waiting[0].bytes < size:
            self._end_pull(consumer, consumer.waiting[0], "409 Message Size Exceeds MaxBytes")
        if not consumer.waiting:
            return False
        pull = consumer.waiting.pop(0)
        if pull.bytes:
            pull.bytes -= size
            if not pull.bytes:
                pull.messages = 1
        pull.messages, pull.delivered = pull.messages - 1, pull.delivered + 1
        if pull.messages:
            consumer.waiting.append(pull)
        consumer.next, consumer.delivered = message.sequence + 1, consumer.delivered + 1
        for session in [*self.sessions]:
            for sid in session.matching(pull.reply):
                session.deliver(sid, message.subject, ack, headers, payload)
        if not pull.messages and pull.bytes:
            self._status(
                pull.reply, "409 Batch Completed", {"Nats-Pending-Messages": 0, "Nats-Pending-Bytes": pull.bytes}
            )
        return True


def _refuse_sealed(stream: Stream) -> None:
    if stream.config["sealed"]:
        raise Refusal(400, 10109, "invalid operation on sealed stream")


def _with_lines(headers: bytes, lines: dict[str, Any]) -> bytes:
    """Return a header block with more lines at its end."""
    before = (headers or b"NATS/1.0\r\n\r\n")[:-2]
    return before + "".join(f"{name}: {value}\r\n" for name, value in lines.items()).encode() + b"\r\n"
