"""Fast-ingest batches on real servers: stored in order, ended at the first refusal, and bounded in size."""

from collections.abc import Iterator

import pytest

from sr_assets.adapters.jetstream import NO_RESPONDERS
from sr_assets.adapters.wire import Ack, BatchEnd, BatchPublisher, Connection, Items, Outgoing, WireError, read_range
from sr_assets.domain.positions import SequenceRange
from sr_assets.domain.refusals import HEADERS_TOO_LARGE, INVALID_SUBJECT, MESSAGE_TOO_LARGE
from sr_assets_tests.adapters.wire.rig import Names, create_stream, flat, outgoing, publish


@pytest.fixture
def batched(connection: Connection, unique: Names) -> str:
    return create_stream(connection, unique("BATCHED"), allow_batched=True)


def with_id(stream: str, *numbers: int) -> list[Outgoing]:
    return [Outgoing(n, f"{stream}.x", b"NATS/1.0\r\nNats-Msg-Id: m%d\r\n\r\n" % n, b"") for n in numbers]


@pytest.mark.parametrize("count", (1, 2, 499, 500, 501, 2500))
def test_batch_stores_all_messages_in_order(connection: Connection, batched: str, count: int) -> None:
    sent = outgoing(batched, count)
    end = BatchPublisher(connection, window=600).publish(Items(sent))
    assert end == BatchEnd(list(range(1, count + 1)), count, count, exhausted=True)
    stored = flat(read_range(connection, batched, SequenceRange(1, count + 1), direct=True))
    assert [(m.subject, m.headers, m.payload) for m in stored] == [item[1:] for item in sent]


def test_batch_without_messages_ends_at_once(connection: Connection, batched: str) -> None:
    assert BatchPublisher(connection).publish(Items(())) == BatchEnd(exhausted=True)


def test_batches_are_bounded_by_messages_and_by_bytes(connection: Connection, batched: str) -> None:
    items = Items(outgoing(batched, 250))
    assert BatchPublisher(connection, max_messages=100).publish(items) == BatchEnd(list(range(1, 101)), 100, 100)
    end = BatchPublisher(connection, max_bytes=500).publish(items)
    assert 1 < end.stored < 100
    assert not end.exhausted
    last = BatchPublisher(connection).publish(items)
    assert (last.sent[0], last.stored, last.last, last.exhausted) == (101 + end.stored, 150 - end.stored, 250, True)


def test_batch_ends_at_first_refusal_in_the_middle(connection: Connection, unique: Names) -> None:
    stream = create_stream(connection, unique("FULL"), max_msgs=1000, discard="new", allow_batched=True)
    end = BatchPublisher(connection).publish(Items(outgoing(stream, 5000)))
    assert (end.stored, end.last) == (1000, 1000)
    assert end.refusal == Ack(1001, error_code=10077, error="maximum messages exceeded")
    end = BatchPublisher(connection).publish(Items(outgoing(stream, 5)))
    assert (end.stored, end.last, end.refusal and end.refusal.sequence) == (0, None, 1)


@pytest.mark.parametrize("at", (1, 2, 700, 1000))
def test_batch_ends_before_message_larger_than_the_stream_accepts(
    connection: Connection, unique: Names, at: int
) -> None:
    stream = create_stream(connection, unique("SMALL"), max_msg_size=1000, allow_batched=True)
    items = outgoing(stream, 1000)
    items[at - 1] = items[at - 1]._replace(payload=b"x" * 2000)
    end = BatchPublisher(connection).publish(Items(items))
    assert end.refusal is not None
    assert (end.refusal.sequence, end.refusal.error_code) == (at, MESSAGE_TOO_LARGE)
    assert (end.stored, end.last) == (at - 1, at - 1 or None)


