"""Frames as bytes: parsing is independent of splits, headers stay bytes, only the server's headers are removed."""

import base64
import contextlib
import copy
import itertools
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sr_assets.adapters.jetstream import decode_response, parse_message
from sr_assets.adapters.nats.stream_info import StreamInfo, parse_stream_info
from sr_assets.adapters.wire.frames import (
    DeliveryParser,
    DirectParser,
    FirstParser,
    Frame,
    FrameParser,
    delivered_message,
    direct_get_message,
    encode_pub,
    has_whole_headers,
)
from sr_assets.adapters.wire.granted import parse_granted
from sr_assets.adapters.wire.publishing import Run, StoredParser, parse_ack
from sr_assets.domain.errors import RunError
from sr_assets.domain.messages import Message

T = TypeVar("T")

#: Values of JSON, with numbers that fit into no table, and the answers of servers, in which any value may be any other.
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(("1", 1 << 63))
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=3,
)
NESTED = st.just(b"[" * 100_000)
ANSWERS: tuple[dict[str, Any], ...] = (
    {"stream": "S", "seq": 7, "duplicate": True},
    {"error": {"code": 500, "err_code": 10_071, "description": "wrong last sequence"}, "seq": 7},
    {"message": {"subject": "a", "seq": 3, "hdrs": "TkFUUy8xLjANCg0K", "data": "eA==", "time": "2026-01-31T12:00:00Z"}},
    {
        "config": {"name": "S", "subjects": ["a"], "num_replicas": 1, "retention": "limits", "mirror": {"name": "M"}},
        "created": "2026-01-31T12:00:00Z",
        "ts": "2026-01-31T12:00:10Z",
        "state": {"messages": 1, "bytes": 1, "first_seq": 1, "last_seq": 1, "first_ts": "2026-01-31T12:00:00Z"},
        "cluster": {"leader": "a", "replicas": [{"name": "b", "active": 1}, {"name": "c", "active": 1}]},
    },
)


@st.composite
def changed_answers(draw: st.DrawFn) -> dict[str, Any]:
    """Draw an answer of a server in which a value, at any depth, is replaced or missing."""
    answer: dict[str, Any] = copy.deepcopy(draw(st.sampled_from(ANSWERS)))
    inner: Any = answer
    while True:
        key = draw(st.sampled_from(sorted(inner) if isinstance(inner, dict) else range(len(inner))))
        if not (isinstance(inner[key], dict | list) and inner[key] and draw(st.booleans())):
            break
        inner = inner[key]
    if draw(st.booleans()):
        del inner[key]
    else:
        inner[key] = draw(VALUES)
    return answer


SERVER_BLOCK = (
    b"Nats-Stream: S\r\nNats-Subject: a.b\r\nNats-Sequence: 7\r\nNats-Time-Stamp: 2026-03-15T13:48:10.5Z\r\n"
    b"Nats-Num-Pending: 3\r\nNats-Last-Sequence: 6\r\n\r\n"
)
STORED_NS = 1_773_582_490_500_000_000

header_lines = st.lists(
    st.one_of(
        st.binary(max_size=20).filter(lambda line: b"\r\n" not in line and not line.endswith(b"\r")),
        st.sampled_from([b"Nats-Stream: EVIL", b"Nats-Sequence: 99", b"A: 1", b"A:1 ", b"", b"X: \xff\xfe"]),
    ),
    max_size=5,
)
blocks = header_lines.map(lambda lines: b"".join(line + b"\r\n" for line in [b"NATS/1.0", *lines]) + b"\r\n")
tokens = st.binary(min_size=1, max_size=12).map(lambda raw: bytes(33 + byte % 200 for byte in raw))
frames = st.one_of(
    st.builds(
        lambda subject, reply, payload: Frame(b"MSG", subject, reply, b"", payload),
        tokens,
        st.just(b"") | tokens,
        st.binary(max_size=300),
    ),
    st.builds(
        lambda subject, reply, headers, payload: Frame(b"HMSG", subject, reply, headers, payload),
        tokens,
        st.just(b"") | tokens,
        blocks | st.binary(min_size=1, max_size=60),
        st.binary(max_size=300),
    ),
    st.sampled_from(
        [
            Frame(b"PING"),
            Frame(b"PONG"),
            Frame(b"+OK"),
            Frame(b"INFO", payload=b'{"a": 1}'),
            Frame(b"-ERR", payload=b"'x'"),
            Frame(b"-ERR", payload=b"'Permissions Violation for Publish to \"a\\nb\"'"),
        ]
    ),
)


