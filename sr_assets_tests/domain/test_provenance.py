"""Recognition of own copies, for every combination of headers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sr_assets.domain.messages import LAST_NS, Message, header_writer
from sr_assets.domain.provenance import CopyOf, Identity, find_copy, foreign_copy, is_copy_of, other_writer_text

IDENTITY = Identity("REG", "eu", "paris")
CREATED_NS = 1_700_000_000_000_000_000
STORED_NS = 1_700_000_100_123_456_789
COPY = header_writer("eu", "paris", "REG", CREATED_NS)(b"", 7, STORED_NS, 0)
RESENT = header_writer("eu", "paris", "REG", CREATED_NS)(b"", 7, STORED_NS, 2)
GO_COPY = b"NATS/1.0\r\nChoria-SR-Source: REG 7 eu paris 1700000100123\r\n\r\n"
FOREIGN_ID = b"NATS/1.0\r\nNats-Msg-Id: x\r\nChoria-SR-Source: REG 7 eu paris 1700000100123\r\n\r\n"
OWN_COPY = CopyOf(7, 1_700_000_100_123, CREATED_NS, 0)
RESENT_COPY = OWN_COPY._replace(restart=2)
COPY_OF_UNKNOWN_SOURCE = CopyOf(7, 1_700_000_100_123, None)


@pytest.mark.parametrize(
    ("headers", "created_ns", "expected"),
    (
        pytest.param(COPY, None, OWN_COPY, id="own_copy_of_any_source"),
        pytest.param(COPY, CREATED_NS, OWN_COPY, id="own_copy_of_this_source"),
        pytest.param(RESENT, CREATED_NS, RESENT_COPY, id="own_copy_resent"),
        pytest.param(COPY, CREATED_NS + 1, None, id="copy_of_an_earlier_source"),
        pytest.param(GO_COPY, CREATED_NS, COPY_OF_UNKNOWN_SOURCE, id="stream_replicator_copy_without_id"),
        pytest.param(FOREIGN_ID, CREATED_NS, COPY_OF_UNKNOWN_SOURCE, id="id_without_source"),
        pytest.param(b"", CREATED_NS, None, id="no_headers"),
        pytest.param(b"NATS/1.0\r\nA: b\r\n\r\n", None, None, id="no_origin"),
        pytest.param(b"NATS/1.0\r\nChoria-SR-Source: REG seven eu paris 1\r\n\r\n", None, None, id="invalid_origin"),
    ),
)
def test_find_copy_recognises_own_copies_by_their_headers(
    headers: bytes, created_ns: int | None, expected: CopyOf | None
) -> None:
    assert find_copy(headers, IDENTITY, created_ns) == expected


@pytest.mark.parametrize(
    "identity", (Identity("OTHER", "eu", "paris"), Identity("REG", "us", "paris"), Identity("REG", "eu", "london"))
)
def test_find_copy_compares_every_part_of_the_identity(identity: Identity) -> None:
    assert find_copy(COPY, identity) is None


def test_find_copy_uses_the_last_hop() -> None:
    second_hop = header_writer("world", "centre", "REG_EU", 5)(COPY, 9, STORED_NS, 0)
    assert find_copy(second_hop, IDENTITY) is None
    assert find_copy(second_hop, Identity("REG_EU", "world", "centre"), 5) == CopyOf(9, 1_700_000_100_123, 5, 0)


def test_copy_of_an_earlier_restart_is_recognised_by_its_message_id() -> None:
    assert [RESENT_COPY.is_before(restart) for restart in (1, 2, 3)] == [False, False, True]
    assert not COPY_OF_UNKNOWN_SOURCE.is_before(3)


def test_other_writer_text_names_both_writers_and_the_remedy() -> None:
    text = other_writer_text("COPIES", IDENTITY, 7)
    for part in (
        "target stream COPIES",
        "copy of REG 7",
        "another replicator named eu/paris",
        "stop one of the two",
    ):
        assert part in text


LINES = st.lists(
    st.sampled_from([b"A: b", b"Nats-Msg-Id: x", b"nats-ttl: 1", b"Choria-SR-Source: REG 7 eu paris 1", b"B:", b"A"]),
    max_size=4,
)
BLOCKS = LINES.map(lambda lines: b"\r\n".join([b"NATS/1.0", *lines, b"", b""]) if lines else b"")
WRITE = header_writer("eu", "paris", "REG", CREATED_NS)


@given(BLOCKS, st.binary(max_size=3), st.integers(0, 2))
def test_every_copy_is_confirmed_by_its_content(headers: bytes, payload: bytes, resend: int) -> None:
    original = Message(7, STORED_NS, "s", headers, payload)
    copy = Message(9, STORED_NS, "t", WRITE(headers, 7, STORED_NS, resend), payload)
    assert is_copy_of(copy, original)
    assert not is_copy_of(copy._replace(payload=payload + b"x"), original)
    assert not is_copy_of(copy._replace(headers=WRITE(b"NATS/1.0\r\nX: y\r\n\r\n", 7, STORED_NS, 0)), original)
    assert not is_copy_of(original._replace(headers=b""), original)


NUMBERS = st.one_of(st.integers(0, 2**70), st.sampled_from([10**30, LAST_NS, LAST_NS + 1])).map(str) | st.sampled_from(
    ["1" * 5_000, "-1", "", "\u0663", "0" * 40 + "1"]
)


@given(NUMBERS, NUMBERS, NUMBERS, NUMBERS)
def test_numbers_of_any_publisher_fit_64_bits_or_are_refused(
    sequence: str, hop_ms: str, stored_ms: str, number: str
) -> None:
    headers = (
        f"NATS/1.0\r\nChoria-SR-Source: REG {sequence} eu paris {hop_ms}\r\n"
        f"Nats-Msg-Id: eu/paris/REG/{stored_ms}/{number}\r\n\r\n"
    ).encode()
    foreign_copy(headers, IDENTITY, CREATED_NS)
    if copy := find_copy(headers, IDENTITY):
        assert all(number is None or 0 <= number <= LAST_NS for number in copy)
        assert copy.stored_ms * 1_000_000 <= LAST_NS
