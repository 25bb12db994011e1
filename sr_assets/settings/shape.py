"""The shape of the file: its mappings, the type of each key, which keys there are; nothing unknown is accepted.

Not here: how a value is read (`values`, `names`, `clusters`), which keys contradict each other (`contradictions`).
"""

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, InstanceOf, model_validator

from sr_assets.domain.clusters import ClusterSettings
from sr_assets.domain.positions import SECOND_NS
from sr_assets.domain.senders import HeaderName, JsonField, SubjectToken
from sr_assets.settings.clusters import parse_cluster, read_file_path, with_tls
from sr_assets.settings.contradictions import refuse_contradiction, refuse_same_names
from sr_assets.settings.names import (
    read_advisory_template,
    read_filter,
    read_header_name,
    read_json_field,
    read_json_path,
    read_prefix,
    read_remove,
    read_site_name,
    read_spark_config,
    read_spark_mode,
    read_stream_name,
    read_subject_token,
)
from sr_assets.settings.records import OnPoison, OnSourceReset, OnTargetReset, Order
from sr_assets.settings.values import (
    DAY_NS,
    MEBIBYTE,
    MINUTE_NS,
    one_of,
    read_duration,
    read_flag,
    read_path,
    read_seconds,
    read_span,
    read_text,
    read_time,
    shown,
    size_in_bytes,
    unsupported,
    whole_number,
)

Text = Annotated[str, BeforeValidator(read_text)]
Flag = Annotated[bool, BeforeValidator(read_flag)]
Span = Annotated[int, BeforeValidator(read_span)]
Duration = Annotated[int, BeforeValidator(read_duration)]
SiteName = Annotated[str, BeforeValidator(read_site_name)]
StreamName = Annotated[str, BeforeValidator(read_stream_name)]
Url = Annotated[InstanceOf[ClusterSettings], BeforeValidator(parse_cluster)]
File = Annotated[Path, BeforeValidator(read_path)]
PemFile = Annotated[str, BeforeValidator(read_file_path)]

_CHORIA = (
    "take the block out and log in by the URL: user:password@, token@, ?credentials=FILE, ?jwt=FILE&nkey=FILE, or by a "
    "certificate in tls"
)
NoChoria = Annotated[None, BeforeValidator(unsupported(_CHORIA))]
NoElection = Annotated[
    None, BeforeValidator(unsupported("take it out and run one instance; a site's lock keeps a second run waiting"))
]
NoHeartbeats = Annotated[
    None, BeforeValidator(unsupported("take the block out; heartbeats have to be sent by another program"))
]


