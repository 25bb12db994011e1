"""One bucket of NATS KV: single keys with their revisions, through one connection.

The leader election, locks and the data source `kv` use it.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from sr_assets.adapters import wire
from sr_assets.adapters.jetstream import (
    MESSAGE_NOT_FOUND,
    STREAM_NOT_FOUND,
    WRONG_LAST_SEQUENCE,
    ApiError,
    parse_message,
)
from sr_assets.domain.clusters import OWN_API, ClusterSettings
from sr_assets.domain.messages import Message

_INSTANCE: Final = "Sr-Assets-Instance"
_EXPECTED: Final = "Nats-Expected-Last-Subject-Sequence"
_DELETED: Final = re.compile(rb"(?mi)^(KV-Operation: *(DEL|PURGE)|Nats-Marker-Reason:)")
_EXPIRED: Final = re.compile(rb"(?mi)^Nats-Marker-Reason: *MaxAge")
#: Servers report a wrong revision of a key by either code.
_WRONG_REVISION: Final = frozenset({WRONG_LAST_SEQUENCE, 10164})
CONNECT_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class Entry:
    """A message of a key: its value, revision and stored time, and the instance of one of our members.

    `expired`: it is the server's marker after the end of a TTL.
    """

    value: str
    revision: int
    stored_ns: int
    instance: str | None
    deleted: bool
    expired: bool = False


class KeyBucket:
    """One bucket through one connection, which opens with the first call and again after `close`; for one thread.

    Every method raises WireError if the server does not respond or refuses a permission. `instance` marks our writes.
    `key_ttl_seconds` is the TTL of each written key, if not the bucket's own.
    """

    def __init__(
        self,
        cluster: ClusterSettings,
        bucket: str,
        *,
        client: str,
        instance: str | None = None,
        key_ttl_seconds: float | None = None,
    ) -> None:
        self.cluster, self.bucket = cluster, bucket
        self.stream = f"KV_{bucket}"
        self._client, self._instance, self._key_ttl_seconds = client, instance, key_ttl_seconds
        self._connection: wire.Connection | None = None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def read(self, key: str) -> Entry | None:
        """Return the last message of a key from the bucket's leader, or None."""
        return self._message({"last_by_subj": self._subject(key)})

    def next(self, key: str, revision: int) -> Entry | None:
        """Return the first message of a key with this revision or a later one, or None."""
        return self._message({"seq": max(1, revision), "next_by_subj": self._subject(key)})

    def revisions(self, key: str) -> Iterator[Entry]:
        """Yield the stored messages of a key, oldest first."""
        revision = 1
        while (entry := self.next(key, revision)) is not None:
            yield entry
            revision = entry.revision + 1

    def keys(self, pattern: str) -> list[str]:
        """Return the keys with a message that match a pattern; a deleted key may be among them."""
        answer = self._opened().request_api(f"STREAM.INFO.{self.stream}", {"subjects_filter": self._subject(pattern)})
        return [subject.removeprefix(self._subject("")) for subject in answer["state"].get("subjects") or {}]

    def create(self, key: str, value: str) -> tuple[int | None, Entry | None]:
        """Create a key; return its revision, or None if a member holds it; and the last message before, if known."""
        (ack,) = self.put({key: (value, 0)})
        if ack is not None:
            return ack, None
        before = self.read(key)
        if before is None or not before.deleted:
            return None, before
        (ack,) = self.put({key: (value, before.revision)})
        return ack, before

    def put(self, values: Mapping[str, tuple[str, int | None]]) -> list[int | None]:
        """Write values, each expecting a revision of its key (None: any); return each new revision.

        A refused value has None. Writing ends when a refusal arrives: values after it may be unwritten and have None.
        """
        items = [
            wire.Outgoing(number, self._put_subject(key), self._headers(revision), value.encode())
            for number, (key, (value, revision)) in enumerate(values.items())
        ]
        return self._publish(items)

    def delete(self, key: str, revision: int | None) -> bool:
        """Delete a key whose last message has this revision (None: any); return whether it had."""
        headers = self._headers(revision, **{"KV-Operation": "DEL"})
        return self._publish([wire.Outgoing(0, self._put_subject(key), headers, b"")])[0] is not None

    def info(self) -> dict[str, Any] | None:
        """Return the info of the bucket's stream, or None if there is no bucket."""
        try:
            return self._opened().request_api(f"STREAM.INFO.{self.stream}")
        except ApiError as error:
            if error.code != STREAM_NOT_FOUND:
                raise
            return None

    # ----------------------------------------------------------------------------------------------------- the server

    def _message(self, wanted: Mapping[str, Any]) -> Entry | None:
        try:
            answer = self._opened().request_api(f"STREAM.MSG.GET.{self.stream}", dict(wanted))
        except ApiError as error:
            if error.code == MESSAGE_NOT_FOUND:
                return None
            raise
        return _entry(parse_message(answer))

    def _subject(self, key: str) -> str:
        return f"$KV.{self.bucket}.{key}"

    def _put_subject(self, key: str) -> str:
        # As the Go client: the bucket of another domain or account is behind its API prefix.
        subject = self._subject(key)
        return subject if self.cluster.api_prefix == OWN_API else self.cluster.api(subject)

    def _headers(self, revision: int | None, **more: str) -> bytes:
        headers = {_INSTANCE: self._instance, **more} if self._instance else more
        if revision is not None:
            headers[_EXPECTED] = str(revision)
        if self._key_ttl_seconds is not None:
            headers["Nats-TTL"] = f"{self._key_ttl_seconds:.3f}s"
        return "\r\n".join(["NATS/1.0", *(f"{name}: {value}" for name, value in headers.items()), "", ""]).encode()

    def _publish(self, items: list[wire.Outgoing]) -> list[int | None]:
        connection = self._opened()
        revisions: list[int | None] = [None] * len(items)
        refusal: wire.Ack | None = None
        for ack in wire.Publisher(connection, ack_timeout_seconds=connection.request_seconds).publish_all(items):
            if ack.error is None:
                revisions[ack.sequence] = ack.target_sequence
            elif ack.error_code not in _WRONG_REVISION:
                refusal = ack
        if refusal is not None:
            raise wire.WireError(
                f"{connection.address}: bucket {self.bucket} refuses a key: {refusal.error} ({refusal.error_code})"
            )
        return revisions

    def _opened(self) -> wire.Connection:
        """Return the open connection."""
        if self._connection is None:
            connection = wire.Connection(self.cluster, self._client, request_seconds=CONNECT_SECONDS)
            connection.open()
            try:
                self._check(connection)
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return self._connection

    def _check(self, connection: wire.Connection) -> None:
        """Check the bucket through a new connection."""


def _entry(message: Message) -> Entry:
    instance = re.search(rf"(?mi)^{_INSTANCE}: *(\S+)", message.headers.decode(errors="replace"))
    return Entry(
        message.payload.decode(errors="replace"),
        message.sequence,
        message.stored_ns,
        instance[1] if instance else None,
        bool(_DELETED.search(message.headers)),
        bool(_EXPIRED.search(message.headers)),
    )


def close_all(buckets: Iterable[KeyBucket]) -> None:
    """Close the connections of several buckets."""
    for bucket in buckets:
        bucket.close()
