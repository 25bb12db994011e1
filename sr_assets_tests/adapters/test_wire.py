"""Bulk traffic against real servers: all bytes come back as they were sent, and every refusal has its own answer."""

import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest

from sr_assets.adapters.wire import (
    HEADERS_TOO_LARGE,
    INVALID_SUBJECT,
    MESSAGE_TOO_LARGE,
    NO_STREAM,
    STREAM_FULL,
    WRONG_LAST_SEQUENCE,
    Ack,
    Connection,
    Outgoing,
    Publisher,
    WireError,
    read_headers,
    read_range,
    read_sequences,
    stored_message,
)
from sr_assets.domain.messages import Message
from sr_assets.domain.positions import SequenceRange
from sr_assets.embedded.nats_server import NatsServer

ODD = (
    b"",
    b"NATS/1.0\r\nA: 1\r\nA:2 \r\na: \t3\r\n\r\n",
    b"NATS/1.0\r\nB : \xff\xfe\x00\r\nNo colon\r\n folded\r\n\r\n",
    b"NATS/1.0\r\nNats-Sequence: 99\r\nNats-Stream: EVIL\r\nNats-Time-Stamp: x\r\nNats-Num-Pending: 7\r\n\r\n",
    b"NATS/1.0\r\nA: b\r\n\r\n\r\nB: c\r\n\r\n",
    b"no version\r\n\r\n",
    b"NATS/1.0\r\nno end",
)
Names = Callable[[str], str]


@pytest.fixture
def connection(nats_server: NatsServer) -> Iterator[Connection]:
    with Connection([nats_server.address]) as opened:
        yield opened


@pytest.fixture
def stream(connection: Connection, unique: Names) -> str:
    return made(connection, unique("WIRE"))


def made(connection: Connection, name: str, **config: Any) -> str:
    """A stream that takes `<name>.>`."""
    body = {"name": name, "subjects": [f"{name}.>"], "allow_direct": True, **config}
    answer = connection.request(f"$JS.API.STREAM.CREATE.{name}", body)
    assert "error" not in answer, answer
    return name