class Raw(BaseModel):
    """A mapping of the file: keys in any case, none twice, none unknown; null and empty text are not set."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            raise ValueError("must be a mapping of keys to values")  # noqa: TRY004  as in read_text
        known: dict[str, Any] = {}
        for key, value in data.items():
            name = key.lower() if isinstance(key, str) else key
            if name not in cls.model_fields:
                near = difflib.get_close_matches(str(name), cls.model_fields, n=1)
                hint = f"did you mean {near[0]}? " if near else ""
                raise ValueError(f"unknown key {shown(key)}; {hint}allowed: {', '.join(cls.model_fields)}")
            if name in known:
                raise ValueError(f"key {shown(key)} is there twice (keys match in any case)")
            known[name] = value
        return {key: value for key, value in known.items() if value is not None and value != ""}


class RawTls(Raw):
    """`tls` of the file, of a stream or of one of its ends: PEM files."""

    ca: PemFile | None = None
    cert: PemFile | None = None
    key: PemFile | None = None

    @model_validator(mode="after")
    def _whole_pair(self) -> Self:
        if (self.cert is None) != (self.key is None):
            raise ValueError("cert and key belong together: name both files or none")
        return self


class RawAdvisory(Raw):
    """`advisory` of a stream."""

    subject: Annotated[str, BeforeValidator(read_advisory_template)]
    observer_subject: Annotated[str, BeforeValidator(read_advisory_template)] | None = None
    reliable: Flag | None = None
    cluster: Annotated[Literal["source", "target"], BeforeValidator(one_of("source", "target"))] = "source"


class RawSpark(Raw):
    """`spark`."""

    mode: Annotated[str, BeforeValidator(read_spark_mode)] = "connect-local"
    config: Annotated[dict[str, str], BeforeValidator(read_spark_config)] = {}


class RawSensor(Raw):
    """`sensor`."""

    interval: Duration = 30 * SECOND_NS
    lag_messages: Annotated[int, BeforeValidator(whole_number(1))] = 1
    lag_seconds: Annotated[int, BeforeValidator(read_seconds)] = 0

    @model_validator(mode="after")
    def _not_hectic(self) -> Self:
        if self.interval < SECOND_NS:
            raise ValueError("interval: must be 1s or more")
        return self


class RawSnapshots(Raw):
    """`snapshots`."""

    retention: Duration | None = None


class RawAdvisories(Raw):
    """`advisories`."""

    retention: Duration = 90 * DAY_NS


class RawStream(Raw):
    """One of `streams`, by the keys of the file."""

    stream: StreamName
    name: SiteName | None = None
    source_url: Url
    target_url: Url
    target_stream: StreamName | None = None
    target_subject_prefix: Annotated[str, BeforeValidator(read_prefix)] = ""
    target_subject_remove: Annotated[str, BeforeValidator(read_remove)] = ""
    filter_subject: Annotated[str, BeforeValidator(read_filter)] | None = None
    no_target_create: Flag | None = None
    create_target: Flag | None = None
    ephemeral: Flag = False
    target_initiated: Flag = False
    start_sequence: Annotated[int, BeforeValidator(whole_number(0))] = 0
    start_time: Annotated[int, BeforeValidator(read_time)] | None = None
    start_delta: Duration | None = None
    start_at_end: Flag = False
    max_age: Duration | None = None
    inspect_field: Annotated[InstanceOf[JsonField], BeforeValidator(read_json_field)] | None = None
    inspect_header: Annotated[InstanceOf[HeaderName], BeforeValidator(read_header_name)] | None = None
    inspect_subject_token: Annotated[InstanceOf[SubjectToken] | None, BeforeValidator(read_subject_token)] = None
    inspect_force_field: Annotated[tuple[str, ...], BeforeValidator(read_json_path)] | None = None
    inspect_duration: Duration | None = None
    warn_duration: Duration | None = None
    size_trigger: Annotated[int, BeforeValidator(size_in_bytes(0))] | None = None
    advisory: RawAdvisory | None = None
    retired_retention: Duration | None = None
    workers: Annotated[int, BeforeValidator(whole_number(1))] = 1
    order: Annotated[Order, BeforeValidator(one_of("stream", "sender", "none"))] | None = None
    on_source_reset: Annotated[OnSourceReset, BeforeValidator(one_of("stop", "recopy", "skip_to_now"))] = "stop"
    on_target_reset: Annotated[OnTargetReset, BeforeValidator(one_of("continue", "recopy", "stop"))] = "continue"
    on_poison: Annotated[OnPoison, BeforeValidator(one_of("park", "stop"))] = "park"
    batch_messages: Annotated[int, BeforeValidator(whole_number(1))] = 50_000
    batch_bytes: Annotated[int, BeforeValidator(size_in_bytes(1))] = 64 * MEBIBYTE
    tls: RawTls | None = None
    source_tls: RawTls | None = None
    target_tls: RawTls | None = None
    choria: NoChoria = None
    source_choria: NoChoria = None
    target_choria: NoChoria = None
    leader_election_name: NoElection = None

    @property
    def source(self) -> ClusterSettings:
        """The source as this entry alone says it, without what it inherits from the top."""
        return with_tls(self.source_url, self.source_tls, self.tls)

    @property
    def target(self) -> ClusterSettings:
        """The target as this entry alone says it, without what it inherits from the top."""
        return with_tls(self.target_url, self.target_tls, self.tls)

    @property
    def extractor(self) -> JsonField | HeaderName | SubjectToken | None:
        """How the sender is found, if senders are followed."""
        return self.inspect_field or self.inspect_header or self.inspect_subject_token

    @property
    def effective_order(self) -> Order:
        """The order that is kept: the one of the stream, with several workers each sender's."""
        return self.order or ("stream" if self.workers == 1 else "sender")

    @model_validator(mode="after")
    def _no_contradiction(self) -> Self:
        refuse_contradiction(self)
        return self


class RawFeed(Raw):
    """One of `feeds`, by the keys of the file."""

    stream: StreamName
    name: SiteName | None = None
    url: Url
    filter_subject: Annotated[str, BeforeValidator(read_filter)] | None = None
    start_sequence: Annotated[int, BeforeValidator(whole_number(0))] = 0
    start_time: Annotated[int, BeforeValidator(read_time)] | None = None
    start_delta: Duration | None = None
    start_at_end: Flag = False
    on_source_reset: Annotated[OnSourceReset, BeforeValidator(one_of("stop", "recopy", "skip_to_now"))] = "stop"
    batch_messages: Annotated[int, BeforeValidator(whole_number(1))] = 200_000
    batch_bytes: Annotated[int, BeforeValidator(size_in_bytes(1))] = 64 * MEBIBYTE
    tls: RawTls | None = None
    choria: NoChoria = None


class RawFile(Raw):
    """The whole file."""

    name: SiteName
    streams: list[RawStream] = []
    feeds: list[RawFeed] = []
    state_store: File | None = None
    logfile: File | None = None
    loglevel: Annotated[
        Literal["debug", "info", "warn", "error"], BeforeValidator(one_of("debug", "info", "warn", "error"))
    ] = "info"
    monitor_port: Any = None
    profiling: Any = None
    spark: RawSpark = RawSpark()
    sensor: RawSensor = RawSensor()
    run_budget: Duration = 5 * MINUTE_NS
    linger: Span | None = None
    snapshots: RawSnapshots = RawSnapshots()
    advisories: RawAdvisories = RawAdvisories()
    tls: RawTls | None = None
    choria: NoChoria = None
    heartbeats: NoHeartbeats = None

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        if "streams" not in self.model_fields_set and not self.feeds:
            raise ValueError("streams: is required")
        entries: list[RawStream | RawFeed] = [*self.streams, *self.feeds]
        refuse_same_names([(entry.name or self.name, entry.stream) for entry in entries])
        return self
