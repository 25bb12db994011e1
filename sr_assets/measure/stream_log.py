"""The messages of a stream from a moment on, as they are stored."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Final, Self

from sr_assets.adapters.jetstream import STREAM_NOT_FOUND
from sr_assets.adapters.wire import Connection, WireError, read_confirmed
from sr_assets.adapters.wire.link import RefusedError
from sr_assets.domain.clusters import ClusterSettings
from sr_assets.domain.messages import Message
from sr_assets.domain.positions import SequenceRange

#: A server that is stopped must not hold up a measurement for long.
_REQUEST_SECONDS: Final = 5.0


class StreamLog:
    """A reader of each message stored after its creation, in order and once; a context manager.

    A stream that does not exist yet is empty. Methods raise WireError if the server fails; the next call connects again.
    """

    def __init__(self, cluster: ClusterSettings, stream: str, *, headers_only: bool = False) -> None:
        self._connection = Connection(cluster, "sr-assets measure", request_seconds=_REQUEST_SECONDS)
        self._stream, self._headers_only, self._is_open = stream, headers_only, False
        self.next_sequence = self._last_sequence() + 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def poll(self) -> Iterator[Message]:
        """Yield the messages stored since the last call."""
        with_last = SequenceRange(self.next_sequence, max(self.next_sequence, self._last_sequence() + 1))
        if not len(with_last):
            return
        try:
            for messages in read_confirmed(
                self._connection, self._stream, with_last, direct=False, headers_only=self._headers_only
            ):
                for message in messages:
                    self.next_sequence = message.sequence + 1
                    yield message
        except WireError:
            self._disconnect()
            raise

    def _last_sequence(self) -> int:
        try:
            if not self._is_open:
                self._connection.open()
                self._is_open = True
            return int(self._connection.request_api(f"STREAM.INFO.{self._stream}")["state"]["last_seq"])
        except RefusedError as error:
            if error.code == STREAM_NOT_FOUND:
                return 0
            raise
        except WireError:
            self._disconnect()
            raise

    def _disconnect(self) -> None:
        self._is_open = False
        with suppress(WireError):
            self._connection.close()