@pytest.mark.parametrize("at", (1, 2, 700, 1000))
def test_batch_ends_before_subject_that_no_stream_takes(connection: Connection, batched: str, at: int) -> None:
    items = outgoing(batched, 1000)
    items[at - 1] = items[at - 1]._replace(subject=f"elsewhere.{batched}")
    end = BatchPublisher(connection).publish(Items(items))
    assert end.refusal is not None
    assert (end.refusal.sequence, end.refusal.error_code) == (at, NO_RESPONDERS)
    assert (end.stored, end.last) == (at - 1, at - 1 or None)


@pytest.mark.parametrize("at", (1, 2, 9))
def test_batch_ends_before_first_of_two_messages_that_are_refused(
    connection: Connection, batched: str, at: int
) -> None:
    items = outgoing(batched, 10)
    items[at - 1] = items[at - 1]._replace(headers=b"NATS/1.0\r\nX: " + b"x" * 65_536 + b"\r\n\r\n")
    items[9] = items[9]._replace(subject=f"{batched}." + "x" * 4096)
    end = BatchPublisher(connection).publish(Items(items))
    assert end.refusal is not None
    assert (end.refusal.sequence, end.refusal.error_code) == (at, HEADERS_TOO_LARGE)
    assert (end.stored, end.last) == (at - 1, at - 1 or None)


@pytest.mark.parametrize("at", (1, 2, 1000))
def test_batch_ends_before_message_that_would_close_the_connection(
    connection: Connection, batched: str, at: int
) -> None:
    items = outgoing(batched, 1000)
    items[at - 1] = items[at - 1]._replace(subject="a b")
    end = BatchPublisher(connection).publish(Items(items))
    assert (end.refusal and end.refusal.sequence, end.refusal and end.refusal.error_code) == (at, INVALID_SUBJECT)
    assert (end.stored, end.last) == (at - 1, at - 1 or None)


def test_batch_counts_duplicates_as_stored_without_storing_them(connection: Connection, batched: str) -> None:
    publish(connection, with_id(batched, 3))
    end = BatchPublisher(connection).publish(Items(with_id(batched, 1, 2, 3, 4)))
    assert (end.stored, end.last, end.refusal) == (4, 4, None)


def test_batch_of_duplicates_has_no_last_sequence(connection: Connection, batched: str) -> None:
    publish(connection, with_id(batched, 1, 2))
    end = BatchPublisher(connection).publish(Items(with_id(batched, 1, 2)))
    assert (end.stored, end.last, end.refusal) == (2, 0, None)
    assert connection.request_api(f"STREAM.INFO.{batched}")["state"]["last_seq"] == 2


def test_stream_without_batches_is_no_refusal_of_a_message(connection: Connection, stream: str) -> None:
    end = BatchPublisher(connection).publish(Items(outgoing(stream, 10)))
    assert (end.sent, end.stored, end.last, end.refusal) == ([1], 0, None, None)


def test_batch_that_the_server_forgot_is_no_refusal_of_a_message(connection: Connection, batched: str) -> None:
    """An update that disables batches stands for the 10 s after which a server forgets an idle batch."""

    def items() -> Iterator[Outgoing]:
        yield from outgoing(batched, 700)
        config = connection.cluster
        with Connection(config) as other:
            for enabled in (False, True):
                body = {"name": batched, "subjects": [f"{batched}.>"], "allow_direct": True, "allow_batched": enabled}
                other.request_api(f"STREAM.UPDATE.{batched}", body)
        yield from outgoing(batched, 700, first=701)

    end = BatchPublisher(connection, window=700).publish(Items(items()))
    assert (end.last, end.refusal, end.exhausted) == (None, None, False)
    assert end.stored <= connection.request_api(f"STREAM.INFO.{batched}")["state"]["last_seq"] <= 700


def test_batch_fails_when_no_acknowledgement_arrives(connection: Connection, batched: str) -> None:
    items = Items([Outgoing(1, f"{batched}.x", b"", b"")])
    connection.request_api(f"STREAM.DELETE.{batched}")
    create_stream(connection, batched, allow_batched=True, no_ack=True)
    with pytest.raises(WireError, match=r"no acknowledgement within 0\.2 s"):
        BatchPublisher(connection, ack_timeout_seconds=0.2).publish(items)
