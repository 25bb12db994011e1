"""The streams of `topology`, with their mirrors, sources and subject transforms."""

import re
from typing import Annotated, Any, Final

from sr_assets.settings.mapping import Block, file_key
from sr_assets.settings.names import ApiPrefix, Filter, StreamName
from sr_assets.settings.target import (
    JETSTREAM_NAMES,
    Compression,
    Discard,
    PlacementBlock,
    Replicas,
    Retention,
    Storage,
)
from sr_assets.settings.values import (
    Flag,
    NumberLimit,
    Positive,
    Size,
    Span,
    Text,
    Time,
    Value,
    choice,
    read_text,
    shown,
)

#: Keys of a stream that are not settings, and JetStream's names that differ from ours.
_NO_SETTINGS: Final = frozenset({"cluster", "stream", "placement", "mirror", "sources"})


def _destination(value: object) -> str:
    """Read the destination of a transform: a subject whose tokens may be `$1`, `{{wildcard(1)}}` and the like."""
    text = read_text(value)
    if re.search(r"\s", re.sub(r"\{\{.*?\}\}", "", text)) or ".." in text or text.startswith(".") or text.endswith("."):
        raise ValueError(f"{shown(text)} is not a subject: tokens separated by single dots, no spaces")
    return text


class TransformBlock(Block):
    """One of `subject_transforms`."""

    src: Filter = file_key("the subjects to copy")
    dest: Annotated[str, Value(_destination, type="subject, with `$1` or `{{wildcard(1)}}`")] = file_key(
        "their subject in the copy", "", default_text="unchanged"
    )


class UpstreamBlock(Block):
    """`mirror`, or one of `sources`."""

    stream: StreamName = file_key("the origin")
    cluster: Text | None = file_key("the origin's cluster", None, default_text="the stream's")
    filter_subject: Filter | None = file_key("the subjects to copy", None, default_text="all")
    subject_transforms: tuple[TransformBlock, ...] = file_key(
        "[transforms](#subject-transforms), instead of a filter", []
    )
    start_sequence: Positive | None = file_key(
        "the start of a new mirror or source; without effect on an existing one", None, default_text="all"
    )
    start_time: Time | None = file_key("instead of a sequence", None, default_text="all")
    api_prefix: ApiPrefix | None = file_key(
        "the API prefix of the origin's JetStream at the copying server, for example of an imported account",
        None,
        default_text="the cluster's",
    )
    deliver_prefix: ApiPrefix | None = file_key("the prefix of delivered messages; needs `api_prefix`", None)


class NativeStreamBlock(Block):
    """One of `topology.streams`, with `mirror`, `sources`, `subjects`, or the last two."""

    cluster: Text | None = file_key("its cluster", None, default_text="the only one")
    stream: StreamName = file_key("its name")
    subjects: tuple[Filter, ...] | None = file_key("its subjects", None)
    description: Text | None = file_key("a description", None)
    storage: Annotated[Storage, choice(Storage)] | None = file_key("the storage", None)
    retention: Annotated[Retention, choice(Retention)] | None = file_key("the retention policy", None)
    replicas: Replicas | None = file_key("the number of replicas", None)
    placement: PlacementBlock | None = file_key("[placement](#block-placement)", None)
    max_msgs: Positive | None = file_key("maximum number of messages", None)
    max_bytes: Size | None = file_key("maximum size", None)
    max_age: Span | None = file_key("maximum age of a message", None)
    max_msgs_per_subject: Positive | None = file_key("maximum number of messages of a subject", None)
    max_msg_size: Size | None = file_key("maximum size of a message", None)
    discard: Annotated[Discard, choice(Discard)] | None = file_key("the messages that a full stream discards", None)
    duplicate_window: Span | None = file_key("the duration of the detection of duplicates", None)
    compression: Annotated[Compression, choice(Compression)] | None = file_key("the compression", None)
    allow_direct: Flag | None = file_key("whether replicas serve messages", None)
    mirror_direct: Flag | None = file_key("whether a mirror serves its origin's messages", None)
    deny_delete: Flag | None = file_key("whether the server refuses to delete messages; permanent", None)
    deny_purge: Flag | None = file_key("whether the server refuses to purge the stream; permanent", None)
    allow_rollup: Flag | None = file_key("whether a message with `Nats-Rollup` replaces earlier ones", None)
    max_consumers: NumberLimit | None = file_key("maximum number of consumers; permanent", None)
    sealed: Flag | None = file_key("whether the stream refuses all messages and changes; permanent", None)
    metadata: dict[Text, Text] | None = file_key("names with text", None)
    mirror: UpstreamBlock | None = file_key("the [origin](#mirror-and-sources) of a mirror", None)
    sources: tuple[UpstreamBlock, ...] = file_key("the [origins](#mirror-and-sources) of a stream with sources", [])

    @property
    def settings(self) -> dict[str, Any]:
        """The configured settings, by JetStream's names."""
        configured = {name: getattr(self, name) for name in self.keys().values() if name not in _NO_SETTINGS}
        if self.subjects is not None:
            configured["subjects"] = list(self.subjects)
        named = {JETSTREAM_NAMES.get(name, name): value for name, value in configured.items() if value is not None}
        if self.placement is not None:
            place = {"cluster": self.placement.cluster or "", "tags": list(self.placement.tags)}
            named["placement"] = {key: value for key, value in place.items() if value}
        return named
