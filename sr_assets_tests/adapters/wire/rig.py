"""Helpers of the wire tests: create streams; publish, delete and count messages."""

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

from sr_assets.adapters.wire import Ack, Connection, Outgoing, Publisher
from sr_assets.domain.messages import Message

# Header blocks that senders produce, well-formed and malformed.
ODD_HEADERS = (
    b"",
    b"NATS/1.0\r\nA: 1\r\nA:2 \r\na: \t3\r\n\r\n",
    b"NATS/1.0\r\nB : \xff\xfe\x00\r\nNo colon\r\n folded\r\n\r\n",
    b"NATS/1.0\r\nNats-Sequence: 99\r\nNats-Stream: EVIL\r\nNats-Time-Stamp: x\r\nNats-Num-Pending: 7\r\n\r\n",
    b"NATS/1.0\r\nA: b\r\n\r\n\r\nB: c\r\n\r\n",
    b"no version\r\n\r\n",
    b"NATS/1.0\r\nno end",
)

Names = Callable[[str], str]


def create_stream(connection: Connection, name: str, **config: Any) -> str:
    """Create a stream with the subjects `<name>.>` and return its name."""
    body = {"name": name, "subjects": [f"{name}.>"], "allow_direct": True, **config}
    answer = connection.request(f"$JS.API.STREAM.CREATE.{name}", body)
    assert "error" not in answer, answer
    return name


def outgoing(stream: str, count: int, *, first: int = 1, size_bytes: int = 20) -> list[Outgoing]:
    return [
        Outgoing(n, f"{stream}.{n % 7}", b"NATS/1.0\r\nN: %d\r\n\r\n" % n, b"%d" % n * (size_bytes // len(str(n))))
        for n in range(first, first + count)
    ]


def publish(connection: Connection, items: Iterable[Outgoing]) -> list[Ack]:
    return list(Publisher(connection).publish_all(items))


def flat(batches: Iterable[list[Message]]) -> list[Message]:
    return list(chain.from_iterable(batches))


def delete(connection: Connection, stream: str, *sequences: int) -> None:
    for sequence in sequences:
        assert connection.request(f"$JS.API.STREAM.MSG.DELETE.{stream}", {"seq": sequence})["success"]


def consumer_count(connection: Connection, stream: str) -> int:
    answer = connection.request(f"$JS.API.STREAM.INFO.{stream}", {})
    return int(answer["state"]["consumer_count"])
