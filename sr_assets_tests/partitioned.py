"""Messages of a partitioned stream, and the comparison of its copies with the source."""

from collections.abc import Iterable
from itertools import groupby

from sr_assets.domain.messages import Message, last_origin
from sr_assets_tests.rig import Rig, Sent

SENDERS = 12


def rounds(count: int, lanes: int, *, first: int = 0, senders: int = SENDERS) -> list[Sent]:
    """Return messages of nodes in turn; a node's number decides the partition: subject `<partition>.n<number>`."""
    return [
        Sent(b'{"sender": "n%d", "turn": %d}' % (node, turn), f"{node % lanes}.n{node}")
        for turn in range(first, first + count)
        for node in range(senders)
    ]


def sequences(copies: Iterable[Message]) -> list[int]:
    """Return the source sequence of each copy."""
    origins = [last_origin(copy.headers) for copy in copies]
    return [origin.sequence for origin in origins if origin is not None]


def assert_exact(rig: Rig, stream: str, target: str) -> None:
    """Assert that every message of the source has one copy, and each sender's copies are in order."""
    copies = rig.copies(target)
    assert sorted(sequences(copies)) == [message.sequence for message in rig.stored(stream)]
    by_sender = sorted(copies, key=lambda copy: copy.payload.partition(b",")[0])
    for sender, own in groupby(by_sender, key=lambda copy: copy.payload.partition(b",")[0]):
        order = sequences(own)
        assert order == sorted(order), sender
