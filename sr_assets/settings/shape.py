"""The mappings of the file with their keys, types and defaults; unknown keys are refused."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, InstanceOf, model_validator

from sr_assets.domain.clusters import ClusterSettings
from sr_assets.domain.positions import DAY_NS, SECOND_NS
from sr_assets.domain.senders import HeaderName, JsonField, SubjectToken
from sr_assets.domain.sizing import FROM_MESSAGES, MAX_FOLD_MESSAGES
from sr_assets.settings.clusters import parse_cluster
from sr_assets.settings.links import Inherited, RawChoria, RawTls, with_api, with_security
from sr_assets.settings.mapping import Raw
from sr_assets.settings.names import (
    read_advisory_template,
    read_api_prefix,
    read_domain,
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
from sr_assets.settings.target import RawTarget
from sr_assets.settings.values import (
    MEBIBYTE,
    one_of,
    read_duration,
    read_flag,
    read_path,
    read_port,
    read_seconds,
    read_span,
    read_text,
    read_time,
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
Domain = Annotated[str, BeforeValidator(read_domain)]
ApiPrefix = Annotated[str, BeforeValidator(read_api_prefix)]
CatchUp = Annotated[int, BeforeValidator(whole_number(1, MAX_FOLD_MESSAGES))]

_ELECTION = (
    "remove it and run one host per site; a second host takes over with the same home, or with `sr-assets recover`"
)
NoElection = Annotated[None, BeforeValidator(unsupported(_ELECTION))]


class RawAdvisory(Raw):
    """`advisory` of a stream."""

    subject: Annotated[str, BeforeValidator(read_advisory_template)]
    observer_subject: Annotated[str, BeforeValidator(read_advisory_template)] | None = None
    reliable: Flag | None = None
    cluster: Annotated[Literal["source", "target"], BeforeValidator(one_of("source", "target"))] = "source"
    format: Annotated[Literal["v2", "v1"], BeforeValidator(one_of("v2", "v1"))] = "v2"


class RawSpark(Raw):
    """`spark`."""

    mode: Annotated[str, BeforeValidator(read_spark_mode)] = "connect-local"
    from_messages: Annotated[int, BeforeValidator(whole_number(0))] = FROM_MESSAGES
    config: Annotated[dict[str, str], BeforeValidator(read_spark_config)] = Field(default_factory=dict)


class RawSensor(Raw):
    """`sensor`."""

    interval: Duration = 30 * SECOND_NS
    lag_messages: Annotated[int, BeforeValidator(whole_number(1))] = 1
    lag_seconds: Annotated[int, BeforeValidator(read_seconds)] = 0

    @model_validator(mode="after")
    def _not_hectic(self) -> Self:
        if self.interval < SECOND_NS:
            raise ValueError("interval: must be at least 1s")
        return self


class RawMetrics(Raw):
    """`metrics`."""

    port: Annotated[int, BeforeValidator(read_port)] | None = None
    host: Text = "127.0.0.1"
    legacy: Flag = False
    textfile: Annotated[Path, BeforeValidator(read_path)] | None = None


class RawHistory(Raw):
    """`snapshots`, `advisories` and `gaps`: the retention of a history."""

    retention: Duration = 90 * DAY_NS


class RawStream(Raw):
    """One of `streams`, by the keys of the file."""

    stream: StreamName
    name: SiteName | None = None
    source_url: Url
    target_url: Url
    source_domain: Domain | None = None
    target_domain: Domain | None = None
    source_api_prefix: ApiPrefix | None = None
    target_api_prefix: ApiPrefix | None = None
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
    catch_up_messages: CatchUp | None = None
    batch_bytes: Annotated[int, BeforeValidator(size_in_bytes(1))] = 64 * MEBIBYTE
    target: RawTarget | None = None
    tls: RawTls | None = None
    source_tls: RawTls | None = None
    target_tls: RawTls | None = None
    choria: RawChoria | None = None
    source_choria: RawChoria | None = None
    target_choria: RawChoria | None = None
    disable_source_tls: Flag = False
    disable_target_tls: Flag = False
    leader_election_name: NoElection = None

    def source_link(self, top: Inherited | None = None) -> ClusterSettings:
        """Return the source cluster with its effective blocks; `top` has those of the top level."""
        cluster = with_api(self.source_url, self.source_domain, self.source_api_prefix)
        return with_security(
            cluster,
            [self.source_tls, self.tls, top.tls if top else None],
            [self.source_choria, self.choria, top.choria if top else None],
            plain="disable_source_tls" if self.disable_source_tls else None,
        )

    def target_link(self, top: Inherited | None = None) -> ClusterSettings:
        """Return the target cluster with its effective blocks; `top` has those of the top level."""
        cluster = with_api(self.target_url, self.target_domain, self.target_api_prefix)
        return with_security(
            cluster,
            [self.target_tls, self.tls, top.tls if top else None],
            [self.target_choria, self.choria, top.choria if top else None],
            plain="disable_target_tls" if self.disable_target_tls else None,
        )

    @property
    def extractor(self) -> JsonField | HeaderName | SubjectToken | None:
        """The sender extractor, if senders are sampled."""
        return self.inspect_field or self.inspect_header or self.inspect_subject_token

    @property
    def effective_order(self) -> Order:
        """The order of the copies: by default the stream's, or each sender's with several workers."""
        return self.order or ("stream" if self.workers == 1 else "sender")


class RawFeed(Raw):
    """One of `feeds`, by the keys of the file."""

    stream: StreamName
    name: SiteName | None = None
    url: Url
    domain: Domain | None = None
    api_prefix: ApiPrefix | None = None
    filter_subject: Annotated[str, BeforeValidator(read_filter)] | None = None
    start_sequence: Annotated[int, BeforeValidator(whole_number(0))] = 0
    start_time: Annotated[int, BeforeValidator(read_time)] | None = None
    start_delta: Duration | None = None
    start_at_end: Flag = False
    on_source_reset: Annotated[OnSourceReset, BeforeValidator(one_of("stop", "recopy", "skip_to_now"))] = "stop"
    batch_messages: Annotated[int, BeforeValidator(whole_number(1))] = 200_000
    batch_bytes: Annotated[int, BeforeValidator(size_in_bytes(1))] = 64 * MEBIBYTE
    retired_retention: Duration = 365 * DAY_NS
    tls: RawTls | None = None
    choria: RawChoria | None = None

    def source_link(self, top: Inherited | None = None) -> ClusterSettings:
        """Return the cluster with its effective blocks; `top` has those of the top level."""
        cluster = with_api(self.url, self.domain, self.api_prefix)
        return with_security(cluster, [self.tls, top.tls if top else None], [self.choria, top.choria if top else None])

    @model_validator(mode="after")
    def _one_api(self) -> Self:
        if self.domain and self.api_prefix:
            raise ValueError("domain, api_prefix: exclude each other; use the JetStream domain or its API prefix")
        return self
