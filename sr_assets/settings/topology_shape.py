"""The mappings inside `topology`, with their keys and types."""

import re
from typing import Annotated, Any, Final, Self

from pydantic import BeforeValidator, Field, model_validator

from sr_assets.domain.clusters import domain_api
from sr_assets.settings.links import RawChoria, RawTls
from sr_assets.settings.mapping import Raw
from sr_assets.settings.names import read_filter
from sr_assets.settings.shape import ApiPrefix, Domain, Flag, Span, StreamName, Text, Url
from sr_assets.settings.target import RawPlacement, read_replicas
from sr_assets.settings.values import one_of, read_text, read_time, shown, size_in_bytes, whole_number


def _read_destination(value: object) -> str:
    """Read the destination of a transform: a subject whose tokens may be `$1`, `{{wildcard(1)}}` and the like."""
    text = read_text(value)
    if re.search(r"\s", re.sub(r"\{\{.*?\}\}", "", text)) or ".." in text or text.startswith(".") or text.endswith("."):
        raise ValueError(f"{shown(text)} is not a subject: tokens separated by single dots, no spaces")
    return text


Filter = Annotated[str, BeforeValidator(read_filter)]
Limit = Annotated[int, BeforeValidator(whole_number(1))]
Size = Annotated[int, BeforeValidator(size_in_bytes(1))]

#: Our name of a setting → JetStream's.
_SETTINGS: Final = {
    "description": "description",
    "subjects": "subjects",
    "storage": "storage",
    "retention": "retention",
    "replicas": "num_replicas",
    "max_msgs": "max_msgs",
    "max_bytes": "max_bytes",
    "max_age": "max_age",
    "max_msgs_per_subject": "max_msgs_per_subject",
    "max_msg_size": "max_msg_size",
    "discard": "discard",
    "duplicate_window": "duplicate_window",
    "compression": "compression",
    "allow_direct": "allow_direct",
    "mirror_direct": "mirror_direct",
    "metadata": "metadata",
}


class RawTransform(Raw):
    """One of `subject_transforms`; without `dest`, matching subjects stay unchanged."""

    src: Filter
    dest: Annotated[str, BeforeValidator(_read_destination)] = ""


class RawUpstream(Raw):
    """`mirror`, or one of `sources`."""

    stream: StreamName
    cluster: Text | None = None
    filter_subject: Filter | None = None
    subject_transforms: list[RawTransform] = Field(default_factory=list)
    start_sequence: Annotated[int, BeforeValidator(whole_number(1))] | None = None
    start_time: Annotated[int, BeforeValidator(read_time)] | None = None
    api_prefix: ApiPrefix | None = None
    deliver_prefix: ApiPrefix | None = None


class RawNativeStream(Raw):
    """One of `topology.streams`."""

    cluster: Text | None = None
    stream: StreamName
    subjects: list[Filter] | None = None
    description: Text | None = None
    storage: Annotated[str, BeforeValidator(one_of("file", "memory"))] | None = None
    retention: Annotated[str, BeforeValidator(one_of("limits", "interest", "workqueue"))] | None = None
    replicas: Annotated[int, BeforeValidator(read_replicas)] | None = None
    placement: RawPlacement | None = None
    max_msgs: Limit | None = None
    max_bytes: Size | None = None
    max_age: Span | None = None
    max_msgs_per_subject: Limit | None = None
    max_msg_size: Size | None = None
    discard: Annotated[str, BeforeValidator(one_of("old", "new"))] | None = None
    duplicate_window: Span | None = None
    compression: Annotated[str, BeforeValidator(one_of("none", "s2"))] | None = None
    allow_direct: Flag | None = None
    mirror_direct: Flag | None = None
    metadata: dict[Text, Text] | None = None
    mirror: RawUpstream | None = None
    sources: list[RawUpstream] = Field(default_factory=list)

    @property
    def settings(self) -> dict[str, Any]:
        """The configured settings, by JetStream's names."""
        named = {theirs: getattr(self, ours) for ours, theirs in _SETTINGS.items() if getattr(self, ours) is not None}
        if self.placement is not None:
            place = {"cluster": self.placement.cluster or "", "tags": self.placement.tags}
            named["placement"] = {key: value for key, value in place.items() if value}
        return named


class RawTopologyCluster(Raw):
    """One of `topology.clusters`: its connection, and the API of its JetStream for us and other clusters' servers."""

    url: Url
    domain: Domain | None = None
    api_prefix: ApiPrefix | None = None
    tls: RawTls | None = None
    choria: RawChoria | None = None

    @model_validator(mode="after")
    def _one_api(self) -> Self:
        if self.domain and self.api_prefix:
            raise ValueError("domain, api_prefix: exclude each other; use the JetStream domain or its API prefix")
        return self

    @property
    def api(self) -> str | None:
        """The API prefix for other clusters, or None for one common JetStream."""
        return domain_api(self.domain) if self.domain else self.api_prefix
