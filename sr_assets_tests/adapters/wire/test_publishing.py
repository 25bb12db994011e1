"""Publishing to real servers: messages are stored in order, and each refusal is reported."""

import socket
from itertools import islice

import pytest

from sr_assets.adapters.jetstream import NO_RESPONDERS
from sr_assets.adapters.wire import (
    Ack,
    Connection,
    Items,
    Outgoing,
    Outgoings,
    Publisher,
    Stored,
    WireError,
    read_range,
)
from sr_assets.adapters.wire.publishing import Run, _Window, encode
from sr_assets.domain.positions import SequenceRange
from sr_assets.domain.refusals import INVALID_SUBJECT, MESSAGE_TOO_LARGE
from sr_assets.embedded.nats_server import NatsServer
from sr_assets_tests.adapters.wire.rig import ODD_HEADERS, Names, create_stream, flat, outgoing, publish
from sr_assets_tests.rig import address, in_background


def test_publisher_stores_more_than_a_window_in_order(connection: Connection, stream: str) -> None:
    sent = outgoing(stream, 2500)
    acks = list(Publisher(connection, max_messages=100, max_bytes=3000).publish_all(iter(sent)))
    assert acks == [Ack(n, n) for n in range(1, 2501)]
    assert [m.payload for m in flat(read_range(connection, stream, SequenceRange(1, 2501), direct=True))] == [
        item.payload for item in sent
    ]


def test_publisher_reports_duplicate_and_continues(connection: Connection, stream: str) -> None:
    items = [Outgoing(n, f"{stream}.x", b"NATS/1.0\r\nNats-Msg-Id: m%d\r\n\r\n" % n, b"") for n in range(1, 4)]
    publish(connection, items[1:2])
    assert publish(connection, items) == [Ack(1, 2), Ack(2, 1, duplicate=True), Ack(3, 3)]


def test_publisher_stops_at_first_refusal(connection: Connection, unique: Names) -> None:
    stream = create_stream(connection, unique("FULL"), max_msgs=10, discard="new")
    acks = list(Publisher(connection, max_messages=20).publish_all(outgoing(stream, 5000)))
    assert acks[:10] == [Ack(n, n) for n in range(1, 11)]
    assert acks[10].error_code == 10077
    assert acks[10].error == "maximum messages exceeded"
    assert len(acks) < 100


def test_publisher_does_not_send_messages_that_close_connection(nats_server: NatsServer) -> None:
    with Connection(address(nats_server)) as connection:
        stream = create_stream(connection, "CLOSING")
        limit = connection.max_payload_bytes
        fits, over = (
            Outgoing(n, f"{stream}.x", ODD_HEADERS[1], b"x" * (limit - len(ODD_HEADERS[1]) + n)) for n in (0, 1)
        )
        acks = publish(connection, [fits, over, fits])
        assert acks[0] == Ack(0, 1)
        assert [ack.error_code for ack in acks[1:]] == [MESSAGE_TOO_LARGE]
        for subject in ("a b", "", "x" * 4100, "a\r\nPUB x 0\r\n"):
            acks = publish(connection, [Outgoing(1, subject, b"", b"")])
            assert [ack.error_code for ack in acks] == [INVALID_SUBJECT]
        assert publish(connection, [Outgoing(3, f"{stream}.x", b"", b"")]) == [Ack(3, 2)]


def test_server_accepts_longest_subject_that_publisher_sends(connection: Connection, stream: str) -> None:
    inbox, _ = connection.new_inboxes(0)
    longest = max(
        length
        for length in range(3900, 4096)
        if not encode(Outgoings([1], ["x" * length], [b""], [b""]), (inbox, b""), 1, 1 << 20).refusal
    )
    subject = f"{stream}." + "x" * (longest - len(stream) - 1)
    assert publish(connection, [Outgoing(1, subject, b"", b"")]) == [Ack(1, 1)]


def test_publisher_yields_local_refusal_after_earlier_acks(connection: Connection, stream: str) -> None:
    items = [*outgoing(stream, 50), Outgoing(51, "not a subject", b"", b""), *outgoing(stream, 50, first=52)]
    acks = publish(connection, items)
    assert [ack.sequence for ack in acks] == list(range(1, 52))
    assert acks[-1].error_code == INVALID_SUBJECT


def test_publisher_reports_subject_without_stream_immediately(connection: Connection, unique: Names) -> None:
    acks = publish(connection, [Outgoing(n, unique("nowhere"), b"", b"") for n in range(3)])
    assert [ack.error_code for ack in acks] == [NO_RESPONDERS] * 3


def test_publisher_rejects_response_of_another_subscriber(nats_server: NatsServer, unique: Names) -> None:
    subject = unique("responder")
    with socket.create_connection(("127.0.0.1", nats_server.port)) as responder, Connection(address(nats_server)) as c:
        responder.sendall(b'CONNECT {"verbose":false}\r\nSUB %b 1\r\nPING\r\n' % subject.encode())
        reader = responder.makefile("rb")
        assert any(line == b"PONG\r\n" for line in islice(reader, 3))

        def answer() -> None:
            reply = reader.readline().split()[3]
            responder.sendall(b"PUB %b 2\r\nok\r\n" % reply)

        with in_background(answer):
            acks = publish(c, [Outgoing(1, subject, b"", b"")])
        reader.close()
    assert acks[0].error == "not the answer of a stream: b'ok'"


def test_publisher_fails_when_stream_never_acknowledges(connection: Connection, unique: Names) -> None:
    stream = create_stream(connection, unique("MUTE"), no_ack=True)
    publisher = Publisher(connection, ack_timeout_seconds=0.2)
    with pytest.raises(WireError, match=r"no acknowledgement within 0\.2 s"):
        list(publisher.publish_all(outgoing(stream, 1)))


def test_late_acknowledgements_of_an_earlier_window_settle_nothing(connection: Connection, stream: str) -> None:
    outbox = Items([Outgoing(sequence, f"{stream}.x", b"", b"") for sequence in (70, 80)])
    window = _Window(outbox, connection, 10, 1 << 20)
    assert window.fill()
    (first, second) = window.in_flight
    # The last of an earlier window, and ours, are stored one after the other.
    assert list(window.settle([Run(first - 1, 4, 2)])) == [Stored([70], 5)]
    assert list(window.settle([Run(first, 5, 1)])) == []
    assert list(window.settle([Run(second, 9, 1)])) == [Stored([80], 9)]
    assert (window.in_flight, window.waiting_bytes) == ({}, 0)