def encode_frame(frame: Frame) -> bytes:
    """Return the bytes that a server sends for a frame."""
    if frame.verb not in (b"MSG", b"HMSG"):
        return b" ".join(filter(None, [frame.verb, frame.payload])) + b"\r\n"
    sizes = [b"%d" % len(frame.headers)] if frame.verb == b"HMSG" else []
    sizes.append(b"%d" % (len(frame.headers) + len(frame.payload)))
    line = b" ".join(filter(None, [frame.verb, frame.subject, b"1", frame.reply, *sizes]))
    return line + b"\r\n" + frame.headers + frame.payload + b"\r\n"


@given(st.lists(frames, max_size=8), st.lists(st.integers(0, 3000), max_size=12))
def test_parser_yields_same_frames_for_every_split(sent: list[Frame], cuts: list[int]) -> None:
    stream = b"".join(map(encode_frame, sent))
    edges = [0, *sorted(cut for cut in cuts if cut < len(stream)), len(stream)]
    parser = FrameParser()
    received = [frame for at, to in itertools.pairwise(edges) for frame in parser.feed(stream[at:to])]
    assert received == sent


@given(st.lists(st.integers(0, 3 << 20), max_size=40), st.integers(0, 5))
def test_parser_reassembles_huge_message_among_others(cuts: list[int], between: int) -> None:
    others = [Frame(b"INFO", payload=b"{}"), Frame(b"PING"), Frame(b"-ERR", payload=b"'x'"), Frame(b"+OK")][:between]
    huge = Frame(b"HMSG", b"a", b"r", b"NATS/1.0\r\nA: \xff\r\n\r\n", b"MSG a 1 3\r\n" * (2 << 20 >> 4))
    sent = [*others, huge, *others]
    stream = b"".join(map(encode_frame, sent))
    edges = [0, *sorted(cut for cut in cuts if cut < len(stream)), len(stream)]
    parser = FrameParser()
    assert [frame for at, to in itertools.pairwise(edges) for frame in parser.feed(stream[at:to])] == sent


