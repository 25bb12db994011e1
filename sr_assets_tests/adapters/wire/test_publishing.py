"""Publishing into real servers: what is stored is in order, and every refusal has its own answer."""

import socket
import threading
from itertools import islice

import pytest

from sr_assets.adapters.wire import (
    HEADERS_TOO_LARGE,
    INVALID_SUBJECT,
    MESSAGE_TOO_LARGE,
    NO_STREAM,
    Ack,
    Connection,
    Outgoing,
    Publisher,
    WireError,
    read_range,
)
from sr_assets.adapters.wire.publishing import _frame
from sr_assets.domain.positions import SequenceRange
from sr_assets.embedded.nats_server import NatsServer
from sr_assets_tests.adapters.wire.rig import ODD, Names, flat, made, outgoing, publish
from sr_assets_tests.rig import address

#: What a stream answers that has no room.
STREAM_FULL = 10077


def test_more_than_a_window_is_stored_in_order(connection: Connection, stream: str) -> None:
    sent = outgoing(stream, 2500)
    acks = list(Publisher(connection, max_messages=100, max_bytes=3000).publish_all(iter(sent)))
    assert acks == [Ack(n, n) for n in range(1, 2501)]
    assert [m.payload for m in flat(read_range(connection, stream, SequenceRange(1, 2501), direct=True))] == [
        item.payload for item in sent
    ]


def test_a_duplicate_is_reported_and_the_rest_goes_on(connection: Connection, stream: str) -> None:
    items = [Outgoing(n, f"{stream}.x", b"NATS/1.0\r\nNats-Msg-Id: m%d\r\n\r\n" % n, b"") for n in range(1, 4)]
    publish(connection, items[1:2])
    assert publish(connection, items) == [Ack(1, 2), Ack(2, 1, duplicate=True), Ack(3, 3)]


def test_sending_stops_at_the_first_refusal(connection: Connection, unique: Names) -> None:
    stream = made(connection, unique("FULL"), max_msgs=10, discard="new")
    acks = list(Publisher(connection, max_messages=20).publish_all(outgoing(stream, 5000)))
    assert acks[:10] == [Ack(n, n) for n in range(1, 11)]
    assert acks[10].error_code == STREAM_FULL
    assert acks[10].error == "maximum messages exceeded"
    assert len(acks) < 100


def test_a_full_stream_says_bytes_or_messages_per_subject(connection: Connection, unique: Names) -> None:
    few_bytes = made(connection, unique("FEW"), max_bytes=50, discard="new")
    one_each = made(connection, unique("ONE"), max_msgs_per_subject=1, discard="new", discard_new_per_subject=True)
    assert publish(connection, [Outgoing(1, f"{few_bytes}.x", b"", b"x" * 60)])[0].error_code == STREAM_FULL
    twice = publish(connection, [Outgoing(n, f"{one_each}.x", b"", b"") for n in (1, 2)])
    assert [ack.error_code for ack in twice] == [None, STREAM_FULL]


def test_what_the_server_would_close_the_connection_for_is_reported_and_not_sent(nats_server: NatsServer) -> None:
    with Connection(address(nats_server)) as connection:
        stream = made(connection, "CLOSING")
        limit = connection.max_payload_bytes
        fits, over = (Outgoing(n, f"{stream}.x", ODD[1], b"x" * (limit - len(ODD[1]) + n)) for n in (0, 1))
        acks = publish(connection, [fits, over, fits])
        assert acks[0] == Ack(0, 1)
        assert [ack.error_code for ack in acks[1:]] == [MESSAGE_TOO_LARGE]
        for subject in ("a b", "", "x" * 4100, "a\r\nPUB x 0\r\n"):
            acks = publish(connection, [Outgoing(1, subject, b"", b"")])
            assert [ack.error_code for ack in acks] == [INVALID_SUBJECT]
        assert publish(connection, [Outgoing(3, f"{stream}.x", b"", b"")]) == [Ack(3, 2)]


def test_the_longest_subject_that_is_sent_is_one_the_server_takes(connection: Connection, stream: str) -> None:
    longest = max(
        length
        for length in range(3900, 4096)
        if not isinstance(_frame(Outgoing(1, "x" * length, b"", b""), b"_INBOX" * 7, connection.max_payload_bytes), Ack)
    )
    subject = f"{stream}." + "x" * (longest - len(stream) - 1)
    assert publish(connection, [Outgoing(1, subject, b"", b"")]) == [Ack(1, 1)]


def test_a_local_refusal_comes_after_the_acks_of_what_went_before(connection: Connection, stream: str) -> None:
    items = [*outgoing(stream, 50), Outgoing(51, "not a subject", b"", b""), *outgoing(stream, 50, first=52)]
    acks = publish(connection, items)
    assert [ack.sequence for ack in acks] == list(range(1, 52))
    assert acks[-1].error_code == INVALID_SUBJECT


def test_headers_over_64_kib_are_refused_by_the_stream(connection: Connection, stream: str) -> None:
    huge = b"NATS/1.0\r\nA: " + b"x" * 70_000 + b"\r\n\r\n"
    assert publish(connection, [Outgoing(1, f"{stream}.x", huge, b"")])[0].error_code == HEADERS_TOO_LARGE


def test_a_subject_no_stream_takes_is_an_error_and_not_a_wait(connection: Connection, unique: Names) -> None:
    acks = publish(connection, [Outgoing(n, unique("nowhere"), b"", b"") for n in range(3)])
    assert [ack.error_code for ack in acks] == [NO_STREAM] * 3


def test_the_answer_of_something_that_is_no_stream_is_an_error(nats_server: NatsServer, unique: Names) -> None:
    subject = unique("responder")
    with socket.create_connection(("127.0.0.1", nats_server.port)) as responder, Connection(address(nats_server)) as c:
        responder.sendall(b'CONNECT {"verbose":false}\r\nSUB %b 1\r\nPING\r\n' % subject.encode())
        reader = responder.makefile("rb")
        assert any(line == b"PONG\r\n" for line in islice(reader, 3))

        def answer() -> None:
            reply = reader.readline().split()[3]
            responder.sendall(b"PUB %b 2\r\nok\r\n" % reply)

        thread = threading.Thread(target=answer)
        thread.start()
        acks = publish(c, [Outgoing(1, subject, b"", b"")])
        thread.join()
        reader.close()
    assert acks[0].error == "not the answer of a stream: b'ok'"


def test_a_stream_that_never_acknowledges_ends_in_an_error(connection: Connection, unique: Names) -> None:
    stream = made(connection, unique("MUTE"), no_ack=True)
    publisher = Publisher(connection, ack_timeout_seconds=0.2)
    with pytest.raises(WireError, match=r"no acknowledgement within 0\.2 s"):
        list(publisher.publish_all(outgoing(stream, 1)))
