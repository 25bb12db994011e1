"""Header bytes: the headers that a copy keeps, and those that it adds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sr_assets.domain.messages import (
    Origin,
    header_values,
    header_writer,
    kept_headers,
    last_origin,
    message_id,
    parse_message_id,
    parse_origin,
)

NAME = st.sampled_from(
    [b"A", b"a", b"X-Nats-Stream", b"Nats-Sequence", b"Nats-Stream", b"nats-msg-id", b"Choria-SR-Source"]
)
VALUE = st.binary(max_size=12).map(lambda value: value.replace(b"\r", b"").replace(b"\n", b""))
LINE = st.tuples(NAME, st.sampled_from([b":", b": ", b":  "]), VALUE).map(b"".join)
TEXT = st.text(alphabet=st.characters(exclude_characters=" \r\n", exclude_categories=["Cs"]), min_size=1, max_size=12)
# A tab at the edge of a value would be trimmed.
NAMED = TEXT.filter(lambda text: "\t" not in text)
CREATED = st.integers(0, 2**63 - 1)
STORED_MS = st.integers(0, 2**63 // 10**6)
ORIGIN = Origin("REG", 7, "US", "east", 1_647_351_430_123)


def block(*lines: bytes) -> bytes:
    return b"NATS/1.0\r\n" + b"".join(line + b"\r\n" for line in lines) + b"\r\n"


def outgoing_headers(headers: bytes) -> bytes:
    """Return the headers of a first copy of a message from `ORIGIN`."""
    return header_writer("US", "east", "REG", 5)(headers, ORIGIN.sequence, ORIGIN.stored_ms * 1_000_000, 0)


@pytest.mark.parametrize(
    "line",
    (
        b"Nats-Msg-Id: 1",
        b"Nats-Expected-Stream: S",
        b"Nats-Expected-Last-Sequence: 1",
        b"Nats-Rollup: all",
        b"Nats-TTL: 1s",
        b"Nats-Incr: 1",
        b"Nats-Batch-Id: 1",
        b"Nats-Schedule: @at",
        b"Nats-Schedule-Target: t",
        b"Nats-Scheduler: s",
        b"Nats-Trace-Dest: t",
        b"Nats-Trace-Only: 1",
        b"nats-trace-hop: 1",
        b"Nats-Trace-Origin-Account: A",
        b"Nats-Stream-Source: S 1",
        b"Nats-Required-Api-Level: 2",
        b"Nats-Stream: S",
        b"Nats-Subject: s",
        b"Nats-Sequence: 1",
        b"Nats-Time-Stamp: t",
        b"Nats-Num-Pending: 1",
        b"Nats-Last-Sequence: 1",
        b"nats-rollup: sub",
        b"NATS-TTL:1s",
    ),
)
def test_control_headers_are_dropped(line: bytes) -> None:
    assert kept_headers(block(b"A: 1", line, b"B: 2")) == block(b"A: 1", b"B: 2")


@pytest.mark.parametrize(
    "line",
    (
        b"Nats-Msg-Identity: 1",
        b"X-Nats-Rollup: all",
        b"Nats-Streams: S",
        b"Nats-Tracer: 1",
        b"Nats-Expected",
        b"A:  two  ",
        b"a:",
        b"no colon",
        b"B: \xff\xfe",
        b"Choria-SR-Source: S 1 r n 1",
        b"Nats-Marker-Reason: MaxAge",
    ),
)
def test_other_headers_are_kept_in_order_with_duplicates(line: bytes) -> None:
    headers = block(line, b"Nats-Rollup: all", b"A: 1", line)
    assert kept_headers(headers) == block(line, b"A: 1", line)


@given(st.lists(LINE), st.builds(Origin, NAMED, st.integers(0, 2**63 - 1), NAMED, NAMED, STORED_MS), CREATED)
def test_copy_has_the_kept_headers_then_its_origin_and_id(lines: list[bytes], origin: Origin, created_ns: int) -> None:
    write = header_writer(origin.replicator, origin.name, origin.stream, created_ns)
    for resend in (0, 3):
        headers = write(block(*lines), origin.sequence, origin.stored_ms * 1_000_000 + 999_999, resend)
        own_id = message_id(origin.replicator, origin.name, origin.stream, created_ns, origin.sequence, resend).encode()
        kept = kept_headers(block(*lines))[:-2]
        assert headers == kept + b"Choria-SR-Source: %b\r\nNats-Msg-Id: %b\r\n\r\n" % (origin.encode(), own_id)
        assert last_origin(headers) == origin
        assert header_values(headers, b"Nats-Msg-Id") == [own_id]


@pytest.mark.parametrize(
    ("headers", "start"),
    (
        (b"", b"NATS/1.0\r\n"),
        (b"NATS/1.0\r\n\r\n", b"NATS/1.0\r\n"),
        (b"NATS/1.0\r\n", b"NATS/1.0\r\n"),
        (b"NATS/1.0\r\nA: b\r\n", b"NATS/1.0\r\nA: b\r\n"),
        (b"NATS/1.0\r\nA: b", b"NATS/1.0\r\nA: b\r\n"),
    ),
)
def test_copy_always_has_a_complete_header_block(headers: bytes, start: bytes) -> None:
    added = block(b"Choria-SR-Source: " + ORIGIN.encode(), b"Nats-Msg-Id: US/east/REG/5/7")
    assert outgoing_headers(headers) == start + added.removeprefix(b"NATS/1.0\r\n")


def test_last_origin_is_that_of_the_last_hop() -> None:
    headers = outgoing_headers(block(b"Choria-SR-Source: CITY 1 a b 2"))
    assert len(header_values(headers, b"Choria-SR-Source")) == 2
    assert last_origin(headers) == ORIGIN
    assert last_origin(b"") is None
    assert last_origin(block(b"choria-sr-source: CITY 1 a b 2")) is None


@given(st.builds(Origin, TEXT, st.integers(0, 2**63 - 1), TEXT, TEXT, STORED_MS))
def test_origin_round_trips(origin: Origin) -> None:
    assert parse_origin(origin.encode()) == origin


@pytest.mark.parametrize(
    "value",
    (
        b"",
        b"S 1 r n",
        b"S x r n 1",
        b"S 1 r n 1 2",
        b"S -1 r n 1",
        b"\xff 1 r n 1",
        b"S 1 r n +1",
        b"S 1 r n 9223372036855",
    ),
)
def test_invalid_origin_is_none(value: bytes) -> None:
    assert parse_origin(value) is None


def test_header_values_match_case_and_are_trimmed() -> None:
    headers = block(b"Sender:\t one two \t", b"sender: no", b"Sender:", b"Sender: \xff", b"X-Sender: no")
    assert header_values(headers, b"Sender") == [b"one two", b"", b"\xff"]
    assert header_values(b"", b"Sender") == []


@given(TEXT, TEXT, TEXT, CREATED, st.integers(1, 2**63 - 1), st.integers(0, 9))
def test_message_id_names_its_source_and_is_parsed_back(
    replicator: str, name: str, stream: str, created: int, sequence: int, resend: int
) -> None:
    text = message_id(replicator, name, stream, created, sequence, resend)
    assert text == f"{replicator}/{name}/{stream}/{created}/{sequence}" + (f"/r{resend}" if resend else "")
    assert parse_message_id(text.encode()) == (created, sequence, resend)
    assert parse_message_id(b"not-an-id") is None