def outgoing(stream: str, count: int, *, first: int = 1, size_bytes: int = 20) -> list[Outgoing]:
    return [
        Outgoing(n, f"{stream}.{n % 7}", b"NATS/1.0\r\nN: %d\r\n\r\n" % n, b"%d" % n * (size_bytes // len(str(n))))
        for n in range(first, first + count)
    ]


def publish(connection: Connection, items: Iterable[Outgoing], *, expect_last: int | None = None) -> list[Ack]:
    return list(Publisher(connection).publish_all(items, expect_last=expect_last))


def flat(batches: Iterable[list[Message]]) -> list[Message]:
    return list(chain.from_iterable(batches))


def delete(connection: Connection, stream: str, *sequences: int) -> None:
    for sequence in sequences:
        assert connection.request(f"$JS.API.STREAM.MSG.DELETE.{stream}", {"seq": sequence})["success"]


def consumers(connection: Connection, stream: str) -> int:
    answer = connection.request(f"$JS.API.STREAM.INFO.{stream}", {})
    return int(answer["state"]["consumer_count"])


# ------------------------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize("direct", (True, False))
def test_odd_headers_and_payloads_come_back_byte_for_byte(connection: Connection, stream: str, direct: bool) -> None:
    payloads = (b"", bytes(range(256)), b"\r\nPING\r\n", b"{}", b"x" * 900_000, b"\0", b"last")
    sent = [Outgoing(n, f"{stream}.x", h, p) for n, (h, p) in enumerate(zip(ODD, payloads, strict=True), 1)]
    assert [ack.target_sequence for ack in publish(connection, sent)] == list(range(1, 8))
    read = flat(read_range(connection, stream, SequenceRange(1, 8), direct=direct))
    assert [(m.headers, m.payload) for m in read] == [(item.headers, item.payload) for item in sent]
    singles = flat(read_sequences(connection, stream, range(7, 0, -1), direct=direct))
    assert singles == read
    assert stored_message(connection, stream, 7) == read[6]


def test_both_ways_of_reading_agree_to_the_nanosecond(connection: Connection, stream: str) -> None:
    publish(connection, outgoing(stream, 300))
    both = [flat(read_range(connection, stream, SequenceRange(0, 301), direct=direct)) for direct in (True, False)]
    assert both[0] == both[1]
    assert [message.sequence for message in both[0]] == list(range(1, 301))


@pytest.mark.parametrize("direct", (True, False))
@pytest.mark.parametrize("limits", ({}, {"batch_messages": 7}, {"max_bytes": 3000}, {"batch_messages": 1}))
def test_a_range_with_holes_is_read_in_order_and_nothing_outside_it(
    connection: Connection, stream: str, direct: bool, limits: dict[str, Any]
) -> None:
    publish(connection, outgoing(stream, 120))
    delete(connection, stream, 10, 40, *range(60, 80), 119, 120)
    read = flat(read_range(connection, stream, SequenceRange(10, 90), direct=direct, **limits))
    assert [m.sequence for m in read] == [s for s in range(11, 90) if s != 40 and not 60 <= s < 80]
    assert flat(read_range(connection, stream, SequenceRange(60, 70), direct=direct, **limits)) == []
    assert flat(read_range(connection, stream, SequenceRange(118, 999), direct=direct, **limits))[-1].sequence == 118
    assert flat(read_range(connection, stream, SequenceRange(500, 999), direct=direct, **limits)) == []
    assert flat(read_range(connection, stream, SequenceRange(5, 5), direct=direct, **limits)) == []


@pytest.mark.parametrize("direct", (True, False))
def test_a_filter_is_applied_by_the_server(connection: Connection, stream: str, direct: bool) -> None:
    publish(connection, outgoing(stream, 100))
    read = flat(
        read_range(
            connection,
            stream,
            SequenceRange(20, 60),
            filter_subject=f"{stream}.3",
            batch_messages=4,
            direct=direct,
        )
    )
    assert [m.sequence for m in read] == [24, 31, 38, 45, 52, 59]


@pytest.mark.parametrize("direct", (True, False))
def test_one_message_larger_than_a_batch_does_not_stop_the_reading(
    connection: Connection, stream: str, direct: bool
) -> None:
    publish(connection, [Outgoing(n, f"{stream}.x", b"", b"x" * (50_000 if n == 3 else 10)) for n in range(1, 6)])
    read = flat(read_range(connection, stream, SequenceRange(1, 6), max_bytes=1000, direct=direct))
    assert [m.sequence for m in read] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("direct", (True, False))
def test_scattered_messages_and_runs_are_read_in_order_and_missing_ones_left_out(
    connection: Connection, stream: str, direct: bool
) -> None:
    publish(connection, outgoing(stream, 400))
    delete(connection, stream, 3, 150)
    asked = [1, 3, 5, *range(100, 200), 399, 400, 401, 9999]
    read = flat(read_sequences(connection, stream, asked, direct=direct, max_bytes=2000))
    assert [m.sequence for m in read] == [s for s in asked if s <= 400 and s not in (3, 150)]
    assert flat(read_sequences(connection, stream, [], direct=direct)) == []


def test_headers_are_read_without_payloads(connection: Connection, stream: str) -> None:
    publish(connection, [Outgoing(n, f"{stream}.x", h, b"payload") for n, h in enumerate(ODD[:5], 1)])
    read = flat(read_headers(connection, stream, SequenceRange(2, 5)))
    assert [(m.sequence, m.headers, m.payload) for m in read] == [(n + 1, ODD[n], b"") for n in (1, 2, 3)]


def test_a_reader_that_is_dropped_leaves_no_consumer_and_a_usable_connection(
    connection: Connection, stream: str
) -> None:
    publish(connection, outgoing(stream, 50))
    reading = read_range(connection, stream, SequenceRange(1, 51), batch_messages=10, direct=False)
    assert len(next(reading)) == 10
    assert consumers(connection, stream) == 1
    reading.close()  # type: ignore[attr-defined]
    assert consumers(connection, stream) == 0
    direct = read_range(connection, stream, SequenceRange(1, 51), batch_messages=10, direct=True)
    next(direct)
    assert len(flat(read_range(connection, stream, SequenceRange(1, 51), direct=True))) == 50


@pytest.mark.parametrize("direct", (True, False))
def test_a_missing_stream_is_one_clear_line(connection: Connection, direct: bool) -> None:
    with pytest.raises(WireError, match="NO_SUCH") as caught:
        flat(read_range(connection, "NO_SUCH", SequenceRange(1, 5), direct=direct))
    assert "\n" not in str(caught.value)


def test_a_stream_without_direct_get_says_so(connection: Connection, unique: Names) -> None:
    stream = made(connection, unique("INDIRECT"), allow_direct=False)
    publish(connection, outgoing(stream, 3))
    with pytest.raises(WireError, match="allow_direct"):
        flat(read_range(connection, stream, SequenceRange(1, 4), direct=True))
    assert len(flat(read_sequences(connection, stream, [1, 3], direct=False))) == 2


# ---------------------------------------------------------------------------------------------------------- publishing


@pytest.mark.parametrize("expect_last", (0, None))
def test_more_than_a_window_is_stored_in_order(connection: Connection, stream: str, expect_last: int | None) -> None:
    sent = outgoing(stream, 2500)
    publisher = Publisher(connection, max_messages=100, max_bytes=3000)
    acks = list(publisher.publish_all(iter(sent), expect_last=expect_last))
    assert acks == [Ack(n, n) for n in range(1, 2501)]
    assert [m.payload for m in flat(read_range(connection, stream, SequenceRange(1, 2501), direct=True))] == [
        item.payload for item in sent
    ]


def test_a_chain_puts_its_expectation_in_front_of_the_headers(connection: Connection, stream: str) -> None:
    publish(connection, [Outgoing(1, f"{stream}.a", b"", b""), Outgoing(2, f"{stream}.a", ODD[1], b"")], expect_last=0)
    read = flat(read_range(connection, stream, SequenceRange(1, 3), direct=True))
    assert read[0].headers == b"NATS/1.0\r\nNats-Expected-Last-Sequence: 0\r\n\r\n"
    assert read[1].headers == b"NATS/1.0\r\nNats-Expected-Last-Sequence: 1\r\n" + ODD[1][10:]


def test_a_chain_refuses_everything_when_another_writer_was_there(connection: Connection, stream: str) -> None:
    publish(connection, outgoing(stream, 5))
    acks = publish(connection, outgoing(stream, 300, first=100), expect_last=4)
    assert [(ack.sequence, ack.error_code) for ack in acks] == [(100, WRONG_LAST_SEQUENCE)]
    assert flat(read_range(connection, stream, SequenceRange(6, 999), direct=True)) == []


def test_a_chain_leaves_no_hole_behind_a_refused_message(connection: Connection, unique: Names) -> None:
    stream = made(connection, unique("SMALL"), max_msg_size=1000)
    items = outgoing(stream, 100)
    items[40] = Outgoing(41, f"{stream}.x", b"", b"x" * 2000)
    acks = publish(connection, items, expect_last=0)
    assert acks[:40] == [Ack(n, n) for n in range(1, 41)]
    assert [(ack.sequence, ack.error_code) for ack in acks[40:]] == [(41, MESSAGE_TOO_LARGE)]
    rest = publish(connection, items[41:], expect_last=40)
    assert [ack.target_sequence for ack in rest] == list(range(41, 100))


def test_a_chain_ends_at_a_duplicate(connection: Connection, stream: str) -> None:
    items = [Outgoing(n, f"{stream}.x", b"NATS/1.0\r\nNats-Msg-Id: %d\r\n\r\n" % n, b"") for n in range(1, 9)]
    publish(connection, items[3:4])
    acks = publish(connection, items, expect_last=1)
    assert acks[:3] == [Ack(1, 2), Ack(2, 3), Ack(3, 4)]
    assert acks[3:] == [Ack(4, 1, duplicate=True)]


def test_without_a_chain_a_duplicate_is_reported_and_the_rest_goes_on(connection: Connection, stream: str) -> None:
    items = [Outgoing(n, f"{stream}.x", b"NATS/1.0\r\nNats-Msg-Id: m%d\r\n\r\n" % n, b"") for n in range(1, 4)]
    publish(connection, items[1:2])
    assert publish(connection, items) == [Ack(1, 2), Ack(2, 1, duplicate=True), Ack(3, 3)]


def test_without_a_chain_sending_stops_at_the_first_refusal(connection: Connection, unique: Names) -> None:
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
    with Connection([nats_server.address]) as connection:
        stream = made(connection, "CLOSING")
        limit = connection.max_payload_bytes
        fits, over = (Outgoing(n, f"{stream}.x", ODD[1], b"x" * (limit - len(ODD[1]) + n)) for n in (0, 1))
        acks = publish(connection, [fits, over, fits], expect_last=0)
        assert [ack.error_code for ack in acks] == [MESSAGE_TOO_LARGE]
        assert publish(connection, [fits, over, fits])[0] == Ack(0, 1)
        for subject in ("a b", "", "x" * 4100, "a\r\nPUB x 0\r\n"):
            acks = publish(connection, [Outgoing(1, subject, b"", b"")])
            assert [ack.error_code for ack in acks] == [INVALID_SUBJECT]
        assert publish(connection, [Outgoing(3, f"{stream}.x", b"", b"")]) == [Ack(3, 2)]


def test_the_longest_subject_that_is_sent_is_one_the_server_takes(connection: Connection, stream: str) -> None:
    longest = max(
        length
        for length in range(3900, 4096)
        if not isinstance(Publisher(connection)._frame(Outgoing(1, "x" * length, b"", b""), b"_INBOX" * 7, None), Ack)
    )
    subject = f"{stream}." + "x" * (longest - len(stream) - 1)
    assert publish(connection, [Outgoing(1, subject, b"", b"")]) == [Ack(1, 1)]


def test_a_local_refusal_comes_after_the_acks_of_what_went_before(connection: Connection, stream: str) -> None:
    items = [*outgoing(stream, 50), Outgoing(51, "not a subject", b"", b""), *outgoing(stream, 50, first=52)]
    acks = publish(connection, items, expect_last=0)
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
    with socket.create_connection(("127.0.0.1", nats_server.port)) as responder, Connection([nats_server.address]) as c:
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


# ---------------------------------------------------------------------------------------------------------- connecting


def test_a_server_that_dies_ends_a_publish_with_one_line_and_the_target_tells_what_was_stored(tmp_path: Path) -> None:
    with NatsServer(tmp_path, "mortal") as server:
        with Connection([server.address]) as connection:
            stream = made(connection, "MORTAL")

            def dying() -> Iterator[Outgoing]:
                yield from outgoing(stream, 2000)
                server.kill()
                yield from outgoing(stream, 20_000, first=2001)

            acks: list[Ack] = []
            with pytest.raises(WireError) as caught:
                acks.extend(Publisher(connection, max_messages=100).publish_all(dying(), expect_last=0))
            assert "\n" not in str(caught.value)
        server.start()
        with Connection([server.address]) as connection:
            stored = flat(read_headers(connection, stream, SequenceRange(1, 30_000)))
            assert [m.sequence for m in stored] == list(range(1, len(stored) + 1))


def test_the_first_server_that_answers_is_taken(nats_server: NatsServer) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{closed.getsockname()[1]}"
        with Connection([nobody, nats_server.address]) as connection:
            assert connection.server_version.startswith("2.")
        with pytest.raises(WireError, match=f"{nobody}: Connection refused"):
            Connection([nobody]).open()


def test_a_server_that_says_nothing_is_left_after_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(WireError, match=r"no INFO within 0\.1 s"):
            Connection([f"127.0.0.1:{port}"], connect_timeout_seconds=0.1).open()


def test_something_else_than_a_nats_server_is_recognised() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            with server.accept()[0] as client:
                client.sendall(b"220 mail.example.net ESMTP\r\n")

        thread = threading.Thread(target=greet)
        thread.start()
        with pytest.raises(WireError, match="not the NATS protocol"):
            Connection([f"127.0.0.1:{server.getsockname()[1]}"]).open()
        thread.join()


def test_credentials_let_in_and_never_show(tmp_path: Path) -> None:
    config = (
        'authorization { users: [ { user: "ada", password: "s3cret", permissions: { publish: { deny: "no.>" } } } ] }'
    )
    with NatsServer(tmp_path, "guarded", config=config) as server:
        with Connection([server.address], user="ada", password="s3cret") as connection:
            made(connection, "GUARDED", subjects=["no.>"])
            with pytest.raises(WireError, match="Permissions Violation for Publish"):
                publish(connection, [Outgoing(1, "no.x", b"", b"")])
        for password in ("wr0ng", None):
            with pytest.raises(WireError, match="Authorization Violation") as caught:
                Connection([server.address], user="ada", password=password).open()
            assert "wr0ng" not in str(caught.value)


def test_a_token_lets_in(tmp_path: Path) -> None:
    with NatsServer(tmp_path, "token", config='authorization { token: "t0ken" }', jetstream=False) as server:
        with Connection([server.address], token="t0ken") as connection, pytest.raises(WireError, match="JetStream"):
            connection.request("$JS.API.INFO", {})
        with pytest.raises(WireError, match="Authorization Violation"):
            Connection([server.address]).open()


def test_pings_are_answered_while_waiting_and_while_publishing(tmp_path: Path) -> None:
    config = 'ping_interval: "50ms"\nping_max: 1'
    with NatsServer(tmp_path, "nervous", config=config) as server, Connection([server.address]) as connection:
        stream = made(connection, "PINGED")
        for first in range(1, 8001, 2000):
            assert connection.receive(0.15) == []
            assert publish(connection, outgoing(stream, 2000, first=first), expect_last=first - 1)[-1].error is None