@given(st.lists(frames, min_size=1, max_size=5), st.data())
def test_parser_yields_only_received_bytes_or_fails_on_damage(sent: list[Frame], data: st.DataObject) -> None:
    stream = bytearray(b"".join(map(encode_frame, sent)))
    at = data.draw(st.integers(0, len(stream) - 1))
    stream[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    parser = FrameParser()
    with contextlib.suppress(ValueError):
        for frame in parser.feed(bytes(stream)):
            assert frame.headers + frame.payload in bytes(stream)


def ack(number: int, sequence: int, domain: bytes = b"") -> Frame:
    return Frame(b"MSG", b"_INBOX.x.%d" % number, b"", b"", b'{"stream":"S",%b"seq":%d}' % (domain, sequence))


# Many of them follow each other.
stored_acks = st.builds(
    ack,
    st.integers(8, 12) | st.integers(0, 2**63),
    st.integers(8, 12) | st.integers(0, 2**64 - 1),
    st.sampled_from([b"", b"", b'"domain":"hub",']),
)
almost_acks = st.sampled_from(
    [
        Frame(b"MSG", b"a", b"", b"", b'{"stream":"S","seq":1,"duplicate":true}'),
        Frame(b"MSG", b"a", b"", b"", b'{"stream":"S","seq":1}\r\nMSG b 1 22\r\n{"stream":"S","seq":2}'),
        Frame(b"MSG", b"a", b"", b"", b'{"stream":"S","seq":1}\r\n'),
        Frame(b"MSG", b"a", b"r", b"", b'{"stream":"S","seq":1}'),
        Frame(b"HMSG", b"a", b"", b"NATS/1.0 503\r\n\r\n", b""),
    ]
)


def feed_cut(sent: list[Frame], cuts: list[int], first: FirstParser[T]) -> list[T | Frame]:
    """Feed frames in pieces; return the contents that `first` took and the other frames, in order."""
    stream = b"".join(map(encode_frame, sent))
    edges = [0, *sorted(cut for cut in cuts if cut < len(stream)), len(stream)]
    parser = FrameParser()
    received: list[T | Frame] = []
    for at, to in itertools.pairwise(edges):
        others = parser.feed(stream[at:to], first)
        received += [*first.take(), *others]
    return received


def acked(runs: Sequence[Run | Frame]) -> list[tuple[int, int] | Frame]:
    """Return runs of acknowledgements as pairs of number and sequence."""
    return [
        each
        for run in runs
        for each in (
            [run]
            if isinstance(run, Frame)
            else [(run.number + at, run.target_sequence + at) for at in range(run.length)]
        )
    ]


@given(
    st.lists(stored_acks | stored_acks | almost_acks | frames, max_size=12), st.lists(st.integers(0, 1500), max_size=6)
)
def test_parser_collects_plain_acks_and_yields_all_other_frames(sent: list[Frame], cuts: list[int]) -> None:
    taken = feed_cut(sent, cuts, StoredParser())
    received = acked(taken)
    assert len(received) == len(sent)
    for item, frame in zip(received, sent, strict=True):
        if isinstance(item, Frame):
            assert item == frame
        else:
            payload = json.loads(frame.payload)
            assert item == (int(frame.subject.rpartition(b".")[2]), payload["seq"])
            assert "duplicate" not in payload


@pytest.mark.parametrize("first", (1, 5, 95, 995))
@pytest.mark.parametrize("skipped", (None, 3, 7))
def test_consecutive_acks_are_runs_for_every_split(first: int, skipped: int | None) -> None:
    """The digits of numbers and sequences change within a run; a sequence of another publisher ends one."""
    sequences = [first + at + (skipped is not None and at >= skipped) for at in range(10)]
    stream = b"".join(encode_frame(ack(at, sequence)) for at, sequence in enumerate(sequences, 6))
    for cut in range(len(stream) + 1):
        parser, stored = FrameParser(), StoredParser("S")
        others = [frame for piece in (stream[:cut], stream[cut:]) for frame in parser.feed(piece, stored)]
        assert others == []
        assert acked(stored.taken) == list(enumerate(sequences, 6))
        assert len(stored.taken) <= (2 if skipped is None else 3)


def test_parser_yields_no_frames_for_collected_acks() -> None:
    stream = b"".join(encode_frame(ack(n, n)) for n in range(9999))
    stored = StoredParser()
    assert FrameParser().feed(stream + b"PING\r\n", stored) == [Frame(b"PING")]
    assert stored.taken == [Run(0, 0, 9999)]


#: Responses to a batched direct get of stream S, and frames that the fast path must leave alone.
responses = st.builds(
    lambda own, added, subject, payload: Frame(b"HMSG", subject, b"", own + added, payload),
    st.sampled_from(
        [b"NATS/1.0\r\n", b"NATS/1.0\r\nA: 1\r\n", b"NATS/1.0\r\nNats-Stream: EVIL\r\n", b"NATS/1.0\r\nno e"]
    ),
    st.sampled_from(
        [SERVER_BLOCK] * 4
        + [
            SERVER_BLOCK.replace(b"Stream: S", b"Stream: M"),
            SERVER_BLOCK.replace(b"-15T", b"-99T"),
            SERVER_BLOCK[: SERVER_BLOCK.index(b"Nats-Num")] + b"\r\n",
            b"\r\n",
        ]
    ),
    st.sampled_from([b"I.1", b"I.1", b"I.1", b"I.2"]),
    st.binary(max_size=300),
)


@given(st.lists(responses, max_size=12), st.lists(st.integers(0, 3000), max_size=6))
def test_direct_parser_takes_only_messages_that_the_slow_path_returns(sent: list[Frame], cuts: list[int]) -> None:
    direct = DirectParser(b"I.1", b"S")
    received = feed_cut(sent, cuts, direct)
    assert len(received) == len(sent)
    for item, frame in zip(received, sent, strict=True):
        if isinstance(item, Frame):
            assert item == frame
        else:
            assert direct_get_message(frame) == (item, 3, b"S")
            assert has_whole_headers(item)
    usual = [frame.subject == b"I.1" and frame.headers.endswith(b"\r\n" + SERVER_BLOCK) for frame in sent]
    if not cuts and all(usual):
        assert not any(isinstance(item, Frame) for item in received)
        assert direct.pending == (3 if sent else 0)


@pytest.mark.parametrize(
    "garbage",
    (
        b"HTTP/1.1 400 Bad Request\r\n",
        b"MSG a 1 x\r\n",
        b"MSG a 1 3\r\nabcdef\r\n",
        b"HMSG a 1 9 3\r\nabc\r\n",
        b"HMSG a 1 -3 3\r\nabc\r\n",
        b"HMSG a 1 3\r\nabc\r\n",
        b"MSG a 1 -2\r\n\r\n",
        b"MSG a 1 %d\r\n" % (1 << 40),
        b"MSG a 1 99999999999999999999999999\r\n",
        b"MSG a b c d 3\r\nabc\r\n",
        b"msg a 1 3\r\nabc\r\n",
        b"PINGPONG\r\n",
        b"\x16\x03\x01\x02\x00\x01\r\n",
        b"\r\n",
    ),
)
def test_parser_rejects_invalid_frames_immediately(garbage: bytes) -> None:
    with pytest.raises(ValueError):
        FrameParser().feed(garbage)


def test_parser_rejects_endless_line() -> None:
    with pytest.raises(ValueError, match="without an end"):
        FrameParser().feed(b"x" * (1 << 20) + b"y")


@given(blocks | st.just(b""), st.binary(max_size=200))
def test_encode_pub_keeps_headers_and_payload_unchanged(headers: bytes, payload: bytes) -> None:
    line, _, rest = encode_pub("a.ü", b"_INBOX.1", headers, payload).partition(b"\r\n")
    verb = b"HPUB" if headers else b"PUB"
    assert line.startswith(verb + b" a.\xc3\xbc _INBOX.1 ")
    assert int(line.rsplit(b" ", 1)[1]) == len(headers) + len(payload)
    assert rest == headers + payload + b"\r\n"


def test_encode_pub_keeps_non_utf8_bytes_of_a_subject() -> None:
    frame = FrameParser().feed(b"MSG a.\xff 1 $JS.ACK.S.c.1.2.1.3.0 0\r\n\r\n")[0]
    assert encode_pub(delivered_message(frame)[0].subject, b"", b"", b"").startswith(b"PUB a.\xff 0")


@pytest.mark.parametrize("subject", ("", "a b", "a\r\nPUB x 0\r\n\r\n", "a\tb", "a\nb", "a\0"))
def test_encode_pub_rejects_invalid_subject(subject: str) -> None:
    with pytest.raises(ValueError, match="not a subject"):
        encode_pub(subject, b"", b"", b"")


@given(blocks | st.just(b""), st.booleans())
def test_direct_get_message_removes_only_server_headers(original: bytes, batch: bool) -> None:
    added = SERVER_BLOCK if batch else SERVER_BLOCK[: SERVER_BLOCK.index(b"Nats-Num")] + b"\r\n"
    received_headers = (original[:-2] if original else b"NATS/1.0\r\n") + added
    answer = direct_get_message(Frame(b"HMSG", b"_INBOX.1", b"", received_headers, b"payload"))
    assert answer is not None
    message, pending, stream = answer
    assert (message.sequence, message.stored_ns, message.subject) == (7, STORED_NS, "a.b")
    assert (message.payload, pending, stream) == (b"payload", 3 if batch else None, b"S")
    assert message.headers == (b"" if original == b"NATS/1.0\r\n\r\n" else original)
    assert has_whole_headers(message)


def test_direct_parser_yields_same_messages_for_every_split() -> None:
    forged = SERVER_BLOCK.replace(b"Stream: S", b"Stream: FORGED")[:-2]
    blocks = [SERVER_BLOCK.replace(b"Pending: 3", b"Pending: %d" % pending) for pending in (3, 2, 1, 0)]
    headers = (b"NATS/1.0\r\n", b"NATS/1.0\r\nA: 1\r\nB:\xff\r\n", b"NATS/1.0\r\n" + forged, b"NATS/1.0\r\n")
    payloads = (b"", b"\r\nHMSG I.1 1 12 12\r\n", b"NATS/1.0\r\n\r\n\r\n", b"x" * 40)
    sent = [
        Frame(b"HMSG", b"I.1", b"", own + block, payload)
        for own, block, payload in zip(headers, blocks, payloads, strict=True)
    ]
    stream = b"".join(map(encode_frame, sent))
    wanted = [answer[0] for frame in sent if (answer := direct_get_message(frame))]
    for at in range(len(stream) + 1):
        parser, direct = FrameParser(), DirectParser(b"I.1", b"S")
        others = [frame for piece in (stream[:at], stream[at:]) for frame in parser.feed(piece, direct)]
        assert (direct.take(), others, direct.pending) == (wanted, [], 0)


SIZE_LINE = b"Nats-Msg-Size: 5\r\n\r\n"


def delivery(number: int, headers: bytes, payload: bytes, *, to: bytes = b"S.c", rest: bytes = b"") -> Frame:
    """The delivery of message `10 + number`, with `20 - number` to follow."""
    reply = b"$JS.ACK.%b.1.%d.%d.%d.%d%b" % (to, 10 + number, number, STORED_NS + number, 20 - number, rest)
    return Frame(b"HMSG" if headers else b"MSG", b"a.\xff.%d" % number, reply, headers, payload)


#: Deliveries of consumer c on stream S, from both forms of servers, and frames that the fast path must leave alone.
deliveries = st.builds(
    lambda headers, payload, to: (headers, payload, to),
    st.sampled_from(
        [
            b"",
            b"NATS/1.0\r\n\r\n",
            b"NATS/1.0\r\nA: 1\r\n\r\n",
            b"NATS/1.0\r\n" + SIZE_LINE,
            b"NATS/1.0\r\nno e" + SIZE_LINE,
        ]
    ),
    st.binary(max_size=300),
    st.sampled_from([(b"S.c", b"")] * 3 + [(b"hub.acc.S.c", b""), (b"hub.acc.S.c", b".x7"), (b"S.other", b"")]),
)


@given(
    st.lists(deliveries, max_size=12),
    st.lists(st.integers(0, 3000), max_size=6),
    st.integers(1, 12),
    st.booleans(),
)
def test_delivery_parser_takes_only_messages_that_the_slow_path_returns(
    sent: list[tuple[bytes, bytes, tuple[bytes, bytes]]], cuts: list[int], lost: int, headers_only: bool
) -> None:
    """One delivery is lost; the slow path decides on the bytes that arrive with the next one, and on frames of others."""
    frames = [
        delivery(number + (number >= lost), headers, payload, to=to, rest=rest)
        for number, (headers, payload, (to, rest)) in enumerate(sent, 1)
    ]
    parser = DeliveryParser(b"S", b"c", 99, headers_only=headers_only)
    received = feed_cut([*frames, Frame(b"HMSG", b"I.1", b"", b"NATS/1.0 404\r\n\r\n")], cuts, parser)
    assert len(received) == len(sent) + 1
    assert isinstance(received[-1], Frame)
    taken = 0
    for item, frame in zip(received, frames, strict=False):
        if isinstance(item, Frame):
            assert item == frame
        else:
            taken += 1
            assert b"S.c." in frame.reply
            assert delivered_message(frame, headers_only=headers_only) == (
                item,
                taken,
                parser.pending + parser.delivered - taken,
            )
    assert parser.delivered == taken
    ours = all(to[0].endswith(b"S.c") for *_, to in sent)
    sizes = [
        len(frame.subject) + len(frame.reply) + len(frame.headers) + len(frame.payload) for frame in frames[:taken]
    ]
    if not cuts and ours and not headers_only:
        assert taken == (len(sent) if lost > len(sent) else 0)
        assert parser.delivered_bytes == sum(sizes)


def test_delivery_parser_yields_same_messages_for_every_split() -> None:
    headers = (b"", b"NATS/1.0\r\nA: 1\r\nB:\xff\r\n\r\n", b"NATS/1.0\r\n\r\n", b"")
    payloads = (b"", b"\r\nMSG a 1 $JS.ACK.S.c.1.1.1.1.1 0\r\n\r\n", b"\r\n", b"x" * 40)
    sent = [delivery(n, *content) for n, content in enumerate(zip(headers, payloads, strict=True), 1)]
    stream = b"".join(map(encode_frame, sent))
    wanted = [delivered_message(frame)[0] for frame in sent]
    for at in range(len(stream) + 1):
        frames, parser = FrameParser(), DeliveryParser(b"S", b"c", 20, headers_only=False)
        others = [frame for piece in (stream[:at], stream[at:]) for frame in frames.feed(piece, parser)]
        assert (parser.take(), others, parser.pending, parser.delivered) == (wanted, [], 16, 4)


def test_direct_get_message_ignores_forged_server_headers() -> None:
    forged = SERVER_BLOCK.replace(b"Stream: S", b"Stream: FORGED").replace(b"Sequence: 7", b"Sequence: 99")
    answer = direct_get_message(Frame(b"HMSG", headers=b"NATS/1.0\r\n" + forged[:-2] + SERVER_BLOCK))
    assert answer is not None
    assert (answer[0].sequence, answer[2]) == (7, b"S")
    assert answer[0].headers == b"NATS/1.0\r\n" + forged


@given(st.integers(0, 999_999_999), st.integers(0, 4_102_444_800))
def test_direct_get_message_parses_time_to_the_nanosecond(nanosecond: int, second: int) -> None:
    date_and_time = datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    fraction = f".{nanosecond:09d}".rstrip("0").rstrip(".")
    block = SERVER_BLOCK.replace(b"2026-03-15T13:48:10.5", f"{date_and_time}{fraction}".encode())
    answer = direct_get_message(Frame(b"HMSG", headers=b"NATS/1.0\r\n" + block))
    assert answer is not None
    assert answer[0].stored_ns == second * 1_000_000_000 + nanosecond


@given(st.text(st.characters(exclude_characters=" \r\n", codec="utf-8"), min_size=1, max_size=30))
def test_direct_get_message_keeps_subject_unchanged(subject: str) -> None:
    block = SERVER_BLOCK.replace(b"a.b", subject.encode())
    answer = direct_get_message(Frame(b"HMSG", headers=b"NATS/1.0\r\n" + block))
    assert answer is not None
    assert answer[0].subject == subject


@given(blocks, st.integers(0, 400))
def test_direct_get_message_is_none_for_truncated_headers(original: bytes, cut: int) -> None:
    headers = original[:-2] + SERVER_BLOCK
    assert direct_get_message(Frame(b"HMSG", headers=headers[: len(headers) - 1 - cut % len(SERVER_BLOCK)])) is None


def test_direct_get_message_is_none_for_status() -> None:
    end = Frame(b"HMSG", headers=b"NATS/1.0 204 EOB\r\nNats-Num-Pending: 0\r\nNats-Last-Sequence: 12\r\n\r\n")
    assert (end.status, end.status_text, direct_get_message(end)) == (204, "204 EOB", None)
    assert Frame(b"HMSG", headers=b"NATS/1.0\r\nStatus: 204\r\n\r\n").status is None


def test_has_whole_headers_detects_headers_damaged_by_server() -> None:
    answer = direct_get_message(Frame(b"HMSG", headers=b"NATS/1.0\r\nno e" + SERVER_BLOCK))
    assert answer is not None
    assert not has_whole_headers(answer[0])


@pytest.mark.parametrize("reply", (b"$JS.ACK.S.c.1.7.3.1700.9", b"$JS.ACK.hub.AHASH.S.c.1.7.3.1700.9.r4nd"))
def test_delivered_message_accepts_both_reply_forms(reply: bytes) -> None:
    message, number, pending = delivered_message(Frame(b"HMSG", b"a.b", reply, b"NATS/1.0\r\n\r\n", b"p"))
    assert (message.sequence, message.stored_ns, message.headers, number, pending) == (7, 1700, b"", 3, 9)


@pytest.mark.parametrize("reply", (b"", b"_INBOX.a", b"$JS.ACK.S.c.1.7.3.x.9"))
def test_delivered_message_rejects_other_replies(reply: bytes) -> None:
    with pytest.raises(ValueError):
        delivered_message(Frame(b"MSG", b"a", reply))


@given(blocks)
def test_delivered_message_removes_size_header_of_server(original: bytes) -> None:
    frame = Frame(b"HMSG", b"a", b"$JS.ACK.S.c.1.7.3.1700.9", original[:-2] + b"Nats-Msg-Size: 12\r\n\r\n")
    message, _, _ = delivered_message(frame, headers_only=True)
    assert message.headers == (b"" if original == b"NATS/1.0\r\n\r\n" else original)
    assert (message.payload, message.payload_bytes) == (b"", 12)


@pytest.mark.parametrize("headers", (b"", b"NATS/1.0\r\nNats-Msg-Size: 12\r\nA: b\r\n\r\n"))
def test_delivered_message_requires_size_as_last_header(headers: bytes) -> None:
    with pytest.raises(ValueError):
        delivered_message(Frame(b"HMSG", b"a", b"$JS.ACK.S.c.1.7.3.1700.9", headers), headers_only=True)


def test_parse_message_keeps_headers_and_payload_unchanged() -> None:
    headers, payload = b"NATS/1.0\r\nB : \xff\r\nno end", bytes(range(256))
    stored = {"subject": "a", "seq": 3, "time": "2026-03-15T13:48:10.5Z"}
    stored |= {"hdrs": base64.b64encode(headers).decode(), "data": base64.b64encode(payload).decode()}
    message = parse_message({"message": stored})
    assert (message.sequence, message.stored_ns) == (3, STORED_NS)
    assert (message.headers, message.payload) == (headers, payload)


@given(
    st.binary(max_size=60)
    | VALUES.map(lambda value: json.dumps(value).encode())
    | changed_answers().map(lambda answer: json.dumps(answer).encode())
    | st.integers(0, 10**30).map(lambda number: b'{"stream":"S","seq":%d}' % number)
    | NESTED
)
@example(b'{"error": {"code": 500}}')
@example(b'{"seq": Infinity}')
@example(b'{"stream":"S","seq":' + b"9" * 5_000 + b"}")
def test_any_answer_to_a_publish_is_stored_or_an_error(payload: bytes) -> None:
    ack = parse_ack(1, Frame(b"MSG", payload=payload))
    if ack.error is None:
        assert type(ack.target_sequence) is int
        assert 0 <= ack.target_sequence < 1 << 63
    else:
        assert ack.target_sequence is None
        assert type(ack.error_code) in (int, type(None))
        assert len(ack.error) < 6_000
        assert ack.error.isprintable()


@given(st.binary(max_size=60) | changed_answers().map(lambda answer: json.dumps(answer).encode()) | NESTED)
def test_any_response_is_parsed_or_refused_in_one_line(payload: bytes) -> None:
    try:
        response = decode_response(payload)
    except ValueError as error:
        assert len(str(error)) < 500  # noqa: PT017
        return
    with contextlib.suppress(AttributeError, TypeError):
        parse_granted(response)
    parsed: list[StreamInfo | Message] = []
    for parse in (parse_message, lambda answer: parse_stream_info(answer, (2, 11, 0))):
        try:
            parsed.append(parse(response))
        except RunError as error:
            assert len(str(error)) < 500  # noqa: PT017
            assert "\n" not in str(error)  # noqa: PT017
    for each in parsed:
        numbers = (each.last_sequence, each.bytes) if isinstance(each, StreamInfo) else (each.sequence, each.stored_ns)
        assert all(type(number) is int and abs(number) < 1 << 63 for number in numbers)
