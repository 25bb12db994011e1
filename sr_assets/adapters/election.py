"""Keys of leader elections in a bucket of NATS KV, as in the Stream Replicator, and records about our own members.

A key's value is its holder's name. Only the member that created or last renewed a key can renew or delete it: each write
expects the key's revision. A key that is not renewed expires with the bucket's TTL. Our members add a header with their
instance, and keep a JSON record under the prefix `sr_assets`, which the Stream Replicator does not read.
"""

import contextlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from sr_assets.adapters import wire
from sr_assets.adapters.jetstream import (
    MESSAGE_NOT_FOUND,
    NAME_TAKEN,
    STREAM_NOT_FOUND,
    TOO_FEW_SERVERS,
    WRONG_LAST_SEQUENCE,
    ApiError,
    parse_message,
)
from sr_assets.domain.clusters import OWN_API, ClusterSettings
from sr_assets.domain.election import record_key
from sr_assets.domain.errors import RunError
from sr_assets.domain.positions import SECOND_NS, parse_rfc3339_ns

#: The TTL of a bucket that we create.
BUCKET_TTL_NS: Final = 10 * SECOND_NS
_REPLICAS: Final = 3
_CONNECT_SECONDS: Final = 5.0
_INSTANCE: Final = "Sr-Assets-Instance"
_EXPECTED: Final = "Nats-Expected-Last-Subject-Sequence"
_DELETED: Final = re.compile(rb"(?mi)^(KV-Operation: *(DEL|PURGE)|Nats-Marker-Reason:)")
#: Servers report a wrong revision of a key by either code.
_WRONG_REVISION: Final = frozenset({WRONG_LAST_SEQUENCE, 10164})


@dataclass(frozen=True, slots=True)
class Entry:
    """The last message of a key: its value, revision and stored time, and the instance of one of our members."""

    value: str
    revision: int
    stored_ns: int
    instance: str | None
    deleted: bool


