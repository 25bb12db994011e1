"""Reading from real servers: every way of reading returns the messages unchanged and in order."""

from pathlib import Path
from typing import Any

import pytest

from sr_assets.adapters.wire import (
    Connection,
    Outgoing,
    WireError,
    read_confirmed,
    read_headers,
    read_range,
    read_sequences,
    stored_message,
)
from sr_assets.domain.clusters import ClusterSettings
from sr_assets.domain.positions import SequenceRange
from sr_assets.embedded.nats_server import NatsServer
from sr_assets_tests.adapters.wire.rig import (
    ODD_HEADERS,
    Names,
    consumer_count,
    create_stream,
    delete,
    flat,
    outgoing,
    publish,
)


@pytest.mark.parametrize("direct", (True, False))
def test_reads_return_odd_headers_and_payloads_unchanged(connection: Connection, stream: str, direct: bool) -> None:
    payloads = (b"", bytes(range(256)), b"\r\nPING\r\n", b"{}", b"x" * 900_000, b"\0", b"last")
    sent = [Outgoing(n, f"{stream}.x", h, p) for n, (h, p) in enumerate(zip(ODD_HEADERS, payloads, strict=True), 1)]
    assert [ack.target_sequence for ack in publish(connection, sent)] == list(range(1, 8))
    read = flat(read_range(connection, stream, SequenceRange(1, 8), direct=direct))
    assert [(m.headers, m.payload) for m in read] == [(item.headers, item.payload) for item in sent]
    singles = flat(read_sequences(connection, stream, range(7, 0, -1), direct=direct))
    assert singles == read
    assert stored_message(connection, stream, 7) == read[6]


@pytest.mark.parametrize("direct", (True, False))
@pytest.mark.parametrize("limits", ({}, {"batch_messages": 7}, {"max_bytes": 3000}, {"batch_messages": 1}))
def test_read_range_skips_holes_and_stays_within_range(
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
def test_read_range_applies_subject_filter(connection: Connection, stream: str, direct: bool) -> None:
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
def test_read_range_returns_message_larger_than_a_batch(connection: Connection, stream: str, direct: bool) -> None:
    publish(connection, [Outgoing(n, f"{stream}.x", b"", b"x" * (50_000 if n == 3 else 10)) for n in range(1, 6)])
    read = flat(read_range(connection, stream, SequenceRange(1, 6), max_bytes=1000, direct=direct))
    assert [m.sequence for m in read] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("direct", (True, False))
def test_read_sequences_returns_existing_messages_in_order(connection: Connection, stream: str, direct: bool) -> None:
    publish(connection, outgoing(stream, 400))
    delete(connection, stream, 3, 150)
    requested = [1, 3, 5, *range(100, 200), 399, 400, 401, 9999]
    read = flat(read_sequences(connection, stream, requested, direct=direct, max_bytes=2000))
    assert [m.sequence for m in read] == [s for s in requested if s <= 400 and s not in (3, 150)]
    assert flat(read_sequences(connection, stream, [], direct=direct)) == []


def test_read_headers_omits_payloads(connection: Connection, stream: str) -> None:
    publish(connection, [Outgoing(n, f"{stream}.x", h, b"payload") for n, h in enumerate(ODD_HEADERS[:5], 1)])
    read = flat(read_headers(connection, stream, SequenceRange(2, 5)))
    assert [(m.sequence, m.headers, m.payload) for m in read] == [(n + 1, ODD_HEADERS[n], b"") for n in (1, 2, 3)]
    assert [m.payload_bytes for m in read] == [len(b"payload")] * 3


def test_closed_read_deletes_its_consumer(connection: Connection, stream: str) -> None:
    publish(connection, outgoing(stream, 50))
    reading = read_range(connection, stream, SequenceRange(1, 51), batch_messages=10, direct=False)
    assert len(next(reading)) == 10
    assert consumer_count(connection, stream) == 1
    reading.close()  # type: ignore[attr-defined]
    assert consumer_count(connection, stream) == 0


def large(stream: str, size_bytes: int) -> list[Outgoing]:
    return [Outgoing(n, f"{stream}.{n}", ODD_HEADERS[n % 5], b"%d" % n * size_bytes) for n in range(1, 10)]


@pytest.mark.parametrize(("size_bytes", "left", "consumers"), ((3_999, 7, 0), (4_000, 7, 1), (4_000, 3, 0)))
def test_many_large_messages_are_read_by_consumer(
    connection: Connection, stream: str, size_bytes: int, left: int, consumers: int
) -> None:
    sent = large(stream, size_bytes)
    publish(connection, sent)
    delete(connection, stream, 5)
    reading = read_confirmed(connection, stream, SequenceRange(1, 3 + left), batch_messages=2, direct=True)
    read = [*next(reading), *next(reading)]
    assert consumer_count(connection, stream) == consumers
    read += flat(reading)
    expected = [item for item in sent[: 2 + left] if item.sequence != 5]
    assert [(m.sequence, m.subject, m.headers, m.payload) for m in read] == expected
    assert consumer_count(connection, stream) == 0


def test_large_messages_of_a_work_queue_are_read_by_direct_gets(connection: Connection, unique: Names) -> None:
    """It takes no consumer without acknowledgements, and to read it one by one is slow."""
    stream = create_stream(connection, unique("QUEUE"), retention="workqueue")
    sent = large(stream, 4_000)
    publish(connection, sent)
    lists = list(read_confirmed(connection, stream, SequenceRange(1, 10), batch_messages=2, direct=True))
    assert [len(messages) for messages in lists] == [2, 2, 2, 2, 1]
    assert [message.payload for message in flat(lists)] == [item.payload for item in sent]


@pytest.mark.process
def test_user_without_consumers_reads_large_messages_by_direct_gets(tmp_path: Path) -> None:
    users = '{ user: "me", password: "p", permissions: { publish: { deny: "$JS.API.CONSUMER.>" } } }'
    with (
        NatsServer(tmp_path, "few", config=f"authorization {{ users: [ {users} ] }}") as server,
        Connection(ClusterSettings((server.address,), user="me", password="p")) as connection,
    ):
        stream = create_stream(connection, "LARGE")
        sent = large(stream, 4_000)
        publish(connection, sent)
        lists = list(read_confirmed(connection, stream, SequenceRange(1, 10), batch_messages=2, direct=True))
    assert [message.payload for message in flat(lists)] == [item.payload for item in sent]


def test_connection_is_usable_after_an_abandoned_direct_read(connection: Connection, stream: str) -> None:
    publish(connection, outgoing(stream, 50))
    abandoned = read_range(connection, stream, SequenceRange(1, 51), batch_messages=10, direct=True)
    next(abandoned)
    assert len(flat(read_range(connection, stream, SequenceRange(1, 51), direct=True))) == 50


@pytest.mark.parametrize("direct", (True, False))
def test_read_range_names_missing_stream_in_one_line(connection: Connection, direct: bool) -> None:
    with pytest.raises(WireError, match="NO_SUCH") as caught:
        flat(read_range(connection, "NO_SUCH", SequenceRange(1, 5), direct=direct))
    assert "\n" not in str(caught.value)


def test_direct_read_requires_allow_direct(connection: Connection, unique: Names) -> None:
    stream = create_stream(connection, unique("INDIRECT"), allow_direct=False)
    publish(connection, outgoing(stream, 3))
    with pytest.raises(WireError, match="allow_direct"):
        flat(read_range(connection, stream, SequenceRange(1, 4), direct=True))
    assert len(flat(read_sequences(connection, stream, [1, 3], direct=False))) == 2
