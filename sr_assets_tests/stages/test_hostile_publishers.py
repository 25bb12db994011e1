"""No message of a publisher stops a stream: whatever its subject, headers and body hold, it is copied or parked.

One run reads many generated messages as a plain stream, as tracked streams of every kind of sender, and as advisories. A
failing batch is halved until one message, or the smallest batch that fails, is left.
"""

import base64
import gzip
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from sr_assets.adapters.published.fleet_reader import open_fleet
from sr_assets.adapters.wire import Connection, Outgoing, Publisher, WireError
from sr_assets.domain.messages import last_origin
from sr_assets.embedded.nats_server import NatsServer
from sr_assets.operate.metrics import Exposition
from sr_assets_tests.examples import one_in
from sr_assets_tests.rig import Rig, Sent, address

MESSAGES_AT_ONCE = 60
NUMBERS = st.one_of(
    st.sampled_from([0, -1, 1, 2**31, 2**63 - 1, 2**63, 2**64, 10**18, 10**400, 9_223_372_037, 9_999_999_999]),
    st.integers(),
    st.sampled_from([1e308, -0.0, 0.5, float("nan"), float("inf")]),
)
TEXTS = st.one_of(
    st.text(max_size=12),
    st.sampled_from(["", "n1", "a.b", "\0", "\ud800", "x" * 255, "é" * 200, "*", ">", "%s", "\U0010ffff", "1e999"]),
)
TIMES = st.one_of(
    st.sampled_from(["0000-00-00T00:00:00Z", "0001-01-01T00:00:00Z", "9999-12-31T23:59:59.999999999Z", "soon"]),
    st.datetimes().map(lambda at: at.isoformat() + "Z"),
)
VALUES = st.one_of(NUMBERS, TEXTS, TIMES, st.none(), st.booleans(), st.just([]), st.just({}), st.just([{"a": [1]}]))
SOURCE_VALUES = st.builds(
    "{} {} {} {} {}".format,
    st.sampled_from(["S", "T" * 300, ""]),
    NUMBERS,
    st.sampled_from(["LONDON", "R"]),
    st.sampled_from(["LONDON", "N"]),
    NUMBERS,
)
HEADER_NAMES = st.sampled_from(
    [
        *("Choria-SR-Source", "Choria-SR-Subject", "Choria-SR-Originator", "Choria-SR-Other", "Node", "Kind"),
        *("Nats-Msg-Id", "Nats-Stream", "Nats-Subject", "Nats-Sequence", "Nats-Time-Stamp", "Nats-Num-Pending"),
        *("Nats-Msg-Size", "Nats-Last-Sequence", "Nats-Marker-Reason", "Nats-Schedule-Target", "nats-ttl", "Nats-TTL"),
        *("Nats-Counter-Sources", "Nats-Rollup", "Nats-Expected-Stream", "Nats-Required-Api-Level", "Status", "X", ""),
    ]
)
LINES = st.one_of(
    st.builds(b"%b: %b".__mod__, st.tuples(HEADER_NAMES.map(str.encode), st.binary(max_size=30))),
    st.builds(
        lambda name, value: f"{name}:{value}".encode(errors="surrogatepass"),
        HEADER_NAMES,
        st.one_of(NUMBERS.map(str), TEXTS, TIMES, SOURCE_VALUES),
    ),
    SOURCE_VALUES.map(lambda value: f"Choria-SR-Source: {value}".encode()),
    st.just(b"Nats-Msg-Id: a/1/" + b"9" * 5000),
)
BLOCKS = st.one_of(
    st.just(b""),
    st.builds(
        lambda version, lines, end: version + b"\r\n" + b"".join(line + b"\r\n" for line in lines) + end,
        st.sampled_from([b"NATS/1.0", b"NATS/1.0 503", b"NATS/1.0 404 None", b"NATS/1.0 100 Idle"]),
        st.lists(LINES.map(lambda line: line.replace(b"\r", b"").replace(b"\n", b"")), max_size=6),
        st.sampled_from([b"\r\n", b"\r\n", b""]),
    ),
    SOURCE_VALUES.map(lambda value: b"NATS/1.0\r\n" + f"Choria-SR-Source: {value}\r\n".encode() * 60 + b"\r\n"),
    st.just(b"NATS/1.0\r\nX: " + b"x" * 65_500 + b"\r\n\r\n"),
)
ADVISED: tuple[str, ...] = (
    "event_id",
    "age",
    "seen",
    "replicator",
    "timestamp",
    "event",
    "value",
    "stream",
    "name",
    "event_time",
)
ADVISED += ("sequence", "transition", "epoch", "previous", "late", "returned", "age_seconds", "outage_seconds", "state")
ADVISED += ("watermark", "position", "lag_messages", "nodes", "next_within_seconds", "since", "silent", "up")
PROTOCOLS = (
    *("io.choria.sr.v2.age_advisory", "io.choria.sr_assets.v1.site_event", "io.choria.sr_assets.v1.node_event"),
    "io.choria.sr_assets.v1.observer_alive",
)
EVENTS = ("new", "timeout", "recover", "expire", "observer_alive", "dark", "restored", "settled", "unretired")


