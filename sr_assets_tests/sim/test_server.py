"""The simulated server answers random requests as a real nats-server does.

An answer counts without what differs between two real servers: names and versions of servers, times, cluster, metadata.
"""

from __future__ import annotations

import itertools
import json
import operator
import re
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sr_assets.adapters.wire.frames import Frame, FrameParser, encode_pub
from sr_assets_tests.adapters.wire.rig import ODD_HEADERS
from sr_assets_tests.examples import one_in
from sr_assets_tests.servers import NatsServer
from sr_assets_tests.sim.server import Server, Session

pytestmark = pytest.mark.process
_numbers = itertools.count(1)
#: What the names of an example begin with, in its requests; replaced by a text of its own.
ROOT: Final = "~"
#: Longer than any answer takes.
PATIENCE_SECONDS: Final = 10.0
#: Keys of JSON whose values differ between two servers, or that the platform does not read (a consumer's positions). A time
#: counts only as one that exists or does not.
_OWN: Final = frozenset({"ts", "created", "time", "metadata", "cluster", "active", "delivered", "ack_floor"})
_TIMES: Final = re.compile(rb"Nats-Time-Stamp: [^\r]*Z\r\n")
_ACK: Final = re.compile(rb"(\$JS\.ACK\.\S+\.)\d{19}(\.\d+)")


#: Requests that only read, and may be repeated.
LATER: Final = re.compile(r"\.INFO|\.GET\.")


class Request(NamedTuple):
    """A published message with a reply subject: a message of a stream, or a request of the API."""

    subject: str
    body: Any = b""
    headers: bytes = b""
    #: The end of the reply subject, after the inbox; None: no reply is wanted.
    reply: str | None = ""

    def encoded(self, root: str, reply: str) -> bytes:
        """Return the client's bytes."""
        body = self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()
        headers, body = (text.replace(ROOT.encode(), root.encode()) for text in (self.headers, body))
        inbox = b"" if self.reply is None else (reply + self.reply).encode()
        return encode_pub(self.subject.replace(ROOT, root), inbox, headers, body)


class Real:
    """A session of the real server."""

    def __init__(self, server: NatsServer) -> None:
        host, _, port = server.address.partition(":")
        self._socket = socket.create_connection((host, int(port)))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.settimeout(PATIENCE_SECONDS)
        self._parser, self.frames = FrameParser(), list[Frame]()

    def ask(self, data: bytes, count: int) -> list[Frame]:
        """Send bytes and return the answers, of which `count` are awaited."""
        self._socket.sendall(data + b"PING\r\n")
        answers = list[Frame]()
        ponged = False
        while not ponged or len(answers) < count:
            try:
                received = self._parser.feed(self._socket.recv(1 << 20))
            except TimeoutError:
                break
            ponged = ponged or any(frame.verb == b"PONG" for frame in received)
            answers += [frame for frame in received if frame.verb not in (b"PING", b"PONG", b"INFO")]
        return answers

    def close(self) -> None:
        self._socket.close()


class Model:
    """A session of the simulated server; its time passes only for what waits."""

    def __init__(self) -> None:
        self.now_ns = time.time_ns()
        self.timers: list[tuple[int, Callable[[], None]]] = []
        self.server = Server(lambda: self.now_ns, lambda at_ns, call: self.timers.append((at_ns, call)))
        self._parser, self._frames = FrameParser(), list[Frame]()
        self._session = Session(self.server, self._emit)

    def ask(self, data: bytes) -> list[Frame]:
        """Return the answers to bytes, with those of requests that expire soon."""
        self.now_ns += 1_000_000
        self._session.feed(data)
        for at_ns, call in [*self.timers]:
            if at_ns < self.now_ns + SOON_NS * 2:
                self.timers.remove((at_ns, call))
                call()
        answers, self._frames = self._frames, []
        return answers

    def _emit(self, data: bytes) -> None:
        self._frames += [frame for frame in self._parser.feed(data) if frame.verb != b"INFO"]


