"""Streams that lack messages, and mirrors that answer for them with less: what the leader has is read, all of it."""

import time
from collections.abc import Callable

import pytest

from sr_assets.adapters.wire import Connection, Outgoing, WireError, read_confirmed, read_headers, read_sequences
from sr_assets.adapters.wire.frames import direct_get_message, encode_json, encode_pub
from sr_assets.domain.positions import SequenceRange
from sr_assets_tests.adapters.wire.rig import Names, delete, flat, made, outgoing, publish

WHOLE = SequenceRange(1, 1001)
#: What a mirror keeps: the last messages, one subject, all but the beginning.
MIRRORS = ({"max_msgs": 10}, {"filter": "3"}, {"opt_start_seq": 500})

Read = Callable[[SequenceRange], list[int]]


def mirrored(connection: Connection, origin: str, kept: dict[str, object], count: int = 3) -> None:
    """Put mirrors before a stream that answer direct gets for it, and wait until each has what it is to have."""
    held = {"max_msgs": 10, "filter": 143, "opt_start_seq": 501}[next(iter(kept))]
    for number in range(count):
        source = {"name": origin} | {key: value for key, value in kept.items() if key == "opt_start_seq"}
        if "filter" in kept:
            source["filter_subject"] = f"{origin}.{kept['filter']}"
        limits = {key: value for key, value in kept.items() if key == "max_msgs"}
        name = f"{origin}_M{number}"
        config = {"name": name, "mirror": source, "allow_direct": True, "mirror_direct": True, **limits}
        assert "error" not in connection.request(f"$JS.API.STREAM.CREATE.{name}", config)
        deadline = time.monotonic() + 20
        while (state := connection.request(f"$JS.API.STREAM.INFO.{name}", {})["state"])["messages"] != held:
            assert time.monotonic() < deadline, state
            time.sleep(0.02)


def answering(connection: Connection, stream: str, requests: int = 40) -> set[bytes]:
    """The streams that answer direct gets of one, by what they write in front of a message."""
    inboxes = [connection.new_inbox() for _ in range(requests)]
    body = encode_json({"seq": 1, "batch": 1})
    connection.send(b"".join(encode_pub(f"$JS.API.DIRECT.GET.{stream}", inbox, b"", body) for inbox in inboxes))
    names: set[bytes] = set()
    while frames := connection.receive(0.2):
        answers = [direct_get_message(frame) for frame in frames]
        names |= {answer[2] for answer in answers if answer}
    return names


@pytest.fixture(params=MIRRORS, ids=lambda kept: next(iter(kept)))
def origin(request: pytest.FixtureRequest, connection: Connection, stream: str) -> str:
    """A stream of 1,000 messages with mirrors that answer most direct gets in its place, with less."""
    publish(connection, outgoing(stream, 1000))
    mirrored(connection, stream, request.param)
    assert len(answering(connection, stream)) > 1
    return stream


@pytest.mark.parametrize("wanted", (WHOLE, SequenceRange(1, 300), SequenceRange(400, 997), SequenceRange(995, 2000)))
def test_what_a_mirror_leaves_out_is_read_from_the_stream_itself(
    connection: Connection, origin: str, wanted: SequenceRange
) -> None:
    for _ in range(10):
        read = flat(read_confirmed(connection, origin, wanted, direct=True, max_bytes=5000))
        assert [message.sequence for message in read] == list(range(wanted.first, min(wanted.next, 1001)))


def test_a_mirror_leaves_out_no_single_message(connection: Connection, origin: str) -> None:
    asked = [*range(1, 200, 2), *range(300, 400), *range(401, 1100, 3)]
    for _ in range(5):
        read = flat(read_sequences(connection, origin, asked, direct=True, max_bytes=5000))
        assert [message.sequence for message in read] == [sequence for sequence in asked if sequence <= 1000]


def test_a_mirror_that_rewrites_subjects_changes_nothing(connection: Connection, stream: str) -> None:
    publish(connection, outgoing(stream, 100))
    transform = {"src": f"{stream}.>", "dest": f"elsewhere.{stream}.>"}
    for number in range(3):
        source = {"name": stream, "subject_transforms": [transform]}
        config = {"name": f"{stream}_T{number}", "mirror": source, "allow_direct": True, "mirror_direct": True}
        assert "error" not in connection.request(f"$JS.API.STREAM.CREATE.{stream}_T{number}", config)
    deadline = time.monotonic() + 20
    while len(answering(connection, stream)) < 2:
        assert time.monotonic() < deadline
    for _ in range(10):
        read = flat(read_confirmed(connection, stream, SequenceRange(1, 101), direct=True))
        read += flat(read_sequences(connection, stream, range(1, 100, 2), direct=True))
        assert {message.subject.partition(".")[0] for message in read} == {stream}
        assert len(read) == 150