def packed(text: bytes) -> str:
    """Return `zcontent` of a registration."""
    return base64.b64encode(gzip.compress(text)).decode()


def registration(content: Any, file: bool) -> bytes:
    """Return a registration as Choria's adapter publishes it."""
    kind = "filecontent" if file else "inventorycontent"
    inner = {"protocol": f"choria:registration:{kind}:1", **content}
    outer = {"protocol": "choria:adapters:jetstream:output:1", "sender": "n1", "data": json.dumps(inner)}
    return json.dumps(outer).encode()


REGISTRATIONS = st.builds(
    registration,
    st.one_of(
        VALUES.map(lambda value: {"content": value}),
        st.one_of(st.binary(max_size=50), VALUES.map(lambda value: json.dumps(value).encode())).map(
            lambda text: {"zcontent": packed(text)}
        ),
        st.just({"zcontent": packed(b"\0" * 10**7)}),
        TEXTS.map(lambda text: {"zcontent": text}),
    ),
    st.booleans(),
)
ADVISORIES = st.builds(
    lambda valid, fields, state: json.dumps({**valid, **fields, **({"state": state} if state else {})}).encode(),
    st.fixed_dictionaries(
        {
            "protocol": st.sampled_from(PROTOCOLS),
            "event": st.sampled_from(EVENTS),
            "replicator": st.just("R"),
            "name": st.just("n"),
            "stream": st.just("S"),
            "value": st.just("node"),
            "timestamp": st.just(1_700_000_000),
        },
        optional={"event_time": TIMES, "transition": st.integers(1, 3), "epoch": st.integers(0, 2**63 - 1)},
    ),
    st.dictionaries(st.sampled_from(ADVISED), VALUES, max_size=4),
    st.one_of(st.none(), st.dictionaries(st.sampled_from(ADVISED), VALUES, max_size=5)),
)
BODIES = st.one_of(
    st.binary(max_size=40),
    NUMBERS.map(lambda number: str(number).encode()),
    REGISTRATIONS,
    ADVISORIES,
    st.dictionaries(st.sampled_from(["sender", "force", "role", "data"]), VALUES, max_size=4).map(
        lambda value: json.dumps(value).encode()
    ),
    st.just(b'{"sender":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    st.just(b'{"sender": ' + b"9" * 5_000 + b"}"),
    st.just(b"x" * 1_000_000),
)
SUBJECTS = st.one_of(
    st.text(st.characters(min_codepoint=0x21, exclude_categories=["Cs"]), min_size=1, max_size=12),
    st.binary(min_size=1, max_size=6).map(lambda raw: raw.decode(errors="surrogateescape")),
    st.sampled_from(
        ["m", "a.b.c", "x" * 3_900, "\ud800".encode(errors="surrogatepass").decode(errors="surrogateescape")]
    ),
)
HEARTBEATS = st.builds(
    lambda number, value: Sent(
        str(number).encode(), "m", f"NATS/1.0\r\nChoria-SR-Subject: x\r\nChoria-SR-Source: {value}\r\n\r\n".encode()
    ),
    NUMBERS,
    SOURCE_VALUES,
)
KNOWN = [
    Sent(b"9999999999", "m", b"NATS/1.0\r\nChoria-SR-Subject: x\r\n\r\n"),
    Sent(b"1", "m", b"NATS/1.0\r\nX: " + b"x" * 65_500 + b"\r\n\r\n"),
    Sent(b"1", "x" * 3_900),
]
MESSAGES = st.one_of(HEARTBEATS, *[st.builds(Sent, BODIES, SUBJECTS, BLOCKS)] * 5)


def publish(server: NatsServer, stream: str, messages: Sequence[Sent]) -> None:
    """Publish what the server accepts, byte for byte."""
    left = list(messages)
    while left:
        with Connection(address(server), "test") as opened:
            publisher = Publisher(opened, ack_timeout_seconds=30.0)
            while left:
                sent = left.pop(0)
                try:
                    list(publisher.publish_all([Outgoing(1, f"{stream}.{sent.subject}", sent.headers, sent.payload)]))
                except WireError:
                    break


def problem_of(rig: Rig, messages: Sequence[Sent]) -> str | None:
    """Publish messages into new streams of every kind, run the site, and describe what went wrong."""
    rig.__post_init__()
    rig.entries, rig.feeds = [], []
    advice = rig.make("ADVICE")
    sampled = {"inspect_duration": "1h", "advisory": {"subject": f"{advice}.%s.%v"}, "size_trigger": 1}
    classes = [{"name": "h", "header": "Kind", "value": "a"}, {"name": "f", "field": "role", "value": "b"}]
    kinds: dict[str, dict[str, Any]] = {
        "PLAIN": {"target_subject_prefix": "copy." + "p" * 200},
        "OLD": {"max_age": "1h"},
        "FIELD": {**sampled, "inspect_field": "sender", "inspect_force_field": "force", "classes": classes},
        "HEADER": {**sampled, "inspect_header": "Node"},
        "TOKEN": {**sampled, "inspect_subject_token": 2},
        "WHOLE": {**sampled, "inspect_subject_token": -1, "max_age": "1h"},
    }
    streams = {kind: rig.make(kind, allow_msg_ttl=True, allow_rollup_hdrs=True) for kind in kinds}
    for kind, stream in streams.items():
        publish(rig.source, stream, messages)
        rig.add(stream, **kinds[kind])
    feed = rig.make("FEED", rig.target)
    publish(rig.target, feed, messages)
    rig.add_feed(feed)
    for _ in range(2):
        reports = rig.run()
        if failures := [report.failure for report in reports.values() if report.failure]:
            return "; ".join(failures)
    return next(_differences(rig, streams, feed), None)


def _differences(rig: Rig, streams: dict[str, str], feed: str) -> Iterator[str]:
    """Yield what is not accounted for, or cannot be read from the published tables."""
    with open_fleet(rig.home) as opened:
        tables = [
            name
            for (name,) in opened.execute("SELECT DISTINCT view_name FROM duckdb_views() WHERE NOT internal").fetchall()
        ]
        for table in tables:
            opened.execute(f'SELECT * FROM "{table}"').fetchall()
    Exposition(rig.settings()).renew()
    rows = {row["stream"]: row for row in rig.rows("replication")}
    for kind, stream in streams.items():
        sent, row = rig.stored(stream), rows[stream]
        parked = {
            row["sequence"] for row in rig.rows(f"SELECT sequence FROM parked_messages WHERE stream = '{stream}'")
        }
        if row["seen_messages"] != len(sent):
            yield f"{kind}: {row['seen_messages']} of {len(sent)} messages are seen"
        copies = {origin.sequence: copy for copy in rig.copies(stream) if (origin := last_origin(copy.headers))}
        if row["copied_messages"] != len(copies) or row["parked_messages"] != len(parked):
            yield f"{kind}: the counters differ from the target: {row}"
        for message in sent:
            copy = copies.get(message.sequence)
            if copy is not None and copy.payload != message.payload:
                yield f"{kind}: copy {message.sequence} differs"
            if copy is None and message.sequence not in parked and kind in ("PLAIN", "OLD"):
                yield f"{kind}: message {message.sequence} is neither copied nor parked"
    if rows[feed]["next_sequence"] != rig.info(feed, rig.target).last_sequence + 1:
        yield f"the feed ends early: {rows[feed]}"


def smallest(rig: Rig, messages: Sequence[Sent]) -> Sequence[Sent]:
    """Halve a failing batch as long as a half fails."""
    middle = len(messages) // 2
    for half in (messages[:middle], messages[middle:]):
        if half and problem_of(rig, half):
            return smallest(rig, half)
    return messages


# Without shrinking, because `smallest` needs fewer drains.
@settings(one_in(100), phases=[Phase.explicit, Phase.generate])
@example(KNOWN)
@given(st.lists(MESSAGES, min_size=MESSAGES_AT_ONCE, max_size=MESSAGES_AT_ONCE))
def test_no_message_of_a_publisher_stops_a_stream(rig: Rig, messages: list[Sent]) -> None:
    if problem := problem_of(rig, messages):
        failing = smallest(rig, messages)
        pytest.fail(f"{problem}\n" + "\n".join(repr(message)[:2_000] for message in itertools.islice(failing, 5)))
