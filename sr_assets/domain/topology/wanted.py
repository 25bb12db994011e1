"""A configured stream, and its JetStream configuration."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from sr_assets.domain.positions import format_rfc3339_ns

#: The metadata key with the name of the replicator that created or adopted a stream.
OWNER: Final = "sr_assets.replicator"
#: Settings of a stream that the configuration omits: the server's defaults, by their names.
DEFAULTS: Final[Mapping[str, Any]] = {
    "storage": "file",
    "retention": "limits",
    "num_replicas": 1,
    "max_msgs": -1,
    "max_bytes": -1,
    "max_age": 0,
    "max_msgs_per_subject": -1,
    "max_msg_size": -1,
    "discard": "old",
    "compression": "none",
    "deny_delete": False,
    "deny_purge": False,
    "allow_rollup_hdrs": False,
    "max_consumers": -1,
    "sealed": False,
}
#: JetStream's name of a setting → our name, if they differ.
OUR_NAMES: Final[Mapping[str, str]] = {
    "num_replicas": "replicas",
    "allow_rollup_hdrs": "allow_rollup",
    "persist_mode": "persist",
}
#: Settings that a server sets when it seals a stream.
SET_BY_SEALING: Final = frozenset({"max_age", "discard", "deny_delete", "deny_purge", "allow_rollup_hdrs"})


class Transform(NamedTuple):
    """A subject transform: subjects that match `src` become `dest`; without `dest` it is a filter."""

    src: str
    dest: str


@dataclass(frozen=True, slots=True)
class Upstream:
    """The origin of a mirror or source.

    `cluster` is a configured name. `api` is the API prefix of that cluster's JetStream at the copying cluster, or None
    for the same JetStream. At most one of `filter_subject` and `transforms`, and one start, is set.
    """

    cluster: str
    stream: str
    filter_subject: str | None = None
    transforms: tuple[Transform, ...] = ()
    start_sequence: int | None = None
    start_time_ns: int | None = None
    api: str | None = None
    deliver: str = ""

    @property
    def wire(self) -> dict[str, Any]:
        """The part of a stream configuration that identifies it."""
        parts: dict[str, Any] = {
            "name": self.stream,
            "filter_subject": self.filter_subject,
            "subject_transforms": [transform._asdict() for transform in self.transforms],
            "opt_start_seq": self.start_sequence,
            "opt_start_time": None if self.start_time_ns is None else format_rfc3339_ns(self.start_time_ns),
            "external": None if self.api is None else {"api": self.api, "deliver": self.deliver},
        }
        return {key: value for key, value in parts.items() if value}

    @property
    def inputs(self) -> tuple[str, ...]:
        """The subject patterns that it copies."""
        return tuple(transform.src for transform in self.transforms) or (self.filter_subject or ">",)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The subject patterns of its copies; a destination with functions may be any subject."""
        if not self.transforms:
            return self.inputs
        return tuple(
            ">" if "{" in transform.dest or "$" in transform.dest else transform.dest or transform.src
            for transform in self.transforms
        )


@dataclass(frozen=True, slots=True)
class WantedStream:
    """A configured stream; `config` has the configured settings, by JetStream's names."""

    cluster: str
    stream: str
    mirror: Upstream | None = None
    sources: tuple[Upstream, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def label(self) -> str:
        """`cluster/stream`, unique in a configuration."""
        return f"{self.cluster}/{self.stream}"

    @property
    def upstreams(self) -> tuple[Upstream, ...]:
        return (self.mirror,) if self.mirror else self.sources

    def whole(self, owner: str) -> dict[str, Any]:
        """Return the configuration for its creation, which is not sealed yet: a server seals only existing streams."""
        made: dict[str, Any] = {"name": self.stream, **DEFAULTS, **self.config, "sealed": False}
        if self.mirror:
            made["mirror"] = self.mirror.wire
        if self.sources:
            made["sources"] = [source.wire for source in self.sources]
        return made | {"metadata": {**self.config.get("metadata", {}), OWNER: owner}}