def deleted_here_and_there(connection: Connection, stream: str) -> set[int]:
    gone = {1, 2, 9, *range(100, 130), 500, 502, 504, 999, 1000}
    delete(connection, stream, *gone)
    return gone


def purged_in_the_middle(connection: Connection, stream: str) -> set[int]:
    """One subject of seven is taken out, behind whatever else stands there."""
    answer = connection.request(f"$JS.API.STREAM.PURGE.{stream}", {"filter": f"{stream}.3"})
    assert answer["purged"] == 143
    return {n for n in range(1, 1001) if n % 7 == 3}


def purged_up_to(connection: Connection, stream: str) -> set[int]:
    assert connection.request(f"$JS.API.STREAM.PURGE.{stream}", {"seq": 600})["purged"] == 599
    return set(range(1, 600))


@pytest.mark.parametrize("mirrors", (False, True), ids=("alone", "mirrored"))
@pytest.mark.parametrize("remove", (deleted_here_and_there, purged_in_the_middle, purged_up_to))
def test_what_the_stream_itself_lacks_is_left_out(
    connection: Connection, stream: str, remove: Callable[[Connection, str], set[int]], mirrors: bool
) -> None:
    publish(connection, outgoing(stream, 1000))
    if mirrors:
        mirrored(connection, stream, {"max_msgs": 10})
    gone = remove(connection, stream)
    there = [n for n in range(1, 1001) if n not in gone]
    for direct in (True, False):
        for max_bytes in (1000, 1 << 20):
            read = flat(read_confirmed(connection, stream, WHOLE, direct=direct, max_bytes=max_bytes))
            assert [message.sequence for message in read] == there
        asked = range(2, 1001, 2)
        singles = flat(read_sequences(connection, stream, asked, direct=direct))
        assert [message.sequence for message in singles] == [n for n in there if n in asked]
    assert [message.sequence for message in flat(read_headers(connection, stream, WHOLE))] == there


@pytest.mark.parametrize("mirrors", (False, True), ids=("alone", "mirrored"))
def test_a_filter_is_answered_by_the_stream_itself(connection: Connection, stream: str, mirrors: bool) -> None:
    publish(connection, outgoing(stream, 1000))
    if mirrors:
        mirrored(connection, stream, {"opt_start_seq": 500})
    delete(connection, stream, 3, 10, 500, 1000)
    for direct in (True, False):
        read = flat(read_confirmed(connection, stream, WHOLE, filter_subject=f"{stream}.3", direct=direct))
        assert [m.sequence for m in read] == [n for n in range(11, 1001) if n % 7 == 3 and n != 500]


@pytest.mark.parametrize("filter_subject", (None, "{}.3"))
@pytest.mark.parametrize("direct", (True, False))
def test_what_a_leader_has_not_come_to_is_not_absent(
    connection: Connection, stream: str, direct: bool, filter_subject: str | None
) -> None:
    """As a leader just elected, or a mirror made anew: the stream held more when the range was planned."""
    publish(connection, outgoing(stream, 10))
    delete(connection, stream, 10)
    subject = filter_subject and filter_subject.format(stream)
    known, beyond = SequenceRange(1, 11), SequenceRange(1, 12)
    read = flat(read_confirmed(connection, stream, known, filter_subject=subject, direct=direct, held=True))
    assert [message.sequence for message in read] == ([3] if subject else list(range(1, 10)))
    with pytest.raises(WireError, match="ends at 10, before 11, which it held"):
        flat(read_confirmed(connection, stream, beyond, filter_subject=subject, direct=direct, held=True))
    with pytest.raises(WireError, match="ends at 10, before 11, which it held"):
        flat(read_headers(connection, stream, beyond))


def test_a_stream_of_holes_takes_a_few_requests(connection: Connection, unique: Names) -> None:
    """Of 400,000 messages every other one is there."""
    stream = made(connection, unique("SIEVE"), storage="memory")
    items = (Outgoing(n, f"{stream}.{'keep' if n % 2 else 'drop'}", b"", b"x") for n in range(1, 400_001))
    assert not any(ack.error for ack in publish(connection, items))
    assert connection.request(f"$JS.API.STREAM.PURGE.{stream}", {"filter": f"{stream}.drop"})["purged"] == 200_000
    before = connection.new_inbox()
    read = flat(read_confirmed(connection, stream, SequenceRange(1, 400_001), direct=True))
    after = connection.new_inbox()
    assert [message.sequence for message in read] == list(range(1, 400_001, 2))
    asked = int(after.rpartition(b".")[2]) - int(before.rpartition(b".")[2])
    assert asked < 200
