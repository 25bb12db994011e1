"""A stream as its server reports it, with its mirror or sources; parsed from the JSON of `STREAM.LIST`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from sr_assets.domain.positions import parse_rfc3339_ns
from sr_assets.domain.topology.wanted import Transform

NativeKind = Literal["mirror", "source"]
_DOMAIN: Final = re.compile(r"\$JS\.([^.]+)\.API")


class Peer(NamedTuple):
    """A server that holds a stream."""

    name: str
    leads: bool
    current: bool


@dataclass(frozen=True, slots=True)
class FoundLink:
    """A mirror, or a source, of a stream.

    `active_ns` is the time since the server heard from the origin, or None for never. `sequence` is the origin's last
    copied sequence, reported by servers since 2.15. `api` is the origin's API prefix, or None for the stream's own
    JetStream. Without `start_sequence` and `start_time` the link started with the origin's first message.
    """

    kind: NativeKind
    stream: str
    api: str | None
    filter_subject: str | None
    transforms: tuple[Transform, ...]
    active_ns: int | None
    error: str | None
    sequence: int | None
    start_sequence: int | None
    start_time: str | None

    @property
    def filters(self) -> tuple[str, ...]:
        """The subject patterns that it copies; empty means all."""
        named = tuple(transform.src for transform in self.transforms) or tuple(filter(None, [self.filter_subject]))
        return () if ">" in named else named

    @property
    def domain(self) -> str | None:
        """The JetStream domain of its origin, or None for the same domain."""
        match = _DOMAIN.fullmatch(self.api or "")
        return match[1] if match else None


@dataclass(frozen=True, slots=True)
class FoundStream:
    """A stream of a cluster: the server's configuration, its state, its links."""

    name: str
    config: Mapping[str, Any]
    state: Mapping[str, Any]
    peers: tuple[Peer, ...]
    links: tuple[FoundLink, ...]
    ts_ns: int | None

    @property
    def last_sequence(self) -> int:
        """The last assigned sequence."""
        return int(self.state.get("last_seq", 0))

    @property
    def metadata(self) -> Mapping[str, str]:
        return self.config.get("metadata") or {}

    @property
    def leader(self) -> str | None:
        """The leader, or None outside of a cluster and without a leader."""
        return next((peer.name for peer in self.peers if peer.leads), None)

    @property
    def placement(self) -> str | None:
        """The required placement as text, or None for any."""
        placement = self.config.get("placement") or {}
        parts = [placement.get("cluster") or "", *(placement.get("tags") or ())]
        return " ".join(part for part in parts if part) or None


def read_stream(answer: Mapping[str, Any]) -> FoundStream:
    """Parse the JSON of `STREAM.INFO`, or of one stream in `STREAM.LIST`."""
    config = answer["config"]
    wanted = {"mirror": [config["mirror"]] if config.get("mirror") else [], "source": config.get("sources") or []}
    reported = {"mirror": [answer["mirror"]] if answer.get("mirror") else [], "source": answer.get("sources") or []}
    cluster = answer.get("cluster") or {}
    leader = [Peer(cluster["leader"], leads=True, current=True)] if cluster.get("leader") else []
    followers = [
        Peer(replica["name"], leads=False, current=bool(replica.get("current")) and not replica.get("offline"))
        for replica in cluster.get("replicas") or ()
    ]
    links = [
        _link(kind, part, next((state for state in reported[kind] if _identity(state) == _identity(part)), {}))
        for kind in ("mirror", "source")
        for part in wanted[kind]
    ]
    ts = answer.get("ts")
    return FoundStream(
        config["name"],
        config,
        answer["state"],
        (*leader, *followers),
        tuple(links),
        parse_rfc3339_ns(ts) if ts else None,
    )


def upstream_identity(part: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the server's identity of a mirror or source: origin, filter and transforms, without the start."""
    external = part.get("external") or {}
    return (*_identity(part), external.get("api") or "", external.get("deliver") or "")


def _identity(part: Mapping[str, Any]) -> tuple[Any, ...]:
    external = part.get("external") or {}
    return part["name"], part.get("filter_subject") or "", _transforms(part), external.get("api") or ""


def _transforms(part: Mapping[str, Any]) -> tuple[Transform, ...]:
    return tuple(
        Transform(transform.get("src", ""), transform.get("dest", ""))
        for transform in part.get("subject_transforms") or ()
    )


def _link(kind: NativeKind, part: Mapping[str, Any], reported: Mapping[str, Any]) -> FoundLink:
    active, error = reported.get("active", -1), reported.get("error")
    return FoundLink(
        kind,
        part["name"],
        (part.get("external") or {}).get("api") or None,
        part.get("filter_subject") or None,
        _transforms(part),
        active if active >= 0 else None,
        f"{error.get('description')} ({error.get('err_code')})" if error else None,
        reported.get("seq"),
        part.get("opt_start_seq") or None,
        part.get("opt_start_time") or None,
    )