def comparable(frame: Frame) -> tuple[Any, ...]:
    """Return a frame without what differs between two servers."""
    payload: Any = frame.payload
    if payload.startswith(b'{"type"'):
        payload = _comparable_json(json.loads(payload))
    headers = _TIMES.sub(b"Nats-Time-Stamp: Z\r\n", frame.headers)
    return frame.verb, frame.subject, _ACK.sub(rb"\1T\2", frame.reply), headers, payload


def _comparable_json(value: Any) -> Any:
    if isinstance(value, dict):
        items = {key: each for key, each in value.items() if key not in _OWN}
        return {
            key: each.startswith("0001-") if key.endswith("_ts") else _comparable_json(each)
            for key, each in items.items()
        }
    if isinstance(value, list):
        return [_comparable_json(each) for each in value]
    # The server adds Go's words.
    return "invalid JSON" if isinstance(value, str) and value.startswith("invalid JSON") else value


def in_order(frames: list[Frame]) -> list[tuple[Any, ...]]:
    """Return frames by their subjects: those of different subjects come in any order."""
    return sorted(map(comparable, frames), key=lambda frame: frame[1:3])


# ----------------------------------------------------------------------------------------------------------- the requests

SOON_NS: Final = 2_000_000
SECOND_NS: Final = 10**9
TOKENS: Final = ("a", "b", "a.b", "c")
PATTERNS: Final = (">", "*", "a", "b", "a.b", "a.*", "a.>", "*.b", "c")
names = st.sampled_from(("A", "A", "B", "M"))
subjects = st.sampled_from(TOKENS).map(lambda token: f"{ROOT}.{token}")
patterns = st.sampled_from(PATTERNS).map(lambda pattern: f"{ROOT}.{pattern}")
sequences = st.integers(0, 9)
sizes = st.sampled_from((1, 60, 100, 200, 1000))


