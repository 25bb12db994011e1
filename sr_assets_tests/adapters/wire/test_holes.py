"""Reads of streams with missing messages, and of streams whose mirrors have fewer messages than the leader."""

from collections.abc import Callable

import pytest

from sr_assets.adapters.jetstream import encode_json
from sr_assets.adapters.wire import Connection, Outgoing, WireError, read_confirmed, read_headers, read_sequences
from sr_assets.adapters.wire.frames import direct_get_message, encode_pub
from sr_assets.domain.positions import SequenceRange
from sr_assets_tests.adapters.wire.rig import Names, create_stream, delete, flat, outgoing, publish
from sr_assets_tests.rig import wait_until

WHOLE = SequenceRange(1, 1001)
#: The messages that a mirror holds: the last ones, one subject, or all from a start sequence.
MIRRORS = ({"max_msgs": 10}, {"filter": "3"}, {"opt_start_seq": 500})


def create_mirrors(connection: Connection, origin: str, selection: dict[str, object], count: int = 3) -> None:
    """Create mirrors that answer direct gets for a stream, and wait until each has copied its messages."""
    expected = {"max_msgs": 10, "filter": 143, "opt_start_seq": 501}[next(iter(selection))]
    for number in range(count):
        source = {"name": origin} | {key: value for key, value in selection.items() if key == "opt_start_seq"}
        if "filter" in selection:
            source["filter_subject"] = f"{origin}.{selection['filter']}"
        limits = {key: value for key, value in selection.items() if key == "max_msgs"}
        name = f"{origin}_M{number}"
        config = {"name": name, "mirror": source, "allow_direct": True, "mirror_direct": True, **limits}
        assert "error" not in connection.request(f"$JS.API.STREAM.CREATE.{name}", config)
        info = f"$JS.API.STREAM.INFO.{name}"
        wait_until(lambda: connection.request(info, {})["state"]["messages"] == expected, name)  # noqa: B023


def answering_streams(connection: Connection, stream: str, requests: int = 40) -> set[bytes]:
    """Return the streams that answer direct gets of a stream, from the headers of their responses."""
    inboxes = [connection.new_inbox() for _ in range(requests)]
    body = encode_json({"seq": 1, "batch": 1})
    connection.send(b"".join(encode_pub(f"$JS.API.DIRECT.GET.{stream}", inbox, b"", body) for inbox in inboxes))
    names: set[bytes] = set()
    while frames := connection.receive(0.2):
        answers = [direct_get_message(frame) for frame in frames]
        names |= {answer[2] for answer in answers if answer}
    return names


@pytest.fixture(params=MIRRORS, ids=lambda selection: next(iter(selection)))
def origin(request: pytest.FixtureRequest, connection: Connection, stream: str) -> str:
    """A stream of 1,000 messages whose mirrors have fewer messages and answer most direct gets."""
    publish(connection, outgoing(stream, 1000))
    create_mirrors(connection, stream, request.param)
    assert len(answering_streams(connection, stream)) > 1
    return stream


@pytest.mark.parametrize(
    "wanted_range", (WHOLE, SequenceRange(1, 300), SequenceRange(400, 997), SequenceRange(995, 2000))
)
def test_read_confirmed_includes_messages_missing_in_mirrors(
    connection: Connection, origin: str, wanted_range: SequenceRange
) -> None:
    for _ in range(10):
        read = flat(read_confirmed(connection, origin, wanted_range, direct=True, max_bytes=5000))
        assert [message.sequence for message in read] == list(range(wanted_range.first, min(wanted_range.next, 1001)))


def test_read_sequences_includes_messages_missing_in_mirrors(connection: Connection, origin: str) -> None:
    requested = [*range(1, 200, 2), *range(300, 400), *range(401, 1100, 3)]
    for _ in range(5):
        read = flat(read_sequences(connection, origin, requested, direct=True, max_bytes=5000))
        assert [message.sequence for message in read] == [sequence for sequence in requested if sequence <= 1000]


def test_reads_return_original_subjects_when_mirrors_rewrite_them(connection: Connection, stream: str) -> None:
    publish(connection, outgoing(stream, 100))
    transform = {"src": f"{stream}.>", "dest": f"elsewhere.{stream}.>"}
    for number in range(3):
        source = {"name": stream, "subject_transforms": [transform]}
        config = {"name": f"{stream}_T{number}", "mirror": source, "allow_direct": True, "mirror_direct": True}
        assert "error" not in connection.request(f"$JS.API.STREAM.CREATE.{stream}_T{number}", config)
    wait_until(lambda: len(answering_streams(connection, stream)) > 1, "answers of two streams")
    for _ in range(10):
        read = flat(read_confirmed(connection, stream, SequenceRange(1, 101), direct=True))
        read += flat(read_sequences(connection, stream, range(1, 100, 2), direct=True))
        assert {message.subject.partition(".")[0] for message in read} == {stream}
        assert len(read) == 150