class ElectionBucket:
    """One bucket through one connection, which opens with the first call and again after `close`; for one thread.

    A missing bucket is created, if `creates`. Every method raises WireError if the server does not respond or refuses a
    permission, and RunError for a bucket whose TTL is not 1 s to 1 h.
    """

    def __init__(self, cluster: ClusterSettings, bucket: str, instance: str, *, creates: bool = True) -> None:
        self.ttl_seconds = 0.0
        self._creates, self._missing = creates, False
        self._cluster, self._bucket, self._instance = cluster, bucket, instance
        self._stream = f"KV_{bucket}"
        self._connection: wire.Connection | None = None

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def exists(self) -> bool:
        """Return whether the bucket exists, or has been created."""
        self._opened()
        return not self._missing

    def age_seconds(self) -> float:
        """Return the time since the bucket was created, by the server's clock; read its TTL, which may be another one."""
        connection = self._opened()
        info = connection.request_api(f"STREAM.INFO.{self._stream}")
        self.ttl_seconds = bucket_ttl_seconds(connection.address, self._bucket, info["config"])
        # A server before 2.10 sends no time.
        return (
            (parse_rfc3339_ns(info["ts"]) - parse_rfc3339_ns(info["created"])) / SECOND_NS if "ts" in info else math.inf
        )

    def read(self, key: str) -> Entry | None:
        """Return the last message of a key from the bucket's leader, or None."""
        try:
            answer = self._opened().request_api(f"STREAM.MSG.GET.{self._stream}", {"last_by_subj": self._subject(key)})
        except ApiError as error:
            if error.code == MESSAGE_NOT_FOUND:
                return None
            raise
        message = parse_message(answer)
        instance = re.search(rf"(?mi)^{_INSTANCE}: *(\S+)", message.headers.decode(errors="replace"))
        return Entry(
            message.payload.decode(errors="replace"),
            message.sequence,
            message.stored_ns,
            instance[1] if instance else None,
            bool(_DELETED.search(message.headers)),
        )

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

        The first refusal ends the writing: it and the values after it have None.
        """
        items = [
            wire.Outgoing(number, self._put_subject(key), self._headers(revision), value.encode())
            for number, (key, (value, revision)) in enumerate(values.items())
        ]
        return self._publish(items)

    def delete(self, key: str, revision: int) -> bool:
        """Delete a key whose last message has our revision; return whether it had."""
        headers = self._headers(revision, **{"KV-Operation": "DEL"})
        return self._publish([wire.Outgoing(0, self._put_subject(key), headers, b"")])[0] is not None

    # ------------------------------------------------------------------------------------------------------- records

    def keep_record(self, site: str, record: Mapping[str, Any]) -> None:
        """Write this member's record about a site; it expires like a key."""
        self.put({record_key(site, self._instance): (json.dumps(record, separators=(",", ":")), None)})

    def forget_record(self, site: str) -> None:
        """Delete this member's record."""
        key = record_key(site, self._instance)
        if (before := self.read(key)) is not None:
            self.delete(key, before.revision)

    def records(self, site: str) -> dict[str, dict[str, Any]]:
        """Return the records of our members about a site, by instance."""
        subjects = self._subject(record_key(site, "*"))
        answer = self._opened().request_api(f"STREAM.INFO.{self._stream}", {"subjects_filter": subjects})
        instances = [subject.rpartition(".")[2] for subject in answer["state"].get("subjects") or {}]
        return {instance: record for instance in instances if (record := self.record(site, instance)) is not None}

    def record(self, site: str, instance: str) -> dict[str, Any] | None:
        """Return the record of one of our members about a site, or None."""
        entry = self.read(record_key(site, instance))
        if entry is None or entry.deleted:
            return None
        with contextlib.suppress(ValueError):
            record = json.loads(entry.value)
            return record if isinstance(record, dict) else None
        return None

    # ----------------------------------------------------------------------------------------------------- the server

    def _subject(self, key: str) -> str:
        return f"$KV.{self._bucket}.{key}"

    def _put_subject(self, key: str) -> str:
        # As the Go client: the bucket of another domain or account is behind its API prefix.
        subject = self._subject(key)
        return subject if self._cluster.api_prefix == OWN_API else self._cluster.api(subject)

    def _headers(self, revision: int | None, **more: str) -> bytes:
        headers = {_INSTANCE: self._instance, **more}
        if revision is not None:
            headers[_EXPECTED] = str(revision)
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
                f"{connection.address}: bucket {self._bucket} refuses a key: {refusal.error} ({refusal.error_code})"
            )
        return revisions

    def _opened(self) -> wire.Connection:
        """Return the open connection; opening it checks the bucket, and creates a missing one."""
        if self._connection is None:
            connection = wire.Connection(self._cluster, "sr-assets election", request_seconds=_CONNECT_SECONDS)
            connection.open()
            try:
                self.ttl_seconds = self._check(connection)
            except BaseException:
                connection.close()
                raise
            connection.request_seconds = min(_CONNECT_SECONDS, max(0.5, self.ttl_seconds / 4))
            self._connection = connection
        return self._connection

    def _check(self, connection: wire.Connection) -> float:
        """Return the bucket's TTL in seconds; raises RunError if it is out of range."""
        try:
            info = connection.request_api(f"STREAM.INFO.{self._stream}")
        except ApiError as error:
            if error.code != STREAM_NOT_FOUND:
                raise
            self._missing = not self._creates
            if self._missing:
                return 0.0
            info = self._create(connection)
        return bucket_ttl_seconds(connection.address, self._bucket, info["config"])

    def _create(self, connection: wire.Connection) -> dict[str, Any]:
        """Create the bucket, with fewer replicas if the cluster has too few servers; return its stream's info."""
        for replicas in (_REPLICAS, 1):
            try:
                return connection.request_api(f"STREAM.CREATE.{self._stream}", self._config(replicas))
            except ApiError as error:
                if error.code == NAME_TAKEN:  # another member has just created it
                    break
                if error.code not in TOO_FEW_SERVERS or replicas == 1:
                    raise
        return connection.request_api(f"STREAM.INFO.{self._stream}")

    def _config(self, replicas: int) -> dict[str, Any]:
        return {
            "name": self._stream,
            "subjects": [f"$KV.{self._bucket}.>"],
            "max_msgs_per_subject": 1,
            "max_age": BUCKET_TTL_NS,
            "duplicate_window": BUCKET_TTL_NS,
            "storage": "file",
            "num_replicas": replicas,
            "discard": "new",
            "allow_rollup_hdrs": True,
            "deny_delete": True,
            "allow_direct": True,
        }


def bucket_ttl_seconds(server: str, bucket: str, config: Mapping[str, Any]) -> float:
    """Return the TTL of a bucket in seconds; raises RunError unless it is 1 s to 1 h."""
    ttl_seconds = float(config.get("max_age", 0) / SECOND_NS)
    if not 1 <= ttl_seconds <= 3600:
        shown = f"a TTL of {ttl_seconds:g} s" if ttl_seconds else "no TTL"
        raise RunError(
            f"{server}: bucket {bucket} has {shown}; leader election needs 1 s to 1 h: run `nats kv add {bucket} --ttl 10s`,"
            " or set leader_election.bucket"
        )
    return ttl_seconds


def close_all(buckets: Iterable[ElectionBucket]) -> None:
    """Close the connections of several buckets."""
    for bucket in buckets:
        bucket.close()
