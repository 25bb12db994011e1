"""Whose copy a message is, for every combination of what its headers hold."""

import pytest

from sr_assets.domain.messages import header_writer
from sr_assets.domain.provenance import CopyOf, Identity, find_copy, other_writer_text

IDENTITY = Identity("REG", "eu", "paris")
CREATED_NS = 1_700_000_000_000_000_000
STORED_NS = 1_700_000_100_123_456_789
COPY = header_writer("eu", "paris", "REG", CREATED_NS)(b"", 7, STORED_NS, 0)
RESENT = header_writer("eu", "paris", "REG", CREATED_NS)(b"", 7, STORED_NS, 2)
GO_COPY = b"NATS/1.0\r\nChoria-SR-Source: REG 7 eu paris 1700000100123\r\n\r\n"
FOREIGN_ID = b"NATS/1.0\r\nNats-Msg-Id: x\r\nChoria-SR-Source: REG 7 eu paris 1700000100123\r\n\r\n"
KNOWN = CopyOf(7, 1_700_000_100_123, CREATED_NS)
UNKNOWN = CopyOf(7, 1_700_000_100_123, None)


@pytest.mark.parametrize(
    ("headers", "created_ns", "expected"),
    (
        pytest.param(COPY, None, KNOWN, id="ours, of any source"),
        pytest.param(COPY, CREATED_NS, KNOWN, id="ours, of this source"),
        pytest.param(RESENT, CREATED_NS, KNOWN, id="ours, sent again"),
        pytest.param(COPY, CREATED_NS + 1, None, id="of an earlier source of the same name"),
        pytest.param(GO_COPY, CREATED_NS, UNKNOWN, id="without an id: the Stream Replicator's"),
        pytest.param(FOREIGN_ID, CREATED_NS, UNKNOWN, id="with an id that names no source"),
        pytest.param(b"", CREATED_NS, None, id="no headers"),
        pytest.param(b"NATS/1.0\r\nA: b\r\n\r\n", None, None, id="no origin"),
        pytest.param(b"NATS/1.0\r\nChoria-SR-Source: REG seven eu paris 1\r\n\r\n", None, None, id="a broken origin"),
    ),
)
def test_a_message_is_our_copy_by_its_headers(headers: bytes, created_ns: int | None, expected: CopyOf | None) -> None:
    assert find_copy(headers, IDENTITY, created_ns) == expected


@pytest.mark.parametrize(
    "identity", (Identity("OTHER", "eu", "paris"), Identity("REG", "us", "paris"), Identity("REG", "eu", "london"))
)
def test_every_part_of_the_identity_counts(identity: Identity) -> None:
    assert find_copy(COPY, identity) is None


def test_the_last_hop_of_a_tree_counts() -> None:
    second_hop = header_writer("world", "centre", "REG_EU", 5)(COPY, 9, STORED_NS, 0)
    assert find_copy(second_hop, IDENTITY) is None
    assert find_copy(second_hop, Identity("REG_EU", "world", "centre"), 5) == CopyOf(9, 1_700_000_100_123, 5)


def test_the_message_about_another_writer_names_both_and_what_to_do() -> None:
    text = other_writer_text("COPIES", IDENTITY, 7)
    for part in (
        "target stream COPIES",
        "copy of REG 7",
        "another replicator named eu/paris",
        "recover --stream paris/REG",
    ):
        assert part in text
