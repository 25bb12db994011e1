"""Keys in a bucket of NATS KV that one member at a time holds: of leader elections, as in the Stream Replicator, and locks.

A key's value names its holder. Only the member that created or last renewed a key can renew or delete it: each write expects
the key's revision. A key that is not renewed expires with the bucket's TTL, a lock with its own. Our members add a header with
their instance. In an election they also keep a JSON record under the prefix `sr_assets`, which the Stream Replicator does not
read.
"""

import contextlib
import json
import math
from collections.abc import Mapping
from typing import Any, Final

from sr_assets.adapters import wire
from sr_assets.adapters.bucket import CONNECT_SECONDS, KeyBucket
from sr_assets.adapters.jetstream import NAME_TAKEN, STREAM_NOT_FOUND, TOO_FEW_SERVERS, ApiError
from sr_assets.domain.clusters import ClusterSettings
from sr_assets.domain.election_keys import record_key
from sr_assets.domain.errors import RunError
from sr_assets.domain.foreign_text import visible
from sr_assets.domain.positions import SECOND_NS, parse_rfc3339_ns

#: The TTL of a bucket that we create.
BUCKET_TTL_NS: Final = 10 * SECOND_NS
#: The characters of a text in a record that are kept; a host's name has at most 255.
_LONGEST_TEXT: Final = 255
_REPLICAS: Final = 3


def sound_name(value: str) -> str:
    """Return the holder's name in a key's value, made visible and short: who may write the bucket chooses it."""
    return visible(value[:_LONGEST_TEXT])


def sound_record(value: object) -> dict[str, Any] | None:
    """Return the texts, made visible and short, and the numbers of a record; None if it is not a JSON object.

    Whoever may write the bucket chooses them, and tables and leases store them.
    """
    if not isinstance(value, dict):
        return None
    texts = {key: visible(each[:_LONGEST_TEXT]) for key, each in value.items() if isinstance(each, str)}
    return texts | {key: each for key, each in value.items() if type(each) is int and 0 <= each < 1 << 63}


class LeaseBucket(KeyBucket):
    """The bucket of an election, or with `key_ttl_seconds` of locks.

    A missing bucket of an election is created, if `creates`. Every method also raises RunError for a bucket of an election whose
    TTL is not 1 s to 1 h, and for one of locks that does not exist or does not allow a TTL per message.
    """

    def __init__(
        self,
        cluster: ClusterSettings,
        bucket: str,
        instance: str,
        key_ttl_seconds: float | None = None,
        *,
        creates: bool = True,
    ) -> None:
        super().__init__(
            cluster, bucket, client="sr-assets election", instance=instance, key_ttl_seconds=key_ttl_seconds
        )
        self.ttl_seconds = 0.0
        self._member, self._creates, self._missing = instance, creates, False

    def exists(self) -> bool:
        """Return whether the bucket exists, or has been created."""
        self._opened()
        return not self._missing

    def age_seconds(self) -> float:
        """Return the time since the bucket was created, by the server's clock; read its TTL, which may be another one."""
        connection = self._opened()
        info = connection.request_api(f"STREAM.INFO.{self.stream}")
        self.ttl_seconds = self._ttl_seconds(connection.address, info["config"])
        return created_seconds_ago(info)

    def _ttl_seconds(self, server: str, config: Mapping[str, Any]) -> float:
        if self._key_ttl_seconds is None:
            return bucket_ttl_seconds(server, self.bucket, config)
        return lock_ttl_seconds(server, self.bucket, config, self._key_ttl_seconds)

    # ------------------------------------------------------------------------------------------------------- records

    def keep_record(self, site: str, record: Mapping[str, Any]) -> None:
        """Write this member's record about a site; it expires like a key."""
        self.put({record_key(site, self._member): (json.dumps(record, separators=(",", ":")), None)})

    def forget_record(self, site: str) -> None:
        """Delete this member's record."""
        key = record_key(site, self._member)
        if (before := self.read(key)) is not None:
            self.delete(key, before.revision)

    def records(self, site: str) -> dict[str, dict[str, Any]]:
        """Return the records of our members about a site, by instance."""
        instances = [key.rpartition(".")[2] for key in self.keys(record_key(site, "*"))]
        return {instance: record for instance in instances if (record := self.record(site, instance)) is not None}

    def record(self, site: str, instance: str) -> dict[str, Any] | None:
        """Return the record of one of our members about a site, or None."""
        entry = self.read(record_key(site, instance))
        if entry is None or entry.deleted:
            return None
        with contextlib.suppress(ValueError, RecursionError):
            return sound_record(json.loads(entry.value))
        return None

    def _check(self, connection: wire.Connection) -> None:
        """Read the bucket's TTL, and create a missing bucket; raises RunError if the TTL is out of range."""
        try:
            info = connection.request_api(f"STREAM.INFO.{self.stream}")
        except ApiError as error:
            if error.code != STREAM_NOT_FOUND:
                raise
            if self._key_ttl_seconds is not None:
                raise RunError(
                    f"{connection.address}: bucket {self.bucket} of the locks does not exist; create it:"
                    f" nats kv add {self.bucket} --marker-ttl 1m"
                ) from None
            self._missing = not self._creates
            if self._missing:
                return
            info = self._create(connection)
        self.ttl_seconds = self._ttl_seconds(connection.address, info["config"])
        connection.request_seconds = min(CONNECT_SECONDS, max(0.5, self.ttl_seconds / 4))

    def _create(self, connection: wire.Connection) -> dict[str, Any]:
        """Create the bucket, with fewer replicas if the cluster has too few servers; return its stream's info."""
        for replicas in (_REPLICAS, 1):
            try:
                return connection.request_api(f"STREAM.CREATE.{self.stream}", self._config(replicas))
            except ApiError as error:
                if error.code == NAME_TAKEN:  # another member has just created it
                    break
                if error.code not in TOO_FEW_SERVERS or replicas == 1:
                    raise
        return connection.request_api(f"STREAM.INFO.{self.stream}")

    def _config(self, replicas: int) -> dict[str, Any]:
        return {
            "name": self.stream,
            "subjects": [f"$KV.{self.bucket}.>"],
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


def lock_ttl_seconds(server: str, bucket: str, config: Mapping[str, Any], ttl_seconds: float) -> float:
    """Return the TTL of locks in a bucket; raises RunError unless the bucket allows per-message TTL."""
    if not config.get("allow_msg_ttl"):
        raise RunError(
            f"{server}: bucket {bucket} does not allow a TTL per message, which locks need; allow it with nats-server 2.11 or"
            f" later: nats stream edit KV_{bucket} --allow-msg-ttl"
        )
    return ttl_seconds


def created_seconds_ago(info: Mapping[str, Any]) -> float:
    """Return the age of a stream by the server's clock; infinite for a server before 2.10, which sends no time."""
    return (parse_rfc3339_ns(info["ts"]) - parse_rfc3339_ns(info["created"])) / SECOND_NS if "ts" in info else math.inf


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