def delete_scattered(connection: Connection, stream: str) -> set[int]:
    deleted = {1, 2, 9, *range(100, 130), 500, 502, 504, 999, 1000}
    delete(connection, stream, *deleted)
    return deleted


def purge_one_subject(connection: Connection, stream: str) -> set[int]:
    """Delete one subject of seven."""
    answer = connection.request(f"$JS.API.STREAM.PURGE.{stream}", {"filter": f"{stream}.3"})
    assert answer["purged"] == 143
    return {n for n in range(1, 1001) if n % 7 == 3}


def purge_beginning(connection: Connection, stream: str) -> set[int]:
    assert connection.request(f"$JS.API.STREAM.PURGE.{stream}", {"seq": 600})["purged"] == 599
    return set(range(1, 600))


@pytest.mark.parametrize("with_mirrors", (False, True), ids=("alone", "mirrored"))
@pytest.mark.parametrize("remove", (delete_scattered, purge_one_subject, purge_beginning))
def test_reads_omit_only_messages_missing_in_the_stream(
    connection: Connection, stream: str, remove: Callable[[Connection, str], set[int]], with_mirrors: bool
) -> None:
    publish(connection, outgoing(stream, 1000))
    if with_mirrors:
        create_mirrors(connection, stream, {"max_msgs": 10})
    deleted = remove(connection, stream)
    remaining = [n for n in range(1, 1001) if n not in deleted]
    for direct in (True, False):
        for max_bytes in (1000, 1 << 20):
            read = flat(read_confirmed(connection, stream, WHOLE, direct=direct, max_bytes=max_bytes))
            assert [message.sequence for message in read] == remaining
        requested = range(2, 1001, 2)
        singles = flat(read_sequences(connection, stream, requested, direct=direct))
        assert [message.sequence for message in singles] == [n for n in remaining if n in requested]
    assert [message.sequence for message in flat(read_headers(connection, stream, WHOLE))] == remaining


@pytest.mark.parametrize("with_mirrors", (False, True), ids=("alone", "mirrored"))
def test_filtered_read_returns_all_matching_messages_of_the_stream(
    connection: Connection, stream: str, with_mirrors: bool
) -> None:
    publish(connection, outgoing(stream, 1000))
    if with_mirrors:
        create_mirrors(connection, stream, {"opt_start_seq": 500})
    delete(connection, stream, 3, 10, 500, 1000)
    for direct in (True, False):
        read = flat(read_confirmed(connection, stream, WHOLE, filter_subject=f"{stream}.3", direct=direct))
        assert [m.sequence for m in read] == [n for n in range(11, 1001) if n % 7 == 3 and n != 500]


@pytest.mark.parametrize("filter_subject", (None, "{}.3"))
@pytest.mark.parametrize("direct", (True, False))
def test_read_fails_when_stream_ends_before_existing_sequence(
    connection: Connection, stream: str, direct: bool, filter_subject: str | None
) -> None:
    """A newly elected leader, or a recreated mirror, may end before a sequence that existed at planning time."""
    publish(connection, outgoing(stream, 10))
    delete(connection, stream, 10)
    subject = filter_subject and filter_subject.format(stream)
    existing, beyond = SequenceRange(1, 11), SequenceRange(1, 12)
    read = flat(read_confirmed(connection, stream, existing, filter_subject=subject, direct=direct, held=True))
    assert [message.sequence for message in read] == ([3] if subject else list(range(1, 10)))
    with pytest.raises(WireError, match="ends at 10, before 11, which it held"):
        flat(read_confirmed(connection, stream, beyond, filter_subject=subject, direct=direct, held=True))
    with pytest.raises(WireError, match="ends at 10, before 11, which it held"):
        flat(read_headers(connection, stream, beyond))


def test_read_of_stream_with_many_holes_needs_few_requests(connection: Connection, unique: Names) -> None:
    """Every other one of the 60,000 messages is deleted."""
    stream = create_stream(connection, unique("SIEVE"), storage="memory")
    items = (Outgoing(n, f"{stream}.{'keep' if n % 2 else 'drop'}", b"", b"x") for n in range(1, 60_001))
    assert not any(ack.error for ack in publish(connection, items))
    assert connection.request(f"$JS.API.STREAM.PURGE.{stream}", {"filter": f"{stream}.drop"})["purged"] == 30_000
    before = connection.new_inbox()
    read = flat(read_confirmed(connection, stream, SequenceRange(1, 60_001), direct=True))
    after = connection.new_inbox()
    assert [message.sequence for message in read] == list(range(1, 60_001, 2))
    requested = int(after.rpartition(b".")[2]) - int(before.rpartition(b".")[2])
    assert requested < 200