def optional(**values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Return dictionaries with some of the values."""
    return st.fixed_dictionaries({}, optional=values)


flags = st.booleans()
sizes_held = optional(
    max_msgs=st.integers(-1, 5),
    max_bytes=st.sampled_from((-1, 100, 300)),
    max_msgs_per_subject=st.integers(-1, 3),
    max_age=st.sampled_from((0, 3600 * SECOND_NS)),
    allow_direct=st.just(True),
    storage=st.sampled_from(("file", "memory")),
)
limits = st.builds(
    operator.or_,
    sizes_held,
    st.one_of(
        st.just({}),
        st.just({"discard": "new"}),
        st.just({"discard": "new", "discard_new_per_subject": True, "max_msgs_per_subject": 1}),
        st.just({"allow_rollup_hdrs": True}),
        st.just({"deny_purge": True}),
        st.just({"deny_delete": True, "allow_msg_ttl": True}),
        st.just({"max_msg_size": 60, "duplicate_window": 60 * SECOND_NS, "description": "x"}),
        st.just({"allow_rollup_hdrs": True, "allow_msg_ttl": True, "subject_delete_marker_ttl": 5 * SECOND_NS}),
    ),
)
configs = st.builds(
    lambda name, subjects, more: {"name": f"{ROOT}{name}", "subjects": subjects, **more},
    st.sampled_from(("A", "A", "B")),
    st.sampled_from(((">",), ("*",), ("a", "b"), ("a.>", "b"), ("c",))).map(
        lambda tokens: [f"{ROOT}.{token}" for token in tokens]
    ),
    limits,
)
HEADERS: Final = (
    *ODD_HEADERS,
    *(
        b"NATS/1.0\r\n%b\r\n\r\n" % line
        for line in (
            b"Nats-Msg-Id: 1",
            b"Nats-Msg-Id: 2",
            b"nats-msg-id: 1",
            b"Nats-Msg-Id:",
            b"Nats-Expected-Last-Msg-Id: 1",
            b"Nats-Expected-Last-Msg-Id: ",
            b"Nats-Expected-Stream: ~A",
            b"Nats-Expected-Stream: NO",
            b"Nats-Expected-Last-Sequence: 1",
            b"Nats-Expected-Last-Sequence: 2\r\nNats-Msg-Id: 1",
            b"Nats-Expected-Last-Subject-Sequence: 0",
            b"Nats-Expected-Last-Subject-Sequence: 1",
            b"Nats-Expected-Last-Subject-Sequence: 2\r\nNats-Expected-Last-Subject-Sequence-Subject: ~.a",
            b"Nats-Rollup: sub",
            b"Nats-Rollup: all",
            b"Nats-Rollup: no",
            b"Nats-TTL: 1h",
            b"Nats-TTL: 90",
            b"Nats-TTL: 1.500s",
            b"Nats-TTL: never",
            b"Nats-TTL: no",
            b"Nats-TTL: 0.5s",
        )
    ),
)
publishes = st.builds(
    Request,
    subjects,
    st.sampled_from((b"", b"x", bytes(range(256)), b"\r\nPING\r\n", b"x" * 40)),
    st.sampled_from(HEADERS),
    st.just(""),
)


def api(operation: str, name: st.SearchStrategy[str], body: st.SearchStrategy[Any]) -> st.SearchStrategy[Request]:
    """Return requests of an operation on a stream."""
    return st.builds(lambda name, body: Request(f"$JS.API.{operation}.{ROOT}{name}", body), name, body)


gets = st.one_of(
    st.builds(lambda seq: {"seq": seq}, sequences),
    st.builds(lambda pattern: {"last_by_subj": pattern}, patterns),
    st.builds(lambda seq, pattern: {"seq": seq, "next_by_subj": pattern}, sequences, patterns),
)
batches = st.builds(
    lambda seq, batch, more: {"seq": seq, "batch": batch, **more},
    st.integers(1, 9),
    st.integers(1, 9),
    optional(next_by_subj=patterns, max_bytes=sizes),
)
create = configs.map(lambda config: Request(f"$JS.API.STREAM.CREATE.{config['name']}", config))
update = st.builds(operator.or_, configs, optional(sealed=st.just(True))).map(
    lambda config: Request(f"$JS.API.STREAM.UPDATE.{config['name']}", config)
)
mirror = sizes_held.map(
    lambda more: Request(f"$JS.API.STREAM.CREATE.{ROOT}M", {**more, "name": f"{ROOT}M", "mirror": {"name": f"{ROOT}A"}})
)
_READS: Final[tuple[dict[str, Any], ...]] = (
    {"opt_start_seq": 1},
    {"opt_start_seq": 3, "filter_subject": f"{ROOT}.a"},
    {"opt_start_seq": 2, "filter_subject": f"{ROOT}.*", "headers_only": True},
    {"opt_start_seq": 1, "headers_only": True},
)
#: Consumers of a read, of a fence, and one that differs from it.
CONSUMERS: Final[list[dict[str, Any]]] = [
    {
        "name": f"{ROOT}C{number}",
        "ack_policy": "none",
        "inactive_threshold": 300 * SECOND_NS,
        "mem_storage": True,
        "num_replicas": 1,
        "deliver_policy": "by_start_sequence",
        **more,
    }
    for number, more in enumerate(_READS)
] + [
    {
        "name": f"{ROOT}F",
        "durable_name": f"{ROOT}F",
        "description": description,
        "deliver_policy": "new",
        "ack_policy": "explicit",
        "inactive_threshold": 300 * SECOND_NS,
        "filter_subject": f"{ROOT}.F",
    }
    for description in ("x", "y")
]


def _creation(name: str, config: dict[str, Any], action: dict[str, str]) -> Request:
    operation = ".".join(filter(None, (f"{ROOT}{name}", config["name"], config.get("filter_subject"))))
    action |= {"action": "create"} if "durable_name" in config else {}
    return Request(f"$JS.API.CONSUMER.CREATE.{operation}", {"stream_name": f"{ROOT}{name}", "config": config, **action})


def _of_consumer(operation: str, body: st.SearchStrategy[Any], last: str = "F") -> st.SearchStrategy[Request]:
    return st.builds(
        lambda name, consumer, body: Request(f"$JS.API.CONSUMER.{operation}.{ROOT}{name}.{ROOT}{consumer}", body),
        names,
        st.sampled_from(("C0", "C1", "C2", "C3", last)),
        body,
    )


pulls = st.builds(
    lambda batch, end, more: {"batch": batch, **end, **more},
    st.integers(1, 5),
    st.sampled_from(({"no_wait": True}, {"no_wait": True, "expires": 60 * SECOND_NS}, {"expires": 60 * SECOND_NS})),
    # Exactly one to three messages of the subject `~.a` with one byte, and any number of others.
    optional(
        max_bytes=st.builds(operator.add, st.sampled_from((64, 128, 192)), st.integers(-1, 1)) | st.integers(60, 400)
    ),
)
#: Control lines: subscriptions that receive what is published, too. A client uses an id once.
lines = st.sampled_from(
    (f"SUB {ROOT}.> 2\r\n", f"SUB {ROOT}.a 3\r\n", f"SUB {ROOT}.c 4\r\n", "UNSUB 2\r\n", "UNSUB 3 1\r\n", "UNSUB 9\r\n")
)
requests = st.one_of(
    *[publishes] * 12,
    publishes.map(lambda request: request._replace(reply=None)),
    lines,
    create,
    update,
    mirror,
    api("STREAM.DELETE", names, st.just(b"")),
    api(
        "STREAM.PURGE",
        names,
        optional(filter=patterns, seq=sequences) | optional(keep=st.integers(0, 3), filter=patterns),
    ),
    api("STREAM.INFO", names, optional(deleted_details=flags, subjects_filter=patterns) | st.just(b"")),
    api("STREAM.MSG.GET", names, gets),
    api("STREAM.MSG.DELETE", names, st.builds(lambda seq: {"seq": seq}, sequences)),
    api("DIRECT.GET", names, gets | batches),
    st.builds(lambda name, subject: Request(f"$JS.API.DIRECT.GET.{ROOT}{name}.{subject}"), names, subjects),
    st.builds(_creation, names, st.sampled_from(CONSUMERS), optional(action=st.just("create"))),
    _of_consumer("INFO", st.just(b"")),
    _of_consumer("DELETE", st.just(b"")),
    _of_consumer("MSG.NEXT", pulls, "C0"),
    _of_consumer("MSG.NEXT", pulls, "C0"),
    st.builds(lambda subject: Request("$JS.API.STREAM.NAMES", {"subject": subject}), patterns | subjects),
    st.just(Request("$JS.API.STREAM.LIST", {"offset": 0})),
    st.builds(
        lambda name, operation: Request(f"$JS.API.STREAM.{operation}.{ROOT}{name}", b"{no"),
        names,
        st.sampled_from(("CREATE", "UPDATE", "INFO", "MSG.GET", "MSG.DELETE", "PURGE")),
    ),
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with NatsServer(tmp_path_factory.mktemp("model"), "real") as started:
        yield started


CONNECT: Final = b'CONNECT {"verbose":false,"pedantic":false,"headers":true,"no_responders":true,"protocol":1}\r\n'


class Pair:
    """A session of the real server and one of the simulated server."""

    def __init__(self, server: NatsServer) -> None:
        self.root = f"R{next(_numbers):06}"
        self.real, self.model = Real(server), Model()
        self._replies, self._deleted, self._lines = itertools.count(1), set[str](), set[str]()
        self.both(CONNECT + b"SUB _I.%b.> 1\r\n" % self.root.encode())

    def close(self) -> None:
        """Delete the streams."""
        for stream in [*self.model.server.streams]:
            self.real.ask(encode_pub(f"$JS.API.STREAM.DELETE.{stream}", b"_I.end", b"", b""), 0)
        self.real.close()

    def both(self, data: bytes) -> tuple[list[Any], list[Any]]:
        """Return the answers of both."""
        expected = self.model.ask(data)
        return in_order(self.real.ask(data, len(expected))), in_order(expected)

    def compare(self, asked: Request | str) -> None:
        """Compare the answers to a request; a mirror, and a consumer with its requests, follow a moment later."""
        if isinstance(asked, str):
            real, model = self.both(asked.replace(ROOT, self.root).encode())
            assert model == real, asked
            return
        reads = bool(LATER.search(asked.subject))
        deadline = time.monotonic() + PATIENCE_SECONDS * reads
        while True:
            data = asked.encoded(self.root, f"_I.{self.root}.{next(self._replies):04}")
            real, model = self.both(data)
            if model == real or time.monotonic() > deadline:
                break
        assert model == real, data
        if not reads:
            self._settle(asked)

    def _settle(self, asked: Request) -> None:
        """Wait until the real server has done what no answer reports."""
        if "MSG.NEXT" in asked.subject:
            self.compare(Request(asked.subject.replace("MSG.NEXT", "INFO")))
        for name in self.model.server.streams:
            if name == f"{self.root}M" or asked.reply is None:
                self.compare(Request(f"$JS.API.STREAM.INFO.{name}"))

    def applies(self, asked: Request | str) -> bool:
        """Return whether the real server's answer is determined.

        Not determined are a mirror without its origin, a direct get that a mirror may answer, and a stream that is created
        while the files of one of its name are being deleted. The platform does not delete single messages, and no consumer
        of its own begins after the next message: the server counts messages before its beginning as pending.
        """
        if isinstance(asked, str):
            used = asked in self._lines
            self._lines.add(asked)
            return not used
        held, subject = self.model.server.streams, asked.subject.replace(ROOT, self.root)
        operation, _, name = subject.rpartition(".")
        if operation.endswith("CREATE") and name.endswith("M"):
            return f"{self.root}A" in held and name not in self._deleted
        if operation.endswith("MSG.DELETE") and isinstance(asked.body, dict):
            return name in held and asked.body["seq"] in held[name].messages
        if "CONSUMER.CREATE" in subject:
            stream = held.get(asked.body["stream_name"].replace(ROOT, self.root))
            return stream is None or asked.body["config"].get("opt_start_seq", 1) <= stream.last + 1
        if f"{self.root}M" in held and (subject.endswith(f"STREAM.DELETE.{self.root}A") or "DIRECT.GET" in subject):
            return False
        if operation.endswith("STREAM.DELETE"):
            self._deleted.add(name)
        return not operation.endswith("STREAM.CREATE") or name not in self._deleted


@one_in(1)
@given(st.lists(create | mirror, min_size=1, max_size=3), st.lists(requests, min_size=15, max_size=60))
@example([], ["UNSUB 3 1\r\n", "SUB ~.a 3\r\n", *[Request("~.a")] * 2])
def test_requests_are_answered_as_by_a_real_server(
    server: NatsServer, made: list[Request], asked: list[Request | str]
) -> None:
    pair = Pair(server)
    try:
        for each in (*made, *asked):
            if pair.applies(each):
                pair.compare(each)
    finally:
        pair.close()


# -------------------------------------------------------------------------------------------------- fast-ingest batches

#: Steps of a batch: its id, and how the number of its message follows the last one; the operation.
steps = st.tuples(st.sampled_from("12"), st.sampled_from(((0, 0), *[(1, 1)] * 8, (2, 1), (0, 1), (1, 3))))
batch_messages = st.builds(
    lambda step, request: (step, request),
    steps,
    st.builds(
        Request,
        st.sampled_from((f"{ROOT}.a", f"{ROOT}.b", f"{ROOT}.a")),
        st.sampled_from((b"", b"x" * 40)),
        st.sampled_from(
            (
                b"",
                b"",
                b"",
                *(
                    b"NATS/1.0\r\n%b\r\n\r\n" % line
                    for line in (
                        b"Nats-Msg-Id: 1",
                        b"Nats-Msg-Id: 2",
                        b"Nats-Rollup: sub",
                        b"Nats-TTL: 1h",
                        b"Nats-Expected-Stream: NO",
                        b"A: b",
                    )
                ),
            )
        ),
        st.just(""),
    ),
)


@one_in(1)
@given(
    limits,
    st.booleans(),
    st.sampled_from((0, 1, 3, 500)),
    st.lists(batch_messages | publishes.map(lambda request: (None, request)), min_size=20, max_size=99),
)
def test_batches_are_answered_as_by_a_real_server(
    server: NatsServer, held: dict[str, Any], allowed: bool, flow: int, messages: list[tuple[Any, Request]]
) -> None:
    pair, numbers = Pair(server), dict[str, int]()
    try:
        config = {**held, "name": f"{ROOT}A", "subjects": [f"{ROOT}.>"], "allow_batched": allowed}
        pair.compare(Request(f"$JS.API.STREAM.CREATE.{ROOT}A", config))
        for step, request in messages:
            if step:
                key, (distance, operation) = step
                numbers[key] = numbers.get(key, 0) + distance if operation else 1
                end = f".{key}.{flow}.fail.{numbers[key]}.{operation}.$FI"
                pair.compare(request._replace(reply=end))
            else:
                pair.compare(request)
        pair.compare(Request(f"$JS.API.STREAM.INFO.{ROOT}A"))
    finally:
        pair.close()


# ---------------------------------------------------------------------------------------------------------------- time


def test_requests_end_as_at_a_real_server_when_they_expire(server: NatsServer) -> None:
    pair = Pair(server)
    try:
        pair.compare(Request(f"$JS.API.STREAM.CREATE.{ROOT}A", {"name": f"{ROOT}A", "subjects": [f"{ROOT}.a"]}))
        pair.compare(_creation("A", CONSUMERS[0], {}))
        for number in range(3):
            for request in (
                {"batch": 2, "expires": SOON_NS},
                {"batch": 3, "expires": SOON_NS, "max_bytes": 900},
                {"batch": 2, "expires": SOON_NS, "no_wait": True},
            ):
                pair.compare(Request(f"$JS.API.CONSUMER.MSG.NEXT.{ROOT}A.{ROOT}C0", request))
            pair.compare(Request(f"{ROOT}.a", b"%d" % number))
            pair.compare(Request(f"$JS.API.CONSUMER.MSG.NEXT.{ROOT}A.{ROOT}C0", {"batch": 1, "no_wait": True}))
    finally:
        pair.close()


#: What writes a key, and the limits of its bucket.
KEYS: Final = {
    "1s": b"NATS/1.0\r\nNats-TTL: 1s\r\n\r\n",
    "1500ms": b"NATS/1.0\r\nA: b\r\nNats-TTL: 1.500s\r\n\r\n",
    "number": b"NATS/1.0\r\nNats-TTL: 1\r\nB: c\r\n\r\n",
    "never": b"NATS/1.0\r\nNats-TTL: never\r\n\r\n",
    "none": b"",
}


def test_keys_expire_as_at_a_real_server(server: NatsServer) -> None:
    pair, buckets = Pair(server), "ABCDEFGH"
    options = itertools.product(("file", "memory"), (0, SECOND_NS), (1, 5))
    try:
        for bucket, (storage, marker_ns, history) in zip(buckets, options, strict=True):
            config = {
                "name": f"{ROOT}{bucket}",
                "subjects": [f"{ROOT}.{bucket}.*"],
                "storage": storage,
                "allow_msg_ttl": True,
                "max_msgs_per_subject": history,
                "subject_delete_marker_ttl": marker_ns,
            }
            pair.compare(Request(f"$JS.API.STREAM.CREATE.{ROOT}{bucket}", config))
            for key, headers in KEYS.items():
                pair.compare(Request(f"{ROOT}.{bucket}.{key}", b"held", headers))
        # First the messages expire, then their markers.
        for _ in range(3):
            for bucket, key in itertools.product(buckets, KEYS):
                last = {"last_by_subj": f"{ROOT}.{bucket}.{key}"}
                pair.compare(Request(f"$JS.API.STREAM.MSG.GET.{ROOT}{bucket}", last))
            for bucket in buckets:
                pair.compare(Request(f"$JS.API.STREAM.INFO.{ROOT}{bucket}", {"subjects_filter": ">"}))
            pair.model.now_ns += 2 * SECOND_NS
    finally:
        pair.close()
