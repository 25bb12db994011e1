"""JetStream's stream info, reduced to the fields that the package uses."""

from dataclasses import dataclass
from typing import Any, Final

from sr_assets.domain.errors import RunError
from sr_assets.domain.positions import parse_rfc3339_ns

Version = tuple[int, int, int]

_BATCHED_DIRECT_GET: Final[Version] = (2, 11, 0)
#: A leader sends a heartbeat every second, and a follower lets another one be elected 4 s after the last. A leader that has
#: lost its followers steps down only 20 s later (measured with 2.15).
_CONTACT_NS: Final = 2_000_000_000


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """A stream's info from its leader. An empty stream's `first_sequence` is `last_sequence` + 1, or 0.

    `ts_ns` is the server's clock at the response (None before 2.10), or at the leader's last contact with a majority of its
    replicas if that was long ago: another leader may have stored messages since. `first_stored_ns` and `last_stored_ns` are
    the stored times of the first and the last message, and `num_deleted` counts the missing sequences between them.
    `server_version` is the connected server's, `leader` the name of the server that stores the stream; `in_contact` means
    that it has just heard from a majority of its replicas, so no other leader has stored more; `config` is the configuration
    as the server sent it.
    """

    stream: str
    created_ns: int
    first_sequence: int
    last_sequence: int
    messages: int
    bytes: int
    ts_ns: int | None
    first_stored_ns: int | None
    last_stored_ns: int | None
    num_deleted: int
    replicas: int
    mirror: bool
    retention: str
    subjects: tuple[str, ...]
    allow_direct: bool
    max_msgs_per_subject: int
    no_ack: bool
    sealed: bool
    server_version: Version
    leader: str
    in_contact: bool
    config: dict[str, Any]

    @property
    def supports_batched_direct_get(self) -> bool:
        """Whether ranges can be read by direct get: the stream allows it and the server has batches (2.11)."""
        return self.allow_direct and self.server_version >= _BATCHED_DIRECT_GET


def parse_stream_info(answer: dict[str, Any], server_version: Version) -> StreamInfo:
    """Read the JSON of `STREAM.INFO` or `STREAM.CREATE`; raises RunError if it is not one."""
    try:
        info = _parsed(answer, server_version)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        info = None
    if info is None or not _is_sound(info):
        raise RunError(f"not a stream info of JetStream: {str(answer)[:80]!r}")
    return info


def _is_sound(info: StreamInfo) -> bool:
    """Return whether the values have their types, and numbers fit into tables."""
    numbers = (info.first_sequence, info.last_sequence, info.messages, info.bytes, info.num_deleted, info.replicas)
    texts = (info.stream, info.retention, info.leader, *info.subjects)
    return (
        all(type(number) is int and -1 <= number < 1 << 63 for number in (*numbers, info.max_msgs_per_subject))
        and all(
            time_ns is None or (type(time_ns) is int and abs(time_ns) < 1 << 63)
            for time_ns in (info.created_ns, info.ts_ns, info.first_stored_ns, info.last_stored_ns)
        )
        and all(isinstance(text, str) for text in texts)
    )


def _parsed(answer: dict[str, Any], server_version: Version) -> StreamInfo:
    config, state, cluster = answer["config"], answer["state"], answer.get("cluster") or {}
    known_ns, silence_ns = _time_ns(answer.get("ts")), _silence_ns(cluster)
    return StreamInfo(
        stream=config["name"],
        created_ns=parse_rfc3339_ns(answer["created"]),
        first_sequence=state["first_seq"],
        last_sequence=state["last_seq"],
        messages=state["messages"],
        bytes=state["bytes"],
        ts_ns=None if known_ns is None or silence_ns is None else known_ns - silence_ns,
        first_stored_ns=_time_ns(state.get("first_ts")),
        last_stored_ns=_time_ns(state.get("last_ts")),
        num_deleted=state.get("num_deleted", 0),
        replicas=config.get("num_replicas", 1),
        mirror=bool(config.get("mirror")),
        retention=config.get("retention", "limits"),
        subjects=tuple(config.get("subjects") or ()),
        allow_direct=bool(config.get("allow_direct")),
        max_msgs_per_subject=config.get("max_msgs_per_subject", -1),
        no_ack=bool(config.get("no_ack")),
        sealed=bool(config.get("sealed")),
        server_version=server_version,
        leader=cluster.get("leader", ""),
        in_contact=silence_ns == 0,
        config=config,
    )


def _silence_ns(cluster: dict[str, Any]) -> int | None:
    """Return how long ago the responding leader heard from a majority of its replicas, 0 if it just did or has none; None if
    there is no leader.
    """
    silences_ns = sorted(replica.get("active", 0) for replica in cluster.get("replicas") or ())
    if not silences_ns:
        return 0
    if not cluster.get("leader"):
        return None
    # The leader and this follower, and all with later contact, are a majority.
    silence_ns: int = silences_ns[(len(silences_ns) + 1) // 2 - 1]
    return silence_ns if silence_ns > _CONTACT_NS else 0


def _time_ns(text: str | None) -> int | None:
    """Return a time in unix ns, or None for Go's zero time (year 1), which means unset."""
    return None if not text or text.startswith("0001-") else parse_rfc3339_ns(text)
